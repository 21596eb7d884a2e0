package partition

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// TestASecondRunEndsAtOnce, and one whose session was ended drops nothing when it wakes up.
func TestASecondRunEndsAtOnce(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.confirm(w.Slot)
	asleep, wake := make(chan struct{}), make(chan struct{})
	first := w.o
	first.Hit = func(point string) {
		if point == "partition.verified" {
			close(asleep)
			<-wake
		}
	}
	m, err := Open(outboxdb.Within(t), w.target(), w.cfg, first)
	must.Succeed(t, err)
	defer m.Close()
	ended := make(chan error, 1)
	go func() {
		_, err := m.Apply(context.Background())
		ended <- err
	}()
	<-asleep // verified, and about to drop
	_, err = w.try()
	f := wantFault(t, err, outbox.Transient, codeBusy)
	pid := fmt.Sprint(m.conn.PgConn().PID())
	if !strings.Contains(f.Message, pid) {
		t.Errorf("the process %s is not named: %v", pid, f)
	}
	// somebody writes to it meanwhile, and a run after that finds it
	w.Exec(`INSERT INTO outbox_0 (doc_id, actor_id, counter, payload, created_at) VALUES ('d', 'a', 9, '{}',
		'2024-05-01 02:00Z')`)
	w.terminate(pid)
	wantWhy(t, w.apply(), 0, "its rows are not those that were verified")
	close(wake)
	if err := <-ended; err == nil {
		t.Error("the first run succeeded")
	}
	if !w.exists(0) {
		t.Error("it is gone")
	}
}

// terminate ends a session, and waits until its locks are gone with it.
func (w *world) terminate(pid string) {
	w.T.Helper()
	w.Exec("SELECT pg_terminate_backend($1::text::int)", pid)
	outboxdb.Eventually(w.T, "the session has ended", func() bool {
		return w.Text("SELECT (count(*) = 0)::text FROM pg_stat_activity WHERE pid = $1::text::int",
			pid) == "true"
	})
}

// TestAStoppedDropLetsItsLockGo: PostgreSQL ends the session of a process that is stopped in the middle of a
// drop, so that a repair can read the partition, and another run goes on.
func TestAStoppedDropLetsItsLockGo(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.confirm(w.Slot)
	var m *Manager
	show := func(setting string) (value string) {
		must.Succeed(t, m.conn.QueryRow(outboxdb.Within(t), "SHOW "+setting).Scan(&value))
		return value
	}
	stopped := false
	w.o.Hit = func(point string) {
		if point == "partition.dropping" {
			stopped = true
			for _, setting := range []string{"idle_session_timeout", "idle_in_transaction_session_timeout"} {
				if got := show(setting); got != "1min" {
					t.Errorf("%s is %s", setting, got)
				}
			}
			_, err := m.conn.Exec(outboxdb.Within(t), // a minute is too long here
				"SET LOCAL idle_in_transaction_session_timeout = 1")
			must.Succeed(t, err)
			if n := w.Text("SELECT count(*)::text FROM outbox_0"); n != "5" { // it waits for the lock
				t.Errorf("%s rows", n)
			}
		}
	}
	m = w.manager()
	if steps, err := m.Apply(outboxdb.Within(t)); err == nil || !stopped || !w.exists(0) {
		t.Fatalf("%+v, %v", steps, err)
	}
	w.o.Hit = nil
	if steps := w.apply(); w.exists(0) {
		t.Errorf("it stays: %+v", steps)
	}
}

// TestACompareThatStopsLetsItsLockGo: PostgreSQL does not wait, with the locks, for a process that reads no
// more of the rows that it sends.
func TestACompareThatStopsLetsItsLockGo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	const rows = 100_000 // more than buffers have room for
	w.insert(0, rows, false)
	m, n := w.manager(), 0
	m.published = &published{}
	must.Succeed(t, m.inTx(outboxdb.Within(t), func(tx pgx.Tx) error {
		p := &Partition{Name: quoted("public", old(0))}
		// also where nobody is told that it is waited for
		wantFault(t, m.lock(outboxdb.Within(t), tx, p, "SHARE"), outbox.Fatal, codeTaken)
		return m.unknownRows(outboxdb.Within(t), tx, p, "false", func(unknownRow) {
			if n++; n > 1 {
				return
			}
			outboxdb.Eventually(t, "PostgreSQL waits for the next statement", func() bool {
				return w.Text("SELECT state FROM pg_stat_activity WHERE pid = $1::text::int",
					fmt.Sprint(m.conn.PgConn().PID())) == "idle in transaction"
			})
		})
	}))
	if n != rows {
		t.Errorf("%d rows", n)
	}
}

