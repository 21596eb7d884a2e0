package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestBlockedSink: NATS takes nothing for longer than wal_sender_timeout while much WAL arrives, in two lengths: shorter and longer than
// the wait for an acknowledgement. The server must never have to end the replication connection because nobody answers, and nothing
// that waits may be confirmed by a keepalive or by the neighbours' commits.
func TestBlockedSink(t *testing.T) {
	slow(t)
	t.Parallel()
	for _, c := range []struct {
		timeout string
		silence time.Duration
	}{{"2s", 4500 * time.Millisecond}, {"5s", 8 * time.Second}} {
		t.Run("wal_sender_timeout="+c.timeout, func(t *testing.T) {
			t.Parallel()
			pg := pgtest.Own(t, 0, "wal_sender_timeout="+c.timeout)
			url, err := pg.CreateDatabase(t.Context(), "blocked")
			must(t, err)
			conn := db(t, url)
			ns := natstest.Process(t)
			o := newOutflow(t, url, ns.URL(), "blocked", append(inCommitOrder, "SINK_DURABLE_AFTER=0s")...)
			o.init()
			o.start()
			o.ready()
			mustExec(t, conn, numbered, 1, 500)
			awaitMessages(t, js(t, ns.URL()), o.stream, 500)
			mustExec(t, conn, "CREATE TABLE neighbours (payload text)")

			watch := watchStandstill(t, conn.Config().ConnString(), o)
			must(t, ns.Pause())
			begun := time.Now()
			before := walEnd(t, conn)
			rows := 500
			for time.Since(begun) < c.silence || rows < 4000 { // how long NATS is silent
				for range 20 {
					mustExec(t, conn, numbered, rows+1, rows+100)
					rows += 100
				}
				mustExec(t, conn, "INSERT INTO neighbours SELECT repeat('n', 500) FROM generate_series(1, 2000)")
				// The first of the rows that wait begins behind before.
				if got := o.confirmed(conn); got > before {
					t.Fatalf("confirmed %v while what was committed after %v is in no stream", got, before)
				}
				time.Sleep(100 * time.Millisecond) // the pace of the load
			}
			must(t, ns.Resume())
			awaitMessages(t, js(t, ns.URL()), o.stream, rows)
			o.exact(conn, ns.URL())
			still := watch()
			switch log := pg.Log(); {
			case !strings.Contains(log, "due to replication timeout"):
			case still > time.Second: // whoever stands still can't answer
				t.Logf("the server ended the connection because nobody answered, on a machine that stood still for %v", still)
			default:
				t.Errorf("the server ended the connection because nobody answered:\n%s", log)
			}
			if !o.child.Running() {
				t.Error("outflow ended")
			}
			if code := o.term(); code != 0 {
				t.Errorf("exit code %d", code)
			}
		})
	}
}
