package operate

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// mustHaveMadeNothing fails where init has made something.
func mustHaveMadeNothing(f *harness.Installation, t *testing.T) {
	t.Helper()
	there := harness.Value[int](t, f.Conn, `SELECT (to_regclass('public.outbox') IS NOT NULL)::int
		+ (SELECT count(*) FROM pg_publication WHERE pubname = $1)::int`, f.Slot)
	if there != 0 {
		t.Errorf("%d of table and publication were made", there)
	}
	for _, name := range []string{f.Stream, "KV_outflow-" + f.Stream} {
		if _, err := f.JS.Stream(t.Context(), name); !errors.Is(err, jetstream.ErrStreamNotFound) {
			t.Errorf("stream %s: %v", name, err)
		}
	}
}

// TestInitLeavesASlotOfSomebodyElseAlone: a slot of the name is somebody else's. init says what it is and
// whose, makes nothing, and advises nothing that would harm it.
func TestInitLeavesASlotOfSomebodyElseAlone(t *testing.T) {
	t.Parallel()
	pg, ns := pgtest.Server(t), natstest.Server(t)
	f := harness.NewInstallation(t, pg, ns.URL(), "taken")
	taken := func(says ...string) {
		t.Helper()
		for _, args := range [][]string{{"init"}, {"init", "--dry-run"}, {"init", "--snapshot"}} {
			out, errOut, code := f.Run(args...)
			if code != 3 {
				t.Errorf("outflow %v: exit code %d, want 3\n%s%s", args, code, out, errOut)
			}
			f.MustContain("outflow "+strings.Join(args, " "), errOut, append(says, f.Slot, "et slot to")...)
			if strings.Contains(errOut, "drop") {
				t.Errorf("outflow %v advises to drop it: %s", args, errOut)
			}
		}
		mustHaveMadeNothing(f, t)
	}
	drop := func() { harness.Exec(t, f.Conn, "SELECT pg_drop_replication_slot($1)", f.Slot) }

	harness.Exec(t, f.Conn, "SELECT pg_create_physical_replication_slot($1)", f.Slot)
	taken("physical")
	drop()
	harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'test_decoding')", f.Slot)
	taken("test_decoding")
	drop()

	// An outflow of another database, and one of this database with another stream: both run.
	other := harness.NewInstallation(t, pg, ns.URL(), "theirs")
	other.Set("SLOT=" + f.Slot)
	other.Slot = f.Slot
	other.Init()
	other.Start()
	harness.Insert(t, other.Conn, "doc", 1, "{}")
	harness.AwaitMessages(t, other.JS, other.Stream, 1)
	taken("belongs to database "+other.Conn.Config().Database, "pid")
	other.MustStop(t)
	here := harness.New(t, other.URL, ns.URL(), f.Slot, "STREAM=ANOTHER", "PUBLICATION="+f.Slot+"_b",
		"TABLE=public.another")
	// nobody reads from it: it may be ours
	here.MustFail(4, []string{"init"}, "checkpoint record", "is not this outflow's", "set slot to a name")
	other.Start()
	harness.Insert(t, other.Conn, "doc", 2, "{}")
	harness.AwaitMessages(t, other.JS, other.Stream, 2)
	here.MustFail(3, []string{"init"}, "no checkpoint record", "pid", "set slot to a name")
	other.MustBeComplete(other.Conn, ns.URL())
}

// TestInitDryRunChangesNothing: it says what is there, what would be made and what does not fit, ends as init
// would, and changes nothing.
func TestInitDryRunChangesNothing(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "dry")
	says := func(code int, want ...string) {
		t.Helper()
		out, errOut, got := f.Run("init", "--dry-run")
		if got != code {
			t.Errorf("exit code %d, want %d\n%s%s", got, code, out, errOut)
		}
		f.MustContain("outflow init --dry-run", out, want...)
	}
	says(0, "table public.outbox: would be made", "publication "+f.Slot+": would be made", "stream "+f.Stream+
		": would be made",
		"bucket outflow-"+f.Stream+": would be made", "slot "+f.Slot+": would be made",
		"checkpoint record: would be made")
	mustHaveMadeNothing(f, t)
	f.Init()
	says(0, "table public.outbox: there", "publication "+f.Slot+": there", "stream "+f.Stream+": there",
		"bucket outflow-"+f.Stream+": there", "slot "+f.Slot+": there, confirmed up to")
	harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" SET (publish = 'update')")
	says(3, "table public.outbox: there", "publication "+f.Slot+": does not fit: ", "stream "+f.Stream+
		": there")
	harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" SET (publish = 'insert')")
	f.Set("COLUMNS_DOC_ID=no_such_column")
	says(3, "table public.outbox: does not fit: ", "no_such_column", "stream "+f.Stream+": there")
	f.Set("COLUMNS_DOC_ID=doc_id")

	// A role that may not make what is missing.
	harness.Exec(t, f.Conn, "DO $$ BEGIN CREATE ROLE dryrun LOGIN REPLICATION; EXCEPTION WHEN "+
		"duplicate_object THEN NULL; END $$")
	harness.Exec(t, f.Conn, "REVOKE CREATE ON SCHEMA public FROM public")
	f.Set("POSTGRES_URL="+strings.Replace(f.URL, "postgres@", "dryrun@", 1), "TABLE=public.other",
		"SLOT=dry_other", "STREAM=OTHER", "PUBLICATION=dry_other")
	says(3, "table public.other: does not fit: the role may not make table", "stream OTHER: would be made")
}

