package repair

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// change is one of what is published, such that rows that are written then are not in the stream of changes
// as rows of the table.
type change struct {
	name   string
	make   string // the publication; "": init makes it
	tables bool   // the outbox has partitions
	// what happens while outflow runs, while it is away, and what an operator mends then; nil: nothing
	running, away, mend func(*testing.T, *harness.Installation)

	says    string   // of the fault, while it lasts
	refused bool     // no repair before it is mended
	missing int      // rows that the repair finds
	rows    []string // the tables that have all rows
}

func allTables(f *harness.Installation) string {
	return "CREATE PUBLICATION " + f.Slot + " FOR ALL TABLES WITH (publish = 'insert')"
}

func wholeSchema(f *harness.Installation) string {
	return "CREATE PUBLICATION " + f.Slot + " FOR TABLES IN SCHEMA public WITH (publish = 'insert')"
}

func swapped(t *testing.T, f *harness.Installation) {
	harness.Exec(t, f.Conn, "BEGIN; ALTER TABLE outbox RENAME TO outbox_old; CREATE TABLE outbox (LIKE "+
		"outbox_old INCLUDING ALL); COMMIT")
}

// written writes n rows.
func written(t *testing.T, f *harness.Installation, n int) {
	for i := range n {
		harness.Insert(t, f.Conn, fmt.Sprint("doc ", i), i, "{}")
	}
}

func ofChanges() []change {
	swap := func(t *testing.T, f *harness.Installation) { swapped(t, f); written(t, f, 5) }
	swapUnread := func(t *testing.T, f *harness.Installation) {
		written(t, f, 4)
		swapped(t, f)
		written(t, f, 2)
	}
	both := []string{"outbox", "outbox_old"}
	return []change{
		{name: "another table, all tables", make: "all", running: swap,
			says: "the one that was published has OID", rows: both},
		{name: "another table, a schema", make: "schema", running: swap,
			says: "the one that was published has OID", rows: both},
		{name: "another table while away, all tables", make: "all", away: swapUnread, says: "OID", missing: 4,
			rows: both},
		{name: "another table while away, a schema", make: "schema", away: swapUnread, says: "OID",
			missing: 4, rows: both},
		{
			name: "out of the schema and back", make: "schema", says: "out of its schema", missing: 1,
			rows: []string{"outbox"}, away: func(t *testing.T, f *harness.Installation) {
				harness.Exec(t, f.Conn, "CREATE SCHEMA aside; ALTER TABLE outbox SET SCHEMA aside")
				harness.Exec(t, f.Conn, "INSERT INTO aside.outbox (doc_id, actor_id, counter, payload) "+
					"VALUES ('doc', 'anna', 2, '{}')")
				harness.Exec(t, f.Conn, "ALTER TABLE aside.outbox SET SCHEMA public")
				written(t, f, 1)
			},
		},
		{
			name: "an unlogged partition", tables: true,
			says: "part_3, a partition of public.outbox, is unlogged", refused: true, missing: 5,
			rows: []string{"outbox"},
			running: func(t *testing.T, f *harness.Installation) {
				harness.Exec(t, f.Conn, "CREATE UNLOGGED TABLE part_3 PARTITION OF outbox FOR VALUES IN (3)")
				harness.Exec(t, f.Conn, "UPDATE turn SET part = 3")
				written(t, f, 5)
				harness.Exec(t, f.Conn, "SELECT pg_logical_emit_message(true, 'x', 'y')")
			},
			mend: func(t *testing.T, f *harness.Installation) {
				harness.Exec(t, f.Conn, "ALTER TABLE part_3 SET LOGGED")
				written(t, f, 2)
			},
		},
	}
}

