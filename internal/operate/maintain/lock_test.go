package maintain

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// said is a log that may be read meanwhile.
type said struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

func config(t *testing.T, url string) (Config, *said) {
	t.Helper()
	log := &said{}
	return Config{Slot: "outflow", Every: time.Hour, Log: slog.New(slog.NewTextHandler(log, nil)),
		Monitor: &Monitor{
			Load: func(context.Context) (*watch.Maintained, error) { return nil, nil },
			Save: func(context.Context, *watch.Maintained) error { return nil },
			Log:  slog.New(slog.DiscardHandler)},
		Connect: func(ctx context.Context) (*pgx.Conn, error) {
			return postgres.Target{URL: url, Slot: "outflow"}.Connect(ctx)
		}}, log
}

// TestOneThatIsStoppedLosesTheLock: PostgreSQL ends its session, and when it wakes up it stands by, and says
// for whom.
func TestOneThatIsStoppedLosesTheLock(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	c, log := config(t, url)
	stopped := &lock{c: c} // it says nothing
	defer stopped.close()
	must.Succeed(t, stopped.hold(t.Context()))

	other, _ := config(t, url)
	next := &lock{c: other}
	defer next.close()
	who, err := next.try(t.Context())
	must.Succeed(t, err)
	if !strings.HasPrefix(who, "outflow/outflow/") || !strings.Contains(who, ", PID ") ||
		!strings.Contains(who, ", connected since 2") {
		t.Errorf("it waits for %q", who)
	}
	limit := ""
	must.Succeed(t, stopped.conn.QueryRow(t.Context(), "SHOW idle_session_timeout").Scan(&limit))
	if limit != "1min" {
		t.Errorf("it may be silent for %s", limit)
	}
	_, err = stopped.conn.Exec(t.Context(), "SET idle_session_timeout = '1ms'") // a minute is too long here
	must.Succeed(t, err)
	must.Succeed(t, next.hold(t.Context())) // waits for that

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- stopped.hold(ctx) }()
	await.Until(t, "the one that wakes up stands by", func() error {
		if who := c.Monitor.WaitsFor(); !strings.Contains(who, ", PID ") {
			return errors.New(log.String())
		}
		return nil
	})
	cancel()
	<-ended
	if !strings.Contains(log.String(), "was stopped, or cut off") {
		t.Errorf("it said:\n%s", log)
	}
}

// TestOneThatIsStoppedSaysSoWhoeverFindsOut: when it wakes up, it reports to PostgreSQL before it looks for
// work.
func TestOneThatIsStoppedSaysSoWhoeverFindsOut(t *testing.T) {
	t.Parallel()
	c, log := config(t, pgtest.Database(t, pgtest.Server(t)))
	c.beat = 50 * time.Millisecond
	l := &lock{c: c}
	defer l.close()
	must.Succeed(t, l.hold(t.Context()))
	_, err := l.conn.Exec(t.Context(), "SET idle_session_timeout = '1ms'")
	must.Succeed(t, err)
	stop := l.keep(t.Context())
	await.Until(t, "it has reported in vain", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if !l.conn.IsClosed() {
			return errors.New("its session goes on")
		}
		return nil
	})
	stop()
	must.Succeed(t, l.hold(t.Context()))
	if !strings.Contains(log.String(), "was stopped, or cut off") ||
		strings.Contains(log.String(), "can't be reached") {
		t.Errorf("it said:\n%s", log)
	}
}

// TestOneThatWorksKeepsTheLock: however long a part takes, PostgreSQL hears of it.
func TestOneThatWorksKeepsTheLock(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	conn, err := pgx.Connect(t.Context(), url)
	must.Succeed(t, err)
	defer postgres.Close(conn)
	c, _ := config(t, url)
	c.beat = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	heard := func() (pid int, at time.Time) {
		must.Succeed(t, conn.QueryRow(t.Context(), `SELECT pid, state_change FROM pg_locks
			JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND datname = current_database()`).
			Scan(&pid, &at))
		return pid, at
	}
	c.Parts = []Part{{Name: "long", Run: func(context.Context, *watch.Maintained) error {
		defer cancel()
		pid, first := heard()
		await.Until(t, "it says that it is there", func() error {
			if same, at := heard(); same != pid || !at.After(first) {
				return errors.New("nothing was heard of it")
			}
			return nil
		})
		return nil
	}}}
	if err := Run(ctx, c); !Ended(ctx, err) {
		t.Fatal(err)
	}
}

// TestOneThatHasWorkedOutlivesARefusedLogin: a server that takes over may refuse it for a while, by its
// pg_hba.conf for one. Only at the start that means that the set-up can't work.
func TestOneThatHasWorkedOutlivesARefusedLogin(t *testing.T) {
	t.Parallel()
	c, log := config(t, pgtest.Database(t, pgtest.Server(t)))
	connect, attempts := c.Connect, 0
	c.Connect = func(ctx context.Context) (*pgx.Conn, error) {
		if attempts++; attempts == 2 {
			return nil, &outbox.Fault{Class: outbox.Fatal, Code: "login", Message: "it refuses the login"}
		}
		return connect(ctx)
	}
	l := &lock{c: c}
	defer l.close()
	must.Succeed(t, l.hold(t.Context()))
	l.close() // as when the server goes
	must.Succeed(t, l.hold(t.Context()))
	if attempts != 3 || !strings.Contains(log.String(), "can't be reached") ||
		strings.Count(log.String(), "PostgreSQL is back") != 1 {
		t.Errorf("%d attempts, and it said:\n%s", attempts, log)
	}
	attempts = 1
	fresh := &lock{c: c}
	defer fresh.close()
	outboxdb.WantFault(t, fresh.hold(t.Context()), outbox.Fatal, "login")
}
