package erasure

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// alone takes the lock of an erasure, as far as that goes.
func (o *erased) alone() error {
	o.t.Helper()
	l, err := Open(outboxdb.Within(o.t), postgres.Target{URL: o.URL}, o.table, o.Slot)
	must.Succeed(o.t, err)
	o.t.Cleanup(l.Close)
	return l.Alone(outboxdb.Within(o.t))
}

// guard keeps erasures away. An hour is longer than the test.
func (o *erased) guard(beat, silent time.Duration) *Guard {
	o.t.Helper()
	return o.guardAt(o.URL, beat, silent)
}

func (o *erased) guardAt(url string, beat, silent time.Duration) *Guard {
	o.t.Helper()
	l, err := Open(outboxdb.Within(o.t), postgres.Target{URL: o.URL}, o.table, o.Slot)
	must.Succeed(o.t, err)
	defer l.Close()
	g, err := keepAway(outboxdb.Within(o.t), postgres.Target{URL: url}, l.root, beat, silent)
	must.Succeed(o.t, err)
	o.t.Cleanup(g.Close)
	return g
}

// lost waits until a guard says that it keeps nobody away any more.
func lost(t *testing.T, g *Guard) {
	t.Helper()
	var err error
	await.Until(t, "the guard notices", func() error {
		if err = g.Check(outboxdb.Within(t)); err == nil {
			return errors.New("it does not")
		}
		return nil
	})
	if !strings.Contains(err.Error(), "connection to PostgreSQL is lost") {
		t.Error(err)
	}
}

// TestAGuardKeepsErasuresAway until its session ends, and then it says so.
func TestAGuardKeepsErasuresAway(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	g := o.guard(time.Millisecond, time.Hour)
	must.Succeed(t, g.Check(outboxdb.Within(t)))
	if f := outbox.FaultOf(o.alone()); f == nil || f.Code != "erase_busy" ||
		!strings.Contains(f.Message, "outflow replay") {
		t.Errorf("%v", f)
	}
	o.Exec("SELECT pg_terminate_backend($1)", g.conn.PgConn().PID())
	lost(t, g)
	await.Until(t, "the lock is free", o.alone)
}

// TestAGuardThatIsSilentIsEndedByPostgreSQL: its process was stopped.
func TestAGuardThatIsSilentIsEndedByPostgreSQL(t *testing.T) {
	t.Parallel()
	lost(t, newOutbox(t).guard(time.Hour, time.Millisecond))
}

// TestAGuardIsNotReliedOnForLongerThanPostgreSQLHasHeardOfIt: the process was stopped, and wakes up.
func TestAGuardIsNotReliedOnForLongerThanPostgreSQLHasHeardOfIt(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	g := o.guard(time.Hour, time.Hour)
	g.heard.Add(-int64(relied.Seconds()))
	ctx, cancel := context.WithTimeout(t.Context(), 2*recheck)
	defer cancel()
	if err := g.Check(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	g = o.guard(time.Millisecond, time.Hour)
	g.heard.Store(0)
	must.Succeed(t, g.Check(outboxdb.Within(t)))
}

// TestAGuardAsksOnceMoreAtItsEnd: the server with its lock is cut off, and nobody says so.
func TestAGuardAsksOnceMoreAtItsEnd(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	must.Succeed(t, o.guard(time.Hour, time.Hour).End(outboxdb.Within(t)))
	proxy, url, err := faultproxy.To(o.URL)
	must.Succeed(t, err)
	t.Cleanup(proxy.Close)
	g := o.guardAt(url, time.Hour, 2*time.Second)
	proxy.Mute(faultproxy.ToServer, true)
	proxy.Mute(faultproxy.ToClient, true)
	g.heard.Store(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).Unix())
	if err := g.End(outboxdb.Within(t)); err == nil ||
		!strings.Contains(err.Error(), "ended since 2026-01-02T03:04:05Z") {
		t.Errorf("%v", err)
	}
}

// TestAGuardBearsAServerThatStandsStill for as long as PostgreSQL bears a guard that does.
func TestAGuardBearsAServerThatStandsStill(t *testing.T) {
	t.Parallel()
	tier.OnlyLong(t, "a server stands still for longer than a beat")
	o := newOutbox(t)
	g := o.guard(time.Millisecond, time.Hour)
	pid := int(g.conn.PgConn().PID())
	must.Succeed(t, syscall.Kill(pid, syscall.SIGSTOP))
	stopped := time.Now()
	await.Until(t, "it stands still", func() error {
		if time.Since(stopped) < beat+2*time.Second {
			return errors.New("a beat is not over")
		}
		return nil
	})
	must.Succeed(t, syscall.Kill(pid, syscall.SIGCONT))
	must.Succeed(t, g.End(outboxdb.Within(t)))
}
