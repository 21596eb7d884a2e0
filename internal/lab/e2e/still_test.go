package e2e

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// unseen does something that outflow run, which is frozen meanwhile, sees as a whole: it reads a loss twice, 5 s apart, and on a machine
// that stands still the steps of a test may come further apart than that.
func (o *outflow) unseen(do func()) {
	o.t.Helper()
	must(o.t, o.child.Pause())
	defer func() { must(o.t, o.child.Resume()) }()
	do()
}

// healthy waits until outflow status says a health.
func (o *outflow) healthy(want string) {
	o.t.Helper()
	eventually(o.t, "outflow status", func() error {
		if r := o.status(); r.Health != want { // the end of a process is seen by the server in a moment
			return fmt.Errorf("health %s, want %s", r.Health, want)
		}
		return nil
	})
}

// left waits until nobody holds a slot: a server sees in a moment that a client has gone.
func left(t testing.TB, conn *pgx.Conn, slot string) {
	t.Helper()
	eventually(t, "slot "+slot+" is free", func() error {
		var active bool
		must(t, conn.QueryRow(t.Context(), "SELECT coalesce(bool_or(active), false) FROM pg_replication_slots WHERE slot_name = $1", slot).Scan(&active))
		if active {
			return errors.New("somebody holds it")
		}
		return nil
	})
}

// watchStandstill watches whether this process, a server and an outflow stand still. The function that it returns ends that and says for
// how long one did at most.
func watchStandstill(t *testing.T, pgURL string, o *outflow) (longest func() time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	var most atomic.Int64
	watch := func(look func()) {
		group.Go(func() {
			for ctx.Err() == nil {
				begun := time.Now()
				look()
				time.Sleep(20 * time.Millisecond)
				most.Store(max(most.Load(), int64(time.Since(begun)))) // nearly right is enough where two write
			}
		})
	}
	conn := db(t, pgURL)
	watch(func() { _ = conn.Ping(ctx) })
	watch(func() { o.get("/healthz") })
	return func() time.Duration {
		cancel()
		group.Wait()
		return time.Duration(most.Load())
	}
}

// inUse tells whether a server refuses because somebody still uses what is to be dropped or changed: who has just been stopped, or a
// worker of its own.
func inUse(err error) bool {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	return ok && refused.Code == "55006"
}