// TestInitSaysWhatOfATableIsNotPublished: what of it will not be published, or not in the order that may be
// meant, is said before anything is made.
func TestInitSaysWhatOfATableIsNotPublished(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "own")
	f.Set("COLUMNS_SEQ_KEY=seq")
	harness.Exec(t, f.Conn, "CREATE TABLE outbox (id int PRIMARY KEY, doc_id text, seq bigint NOT NULL, "+
		"key text, payload jsonb NOT NULL)")
	harness.Exec(t, f.Conn, "INSERT INTO outbox SELECT n, 'doc', n, lpad(n::text, 20, '0'), '{}' FROM "+
		"generate_series(1, 3) n")

	f.MustFail(3, []string{"init"}, "seq", "bigint", "in text 10 comes before 9", "columns.counter")
	f.MustFail(3, []string{"init", "--print"}, "in text 10 comes before 9")
	if _, err := f.JS.Stream(t.Context(), f.Stream); err == nil {
		t.Error("init made a stream, and refuses the table")
	}
	f.Set("COLUMNS_SEQ_KEY=key")
	out := f.MustRun("init", "--dry-run")
	notes := []string{"public.outbox has 3 rows", "will not be published", "outflow init --snapshot",
		`"doc_id"`, `"key"`, "may be NULL", "reorder.mode: horizon stays"}
	f.MustContain("outflow init --dry-run", out, notes...)
	out = f.MustRun("init")
	f.MustContain("outflow init", out, notes...)
	if at, made := strings.Index(out, "has 3 rows"), strings.Index(out, ": made"); at > made {
		t.Errorf("it is said after something was made:\n%s", out)
	}
	if out, _, _ := f.Run("init"); strings.Contains(out, "has 3 rows") {
		t.Errorf("the second init says of rows what the first one said:\n%s", out)
	}

	// What is printed is what is missing.
	sql, errOut, code := f.Run("init", "--print")
	if code != 0 || strings.Contains(sql, "CREATE") ||
		!strings.Contains(sql, "-- table public.outbox: there") {
		t.Errorf("exit code %d\n%s%s", code, sql, errOut)
	}
	f.Set("COLUMNS_SEQ_KEY=")
	if out, _, _ := f.Run("init", "--dry-run"); !strings.Contains(out, "has no order key") {
		t.Errorf("nothing is said of a key that is missing:\n%s", out)
	}
	f.Set("COLUMNS_SEQ_KEY=key")

	// An installation whose key became a number, as one of an older version may have it: run refuses it,
	// drain does not.
	f.Start()
	harness.Exec(t, f.Conn, "INSERT INTO outbox SELECT n, 'doc', n, lpad(n::text, 20, '0'), '{}' FROM "+
		"generate_series(4, 6) n")
	harness.AwaitMessages(t, f.JS, f.Stream, 3)
	f.MustStop(t)
	harness.Exec(t, f.Conn, "ALTER TABLE outbox RENAME key TO key_text")
	harness.Exec(t, f.Conn, "ALTER TABLE outbox RENAME seq TO key")
	harness.Exec(t, f.Conn, "INSERT INTO outbox SELECT n, 'doc', n, lpad(n::text, 20, '0'), '{}' FROM "+
		"generate_series(7, 12) n")
	f.MustFail(3, []string{"run"}, "in text 10 comes before 9")
	f.MustRun("drain", "--timeout", "2m")
	f.Set("COLUMNS_SEQ_KEY=key_text")
	f.Init()
	harness.Exec(t, f.Conn, "INSERT INTO outbox SELECT n, 'doc', n, lpad(n::text, 20, '0'), '{}' FROM "+
		"generate_series(13, 14) n")
	f.Start()
	harness.AwaitMessages(t, f.JS, f.Stream, 11)
}

// TestRowsFromBeforeInitCanBePublishedLater: rows that init has left out are published later, each once,
// whatever was written, published and deleted meanwhile.
func TestRowsFromBeforeInitCanBePublishedLater(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "older")
	harness.Exec(t, f.Conn, "CREATE TABLE outbox (id int PRIMARY KEY, doc_id text NOT NULL, seq_key text "+
		"NOT NULL, payload jsonb NOT NULL)")
	insert := func(from, to int) {
		t.Helper()
		harness.Exec(t, f.Conn, "INSERT INTO outbox SELECT n, 'doc', lpad(n::text, 20, '0'), '{}' FROM "+
			"generate_series($1::int, $2) n", from, to)
	}
	ids := func(want ...string) {
		t.Helper()
		var got []string
		for _, m := range harness.Messages(t, f.JS, f.Stream) {
			got = append(got, m.Outflow.ID)
		}
		if !slices.Equal(got, want) {
			t.Errorf("the stream has the events %v, want %v", got, want)
		}
	}
	fill := func() {
		t.Helper()
		f.MustFailInGap("rows_missing", "repair", "--check")
		f.MustRun("repair", "--accept", "rows_missing")
	}
	insert(1, 3)
	f.Init()
	f.MustFail(3, []string{"init", "--snapshot"}, "docs/snapshot.md")
	insert(4, 5)
	harness.Exec(t, f.Conn, "DELETE FROM outbox WHERE id = 5")
	fill() // nothing was published: what is older comes first
	f.Start()
	harness.AwaitMessages(t, f.JS, f.Stream, 5)
	f.MustStop(t)
	ids("1", "2", "3", "4", "5")

	insert(6, 6)
	f.Start()
	harness.AwaitMessages(t, f.JS, f.Stream, 6)
	f.MustStop(t)
	f.MustRun("repair", "--check")
}
