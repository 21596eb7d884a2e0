package archive

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// TestBytesAreTheValueOfARowThatIsPutBack: ids of any bytes, also those that would be an escape in text.
func TestBytesAreTheValueOfARowThatIsPutBack(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.Database(t, pgtest.Server(t)))
	must.Succeed(t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	_, err = conn.Exec(t.Context(), "CREATE TABLE outbox (id bytea, doc_id text, payload text)")
	must.Succeed(t, err)
	l := &wiring.Layout{Resolved: config.Resolved{ID: "id", Mapping: relay.Mapping{Table: "public.outbox",
		Doc: "doc_id", Payload: "payload"}, Uses: map[string]config.Use{"doc_id": {Role: config.InDoc}}},
		Table: catalog.Table{Schema: "public", Name: "outbox", Columns: []catalog.Column{
			{Name: "id", TypeOID: byteaOID, Values: "bytea"},
			{Name: "doc_id", TypeOID: 25, Values: "text"},
			{Name: "payload", TypeOID: 25, Values: "text"}}}}
	w := &rowWriter{conn: conn, layout: l, rep: &Rows{Table: "public.outbox"}, hit: func(string) {}, doc: -1}
	must.Succeed(t, w.prepare(config.Config{Subject: "outbox.{doc_id}"}))
	ids := [][]byte{{'\\', '\\'}, []byte(`\x41`), {0xff, 0, '\\', 1}}
	for range 2 {
		for _, id := range ids {
			h := outbox.Header{ID: string(id), Pos: outbox.Position{LSN: 16}, Of: 1, Due: 16, Thru: 16}
			values, key, err := w.carry.row(&archive.Message{Seq: 1, Subject: "outbox.d",
				Header: nats.Header{outbox.HeaderName: {h.String()}}, Data: []byte("{}")})
			must.Succeed(t, err)
			w.rows = append(w.rows, w.carry.stored(values, key))
		}
		must.Succeed(t, w.flush(t.Context()))
	}
	rows, err := conn.Query(t.Context(), "SELECT id FROM outbox")
	must.Succeed(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	must.Succeed(t, err)
	if len(got) != len(ids) {
		t.Fatalf("%d rows: %q", len(got), got)
	}
	for i, id := range ids {
		if !bytes.Equal(got[i], id) {
			t.Errorf("%q was put back as %q", id, got[i])
		}
	}
}

// TestARowThatIsPutBackNeedsAPartition, of which there may be none after a night without maintain. A CHECK
// that fails is another matter.
func TestARowThatIsPutBackNeedsAPartition(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.Database(t, pgtest.Server(t)))
	must.Succeed(t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	_, err = conn.Exec(t.Context(), "CREATE TABLE outbox (id text, doc_id text, payload text, "+
		"at timestamptz DEFAULT now()) PARTITION BY RANGE (at)")
	must.Succeed(t, err)
	l := &wiring.Layout{Resolved: config.Resolved{ID: "id", Mapping: relay.Mapping{Table: "public.outbox",
		Doc: "doc_id", Payload: "payload"}, Uses: map[string]config.Use{"doc_id": {Role: config.InDoc}}}}
	l.Table, err = catalog.ReadTable(t.Context(), conn, "public.outbox")
	must.Succeed(t, err)
	put := func() *outbox.Fault {
		w := &rowWriter{conn: conn, layout: l, rep: &Rows{Table: "public.outbox"}, hit: func(string) {},
			doc: -1}
		must.Succeed(t, w.prepare(config.Config{Subject: "outbox.{doc_id}"}))
		h := outbox.Header{ID: "4711", Pos: outbox.Position{LSN: 16}, Of: 1, Due: 16, Thru: 16}
		values, key, err := w.carry.row(&archive.Message{Seq: 1, Subject: "outbox.d",
			Header: nats.Header{outbox.HeaderName: {h.String()}}, Data: []byte("{}")})
		must.Succeed(t, err)
		w.rows = append(w.rows, w.carry.stored(values, key))
		err = w.flush(t.Context())
		if err == nil {
			t.Fatal("it was put back")
		}
		return outbox.FaultOf(err)
	}
	if f := put(); f == nil || f.Code != "rows_partition" || !strings.Contains(f.Message, "4711") {
		t.Error(f)
	}
	_, err = conn.Exec(t.Context(), "CREATE TABLE rest PARTITION OF outbox DEFAULT; ALTER TABLE outbox ADD "+
		"CHECK (doc_id = 'other')")
	must.Succeed(t, err)
	if f := put(); f != nil {
		t.Error(f)
	}
}

// TestTheKeyOfARowThatIsPutBackIsThatOfItsMessage, whatever it looks like as text. A row that gets another id
// or key than its message has would be published once more.
func TestTheKeyOfARowThatIsPutBackIsThatOfItsMessage(t *testing.T) {
	t.Parallel()
	const changes = "CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql AS " +
		"$$ BEGIN %s; RETURN NEW; END $$; CREATE TRIGGER change BEFORE INSERT ON outbox " +
		"FOR EACH ROW EXECUTE FUNCTION change()"
	for _, c := range []struct{ key, value, trigger, code string }{
		{"bytea", `\x41`, "", ""},
		{"char(8)", "ab      ", "", ""},
		{"numeric(9, 2)", "1.50", "", ""},
		{"numeric(9, 3)", "1.50", "", ""},
		{"json", `{"a":  1}`, "", ""}, // types without an operator =
		{"json", `{"a":  1}`, `NEW.key = '{"a": 1}'`, "rows_columns"},
		{"point", "(1, 2)", "", ""},
		{"numeric(9, 1)", "1.55", "", "rows_columns"}, // a column that has become narrower
		{"timestamptz(0)", "2026-01-31 12:00:00.5+00", "", "rows_columns"},
		{"varchar(2)", "abc", "", "22001"},
		{"char(2)", "abc", "", "22001"},
		{"short", "abc", "", "22001"},
		{"short", "ab", "", ""},
		{"text", "k", "", ""},
		{"text", "k", "NEW.id = 'another'", "rows_columns"},
		{"text", "k", "NEW.key = 'another'", "rows_columns"},
		{"text", "k", "NEW.key = NULL", "rows_columns"},
	} {
		t.Run(c.key+c.value+c.trigger, func(t *testing.T) {
			t.Parallel()
			conn, err := pgx.Connect(t.Context(), pgtest.Database(t, pgtest.Server(t)))
			must.Succeed(t, err)
			defer conn.Close(context.Background()) //nolint:errcheck // the test is over
			sql := "CREATE DOMAIN short AS varchar(2); CREATE TABLE outbox (id text, doc_id text, key " +
				c.key + ", payload text);"
			if c.trigger != "" {
				sql += fmt.Sprintf(changes, c.trigger)
			}
			_, err = conn.Exec(t.Context(), sql)
			must.Succeed(t, err)
			table, err := catalog.ReadTable(t.Context(), conn, "outbox")
			must.Succeed(t, err)
			w := &rowWriter{conn: conn, rep: &Rows{Table: "public.outbox"}, hit: func(string) {}, doc: -1,
				layout: &wiring.Layout{Table: table, Resolved: config.Resolved{ID: "id",
					Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Key: "key",
						Payload: "payload"},
					Uses: map[string]config.Use{"doc_id": {Role: config.InDoc}}}}}
			must.Succeed(t, w.prepare(config.Config{Subject: "outbox.{doc_id}"}))
			h := outbox.Header{ID: "1", Key: c.value, Pos: outbox.Position{LSN: 16}, Of: 1, Due: 16, Thru: 16}
			values, key, err := w.carry.row(&archive.Message{Seq: 1, Subject: "outbox.d",
				Header: nats.Header{outbox.HeaderName: {h.String()}}, Data: []byte("{}")})
			must.Succeed(t, err)
			w.rows = [][]any{w.carry.stored(values, key)}
			err = w.flush(t.Context())
			code := postgres.SQLState(err)
			if f := outbox.FaultOf(err); f != nil {
				code = f.Code
			}
			if code != c.code || (err == nil) != (c.code == "") {
				t.Errorf("code %q: %v", c.code, err)
			}
		})
	}
}

