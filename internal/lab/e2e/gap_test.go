package e2e

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

// gapped is an installation that has published rows and loses something that it cannot go on without.
type gapped struct {
	*outflow
	pg   *pgserver.Server
	url  string
	conn *pgx.Conn
	js   jetstream.JetStream
	nats *natstest.ServerProcess

	sum      string     // of the stream, "" if there is none, or anySum
	from, to outbox.LSN // between these lies the row that is committed and not published
}

const anySum = "any"

// gapCase is a way to make one.
type gapCase struct {
	name     string
	major    int      // of PostgreSQL, 0: the default
	settings []string // of the server, which is the test's own then
	lives    bool     // outflow runs while it happens, and finds it done
	sees     bool     // it sees how it happens
	smash    func(g *gapped)
	init     bool // outflow init is tried as well: it must not hide the gap
	code     string
	says     []string
	whole    bool // the row that is not published must be in the range
}

// TestGaps is claim C7: whatever is lost, outflow stops with exit code 4, a message of its own and the LSN range, and publishes nothing.
func TestGaps(t *testing.T) {
	slow(t)
	t.Parallel()
	for _, group := range [][]gapCase{slotGaps, liveGaps, serverGaps} {
		runGaps(t, group)
	}
}

// runGaps breaks everything first and looks afterwards: a loss counts only when a second reading, 5 s later, agrees.
func runGaps(t *testing.T, cases []gapCase) {
	all := make([]*gapped, len(cases))
	atOnce(t, len(cases), func(i int) {
		c := cases[i]
		if c.major != 0 && !installed(c.major) {
			return
		}
		g := startGap(t, &c)
		all[i] = g
		if !c.lives {
			if code := g.term(); code != 0 {
				t.Fatalf("%s: stop: exit code %d", c.name, code)
			}
			left(t, g.conn, g.slot)
			g.write(1)
		}
		g.sum = g.digest()
		g.log.Reset()
		if c.lives && !c.sees {
			g.unseen(func() { c.smash(g) })
		} else {
			c.smash(g)
		}
		if !c.lives {
			g.sum = g.digest()
			g.start()
		}
	})
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			g := all[i]
			if g == nil {
				lacks(t, c.major)
			}
			g.t = t
			g.ends(4, append([]string{"LSN range"}, c.says...)...)
			from, to := g.lsnRange()
			if from > to || c.whole && (from > g.from || to < g.to) {
				t.Errorf("the range is %v to %v, what is not published lies in %v to %v", from, to, g.from, g.to)
			}
			want := c.code
			if want == "divergence" {
				want = "not running" // status compares no messages with the WAL
			}
			g.healthy(want)
			if c.init {
				g.fails(4, []string{"init"}, c.says...)
			}
			if g.sum != anySum && g.digest() != g.sum {
				t.Error("the stream is not what it was")
			}
		})
	}
}

// lacks skips a test because a major is not here, which fails it where that major is required.
func lacks(t *testing.T, major int) {
	t.Helper()
	tier.Missing(t, fmt.Sprint("postgres-", major), "needs PostgreSQL %d (scripts/postgres %[1]d)", major)
}

func installed(major int) bool {
	_, err := pgserver.Find(major)
	return err == nil
}

func startGap(t *testing.T, c *gapCase) *gapped {
	t.Helper()
	g := &gapped{nats: natstest.Process(t)}
	if c.settings == nil && c.major == 0 {
		g.pg = pgtest.Server(t)
	} else {
		g.pg = pgtest.Own(t, c.major, c.settings...)
	}
	g.outflow, g.conn, g.url = installation(t, g.pg, g.nats.URL(), "gap")
	g.js = js(t, g.nats.URL())
	g.init()
	g.start()
	g.write(20)
	awaitMessages(t, g.js, g.stream, 20)
	return g
}