// TestAChangeOfWhatIsPublishedMustBeAccepted changes what is published behind outflow's back: it stops with
// the range, and stops until a repair has accepted it, also where what was changed is mended. Then every row
// is in the stream once, also those of a table that was renamed away.
func TestAChangeOfWhatIsPublishedMustBeAccepted(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	pg, ns := pgtest.Server(t), natstest.Server(t)
	for _, c := range ofChanges() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.make == "schema" && pg.Installation.Major < 15 {
				return
			}
			f := harness.NewInstallation(t, pg, ns.URL(), "otherwise")
			switch {
			case c.tables:
				harness.PartitionedTable(t)(f.Conn)
			case c.make == "all":
				harness.Exec(t, f.Conn, allTables(f))
			case c.make == "schema":
				harness.Exec(t, f.Conn, wholeSchema(f))
			}
			f.Init()
			f.Start()
			harness.Insert(t, f.Conn, "first", 1, "{}")
			harness.AwaitMessages(t, f.JS, f.Stream, 1)
			if c.running != nil {
				c.running(t, f)
			}
			if c.away != nil {
				f.MustStop(t)
				c.away(t, f)
				f.Start()
			}
			f.MustEndInGap("publication_changed")
			if c.refused {
				f.MustFail(3, []string{"repair"}, c.says)
				f.MustFail(3, []string{"repair", "--accept", "publication_changed"}, c.says)
			}
			if c.mend != nil {
				c.mend(t, f)
				f.Start()
				f.MustEndInGap("publication_changed")
			}
			harness.AwaitSlotFree(t, f.Conn, f.Slot)
			r, stderr, code := f.Repair()
			if code != 4 || r.Fault != "publication_changed" || r.Missing < c.missing || len(c.rows) > 1 &&
				!strings.Contains(strings.Join(r.Notes, " "), "public.outbox_old") {
				t.Fatalf("look: exit code %d, %+v\n%s", code, r, stderr)
			}
			// One that is killed finds the former table again. Where this test stood still it may have come
			// to its end.
			if former := len(c.rows) > 1 && c.away != nil; !former ||
				killedAt(f, t, "publication_changed", "publishing", 0) {
				harness.AwaitSlotFree(t, f.Conn, f.Slot)
				if r, stderr, code = f.Repair("--accept", "publication_changed"); code != 0 || !r.Repaired {
					t.Fatalf("repair: exit code %d, %+v\n%s", code, r, stderr)
				}
			}
			f.Start()
			f.AwaitReady()
			harness.Insert(t, f.Conn, "after", 1, "{}")
			mustHaveOnceEach(f, t, 0, c.rows...)
			f.MustStop(t)
		})
	}
}

// TestIDsThatBeginAnewAreNotTakenForPublished: ids that count begin anew with the table that takes the place
// of another, so its rows have ids that messages have. A repair does not take them for published, whether the
// other table is still there, or only its messages tell what the ids were.
func TestIDsThatBeginAnewAreNotTakenForPublished(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	pg, ns := pgtest.Server(t), natstest.Server(t)
	anew := func(sql string) func(*testing.T, *harness.Installation) {
		return func(t *testing.T, f *harness.Installation) { swapped(t, f); harness.Exec(t, f.Conn, sql) }
	}
	for _, c := range []struct {
		name, code, of string
		change         func(*testing.T, *harness.Installation)
		was            int // rows that are not there any more
		rows           []string
	}{
		{"renamed", "publication_changed", "public.outbox_old", swapped, 0, []string{"outbox", "outbox_old"}},
		{"dropped", "publication_changed", "stream", anew("DROP TABLE outbox_old"), 4, []string{"outbox"}},
		{"emptied", "publication_changed", "stream", anew("DELETE FROM outbox_old"), 4, []string{"outbox"}},
		{"another cluster", "system_changed", "stream", func(t *testing.T, f *harness.Installation) {
			f.MustStop(t)
			harness.Exec(t, f.Conn, "TRUNCATE outbox RESTART IDENTITY")
			harness.EditRecord(t, f, func(rec map[string]any) { rec["system_id"] = "7000000000000000000" })
			f.Start()
		}, 4, []string{"outbox"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := harness.NewInstallation(t, pg, ns.URL(), "anew")
			harness.Exec(t, f.Conn, `CREATE TABLE outbox (id bigint GENERATED ALWAYS
				AS IDENTITY PRIMARY KEY, doc_id text NOT NULL, actor_id text NOT NULL,
				counter bigint NOT NULL, seq_key text NOT NULL GENERATED ALWAYS
				AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED,
				payload jsonb NOT NULL)`)
			harness.Exec(t, f.Conn, allTables(f))
			f.Init()
			f.Start()
			written(t, f, 4)
			harness.AwaitMessages(t, f.JS, f.Stream, 4)
			c.change(t, f)
			// the document of the message with that id, another key
			harness.Insert(t, f.Conn, "doc 0", 10, "{}")
			for i := range 4 {
				// the key, another document; of the last one not even the id
				harness.Insert(t, f.Conn, "new", i+1, "{}")
			}
			f.MustEndInGap(c.code)
			harness.AwaitSlotFree(t, f.Conn, f.Slot)
			says := []string{"4 rows of table public.outbox have the id of another event of " + c.of,
				"RESTART WITH"}
			f.MustFail(3, []string{"repair"}, says...)
			f.MustFail(3, []string{"repair", "--accept", c.code}, says...)
			harness.Exec(t, f.Conn, "ALTER TABLE outbox ALTER COLUMN id RESTART WITH 100; UPDATE outbox "+
				"SET id = DEFAULT")
			if r, stderr, code := f.Repair("--accept", c.code); code != 0 || r.Published != 5 {
				t.Fatalf("repair: exit code %d, %+v\n%s", code, r, stderr)
			}
			f.Start()
			f.AwaitReady()
			harness.Insert(t, f.Conn, "after", 1, "{}")
			mustHaveOnceEach(f, t, c.was, c.rows...)
			f.MustStop(t)
		})
	}
}

