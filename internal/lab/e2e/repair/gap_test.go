package repair

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

// gapSetup is an installation that has published rows and loses something that it cannot go on without.
type gapSetup struct {
	*harness.Outflow
	pg   *pgserver.Server
	url  string
	conn *pgx.Conn
	js   jetstream.JetStream
	nats *natstest.ServerProcess

	sum      string     // of the stream, "" if there is none, or anySum
	from, to outbox.LSN // between these lies the row that is committed and not published
}

const anySum = "any"

// serverGapCase is a way to make one.
type serverGapCase struct {
	name     string
	major    int      // of PostgreSQL, 0: the default
	settings []string // of the server, which is the test's own then
	lives    bool     // outflow runs while it happens, and finds it done
	sees     bool     // it sees how it happens
	damage   func(g *gapSetup)
	init     bool // outflow init is tried as well: it must not hide the gap
	code     string
	whole    bool // the row that is not published must be in the range
}

// TestEveryGapStopsOutflowWithExitCode4 is claim C7: whatever is lost, outflow stops with exit code 4, a
// code of its own and the LSN range, and publishes nothing.
func TestEveryGapStopsOutflowWithExitCode4(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	for _, group := range [][]serverGapCase{slotGaps, liveGaps, serverGaps} {
		runGaps(t, harness.Part(2, group))
	}
}

// runGaps breaks everything first and looks afterwards: a loss counts only when a recheck, 5 s later,
// agrees.
func runGaps(t *testing.T, cases []serverGapCase) {
	all := make([]*gapSetup, len(cases))
	harness.AtOnce(t, len(cases), func(i int) {
		c := cases[i]
		if c.major != 0 && !installed(c.major) {
			return
		}
		g := startGap(t, &c)
		all[i] = g
		if !c.lives {
			g.MustStop(t)
			harness.AwaitSlotFree(t, g.conn, g.Slot)
			g.write(1)
		}
		g.sum = g.digest()
		if c.lives && !c.sees {
			whileFrozen(g.Outflow, func() { c.damage(g) })
		} else {
			c.damage(g)
		}
		if !c.lives {
			g.sum = g.digest()
			g.Start()
		}
	})
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			all[i].mustStand(t, c.major, c.code, c.whole, c.init)
		})
	}
}

// mustStand waits for the end of outflow run: it names the gap and the range, in which, with whole, lies all
// that is not published; outflow init does not hide it; the stream is as it was. Without a set-up the major
// was not there.
func (g *gapSetup) mustStand(t *testing.T, major int, code string, whole, init bool) {
	t.Helper()
	if g == nil {
		SkipWithoutMajor(t, major)
	}
	g.T = t
	g.MustEndInGap(code)
	from, to := g.LSNRange()
	if from > to || whole && (from > g.from || to < g.to) {
		t.Errorf("the range is %v to %v, what is not published lies in %v to %v", from, to, g.from, g.to)
	}
	if code == "divergence" {
		code = "not running" // status compares no messages with the WAL
	}
	g.AwaitHealth(code)
	if init {
		g.MustFailInGap(code, "init")
	}
	if g.sum != anySum && g.digest() != g.sum {
		t.Error("the stream is not what it was")
	}
}

// SkipWithoutMajor skips a test because a major is not here, which fails it where that major is required.
func SkipWithoutMajor(t *testing.T, major int) {
	t.Helper()
	tier.Missing(t, fmt.Sprint("pg", major), "needs PostgreSQL %d (scripts/postgres %[1]d)", major)
}

func installed(major int) bool {
	_, err := pgserver.Find(major)
	return err == nil
}

func startGap(t *testing.T, c *serverGapCase) *gapSetup {
	t.Helper()
	g := &gapSetup{nats: natstest.Process(t)}
	if c.settings == nil && c.major == 0 {
		g.pg = pgtest.Server(t)
	} else {
		g.pg = pgtest.Own(t, c.major, c.settings...)
	}
	g.Outflow, g.conn, g.url = harness.Install(t, g.pg, g.nats.URL(), "gap")
	g.js = harness.JetStream(t, g.nats.URL())
	g.Init()
	g.Start()
	g.write(20)
	harness.AwaitMessages(t, g.js, g.Stream, 20)
	return g
}

// write inserts rows, and notes between which LSNs.
func (g *gapSetup) write(n int) {
	g.T.Helper()
	g.from = harness.WALEnd(g.T, g.conn)
	harness.Exec(g.T, g.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc', "+
		"gen_random_uuid()::text, n, '{}' FROM generate_series(1, $1) n", n)
	g.to = harness.WALEnd(g.T, g.conn)
}

// digest is what the stream holds, "" if there is none.
func (g *gapSetup) digest() string {
	g.T.Helper()
	if _, err := g.js.Stream(g.T.Context(), g.Stream); err != nil {
		return ""
	}
	_, sum, err := oracle.Digest(g.T.Context(), g.js, g.Stream)
	harness.Must(g.T, err)
	return sum
}

// take ends whoever holds the slot, and drops it before it comes back.
func (g *gapSetup) take() {
	harness.Exec(g.T, g.conn, fmt.Sprintf(`DO $$ BEGIN
		LOOP
			BEGIN
				PERFORM pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '%[1]s'
				AND active;
				PERFORM pg_drop_replication_slot('%[1]s');
				RETURN;
			EXCEPTION WHEN object_in_use THEN
				PERFORM pg_sleep(0.002);
			END;
		END LOOP;
	END $$`, g.Slot))
}

