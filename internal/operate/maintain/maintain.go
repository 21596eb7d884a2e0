// Package maintain is the loop of `outflow maintain`: the parts that keep table and stream small, one after
// the other, again and again, by one process of several.
package maintain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Part is what is done in a round.
type Part struct {
	Name string
	// Run does it, and says in m what is known of it then.
	Run func(ctx context.Context, m *watch.Maintained) error
}

// Config says what to do, and how often.
type Config struct {
	Parts []Part // in this order
	Every time.Duration
	Slot  string // of which only one does it
	Log   *slog.Logger
	// Connect connects to the database, where the lock is that keeps two of them apart.
	Connect func(context.Context) (*pgx.Conn, error)
	Monitor *Monitor // is told of everything; nil: nobody is

	beat time.Duration // 0: the constant
}

const (
	firstPause = time.Second      // before a part that failed for a moment is tried again
	lookAgain  = time.Second      // so often one that stands by looks whether the other one is gone
	answer     = 30 * time.Second // how long PostgreSQL may take to say what it is asked
	remind     = 10 * time.Minute // so often it is said again that a part fails in the same way
	advisory   = 0x6f75746d       // the class of the lock; its object is the slot

	// A process that has the lock tells PostgreSQL so often that it is there. PostgreSQL ends the session of
	// one that was silent for longer than that: it was stopped, or is cut off, and could keep the lock for
	// ever.
	beat   = 15 * time.Second
	silent = time.Minute
)

// Once runs each part once, whether another process is at it or not, and returns the error that somebody has
// to decide about, else the first one.
func Once(ctx context.Context, c Config) error {
	var worst error
	c.Monitor.begin(ctx, &c, true)
	for _, p := range c.Parts {
		err := c.Monitor.run(ctx, p)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			c.Log.Error("part failed", attributes(p.Name, err)...)
		}
		if worst == nil || gap(err) && !gap(worst) {
			worst = err
		}
	}
	_ = c.Monitor.end(ctx, nil) // it looks at no partitions
	return worst
}

func gap(err error) bool {
	f := outbox.FaultOf(err)
	return f != nil && f.Class == outbox.Gap
}

// attributes are those of the log line of a failure: outflow explain says more about a code.
func attributes(part string, err error) []any {
	all := []any{"part", part}
	if f := outbox.FaultOf(err); f != nil && f.Code != "" {
		all = append(all, "code", f.Code)
	}
	return append(all, "err", err)
}

// kind is what failures have in common of which only the first is said. The text of one that has a code may
// have a port in it that is another one each time.
func kind(err error) string {
	if f := outbox.FaultOf(err); f != nil && f.Code != "" {
		return f.Code
	}
	return err.Error()
}

// state is how a part fares.
type state struct {
	Part
	due   time.Time     // when it is run next
	pause time.Duration // 0: it did not fail the last time
	since time.Time     // when it began to fail
	said  time.Time     // when that was last said
	what  string        // that it was said of
}