// mustHaveOnceEach waits until as many messages as rows of the tables are there, beside those of rows that
// are gone, and makes sure that each row has one.
func mustHaveOnceEach(f *harness.Installation, t *testing.T, gone int, tables ...string) {
	t.Helper()
	var ids []string
	for _, table := range tables {
		some := harness.Value[[]string](t, f.Conn, "SELECT coalesce(array_agg(id::text), '{}') FROM "+
			table)
		ids = append(ids, some...)
	}
	harness.AwaitMessages(t, f.JS, f.Stream, len(ids)+gone)
	count := map[string]int{}
	for _, m := range harness.Messages(t, f.JS, f.Stream) {
		count[outbox.HeaderID(m.Header.Get(outbox.HeaderName))]++
	}
	for _, id := range ids {
		if count[id] != 1 {
			t.Errorf("row %s is in %d messages", id, count[id])
		}
	}
	if len(count) != len(ids)+gone {
		t.Errorf("%d events in the stream, %d rows, and %d are gone", len(count), len(ids), gone)
	}
}

// TestRowsOfAPartitionThatWasUnloggedAreRepaired: a partition was unlogged for a while, and nothing but its
// file shows it, as it does after VACUUM FULL. Outflow goes on, and asks to look; the look finds the rows,
// and a repair publishes them.
func TestRowsOfAPartitionThatWasUnloggedAreRepaired(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "unlogged")
	harness.PartitionedTable(t)(f.Conn)
	f.Init()
	f.Start()
	written(t, f, 2)
	harness.AwaitMessages(t, f.JS, f.Stream, 2)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	if r, stderr, code := f.Repair("--check"); code != 0 || r.Fault != "" || r.Rows != 2 || r.Missing != 0 {
		t.Errorf("check: exit code %d, %+v\n%s", code, r, stderr)
	}
	harness.Exec(t, f.Conn, "ALTER TABLE part_2 SET UNLOGGED")
	written(t, f, 3)
	harness.Exec(t, f.Conn, "ALTER TABLE part_2 SET LOGGED")
	f.Start()
	harness.Insert(t, f.Conn, "later", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 3)
	harness.Eventually(t, "it asks to look", func() error {
		if !strings.Contains(f.Said(), "outflow repair --check") {
			return fmt.Errorf("%s", f.Log.Tail(900))
		}
		return nil
	})
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	was := state(f, t)
	r, stderr, code := f.Repair("--check")
	if code != 4 || r.Fault != "rows_missing" || r.Missing != 3 ||
		r.Command != "outflow repair --accept rows_missing" {
		t.Errorf("check: exit code %d, %+v\n%s", code, r, stderr)
	}
	if now := state(f, t); now != was {
		t.Errorf("a check changed %s to %s", was, now)
	}
	f.MustFail(2, []string{"repair", "--check", "--accept", "rows_missing"}, "Give one of them")
	if r, stderr, code = f.Repair("--accept", "rows_missing"); code != 0 || r.Published != 3 {
		t.Fatalf("repair: exit code %d, %+v\n%s", code, r, stderr)
	}
	f.Start()
	f.AwaitReady()
	harness.Insert(t, f.Conn, "after", 1, "{}")
	mustHaveOnceEach(f, t, 0, "outbox")
	if code := f.Stop(); code != 0 || strings.Contains(f.Said(), "--check") {
		t.Errorf("stop: exit code %d; it asks again:\n%s", code, f.Log.Tail(900))
	}
}

