package e2e

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// The peers_*_test.go files hold what other streamers of a WAL were seen to fail at: docs/guarantees.md, "Failures seen elsewhere".

// exact compares stream and table and holds the order: with horizon 0s and sort commit the messages are in the order of their positions.
func (o *outflow) exact(conn *pgx.Conn, natsURL string) []*oracle.Message {
	o.t.Helper()
	o.mustBeComplete(conn, natsURL)
	all := messages(o.t, js(o.t, natsURL), o.stream)
	for i := 1; i < len(all); i++ {
		if a, b := all[i-1].Outflow.Pos, all[i].Outflow.Pos; a.Compare(b) >= 0 {
			o.t.Fatalf("message %d has position %v, the one before it %v", all[i].Seq, b, a)
		}
	}
	return all
}

// inCommitOrder are the settings under which exact holds the order.
var inCommitOrder = []string{"REORDER_HORIZON=0s", "REORDER_SORT=commit"}

// TestStopInsideATransaction ends outflow while it publishes one large transaction, in every way there is, and lets it go on: a loop
// that was ended is not a loop that has finished.
func TestStopInsideATransaction(t *testing.T) {
	slow(t)
	t.Parallel()
	const rows = 20_000
	seed := uint64(number(t, "OUTFLOW_TEST_SEED", 1))
	ns := natstest.Process(t)
	for _, c := range []struct {
		name string
		stop func(t *testing.T, o *outflow, conn *pgx.Conn)
	}{
		{"SIGTERM", func(t *testing.T, o *outflow, _ *pgx.Conn) {
			if code := o.term(); code != 0 {
				t.Errorf("exit code %d", code)
			}
			o.start()
		}},
		{"SIGKILL", func(_ *testing.T, o *outflow, _ *pgx.Conn) { o.kill(); o.start() }},
		// All of its connections to the database, also those that replicate nothing.
		{"connections cut", func(t *testing.T, _ *outflow, conn *pgx.Conn) {
			mustExec(t, conn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(seed, uint64(len(c.name))))
			o, conn, _ := installation(t, pgtest.Server(t), ns.URL(), "stopped", append(inCommitOrder, "SINK_DURABLE_AFTER=0s")...) // confirmed at once
			o.init()
			o.start()
			const trials = 3
			for trial := range trials {
				mustExec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
					SELECT 'doc' || n % 10, 'a', $2::bigint * $1 + n, '{"op": [[0, 0, "x"]]}' FROM generate_series(1, $2::bigint) n`, trial, rows)
				for range 2 {
					o.ready() // a signal that comes before the program can take it is a kill
					awaitMessages(t, js(t, ns.URL()), o.stream, trial*rows+1+rnd.IntN(rows/2))
					c.stop(t, o, conn)
				}
				row(t, conn, "between", trial, "{}") // so that something else could be confirmed
			}
			awaitMessages(t, js(t, ns.URL()), o.stream, trials*(rows+1))
			o.exact(conn, ns.URL())
		})
	}
}

// TestCrashBehindACompressibleRow: the text of a large value is many times as long as its WAL. An LSN that is computed from lengths
// points beyond transactions that nobody has published, even beyond the WAL.
func TestCrashBehindACompressibleRow(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Process(t)
	o, conn, _ := installation(t, pgtest.Server(t), ns.URL(), "compressible", append(inCommitOrder, "SINK_DURABLE_AFTER=0s")...)
	o.init()
	o.start()
	o.ready()
	row(t, conn, "large", 1, `"`+strings.Repeat("x", 1_000_000)+`"`)
	awaitMessages(t, js(t, ns.URL()), o.stream, 1)
	must(t, ns.Pause()) // what comes now stays in flight
	for i := 2; i <= 10; i++ {
		row(t, conn, "small", i, "{}")
	}
	end := walEnd(t, conn)
	eventually(t, "nine rows in flight, the large one confirmed", func() error {
		_, body := o.get("/metrics")
		if !strings.Contains(body, "\noutflow_in_flight_messages 9\n") && !strings.Contains(o.log.String(), "session ended") { // it waits for seconds only
			return fmt.Errorf("metrics: %.3000s", body)
		}
		return nil
	})
	o.kill()
	if c := o.confirmed(conn); c > end {
		t.Errorf("confirmed %v, the WAL ends at %v", c, end)
	}
	must(t, ns.Resume())
	for i := 11; i <= 13; i++ {
		row(t, conn, "after", i, "{}")
	}
	o.start()
	awaitMessages(t, js(t, ns.URL()), o.stream, 13)
	o.exact(conn, ns.URL())
}

// walEnd is where the next commit goes.
func walEnd(t testing.TB, conn *pgx.Conn) outbox.LSN {
	t.Helper()
	return lsn(t, conn, "SELECT pg_current_wal_insert_lsn()::text")
}

// confirmed is what the server has of the slot.
func (o *outflow) confirmed(conn *pgx.Conn) outbox.LSN {
	o.t.Helper()
	return lsn(o.t, conn, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1", o.slot)
}

func lsn(t testing.TB, conn *pgx.Conn, sql string, args ...any) outbox.LSN {
	t.Helper()
	var text string
	must(t, conn.QueryRow(t.Context(), sql, args...).Scan(&text))
	l, err := outbox.ParseLSN(text)
	must(t, err)
	return l
}

// TestTwoStartAtOnce: two instances of one slot, started at the same moment, again and again.
func TestTwoStartAtOnce(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Process(t)
	a, conn, url := installation(t, pgtest.Server(t), ns.URL(), "both", inCommitOrder...)
	b := newOutflow(t, url, ns.URL(), a.slot, inCommitOrder...)
	b.named(a.stream)
	a.init()
	const rounds, rows = 5, 2000
	for i := range rounds {
		mustExec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
			SELECT 'doc', 'a', $2::bigint * $1 + n, '{}' FROM generate_series(1, $2::bigint) n`, i, rows)
		a.start()
		b.start()
		awaitMessages(t, js(t, ns.URL()), a.stream, i*rows+1+rows/3)
		if i == rounds-1 {
			break
		}
		a.kill()
		b.kill()
	}
	awaitMessages(t, js(t, ns.URL()), a.stream, rounds*rows)
	a.exact(conn, ns.URL())
	a.ready() // a signal that comes before the program can take it is a kill
	b.ready()
	if x, y := a.term(), b.term(); x != 0 || y != 0 {
		t.Errorf("exit codes %d and %d", x, y)
	}
}

// TestLostSlotIsNotMadeAnew: one that begins at "now" would skip what was written meanwhile, and nobody would know.
func TestLostSlotIsNotMadeAnew(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		o, conn, _ := installation(t, pg, ns.URL(), "lost", inCommitOrder...)
		o.init()
		o.start()
		row(t, conn, "before", 1, "{}")
		awaitMessages(t, js(t, ns.URL()), o.stream, 1)
		if code := o.term(); code != 0 {
			t.Fatalf("exit code %d", code)
		}
		row(t, conn, "meanwhile", 2, "{}")
		mustExec(t, conn, "SELECT pg_drop_replication_slot($1)", o.slot)
		o.log.Reset()
		o.start()
		o.ends(4, "slot", o.slot, "does not exist", "LSN range")
		o.fails(4, []string{"init"}, "slot", "LSN range")
		var slots int
		must(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", o.slot).Scan(&slots))
		if slots != 0 {
			t.Error("the slot is there again")
		}
		if n := len(messages(t, js(t, ns.URL()), o.stream)); n != 1 {
			t.Errorf("%d messages, want 1", n)
		}
	})
}
