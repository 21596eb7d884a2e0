package outage

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestABlockedSinkKeepsTheReplicationConnection: NATS takes nothing for longer than wal_sender_timeout while
// much WAL arrives, in two lengths: shorter and longer than the wait for an acknowledgement. The server must
// never have to end the replication connection because nobody answers, and nothing that waits may be
// confirmed by a keepalive or by the neighbours' commits.
func TestABlockedSinkKeepsTheReplicationConnection(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	for _, c := range []struct {
		timeout string
		silence time.Duration
	}{{"2s", 4500 * time.Millisecond}, {"5s", 8 * time.Second}} {
		t.Run("wal_sender_timeout="+c.timeout, func(t *testing.T) {
			t.Parallel()
			pg := pgtest.Own(t, 0, "wal_sender_timeout="+c.timeout)
			url, err := pg.CreateDatabase(t.Context(), "blocked")
			harness.Must(t, err)
			conn := harness.Connect(t, url)
			ns := natstest.Process(t)
			o := harness.New(t, url, ns.URL(), "blocked",
				append(harness.InCommitOrder, "SINK_DURABLE_AFTER=0s")...)
			o.Init()
			o.Start()
			o.AwaitReady()
			harness.Exec(t, conn, harness.InsertNumbered, 1, 500)
			harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 500)
			harness.Exec(t, conn, "CREATE TABLE neighbours (payload text)")

			watch := watchStandstill(t, conn.Config().ConnString(), o)
			harness.Must(t, ns.Pause())
			begun := time.Now()
			before := harness.WALEnd(t, conn)
			rows := 500
			for time.Since(begun) < c.silence || rows < 4000 { // how long NATS is silent
				for range 20 {
					harness.Exec(t, conn, harness.InsertNumbered, rows+1, rows+100)
					rows += 100
				}
				harness.Exec(t, conn, "INSERT INTO neighbours SELECT repeat('n', 500) FROM "+
					"generate_series(1, 2000)")
				// The first of the rows that wait begins behind before.
				if got := o.ConfirmedLSN(conn); got > before {
					t.Fatalf("confirmed %v while what was committed after %v is in no stream", got, before)
				}
				time.Sleep(100 * time.Millisecond) // the pace of the load
			}
			harness.Must(t, ns.Resume())
			harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, rows)
			o.MustBeExact(conn, ns.URL())
			still := watch()
			switch log := pg.Log(); {
			case !strings.Contains(log, "due to replication timeout"):
			case still > time.Second: // whoever stands still can't answer
				t.Logf("the server ended the connection because nobody answered, on a machine that stood "+
					"still for %v", still)
			default:
				t.Errorf("the server ended the connection because nobody answered:\n%s", log)
			}
			if !o.Process.Running() {
				t.Error("outflow ended")
			}
			o.MustStop(t)
		})
	}
}
