package erasure

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// advisory is the first half of the lock's key; the second one is the outbox.
const advisory = 0x6f667265

// Alone makes sure that no other run erases from this outbox, and that nobody puts back or publishes
// meanwhile what was read before.
func (l *Ledger) Alone(ctx context.Context) error {
	return lock(ctx, l.conn, l.root, "pg_try_advisory_lock",
		"table %s: another outflow erase is at work, or an outflow archive rows or outflow replay, which "+
			"may have read what is to be erased")
}

// NoneAtWork makes sure that no run erases from an outbox until the connection ends: what is put back was
// read before the erasure would have been known.
func NoneAtWork(ctx context.Context, conn catalog.Querier, root catalog.Table) error {
	return lock(ctx, conn, root, "pg_try_advisory_lock_shared", "outflow erase is at work on table %s")
}

func lock(ctx context.Context, q catalog.Querier, root catalog.Table, function, busy string) error {
	var standby, got bool
	err := q.QueryRow(ctx, "SELECT pg_catalog.pg_is_in_recovery(), pg_catalog."+function+
		"($1::int, $2::oid::int8::bit(32)::int)", int32(advisory), root.OID).Scan(&standby, &got)
	switch {
	case err != nil:
		return err
	case standby:
		return postgres.Fatal(nil, "in_recovery", "Run it with postgres.url pointed at the primary",
			"table %s: the server is a standby, and a lock there keeps no outflow erase away", root.Quoted())
	case !got:
		return &outbox.Fault{Class: outbox.Transient, Code: "erase_busy",
			Message: fmt.Sprintf(busy, root.Quoted())}
	}
	return nil
}

// A process that keeps erasures away tells PostgreSQL so often that it is there. PostgreSQL ends the session
// of one that was silent for longer than that: it was stopped, or is cut off. So it relies on the session for
// less. For an answer of PostgreSQL, which may stand still as well, it waits no longer either.
const (
	beat   = 15 * time.Second
	relied = 30 * time.Second
	silent = time.Minute
)

// Guard keeps erasures away from an outbox while a process writes what it has read elsewhere than to
// PostgreSQL. Before each write it asks with Check.
type Guard struct {
	conn         *pgx.Conn
	beat, silent time.Duration
	heard        atomic.Int64       // Unix time before the last request that PostgreSQL has answered
	last         context.CancelFunc // lets it ask once more, and no more then
	stop         context.CancelFunc
	ended        chan struct{} // closed when it asks no more
	err          error         // why, unless it was to end
}

// KeepAway makes sure that no run erases from an outbox until the guard is closed.
func KeepAway(ctx context.Context, target postgres.Target, root catalog.Table) (*Guard, error) {
	return keepAway(ctx, target, root, beat, silent)
}

func keepAway(ctx context.Context, target postgres.Target, root catalog.Table, beat, silent time.Duration) (
	*Guard, error) {
	conn, err := target.Connect(ctx)
	if err != nil {
		return nil, err
	}
	g := &Guard{conn: conn, beat: beat, silent: silent, ended: make(chan struct{})}
	g.heard.Store(time.Now().Unix())
	if err = NoneAtWork(ctx, conn, root); err == nil {
		_, err = conn.Exec(ctx, fmt.Sprintf("SET idle_session_timeout = %d", silent.Milliseconds()))
	}
	if err != nil {
		postgres.Close(conn)
		return nil, err
	}
	ctx, g.stop = context.WithCancel(context.WithoutCancel(ctx))
	var more context.Context
	more, g.last = context.WithCancel(ctx)
	go g.watch(ctx, more)
	return g, nil
}

// watch returns when the session has ended, or when PostgreSQL has answered what it was asked after more had
// ended.
func (g *Guard) watch(ctx, more context.Context) {
	defer crash.Guard()
	defer close(g.ended)
	for last := false; g.err == nil && !last; {
		wait, cancel := context.WithTimeout(more, g.beat)
		_, _ = g.conn.WaitForNotification(wait) // it returns early if the session has ended: Ping says so
		cancel()
		last = more.Err() != nil
		asked := time.Now().Unix()
		ask, cancel := context.WithTimeout(ctx, g.silent)
		if g.err = g.conn.Ping(ask); g.err == nil {
			g.heard.Store(asked)
		}
		cancel()
	}
}

// lost says since when an erasure may have run.
func (g *Guard) lost() error {
	return fmt.Errorf("the connection to PostgreSQL is lost that kept erasures away: run those again that "+
		"have ended since %s: %w", time.Unix(g.heard.Load(), 0).UTC().Format(time.RFC3339), g.err)
}

// Check returns an error if an erasure may have begun since. Where PostgreSQL was not heard for long, because
// the process or the server stood still, it waits for its answer. It may be called on nil.
func (g *Guard) Check(ctx context.Context) error {
	for g != nil {
		select {
		case <-g.ended:
			return g.lost()
		default:
		}
		// by the wall clock, which goes on while the machine sleeps
		if age := time.Now().Unix() - g.heard.Load(); age >= 0 && age < int64(relied.Seconds()) {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-g.ended:
		case <-time.After(recheck):
		}
	}
	return nil
}

// recheck is how often is looked whether PostgreSQL has answered.
const recheck = 100 * time.Millisecond

// End is called after the last write. It asks PostgreSQL once more, and returns an error if an erasure may
// have begun before that. It may be called on nil.
func (g *Guard) End(ctx context.Context) error {
	if g == nil {
		return nil
	}
	g.last()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-g.ended:
	}
	if g.err != nil {
		return g.lost()
	}
	return nil
}

// Close lets erasures begin. It may be called on nil.
func (g *Guard) Close() {
	if g == nil {
		return
	}
	g.stop()
	<-g.ended
	postgres.Close(g.conn)
}
