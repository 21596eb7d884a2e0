package tablesnapshot

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestASnapshotReadsTheRowsOfItsMoment(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.Exec(
		`INSERT INTO outbox (doc_id, actor_id, counter, payload)
			VALUES ('b', 'x', 2, '{"n": 1.10}'), ('B', 'x', 1, '{}'), ('b', 'x', 1, '{}'), ('a', 'x', 3, '{}')`)
	snap, err := Open(within(t), d.cfg, "")
	must.Succeed(t, err)
	defer snap.Close()
	d.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('late', 'x', 2, '{}')`)
	if err := snap.AwaitFlush(within(t)); err != nil {
		t.Error(err)
	}
	d.published(t, snap, "id", "doc_id", "actor_id", "counter", "payload") // seq_key is generated
	var got, ids []string
	rows := func(q Query) error {
		got = nil
		q.Mapping, q.ID, q.Columns = outboxdb.Mapping, "id", []string{"id", SortDoc, SortKey, "payload"}
		return snap.Rows(within(t), q, func(v [][]byte) error {
			ids = append(ids, string(v[0]))
			got = append(got, fmt.Sprintf("%s %s %s", v[1], strings.TrimLeft(string(v[2]), "x:0"), v[3]))
			return nil
		})
	}
	if err := rows(Query{Sorted: true}); err != nil ||
		!slices.Equal(got, []string{"B 1 {}", "a 3 {}", "b 1 {}", `b 2 {"n": 1.10}`}) {
		t.Errorf("%q, %v", got, err)
	}
	if err := rows(Query{Sorted: true, Where: "counter > 1 -- the rest", Only: ids[1:]}); err != nil ||
		!slices.Equal(got, []string{"a 3 {}", `b 2 {"n": 1.10}`}) {
		t.Errorf("%q, %v", got, err)
	}
	d.Exec(`CREATE FUNCTION refuse() RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'no'; END$$`)
	for _, where := range []string{"public.refuse()", "counter = (SELECT generate_series(1, 2))",
		"gone.refuse()", "true; DROP TABLE outbox"} {
		snap, err := Open(within(t), d.cfg, "")
		must.Succeed(t, err)
		defer snap.Close()
		q := Query{Mapping: outboxdb.Mapping, ID: "id", Columns: []string{"id"}}
		none := func([][]byte) error { return nil }
		for range 2 { // the snapshot is still of use
			q.Where = where
			wantFault(t, snap.TryRows(within(t), q, none), outbox.Usage, "where")
			q.Where = ""
			must.Succeed(t, snap.TryRows(within(t), q, none))
		}
	}
}

// The table that was published before may have other columns: then the two can't be read as one, and that is
// what is said.
func TestAnotherTableWithOtherColumnsIsRefused(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	d.Exec(outboxdb.PlainTable + `; CREATE PUBLICATION outflow FOR ALL TABLES;
		INSERT INTO outbox (id, doc_id, actor_id, counter, payload) VALUES ('00000000-0000-0000-0000-000000000001', 'a', 'x', 1, '{}')`)
	for _, c := range []struct {
		former  string
		columns []string // that are read; nil: the id
		code    string   // "": none
		reused  int
	}{
		{former: "(LIKE outbox)"},
		{former: "AS SELECT * FROM outbox"},
		{former: "AS SELECT id, doc_id, actor_id, 2::bigint AS counter, seq_key, payload FROM outbox",
			reused: 1},
		{former: "(id bigint, doc_id text)", code: "former_table"},
		{former: "(number uuid, doc_id text)", code: "former_table"},
		{former: "(LIKE outbox); ALTER TABLE former ALTER payload TYPE json"},
		{former: "(LIKE outbox); ALTER TABLE former ALTER payload TYPE bytea USING ''",
			columns: outboxdb.Columns, code: "former_table"},
		{former: "(LIKE outbox); ALTER TABLE former RENAME payload TO body", columns: outboxdb.Columns,
			code: "former_table"},
	} {
		d.Exec("DROP TABLE IF EXISTS former; CREATE TABLE former " + c.former)
		snap, err := Open(within(t), d.cfg, "")
		must.Succeed(t, err)
		var oid uint32
		must.Succeed(t, d.Conn.QueryRow(within(t), "SELECT 'former'::regclass::oid").Scan(&oid))
		name, err := snap.IncludeFormer(within(t), oid)
		if err != nil || name != "public.former" {
			t.Fatalf("%s: %q, %v", c.former, name, err)
		}
		n, err := snap.CountReused(within(t), Query{ID: "id", Columns: outboxdb.Columns})
		if err == nil {
			if c.columns == nil {
				c.columns = []string{"id"}
			}
			err = snap.Rows(within(t), Query{Mapping: outboxdb.Mapping, ID: "id", Columns: c.columns},
				func([][]byte) error { return nil })
		}
		if c.code != "" {
			wantFault(t, err, outbox.Fatal, c.code)
		} else if err != nil || n != c.reused {
			t.Errorf("%s: %d ids are reused, %v", c.former, n, err)
		}
		snap.Close()
	}
}

// A policy that hides rows from the role hides none from the WAL: what is read of the table must not look
// complete.
func TestAPolicyThatHidesRowsIsRefused(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	role := strings.ReplaceAll(t.Name(), "/", "_")
	d.Exec(
		fmt.Sprintf(
			`DROP ROLE IF EXISTS %[1]q; CREATE ROLE %[1]q; GRANT SELECT ON outbox TO %[1]q;
				ALTER TABLE outbox ENABLE ROW LEVEL SECURITY`, role))
	snap, err := Open(within(t), d.cfg, "")
	must.Succeed(t, err)
	defer snap.Close()
	if _, err := snap.conn.Exec(within(t), fmt.Sprintf("SET ROLE %q", role)); err != nil {
		t.Fatal(err)
	}
	err = snap.Rows(within(t), Query{Mapping: outboxdb.Mapping, ID: "id", Columns: []string{"id"}},
		func([][]byte) error { return nil })
	wantFault(t, err, outbox.Fatal, "row_security")
}

// published wants these of all columns to be in the stream of changes.
func (d *database) published(t *testing.T, snap *Snapshot, want ...string) {
	t.Helper()
	var in []string
	for _, c := range snap.StreamedColumns(outboxdb.Columns) {
		in = append(in, c.Name)
	}
	if !slices.Equal(in, want) {
		t.Errorf("in the WAL are %v, want %v", in, want)
	}
}

// A generated column is in the stream of changes only where the publication says so: else its value is
// computed, not read.
func TestGeneratedColumnsAreReadWhereThePublicationHasThem(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		check := func(want ...string) {
			t.Helper()
			snap, err := Open(within(t), d.cfg, "")
			must.Succeed(t, err)
			defer snap.Close()
			d.published(t, snap, want...)
		}
		check("id", "doc_id", "actor_id", "counter", "payload")
		if srv.Installation.Major >= 18 {
			d.Exec("ALTER PUBLICATION " + postgres.Quote(d.cfg.Publication) +
				" SET (publish_generated_columns = stored)")
			check(outboxdb.Columns...)
		}
	})
}

// TestTheColumnThatIsLackingIsNamed, and no other whose name is a part of its name.
func TestTheColumnThatIsLackingIsNamed(t *testing.T) {
	t.Parallel()
	id, doc := errors.New("id differs"), errors.New("doc_id differs")
	for _, c := range []struct {
		message   string
		id, which error
	}{
		{"column outbox.doc_id does not exist", id, doc},
		{"column outbox.id does not exist", id, id},
		{`column "id" does not exist`, id, id},
		{"Spalte »doc_id« existiert nicht", id, doc},
		{"column doc_ids.id does not exist", id, id},
		{"column outbox.doc_id does not exist", nil, doc},
		{"column outbox.payed does not exist", id, nil},
		{"column outbox.paid does not exist", id, nil},
	} {
		s := &Snapshot{table: catalog.Table{Columns: []catalog.Column{{Name: "id"}, {Name: "doc_id"}}},
			differ: map[string]error{"id": c.id, "doc_id": doc}}
		err := &pgconn.PgError{Code: postgres.StateUndefinedColumn, Message: c.message}
		if got := s.differs(err); !errors.Is(got, c.which) {
			t.Errorf("%s: %v", c.message, got)
		}
	}
}
