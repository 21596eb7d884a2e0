package partition

import (
	"context"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAStatementThatWasGivenUpHasEnded when the manager is closed: its process is about to end, and the next
// one needs the table's lock.
func TestAStatementThatWasGivenUpHasEnded(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	for try := 1; ; try++ {
		m := w.manager()
		must.Succeed(t, m.alone(t.Context()))
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := m.conn.Exec(ctx, "SELECT pg_sleep(600)"); err == nil {
			t.Fatal("it slept")
		}
		m.Close()
		select {
		case <-m.conn.PgConn().CleanupDone():
		default:
			if try == 3 { // it waits for a moment only, and the machine may stand still for longer
				t.Fatal("PostgreSQL has not ended it yet")
			}
			continue
		}
		if n := w.Text("SELECT count(*)::text FROM pg_locks WHERE locktype = 'advisory' AND granted AND " +
			"database = (SELECT oid FROM pg_database WHERE datname = current_database())"); n != "0" {
			t.Errorf("%s locks are held", n)
		}
		return
	}
}
