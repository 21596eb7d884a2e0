package e2e

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// nothingMade fails where init has made something.
func (f *faulty) nothingMade(t *testing.T) {
	t.Helper()
	var there int
	must(t, f.conn.QueryRow(t.Context(), `SELECT (to_regclass('public.outbox') IS NOT NULL)::int
		+ (SELECT count(*) FROM pg_publication WHERE pubname = $1)::int`, f.slot).Scan(&there))
	if there != 0 {
		t.Errorf("%d of table and publication were made", there)
	}
	for _, name := range []string{f.stream, "KV_outflow-" + f.stream} {
		if _, err := f.js.Stream(t.Context(), name); !errors.Is(err, jetstream.ErrStreamNotFound) {
			t.Errorf("stream %s: %v", name, err)
		}
	}
}

// TestInitNameIsTaken: a slot of the name is somebody else's. init says what it is and whose, makes nothing, and advises nothing that
// would harm it.
func TestInitNameIsTaken(t *testing.T) {
	t.Parallel()
	pg, ns := pgtest.Server(t), natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pg, ns.URL(), "taken")
	taken := func(says ...string) {
		t.Helper()
		for _, args := range [][]string{{"init"}, {"init", "--dry-run"}, {"init", "--snapshot"}} {
			out, errOut, code := f.exec(args...)
			if code != 3 {
				t.Errorf("outflow %v: exit code %d, want 3\n%s%s", args, code, out, errOut)
			}
			f.mustSay("outflow "+strings.Join(args, " "), errOut, append(says, f.slot, "et slot to")...)
			if strings.Contains(errOut, "drop") {
				t.Errorf("outflow %v advises to drop it: %s", args, errOut)
			}
		}
		f.nothingMade(t)
	}
	drop := func() { mustExec(t, f.conn, "SELECT pg_drop_replication_slot($1)", f.slot) }

	mustExec(t, f.conn, "SELECT pg_create_physical_replication_slot($1)", f.slot)
	taken("physical")
	drop()
	mustExec(t, f.conn, "SELECT pg_create_logical_replication_slot($1, 'test_decoding')", f.slot)
	taken("test_decoding")
	drop()

	// An outflow of another database, and one of this database with another stream: both run.
	other := &faulty{js: f.js}
	other.outflow, other.conn, other.url = installation(t, pg, ns.URL(), "theirs")
	other.set("SLOT=" + f.slot)
	other.slot = f.slot
	other.init()
	other.start()
	row(t, other.conn, "doc", 1, "{}")
	awaitMessages(t, other.js, other.stream, 1)
	taken("belongs to database "+other.conn.Config().Database, "pid")
	if code := other.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	here := newOutflow(t, other.url, ns.URL(), f.slot, "STREAM=ANOTHER", "PUBLICATION="+f.slot+"_b", "TABLE=public.another")
	here.fails(4, []string{"init"}, "checkpoint record", "is not this outflow's", "set slot to a name") // nobody reads from it: it may be ours
	other.start()
	row(t, other.conn, "doc", 2, "{}")
	awaitMessages(t, other.js, other.stream, 2)
	here.fails(3, []string{"init"}, "no checkpoint record", "pid", "set slot to a name")
	other.mustBeComplete(other.conn, ns.URL())
}

// TestInitDryRun: it says what is there, what would be made and what does not fit, ends as init would, and changes nothing.
func TestInitDryRun(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "dry")
	says := func(code int, want ...string) {
		t.Helper()
		out, errOut, got := f.exec("init", "--dry-run")
		if got != code {
			t.Errorf("exit code %d, want %d\n%s%s", got, code, out, errOut)
		}
		f.mustSay("outflow init --dry-run", out, want...)
	}
	says(0, "table public.outbox: would be made", "publication "+f.slot+": would be made", "stream "+f.stream+": would be made",
		"bucket outflow-"+f.stream+": would be made", "slot "+f.slot+": would be made", "checkpoint record: would be made")
	f.nothingMade(t)
	f.init()
	says(0, "table public.outbox: there", "publication "+f.slot+": there", "stream "+f.stream+": there", "bucket outflow-"+f.stream+": there",
		"slot "+f.slot+": there, confirmed up to")
	mustExec(t, f.conn, "ALTER PUBLICATION "+f.slot+" SET (publish = 'update')")
	says(3, "table public.outbox: there", "publication "+f.slot+": does not fit: ", "stream "+f.stream+": there")
	mustExec(t, f.conn, "ALTER PUBLICATION "+f.slot+" SET (publish = 'insert')")
	f.set("COLUMNS_DOC_ID=no_such_column")
	says(3, "table public.outbox: does not fit: ", "no_such_column", "stream "+f.stream+": there")
	f.set("COLUMNS_DOC_ID=doc_id")

	// A role that may not make what is missing.
	mustExec(t, f.conn, "DO $$ BEGIN CREATE ROLE dryrun LOGIN REPLICATION; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
	mustExec(t, f.conn, "REVOKE CREATE ON SCHEMA public FROM public")
	f.set("POSTGRES_URL="+strings.Replace(f.url, "postgres@", "dryrun@", 1), "TABLE=public.other", "SLOT=dry_other", "STREAM=OTHER", "PUBLICATION=dry_other")
	says(3, "table public.other: does not fit: the role may not make table", "stream OTHER: would be made")
}