// write inserts rows, and notes between which LSNs.
func (g *gapped) write(n int) {
	g.t.Helper()
	g.from = g.lsn("SELECT pg_current_wal_insert_lsn()::text")
	mustExec(g.t, g.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc', gen_random_uuid()::text, n, '{}' FROM generate_series(1, $1) n", n)
	g.to = g.lsn("SELECT pg_current_wal_insert_lsn()::text")
}

func (g *gapped) lsn(sql string) outbox.LSN {
	g.t.Helper()
	var text string
	must(g.t, g.conn.QueryRow(g.t.Context(), sql).Scan(&text))
	lsn, err := outbox.ParseLSN(text)
	must(g.t, err)
	return lsn
}

// digest is what the stream holds, "" if there is none.
func (g *gapped) digest() string {
	g.t.Helper()
	if _, err := g.js.Stream(g.t.Context(), g.stream); err != nil {
		return ""
	}
	_, sum, err := oracle.Digest(g.t.Context(), g.js, g.stream)
	must(g.t, err)
	return sum
}

// take ends whoever holds the slot, and drops it before it comes back.
func (g *gapped) take() {
	mustExec(g.t, g.conn, fmt.Sprintf(`DO $$ BEGIN
		LOOP
			BEGIN
				PERFORM pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '%[1]s' AND active;
				PERFORM pg_drop_replication_slot('%[1]s');
				RETURN;
			EXCEPTION WHEN object_in_use THEN
				PERFORM pg_sleep(0.002);
			END;
		END LOOP;
	END $$`, g.slot))
}

func (g *gapped) createSlot() {
	mustExec(g.t, g.conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", g.slot)
}

// outgrow writes more WAL than the slot may keep.
func (g *gapped) outgrow() {
	for range 4 {
		mustExec(g.t, g.conn, "SELECT pg_logical_emit_message(false, 'x', repeat('y', 1000000)) FROM generate_series(1, 3)")
		mustExec(g.t, g.conn, "SELECT pg_switch_wal()")
		mustExec(g.t, g.conn, "CHECKPOINT")
	}
	g.invalidated()
}

// invalidated waits until the slot is.
func (g *gapped) invalidated() {
	eventually(g.t, "the slot is invalidated", func() error {
		var status *string
		err := g.conn.QueryRow(g.t.Context(), "SELECT wal_status FROM pg_replication_slots WHERE slot_name = $1", g.slot).Scan(&status)
		if err == nil && (status == nil || *status != "lost") {
			mustExec(g.t, g.conn, "CHECKPOINT")
			err = fmt.Errorf("wal_status %v", status)
		}
		return err
	})
}

var keepLittle = []string{"max_slot_wal_keep_size=1MB", "wal_keep_size=0", "max_wal_size=32MB"}

// Gaps of the slot that happen while outflow is stopped. (Dropped, and made anew: TestFaults.)
var slotGaps = []gapCase{
	{name: "slot advanced by hand", code: "slot_ahead", says: []string{"beyond every place", "somebody moved it"}, whole: true, init: true,
		smash: func(g *gapped) {
			mustExec(g.t, g.conn, "SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())", g.slot)
		}},
	{name: "slot invalidated by max_slot_wal_keep_size", settings: keepLittle, code: "slot_invalidated", says: []string{"was invalidated"}, whole: true,
		init: true, smash: (*gapped).outgrow},
	{name: "slot invalidated by max_slot_wal_keep_size on 18", major: 18, settings: keepLittle, code: "slot_invalidated",
		says: []string{"was invalidated: wal_removed"}, whole: true, smash: (*gapped).outgrow},
	{name: "slot invalidated by idle_replication_slot_timeout", major: 18, settings: []string{"idle_replication_slot_timeout=1s"}, code: "slot_invalidated",
		says: []string{"was invalidated: idle_timeout"}, whole: true, smash: (*gapped).invalidated},
	{name: "slot dropped, then init", code: "slot_missing", says: []string{"does not exist"}, whole: true, init: true,
		smash: func(g *gapped) { mustExec(g.t, g.conn, "SELECT pg_drop_replication_slot($1)", g.slot) }},
	{name: "slot made anew, then init", code: "slot_ahead", says: []string{"made it anew"}, whole: true, init: true,
		smash: func(g *gapped) {
			mustExec(g.t, g.conn, "SELECT pg_drop_replication_slot($1)", g.slot)
			g.createSlot()
		}},
	{name: "bucket deleted", code: "record_missing", says: []string{"checkpoint record", "missing"}, whole: true,
		smash: func(g *gapped) { must(g.t, g.js.DeleteKeyValue(g.t.Context(), checkpoint.Bucket(g.stream))) }},
	{name: "stream deleted, then init", code: "stream_missing", says: []string{"does not exist"}, init: true,
		smash: func(g *gapped) { must(g.t, g.js.DeleteStream(g.t.Context(), g.stream)) }},
}

// Gaps that happen to an outflow that runs.
var liveGaps = []gapCase{
	{name: "slot dropped under a running outflow", lives: true, code: "slot_missing", says: []string{"does not exist"}, whole: true,
		smash: func(g *gapped) {
			g.take()
			g.write(1)
		}},
	{name: "slot made anew under a running outflow", lives: true, code: "slot_ahead", says: []string{"made it anew"}, whole: true,
		smash: func(g *gapped) {
			g.take()
			g.write(1)
			g.createSlot()
		}},
	{name: "slot lost during an outage of NATS", lives: true, sees: true, settings: keepLittle, code: "slot_invalidated", says: []string{"was invalidated"}, whole: true,
		smash: func(g *gapped) {
			must(g.t, g.nats.Kill())
			g.write(1)
			g.outgrow()
			must(g.t, g.nats.Start())
		}},
	{name: "record deleted under a running outflow", lives: true, code: "record_missing", says: []string{"checkpoint record", "missing"},
		smash: func(g *gapped) {
			kv, err := g.js.KeyValue(g.t.Context(), checkpoint.Bucket(g.stream))
			must(g.t, err)
			must(g.t, kv.Delete(g.t.Context(), g.slot))
			g.write(1)
			g.sum = anySum // published before the record is written again
		}},
	{name: "stream deleted under a running outflow", lives: true, code: "stream_missing", says: []string{"does not exist"},
		smash: func(g *gapped) {
			must(g.t, g.js.DeleteStream(g.t.Context(), g.stream))
			g.write(1)
			g.sum = ""
		}},
	{name: "stream made anew under a running outflow", lives: true, code: "stream_recreated", says: []string{"was made at"},
		smash: func(g *gapped) {
			s, err := g.js.Stream(g.t.Context(), g.stream)
			must(g.t, err)
			cfg := s.CachedInfo().Config
			must(g.t, g.js.DeleteStream(g.t.Context(), g.stream))
			_, err = g.js.CreateStream(g.t.Context(), cfg)
			must(g.t, err)
			g.sum = g.digest()
			g.write(1)
		}},
}
