package erasure

import (
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// erased is an outbox of which a document was erased, whose row has come back.
type erased struct {
	*outboxdb.DB
	t     *testing.T
	table string
}

func (o *erased) begin() *Record {
	o.t.Helper()
	l, err := Open(outboxdb.Within(o.t), postgres.Target{URL: o.URL}, o.table, o.Slot)
	must.Succeed(o.t, err)
	defer l.Close()
	system := o.Text("SELECT system_identifier::text FROM pg_control_system()")
	r, err := l.Begin(outboxdb.Within(o.t), "r", "gone", system, "OUTBOX", time.Now())
	must.Succeed(o.t, err)
	return r
}

// back says which rows of the table were erased.
func (o *erased) back() string {
	o.t.Helper()
	s, err := tablesnapshot.Open(outboxdb.Within(o.t), catalog.Config{URL: o.URL, Table: o.table,
		Slot: o.Slot, Publication: o.Slot}, "")
	must.Succeed(o.t, err)
	defer s.Close()
	all, err := Read(outboxdb.Within(o.t), s.Querier(), s.Table())
	must.Succeed(o.t, err)
	q := tablesnapshot.Query{Mapping: outboxdb.Mapping, ID: "id"}
	back, err := FindBack(outboxdb.Within(o.t), s, q, all)
	must.Succeed(o.t, err)
	return back.String()
}

func newOutbox(t *testing.T) *erased {
	t.Helper()
	o := &erased{outboxdb.New(t, pgtest.Server(t)), t, "outbox"}
	o.Exec(outboxdb.PlainTable)
	o.Exec("CREATE PUBLICATION " + o.Slot + " FOR TABLE outbox")
	o.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('gone', 'a', 1, '{}')")
	o.begin()
	o.Exec("INSERT INTO outflow_erased_rows SELECT left(encode(sha256(id::text::bytea), 'hex'), 32)::uuid, "+
		"$1, 'r' FROM outbox", o.Slot)
	return o
}

// TestWhatWasErasedIsKnownUnderAnotherName of the outbox, before and after its requests are taken up.
func TestWhatWasErasedIsKnownUnderAnotherName(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ sql, table string }{
		{"ALTER TABLE outbox RENAME TO events", "events"},
		{"CREATE SCHEMA notes; ALTER TABLE outbox SET SCHEMA notes", "notes.outbox"},
		{"ALTER SCHEMA public RENAME TO notes", "notes.outbox"},
		// an older version made it
		{"ALTER TABLE outflow_erasures DROP COLUMN root_oid, DROP COLUMN root_system", "outbox"},
		{"UPDATE outflow_erasures SET system_id = '1'; ALTER TABLE outbox RENAME TO events", "events"},
		{"UPDATE outflow_erasures SET system_id = '1', root_system = '1', root_oid = 1", "outbox"},
	} {
		o := newOutbox(t)
		want := o.back()
		if want == "" {
			t.Fatal("the row that has come back is not known")
		}
		first := o.begin()
		o.Exec(c.sql)
		o.table = c.table
		if got := o.back(); got != want {
			t.Errorf("%s: %q, want %q", c.sql, got, want)
		}
		if r := o.begin(); !r.Is("gone") || !r.Requested.Equal(first.Requested) {
			t.Errorf("%s: it is another request", c.sql)
		}
		if got := o.back(); got != want {
			t.Errorf("%s, taken up: %q, want %q", c.sql, got, want)
		}
		count := func(schema string) string {
			return o.Text("SELECT concat((SELECT count(*) FROM " + schema + ".outflow_erasures), " +
				"(SELECT count(*) FROM " + schema + ".outflow_erased_rows))")
		}
		schema, _, err := catalog.SplitTable(o.table)
		must.Succeed(t, err)
		if n := count(schema); n != "11" {
			t.Errorf("%s: there are %s requests and rows", c.sql, n)
		}
		if strings.Contains(c.sql, "SET SCHEMA") && count("public") != "00" {
			t.Errorf("%s: something stayed behind", c.sql)
		}
	}
}

// TestWhatWasErasedOfADocumentOfBytesIsKnown: messages have the bytes, which PostgreSQL prints in hex.
func TestWhatWasErasedOfADocumentOfBytesIsKnown(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	o.Exec("ALTER TABLE outbox ALTER doc_id TYPE bytea USING convert_to(doc_id, 'UTF8')")
	if o.back() == "" {
		t.Error("the row that has come back is not known")
	}
}

// TestATableOfTheFormerNameHasNoErasures.
func TestATableOfTheFormerNameHasNoErasures(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	o.Exec("ALTER TABLE outbox RENAME TO former")
	o.Exec("CREATE TABLE outbox (LIKE former INCLUDING ALL)")
	o.Exec("INSERT INTO outbox SELECT * FROM former")
	if got := o.back(); got != "" {
		t.Errorf("the new table: %s", got)
	}
	o.table = "former"
	if got := o.back(); got == "" {
		t.Error("the former one has forgotten what was erased")
	}
}

// TestACertificateSaysWhenTheErasureFinished: when it was stored first, however often it is run again.
func TestACertificateSaysWhenTheErasureFinished(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	l, err := Open(outboxdb.Within(t), postgres.Target{URL: o.URL}, o.table, o.Slot)
	must.Succeed(t, err)
	defer l.Close()
	var first time.Time
	for range 2 {
		r, err := l.Find(outboxdb.Within(t), "r", "gone")
		must.Succeed(t, err)
		before := o.Text("SELECT clock_timestamp()::text")
		must.Succeed(t, l.Finish(outboxdb.Within(t), r, map[string]string{"request": "r"}))
		text := o.Text("SELECT coalesce(certificate->>'finished', '') FROM outflow_erasures")
		at, err := time.Parse(time.RFC3339, text)
		must.Succeed(t, err)
		if !at.Equal(r.Finished) || !first.IsZero() && !at.Equal(first) {
			t.Errorf("the certificate says %v, the request %v, and first it was %v", at, r.Finished, first)
		}
		late := o.Text("SELECT ($1::timestamptz <= $2::timestamptz)::text", before, text) == "true"
		if first.IsZero() != late {
			t.Errorf("it finished at %s, and was asked for at %s", text, before)
		}
		first = at
	}
}
