package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// Health asks outflow status --json for the health.
func (o *Outflow) Health() (health, problem string) {
	o.T.Helper()
	var report struct{ Health, Problem string }
	Must(o.T, json.Unmarshal([]byte(o.MustRun("status", "--json")), &report))
	return report.Health, report.Problem
}

// A machine that tests may stand still, as a whole or any process of it, for seconds and at any moment. No
// test takes that for an answer.
const (
	Patience   = await.Limit      // how long a test waits for what must come
	AskTimeout = 20 * time.Second // one question to a server: one that was killed meanwhile never answers
	Tries      = 5                // of a command that says that a server does not answer
)

// AwaitReady waits until /readyz says so.
func (o *Outflow) AwaitReady() {
	o.T.Helper()
	Eventually(o.T, "ready", func() error {
		if code, body := o.Get("/readyz"); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
}

// Eventually waits until check returns nil, while what the test has started runs: its outflows, and what
// else it names.
func Eventually(t testing.TB, what string, check func() error, running ...*process.Process) {
	t.Helper()
	await.Until(t, what, check, func() (err error) {
		for _, p := range running {
			if !p.Running() {
				err = fmt.Errorf("process %d has ended: %v", p.PID(), p.Wait())
			}
		}
		for key := range outflows.Range {
			o := key.(*Outflow)
			within := strings.HasPrefix(o.T.Name()+"/", t.Name()+"/") ||
				strings.HasPrefix(t.Name()+"/", o.T.Name()+"/")
			if within && !o.ending.Load() && o.Process != nil && !o.Process.Running() {
				err = fmt.Errorf("outflow run of %s has ended: %v", o.Slot, o.Process.Wait())
			}
		}
		return err
	})
}

// most is how many cases run at the same time. Each has servers and programs of its own, and more of them
// than a slow machine can bear would wait for one another until they give up.
const most = 4

// AtOnce does something n times, a few at the same time, more of them than tests may run in parallel, and
// returns when all have ended. A fatal failure ends the one that it happens in first.
func AtOnce(t *testing.T, n int, do func(i int)) {
	t.Helper()
	var all sync.WaitGroup
	running := make(chan struct{}, most)
	for i := range n {
		all.Go(func() {
			running <- struct{}{}
			defer func() { <-running }()
			do(i)
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// AwaitRoles waits until one of two runs and the other one stands by. Who stands still too long hands over.
func AwaitRoles(a, b *Outflow) (active, standby *Outflow) {
	a.T.Helper()
	Eventually(a.T, "one runs, one stands by", func() error {
		_, x := a.Get("/readyz")
		_, y := b.Get("/readyz")
		switch {
		case strings.HasPrefix(x, "running") && strings.HasPrefix(y, "standby"):
			active, standby = a, b
		case strings.HasPrefix(x, "standby") && strings.HasPrefix(y, "running"):
			active, standby = b, a
		default:
			return fmt.Errorf("%s; %s", x, y)
		}
		return nil
	})
	return active, standby
}

// AwaitState waits until /readyz says 200 and names a state.
func (o *Outflow) AwaitState(want string) {
	o.T.Helper()
	Eventually(o.T, want, func() error {
		if code, body := o.Get("/readyz"); code != 200 || !strings.HasPrefix(body, want) {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
}

// RunAtOnce runs a subtest for each case, a few at the same time: they wait more than they work.
func RunAtOnce[C any](t *testing.T, cases []C, name func(C) string, test func(t *testing.T, i int, c C)) {
	t.Helper()
	AtOnce(t, len(cases), func(i int) {
		t.Run(name(cases[i]), func(t *testing.T) { test(t, i, cases[i]) })
	})
}

// AwaitHealth waits until outflow status says a health.
func (o *Outflow) AwaitHealth(want string) {
	o.T.Helper()
	Eventually(o.T, "outflow status", func() error {
		if r := o.Status(); r.Health != want { // the end of a process is seen by the server in a moment
			return fmt.Errorf("health %s, want %s", r.Health, want)
		}
		return nil
	})
}

// AwaitSlotFree waits until nobody holds a slot: a server sees in a moment that a client has gone.
func AwaitSlotFree(t testing.TB, conn *pgx.Conn, slot string) {
	t.Helper()
	Eventually(t, "slot "+slot+" is free", func() error {
		var active bool
		Must(t, conn.QueryRow(t.Context(), "SELECT coalesce(bool_or(active), false) FROM "+
			"pg_replication_slots WHERE slot_name = $1", slot).Scan(&active))
		if active {
			return errors.New("somebody holds it")
		}
		return nil
	})
}

// inUse tells whether a server refuses because somebody still uses what is to be dropped or changed: who has
// just been stopped, or a worker of its own.
func inUse(err error) bool {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	return ok && refused.Code == "55006"
}
