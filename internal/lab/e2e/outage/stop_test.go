package outage

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAStopInsideATransactionLosesNothing ends outflow while it publishes one large transaction, in every way
// there is, and lets it go on: a loop that was ended is not a loop that has finished.
func TestAStopInsideATransactionLosesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	const rows = 20_000
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", 1))
	ns := natstest.Process(t)
	for _, c := range []struct {
		name string
		stop func(t *testing.T, o *harness.Outflow, conn *pgx.Conn)
	}{
		{"SIGTERM", func(t *testing.T, o *harness.Outflow, _ *pgx.Conn) {
			o.MustStop(t)
			o.Start()
		}},
		{"SIGKILL", func(_ *testing.T, o *harness.Outflow, _ *pgx.Conn) { o.Kill(); o.Start() }},
		// All of its connections to the database, also those that replicate nothing.
		{"connections cut", func(t *testing.T, _ *harness.Outflow, conn *pgx.Conn) {
			harness.Exec(t, conn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "+
				"pg_backend_pid() AND datname = current_database()")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(seed, uint64(len(c.name))))
			// confirmed at once
			o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "stopped",
				append(harness.InCommitOrder, "SINK_DURABLE_AFTER=0s")...)
			o.Init()
			o.Start()
			const trials = 3
			for trial := range trials {
				harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
					SELECT 'doc' || n % 10, 'a', $2::bigint * $1 + n, '{"op": [[0, 0, "x"]]}'
					FROM generate_series(1, $2::bigint) n`, trial, rows)
				for range 2 {
					o.AwaitReady() // a signal that comes before the program can take it is a kill
					harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, trial*rows+1+
						rnd.IntN(rows/2))
					c.stop(t, o, conn)
				}
				harness.Insert(t, conn, "between", trial, "{}") // so that something else could be confirmed
			}
			harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, trials*(rows+1))
			o.MustBeExact(conn, ns.URL())
		})
	}
}

// TestACrashBehindACompressibleRowSkipsNothing: the text of a large value is many times as long as its WAL.
// An LSN that is computed from lengths points beyond transactions that nobody has published, even beyond the
// WAL.
func TestACrashBehindACompressibleRowSkipsNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Process(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "compressible",
		append(harness.InCommitOrder, "SINK_DURABLE_AFTER=0s")...)
	o.Init()
	o.Start()
	o.AwaitReady()
	harness.Insert(t, conn, "large", 1, `"`+strings.Repeat("x", 1_000_000)+`"`)
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
	harness.Must(t, ns.Pause()) // what comes now stays in flight
	for i := 2; i <= 10; i++ {
		harness.Insert(t, conn, "small", i, "{}")
	}
	end := harness.WALEnd(t, conn)
	harness.Eventually(t, "nine rows in flight, the large one confirmed", func() error {
		// it waits for seconds only
		if n := harness.Metric(t, o, "outflow_in_flight_messages"); n != 9 &&
			!strings.Contains(o.Log.String(), "session ended") {
			return fmt.Errorf("%v in flight", n)
		}
		return nil
	})
	o.Kill()
	if c := o.ConfirmedLSN(conn); c > end {
		t.Errorf("confirmed %v, the WAL ends at %v", c, end)
	}
	harness.Must(t, ns.Resume())
	for i := 11; i <= 13; i++ {
		harness.Insert(t, conn, "after", i, "{}")
	}
	o.Start()
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 13)
	o.MustBeExact(conn, ns.URL())
}

// TestTwoInstancesStartedAtOnceLeaveAnExactStream: two instances of one slot, started at the same moment,
// again and again.
func TestTwoInstancesStartedAtOnceLeaveAnExactStream(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Process(t)
	a, conn, url := harness.Install(t, pgtest.Server(t), ns.URL(), "both", harness.InCommitOrder...)
	b := harness.New(t, url, ns.URL(), a.Slot, harness.InCommitOrder...)
	b.UseStream(a.Stream)
	a.Init()
	const rounds, rows = 5, 2000
	for i := range rounds {
		harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
			SELECT 'doc', 'a', $2::bigint * $1 + n, '{}' FROM generate_series(1, $2::bigint) n`, i, rows)
		a.Start()
		b.Start()
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), a.Stream, i*rows+1+rows/3)
		if i == rounds-1 {
			break
		}
		a.Kill()
		b.Kill()
	}
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), a.Stream, rounds*rows)
	a.MustBeExact(conn, ns.URL())
	a.AwaitReady() // a signal that comes before the program can take it is a kill
	b.AwaitReady()
	if x, y := a.Stop(), b.Stop(); x != 0 || y != 0 {
		t.Errorf("exit codes %d and %d", x, y)
	}
}

// TestALostSlotIsNotRecreated: one that begins at "now" would skip what was written meanwhile, and nobody
// would know.
func TestALostSlotIsNotRecreated(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		o, conn, _ := harness.Install(t, pg, ns.URL(), "lost", harness.InCommitOrder...)
		o.Init()
		o.Start()
		harness.Insert(t, conn, "before", 1, "{}")
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
		o.MustStop(t)
		harness.Insert(t, conn, "meanwhile", 2, "{}")
		harness.Exec(t, conn, "SELECT pg_drop_replication_slot($1)", o.Slot)
		o.Start()
		o.MustEndInGap("slot_missing")
		o.MustFailInGap("slot_missing", "init")
		slots := harness.Value[int](t, conn, "SELECT count(*) FROM pg_replication_slots WHERE "+
			"slot_name = $1", o.Slot)
		if slots != 0 {
			t.Error("the slot is there again")
		}
		if n := len(harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)); n != 1 {
			t.Errorf("%d messages, want 1", n)
		}
	})
}