// Run runs the parts until the context ends, while this process has the lock. An error of a part does not
// stop the others. What may pass is tried again soon, everything else after Every.
func Run(ctx context.Context, c Config) error {
	parts := make([]*state, len(c.Parts))
	for i, p := range c.Parts {
		parts[i] = &state{Part: p}
	}
	l := lock{c: c}
	stop := l.keep(ctx)
	defer func() {
		stop()
		l.close()
	}()
	for {
		had := l.conn
		if err := l.hold(ctx); err != nil {
			return err
		}
		if l.conn != had {
			c.Monitor.begin(ctx, &c, false)
		}
		next, ran := time.Now().Add(c.Every), false
		for _, p := range parts {
			if !time.Now().Before(p.due) {
				c.round(ctx, p)
				ran = true
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if p.due.Before(next) {
				next = p.due
			}
		}
		if ran {
			l.mu.Lock()
			if err := c.Monitor.end(ctx, l.conn); l.lost == nil && l.conn.IsClosed() {
				l.lost = err
			}
			l.mu.Unlock()
		}
		c.Monitor.is(idle, time.Until(next)+answer)
		if err := sleep(ctx, time.Until(next)); err != nil {
			return err
		}
	}
}

// round runs a part and says what became of it, but the same failure only once in a while.
func (c *Config) round(ctx context.Context, p *state) {
	began := time.Now()
	err := c.Monitor.run(ctx, p.Part)
	now := time.Now()
	p.due = began.Add(c.Every)
	switch f := outbox.FaultOf(err); {
	case ctx.Err() != nil:
	case err == nil:
		if p.pause > 0 {
			c.Log.Info("part works again", "part", p.Name, "failed_since", p.since)
		}
		p.pause, p.what = 0, ""
	default:
		if p.pause == 0 {
			p.since = now
		}
		p.pause = min(max(firstPause, 2*p.pause), c.Every)
		if f == nil || f.Class == outbox.Transient {
			p.due = now.Add(p.pause)
		}
		if what := kind(err); what != p.what || now.Sub(p.said) >= remind {
			c.Log.Error("part failed, and is tried again", append(attributes(p.Name, err),
				"failing_since", p.since)...)
			p.what, p.said = what, now
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// lock is an advisory lock, held by a connection of its own. It keeps two processes from doing the same work,
// and nothing depends on it: what must not be done twice is guarded where it is done.
type lock struct {
	c       Config
	standby string // who has it, as that was said; "": nobody has
	said    string
	worked  bool // it had the lock, so the set-up works

	mu   sync.Mutex // of what follows
	lost error      // by which somebody has found the connection broken; nil: nobody has
	conn *pgx.Conn  // nil: there is none; the loop alone sets this, and whether it has the lock
	held bool
}

// keep says again and again that this process has the lock, whatever it does, until it is stopped.
func (l *lock) keep(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer crash.Guard()
		defer close(ended)
		for sleep(ctx, cmp.Or(l.c.beat, beat)) == nil {
			l.mu.Lock()
			if l.held {
				limited, cancel := context.WithTimeout(ctx, answer)
				if err := l.conn.Ping(limited); err != nil && l.lost == nil { // the loop opens another one
					l.lost = err
				}
				cancel()
			}
			l.mu.Unlock()
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// hold returns when this process has the lock.
func (l *lock) hold(ctx context.Context) error {
	for pause := lookAgain; ; {
		who, err := l.try(ctx)
		if err == nil && l.said != "" {
			l.c.Log.Info("PostgreSQL is back")
			l.said = ""
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil && l.held:
			if l.standby != "" {
				l.c.Log.Info("the other one is gone: this one goes on")
			}
			l.standby, l.worked = "", true
			return nil
		case err == nil:
			l.c.Monitor.standsBy(who, pause+answer)
			if who != l.standby {
				l.c.Log.Info("another outflow maintain is at work: standing by", "who", who)
			}
			l.standby, pause = who, lookAgain
		default:
			if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) && pg.Code == idleSessionTimeout {
				l.close()
				l.c.Log.Warn("this process was stopped, or cut off from PostgreSQL: another one may be at "+
					"work", "for_more_than", silent)
				continue
			}
			l.close()
			l.c.Monitor.is(away, max(l.c.Every, lookAgain)+answer)
			f := outbox.FaultOf(err)
			if f != nil && f.Class != outbox.Transient && l.said == "" && l.standby == "" && !l.worked {
				return err // the set-up can't work
			}
			if what := kind(err); what != l.said {
				l.c.Log.Error("PostgreSQL can't be reached: nothing is done", "err", err)
				l.said = what
			}
			pause = min(2*pause, max(l.c.Every, lookAgain))
		}
		if err := sleep(ctx, pause); err != nil {
			return err
		}
	}
}

// idleSessionTimeout is the code of the error with which PostgreSQL ends a session that was silent.
const idleSessionTimeout = "57P05"

// try takes the lock, or looks whether the connection that has it is still there. Where another process has
// the lock it says who.
func (l *lock) try(ctx context.Context) (who string, err error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		if l.conn, err = l.c.Connect(ctx); err != nil {
			l.conn = nil
			return "", err
		}
		if _, err := l.conn.Exec(ctx, "SELECT set_config('idle_session_timeout', $1, false)",
			strconv.FormatInt(silent.Milliseconds(), 10)); err != nil {
			return "", fmt.Errorf("limit how long a session of outflow maintain may be silent: %w", err)
		}
	}
	sql := "SELECT pg_try_advisory_lock($1::int, hashtext($2))"
	if l.held {
		sql = "SELECT $1::int IS NOT NULL AND $2::text IS NOT NULL"
	}
	err = l.conn.QueryRow(ctx, sql, int32(advisory), l.c.Slot).Scan(&l.held)
	if err == nil && !l.held {
		who, err = l.holder(ctx)
	}
	if err != nil && l.lost != nil { // since then it says no more than that it is closed
		err = l.lost
	}
	if err != nil {
		return "", fmt.Errorf("take the advisory lock of outflow maintain: %w", err)
	}
	return who, nil
}

// holder says who has the lock, as far as PostgreSQL tells: of another role's session it may be the PID only.
func (l *lock) holder(ctx context.Context) (who string, err error) {
	err = l.conn.QueryRow(ctx, `SELECT concat_ws(', ', nullif(a.application_name, ''), 'PID ' || a.pid,
			'from ' || host(a.client_addr), 'connected since ' || to_char(a.backend_start,
				'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
		FROM pg_locks l JOIN pg_stat_activity a USING (pid)
		WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
			AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
			AND l.classid = $1::bigint::oid
			AND l.objid = (hashtext($2)::bigint & 4294967295)::oid`, int64(advisory), l.c.Slot).Scan(&who)
	if errors.Is(err, pgx.ErrNoRows) {
		return "one that has just ended", nil
	}
	return who, err
}

func (l *lock) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		postgres.Close(l.conn)
	}
	l.conn, l.held, l.lost = nil, false, nil
}

// Ended reports whether an error only says that the context has ended.
func Ended(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, ctx.Err())
}