// said is what a line says.
type said chan string

func (s said) Write(p []byte) (int, error) {
	s <- string(p)
	return len(p), nil
}

// TestALockThatWasHadIsNotWaitedFor: what takes its time under it may, and is another thing.
func TestALockThatWasHadIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 5, true)
	lines := make(said, 100)
	line := progress.New(progress.Config{Stdout: io.Discard, Stderr: lines})
	defer line.Close()
	w.o.Hit = func(point string) {
		if point != "partition.sealing" {
			return
		}
		line.Start("apply")
		if text := <-lines; strings.Contains(text, "waiting") {
			t.Errorf("it has the lock, and says: %s", text)
		}
		line.Stop()
	}
	m := w.manager()
	_, err := m.Apply(progress.With(outboxdb.Within(t), line))
	must.Succeed(t, err)
	w.want(0, Sealed)
}

// TestADropThatReadsForLongKeepsItsLock: PostgreSQL hears of a process that reads the archive.
func TestADropThatReadsForLongKeepsItsLock(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.confirm(w.Slot)
	w.cfg.beat = time.Millisecond
	m := w.manager()
	outside, beats := m.o.Outside, 0
	m.o.Outside = func(ctx context.Context) (Outside, error) {
		heard := func() string {
			return w.Text("SELECT state_change::text FROM pg_stat_activity WHERE pid = $1::text::int AND "+
				"xact_start IS NOT NULL", fmt.Sprint(m.conn.PgConn().PID()))
		}
		if w.Text("SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1::text::int AND mode = "+
			"'AccessExclusiveLock')::text", fmt.Sprint(m.conn.PgConn().PID())) == "true" {
			before := heard()
			outboxdb.Eventually(t, "it says that it is there", func() bool { return heard() != before })
			beats++
		}
		return outside(ctx)
	}
	if steps, err := m.Apply(outboxdb.Within(t)); err != nil || w.exists(0) || beats != 1 {
		t.Errorf("%d times within the drop; %+v, %v", beats, steps, err)
	}
}

// TestARunLooksAgainOnlyAfterItDidSomething: one that finds nothing to do reads record, slots and stream
// once, and a drop is decided from what was read behind all else.
func TestARunLooksAgainOnlyAfterItDidSomething(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	looks, outside := 0, w.o.Outside
	w.o.Outside = func(ctx context.Context) (Outside, error) {
		looks++
		return outside(ctx)
	}
	w.insert(0, 5, true)
	run := func(what string, want int) {
		t.Helper()
		looks = 0
		if steps := w.apply(); looks != want {
			t.Errorf("%s: it looked %d times, not %d: %v", what, looks, want, steps)
		}
	}
	run("it made the table of states, and partitions, and detached one", 4)
	run("nothing to do", 1)
	w.confirm(w.Slot)
	run("every slot has confirmed it, and it was dropped under its lock", 3)
	if w.exists(0) {
		t.Error("the partition is still there")
	}
}

// TestALostConnectionEndsTheReading also of ids that are kept in memory: hours of it may lie ahead.
func TestALostConnectionEndsTheReading(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.confirm(w.Slot)
	var m *Manager
	within := outboxdb.Within(t)
	w.o.Published = func(_ context.Context, _ Period, add func([16]byte) error) (_ Seen, err error) {
		w.Exec("SELECT pg_terminate_backend($1::text::int)", fmt.Sprint(m.conn.PgConn().PID()))
		for n := 0; err == nil && within.Err() == nil; n++ {
			if err = add([16]byte{}); n%fetched == 0 {
				time.Sleep(100 * time.Millisecond)
			}
		}
		if within.Err() != nil {
			t.Error("it does not notice")
		}
		return w.seen, err
	}
	m = w.manager()
	if _, err := m.Apply(within); err == nil {
		t.Error("it goes on")
	}
}