// TestInitOfATableOfOnesOwn: what of it will not be published, or not in the order that may be meant, is said before anything is made.
func TestInitOfATableOfOnesOwn(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "own")
	f.set("COLUMNS_SEQ_KEY=seq")
	mustExec(t, f.conn, "CREATE TABLE outbox (id int PRIMARY KEY, doc_id text, seq bigint NOT NULL, key text, payload jsonb NOT NULL)")
	mustExec(t, f.conn, "INSERT INTO outbox SELECT n, 'doc', n, lpad(n::text, 20, '0'), '{}' FROM generate_series(1, 3) n")

	f.fails(3, []string{"init"}, "seq", "bigint", "in text 10 comes before 9", "columns.counter")
	f.fails(3, []string{"init", "--print"}, "in text 10 comes before 9")
	if _, err := f.js.Stream(t.Context(), f.stream); err == nil {
		t.Error("init made a stream, and refuses the table")
	}
	f.set("COLUMNS_SEQ_KEY=key")
	out, errOut, code := f.exec("init", "--dry-run")
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, errOut)
	}
	notes := []string{"public.outbox has 3 rows", "will not be published", "outflow init --snapshot", `"doc_id"`, `"key"`, "may be NULL"}
	f.mustSay("outflow init --dry-run", out, notes...)
	if out, errOut, code = f.exec("init"); code != 0 {
		t.Fatalf("exit code %d: %s", code, errOut)
	}
	f.mustSay("outflow init", out, notes...)
	if at, made := strings.Index(out, "has 3 rows"), strings.Index(out, ": made"); at > made {
		t.Errorf("it is said after something was made:\n%s", out)
	}
	if out, _, _ := f.exec("init"); strings.Contains(out, "has 3 rows") {
		t.Errorf("the second init says of rows what the first one said:\n%s", out)
	}

	// What is printed is what is missing.
	sql, errOut, code := f.exec("init", "--print")
	if code != 0 || strings.Contains(sql, "CREATE") || !strings.Contains(sql, "-- table public.outbox: there") {
		t.Errorf("exit code %d\n%s%s", code, sql, errOut)
	}
	f.set("COLUMNS_SEQ_KEY=")
	if out, _, _ := f.exec("init", "--dry-run"); !strings.Contains(out, "has no order key") {
		t.Errorf("nothing is said of a key that is missing:\n%s", out)
	}
	f.set("COLUMNS_SEQ_KEY=key")

	// An installation whose key became a number, as one of an older version may have it: run refuses it, drain does not.
	f.start()
	mustExec(t, f.conn, "INSERT INTO outbox SELECT n, 'doc', n, lpad(n::text, 20, '0'), '{}' FROM generate_series(4, 6) n")
	awaitMessages(t, f.js, f.stream, 3)
	if code := f.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	mustExec(t, f.conn, "ALTER TABLE outbox RENAME key TO key_text")
	mustExec(t, f.conn, "ALTER TABLE outbox RENAME seq TO key")
	mustExec(t, f.conn, "INSERT INTO outbox SELECT n, 'doc', n, lpad(n::text, 20, '0'), '{}' FROM generate_series(7, 12) n")
	f.fails(3, []string{"run"}, "in text 10 comes before 9")
	if out, errOut, code := f.exec("drain", "--timeout", "2m"); code != 0 {
		t.Fatalf("outflow drain: exit code %d\n%s%s", code, out, errOut)
	}
	f.set("COLUMNS_SEQ_KEY=key_text")
	f.init()
	mustExec(t, f.conn, "INSERT INTO outbox SELECT n, 'doc', n, lpad(n::text, 20, '0'), '{}' FROM generate_series(13, 14) n")
	f.start()
	awaitMessages(t, f.js, f.stream, 11)
}

// TestOlderRowsAfterInit: rows that init has left out are published later, each once, whatever was written, published and deleted meanwhile.
func TestOlderRowsAfterInit(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "older")
	mustExec(t, f.conn, "CREATE TABLE outbox (id int PRIMARY KEY, doc_id text NOT NULL, seq_key text NOT NULL, payload jsonb NOT NULL)")
	insert := func(from, to int) {
		t.Helper()
		mustExec(t, f.conn, "INSERT INTO outbox SELECT n, 'doc', lpad(n::text, 20, '0'), '{}' FROM generate_series($1::int, $2) n", from, to)
	}
	ids := func(want ...string) {
		t.Helper()
		var got []string
		for _, m := range messages(t, f.js, f.stream) {
			got = append(got, m.Outflow.ID)
		}
		if !slices.Equal(got, want) {
			t.Errorf("the stream has the events %v, want %v", got, want)
		}
	}
	fill := func() {
		t.Helper()
		f.fails(4, []string{"repair", "--check"}, "rows_missing")
		if out, errOut, code := f.exec("repair", "--accept", "rows_missing"); code != 0 {
			t.Fatalf("exit code %d\n%s%s", code, out, errOut)
		}
	}
	insert(1, 3)
	f.init()
	f.fails(3, []string{"init", "--snapshot"}, "docs/snapshot.md")
	insert(4, 5)
	mustExec(t, f.conn, "DELETE FROM outbox WHERE id = 5")
	fill() // nothing was published: what is older comes first
	f.start()
	awaitMessages(t, f.js, f.stream, 5)
	if code := f.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	ids("1", "2", "3", "4", "5")

	insert(6, 6)
	f.start()
	awaitMessages(t, f.js, f.stream, 6)
	if code := f.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	if out, errOut, code := f.exec("repair", "--check"); code != 0 {
		t.Errorf("exit code %d\n%s%s", code, out, errOut)
	}
}