func (g *gapSetup) createSlot() {
	harness.Exec(g.T, g.conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", g.Slot)
}

// outgrow writes more WAL than the slot may keep.
func (g *gapSetup) outgrow() {
	for range 4 {
		harness.Exec(g.T, g.conn, "SELECT pg_logical_emit_message(false, 'x', repeat('y', 1000000)) FROM "+
			"generate_series(1, 3)")
		harness.Exec(g.T, g.conn, "SELECT pg_switch_wal()")
		harness.Exec(g.T, g.conn, "CHECKPOINT")
	}
	g.invalidated()
}

// invalidated waits until the slot is.
func (g *gapSetup) invalidated() {
	harness.Eventually(g.T, "the slot is invalidated", func() error {
		var status *string
		err := g.conn.QueryRow(g.T.Context(),
			"SELECT wal_status FROM pg_replication_slots WHERE slot_name = $1", g.Slot).Scan(&status)
		if err == nil && (status == nil || *status != "lost") {
			harness.Exec(g.T, g.conn, "CHECKPOINT")
			err = fmt.Errorf("wal_status %v", status)
		}
		return err
	})
}

var keepLittle = []string{"max_slot_wal_keep_size=1MB", "wal_keep_size=0", "max_wal_size=32MB"}

// Gaps of the slot that happen while outflow is stopped. (Dropped, and made anew:
// TestABrokenSetupStopsOutflowUntilItIsMended.)
var slotGaps = []serverGapCase{
	{name: "slot advanced by hand", code: "slot_ahead", whole: true, init: true,
		damage: func(g *gapSetup) {
			harness.Exec(g.T, g.conn, "SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())", g.Slot)
		}},
	{name: "slot invalidated by max_slot_wal_keep_size", settings: keepLittle, code: "slot_invalidated",
		whole: true, init: true, damage: (*gapSetup).outgrow},
	{name: "slot invalidated by max_slot_wal_keep_size on 18", major: 18, settings: keepLittle,
		code: "slot_invalidated", whole: true, damage: (*gapSetup).outgrow},
	{name: "slot invalidated by idle_replication_slot_timeout", major: 18,
		settings: []string{"idle_replication_slot_timeout=1s"}, code: "slot_invalidated", whole: true,
		damage: (*gapSetup).invalidated},
	{name: "slot dropped, then init", code: "slot_missing", whole: true,
		init: true, damage: func(g *gapSetup) {
			harness.Exec(g.T, g.conn, "SELECT pg_drop_replication_slot($1)", g.Slot)
		}},
	{name: "slot made anew, then init", code: "slot_ahead", whole: true,
		init: true, damage: func(g *gapSetup) {
			harness.Exec(g.T, g.conn, "SELECT pg_drop_replication_slot($1)", g.Slot)
			g.createSlot()
		}},
	{name: "bucket deleted", code: "record_missing",
		whole: true, damage: func(g *gapSetup) {
			harness.Must(g.T, g.js.DeleteKeyValue(g.T.Context(), checkpoint.Bucket(g.Stream)))
		}},
	{name: "stream deleted, then init", code: "stream_missing", init: true,
		damage: func(g *gapSetup) { harness.Must(g.T, g.js.DeleteStream(g.T.Context(), g.Stream)) }},
}

// Gaps that happen to an outflow that runs.
var liveGaps = []serverGapCase{
	{name: "slot dropped under a running outflow", lives: true, code: "slot_missing", whole: true,
		damage: func(g *gapSetup) {
			g.take()
			g.write(1)
		}},
	{name: "slot made anew under a running outflow", lives: true, code: "slot_ahead", whole: true,
		damage: func(g *gapSetup) {
			g.take()
			g.write(1)
			g.createSlot()
		}},
	{name: "slot lost during an outage of NATS", lives: true, sees: true, settings: keepLittle,
		code: "slot_invalidated", whole: true, damage: func(g *gapSetup) {
			harness.Must(g.T, g.nats.Kill())
			g.write(1)
			g.outgrow()
			harness.Must(g.T, g.nats.Start())
		}},
	{name: "record deleted under a running outflow", lives: true, code: "record_missing",
		damage: func(g *gapSetup) {
			kv, err := g.js.KeyValue(g.T.Context(), checkpoint.Bucket(g.Stream))
			harness.Must(g.T, err)
			harness.Must(g.T, kv.Delete(g.T.Context(), g.Slot))
			g.write(1)
			g.sum = anySum // published before the record is written again
		}},
	{name: "stream deleted under a running outflow", lives: true, code: "stream_missing",
		damage: func(g *gapSetup) {
			harness.Must(g.T, g.js.DeleteStream(g.T.Context(), g.Stream))
			g.write(1)
			g.sum = ""
		}},
	{name: "stream made anew under a running outflow", lives: true, code: "stream_recreated",
		damage: func(g *gapSetup) {
			s, err := g.js.Stream(g.T.Context(), g.Stream)
			harness.Must(g.T, err)
			cfg := s.CachedInfo().Config
			harness.Must(g.T, g.js.DeleteStream(g.T.Context(), g.Stream))
			_, err = g.js.CreateStream(g.T.Context(), cfg)
			harness.Must(g.T, err)
			g.sum = g.digest()
			g.write(1)
		}},
}