// TestTheSequenceOfIDsIsNamed: nobody moves it, and a table that was made anew would give them once more. The
// statement never moves it back.
func TestTheSequenceOfIDsIsNamed(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.Database(t, pgtest.Server(t)))
	must.Succeed(t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	const name, id = `it's "a" box`, `the id's`
	table := postgres.Quote("public") + "." + postgres.Quote(name)
	_, err = conn.Exec(t.Context(), "CREATE TABLE "+table+" ("+postgres.Quote(id)+` bigint GENERATED ALWAYS AS
		IDENTITY, payload text); INSERT INTO `+table+" OVERRIDING SYSTEM VALUE VALUES (700, '')")
	must.Succeed(t, err)
	l := &wiring.Layout{Resolved: config.Resolved{ID: id,
		Mapping: relay.Mapping{Table: name, Payload: "payload"}},
		Table: catalog.Table{Schema: "public", Name: name, Columns: []catalog.Column{
			{Name: id, TypeOID: 20, Values: "bigint", Default: true, Identity: true, Category: "N"},
			{Name: "payload", TypeOID: 25, Values: "text"}}}}
	w := &rowWriter{layout: l, rep: &Rows{Table: name}}
	must.Succeed(t, w.prepare(config.Config{Subject: "outbox"}))
	_, statement, named := strings.Cut(w.rep.String(), "before anybody writes, ")
	if !named {
		t.Fatal(w.rep)
	}
	next := func() (n int) {
		t.Helper()
		_, err := conn.Exec(t.Context(), statement)
		must.Succeed(t, err)
		must.Succeed(t, conn.QueryRow(t.Context(), "INSERT INTO "+table+" VALUES (DEFAULT, '') RETURNING "+
			postgres.Quote(id)).Scan(&n))
		return n
	}
	if n := next(); n != 701 {
		t.Errorf("the next id is %d", n)
	}
	_, err = conn.Exec(t.Context(), "DELETE FROM "+table+" WHERE "+postgres.Quote(id)+" > 700")
	must.Succeed(t, err)
	if n := next(); n <= 701 {
		t.Errorf("of a table that has lost its newest rows the next id is %d", n)
	}
}