// TestTheOrdinaryLifeOfATableStopsNothing: what happens to a table in the course of its life hides no row,
// and stops nothing, while outflow runs and while it is away.
func TestTheOrdinaryLifeOfATableStopsNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "ordinary")
	harness.PartitionedTable(t)(f.Conn)
	f.Init()
	f.Start()
	n := 0
	confirmed := func() { // so far the publication was read again
		t.Helper()
		harness.Insert(t, f.Conn, "doc", n, "{}")
		n++
		end := harness.WALEnd(t, f.Conn)
		harness.AwaitMessages(t, f.JS, f.Stream, n)
		f.AwaitConfirmed(f.Conn, end)
	}
	confirmed()
	for _, away := range []bool{false, true} {
		if away {
			f.MustStop(t)
		}
		for _, sql := range []string{
			"CREATE TABLE part_9 PARTITION OF outbox FOR VALUES IN (9)",
			"ALTER TABLE outbox DETACH PARTITION part_9 CONCURRENTLY",
			"ALTER TABLE outbox ATTACH PARTITION part_9 FOR VALUES IN (9)",
			"ALTER TABLE outbox DETACH PARTITION part_9",
			"DROP TABLE part_9",
			"VACUUM FULL part_1",
			"CREATE INDEX ordinary ON part_2 (doc_id)",
			"CLUSTER part_2 USING ordinary",
			"DROP INDEX ordinary",
			"TRUNCATE part_1",
			"ALTER TABLE outbox ADD COLUMN more float8 DEFAULT random()",
			"ALTER TABLE outbox ALTER COLUMN more TYPE text",
			"ALTER TABLE outbox DROP COLUMN more",
			"ALTER TABLE part_1 RENAME TO first", "ALTER TABLE first RENAME TO part_1",
			"GRANT SELECT ON outbox TO PUBLIC",
			"ANALYZE outbox",
		} {
			harness.Exec(t, f.Conn, sql)
			if !away {
				harness.Insert(t, f.Conn, "doc", n, "{}")
				n++
			}
		}
		if away {
			f.Start()
		}
		confirmed()
	}
	f.MustStop(t)
	mustHaveOnceEach(f, t, 0, "outbox")
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	if r, stderr, code := f.Repair("--check"); code != 0 || r.Missing != 0 {
		t.Errorf("check: exit code %d, %+v\n%s", code, r, stderr)
	}
}

// TestAShardThatPublishesUpdatesIsRefused: PostgreSQL sends an UPDATE that moves a row into a shard as an
// INSERT. A publication that would publish it is refused, by init and by run.
func TestAShardThatPublishesUpdatesIsRefused(t *testing.T) {
	t.Parallel()
	pg, ns := pgtest.Server(t), natstest.Server(t)
	if pg.Installation.Major < 15 {
		t.Skip("row filters came with PostgreSQL 15")
	}
	f := harness.NewInstallation(t, pg, ns.URL(), "updates", "SHARD=1/2")
	harness.Exec(t, f.Conn, `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
		doc_id text NOT NULL, actor_id text NOT NULL,
		counter bigint NOT NULL, seq_key text NOT NULL GENERATED ALWAYS
		AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED,
		payload jsonb NOT NULL)`)
	harness.Exec(t, f.Conn, "ALTER TABLE outbox REPLICA IDENTITY FULL")
	harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Slot+
		" FOR TABLE outbox WHERE ((((hash_array(ARRAY[doc_id]) & 2147483647) % 2) = 1))")
	f.MustFail(3, []string{"init"}, "publishes updates", "SET (publish = 'insert')")
	harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" SET (publish = 'insert')")
	f.Init()
	f.Start()
	f.AwaitReady()
	harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" SET (publish = 'insert, update')")
	written(t, f, 1)
	f.MustEnd(3, "publishes updates")
	harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" SET (publish = 'insert')")
	f.Start()
	f.MustEndInGap("publication_changed")
}
