package catalog

import (
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// An ALTER TABLE that does not end is what keeps a start, a status and each round of maintain waiting.
func TestALockOnTheTableIsSuspected(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.Exec("CREATE TABLE locked (id int, next int GENERATED ALWAYS AS (id + 1) STORED)")
	tx, err := d.Conn.Begin(t.Context())
	must.Succeed(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE locked IN ACCESS EXCLUSIVE MODE")
	must.Succeed(t, err)
	other, err := postgres.Connect(t.Context(), d.URL)
	must.Succeed(t, err)
	defer func() { _ = other.Close(t.Context()) }()
	_, err = other.Exec(t.Context(), "SET statement_timeout = '2s'")
	must.Succeed(t, err)
	if _, err = ReadTable(t.Context(), other, "locked"); err == nil ||
		!strings.Contains(err.Error(), "hold a lock on the table") {
		t.Error(err)
	}
	must.Succeed(t, tx.Rollback(t.Context()))
}

func TestTableNamesAreSplitAsPostgreSQLDoes(t *testing.T) {
	t.Parallel()
	for table, want := range map[string][]string{
		"outbox": {"public", "outbox"}, "public.outbox": {"public", "outbox"},
		"Public.Out box":     {"Public", "Out box"},
		`"my.schema".outbox`: {"my.schema", "outbox"}, `"a""b"."c.d"`: {`a"b`, "c.d"}, `"x"`: {"public", "x"},
		"": nil, ".": nil, "a.": nil, ".a": nil, "a.b.c": nil, `"a`: nil, `"a"b`: nil, `""`: nil, `"a".`: nil,
	} {
		schema, name, err := SplitTable(table)
		if want == nil {
			wantFault(t, err, outbox.Usage, "table")
			continue
		}
		if err != nil || schema != want[0] || name != want[1] {
			t.Errorf("%s: %q %q %v, want %q", table, schema, name, err, want)
		}
	}
}

func TestTheTableIsReadWithItsColumns(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	table, err := d.table()
	if err != nil || table.OID == 0 || table.Partitioned || table.Schema != "public" {
		t.Fatal(table, err)
	}
	names := make([]string, len(table.Columns))
	for i, c := range table.Columns {
		names[i] = c.Name
	}
	if want := append(slices.Clone(outboxdb.Columns), "created_at"); !slices.Equal(names, want) {
		t.Errorf("columns %v, want %v", names, want)
	}
	key, _ := table.Column("seq_key")
	if !key.Generated || !strings.Contains(key.Expression, "lpad") || key.TypeName != "text" || !key.NotNull {
		t.Errorf("seq_key: %+v", key)
	}
	if c, _ := table.Column("counter"); c.TypeOID != 20 || c.Generated || c.Expression != "" {
		t.Errorf("counter: %+v", c)
	}
	d.Exec("CREATE DOMAIN doc AS varchar(40)")
	d.Exec(`CREATE SCHEMA "other.one"`)
	d.Exec(`CREATE TABLE "other.one"."Out box" (id int, a doc) PARTITION BY LIST (id)`)
	d.cfg.Table = `"other.one".Out box`
	table, err = d.table()
	if err != nil || !table.Partitioned || len(table.Columns) != 2 {
		t.Fatal(table, err)
	}
	d.Exec(`ALTER DATABASE ` + d.Text("SELECT quote_ident(current_database())") +
		` SET search_path = "other.one"`)
	d.cfg.Table = "Out box"
	_, err = d.table()
	f := wantFault(t, err, outbox.Fatal, "table_missing")
	if !strings.Contains(f.Message, "public.Out box") ||
		!strings.Contains(f.Message, "database "+d.Text("SELECT current_database()")+" ") {
		t.Errorf("a name without a schema, and a search_path: %v", f)
	}
}

func (d *database) table() (Table, error) {
	s := d.setup()
	defer s.Close()
	return s.Table(within(d.T))
}

// Of which types the text sorts as the values do, by what the server says of both: only those may be keys.
func TestOnlyTypesWhoseTextSortsMayBeKeys(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	d.Exec("CREATE DOMAIN counted AS bigint CHECK (VALUE > 0)")
	for typ, values := range map[string]string{
		"smallint": "'9', '10'", "integer": "'9', '10'", "bigint": "'9', '10'", "counted": "'9', '10'",
		"numeric": "'9.5', '10'", "real": "'9', '10'",
		"double precision": "'9', '10'", "money": "'9', '10'", "oid": "'9', '10'", "xid8": "'9', '10'",
		"pg_lsn": "'0/9', '0/10'", "interval": "'9 days', '10 days'",
		"text":        `'9' COLLATE "C", '10'`,
		"uuid":        "'00000000-0000-7000-8000-000000000009', '00000000-0000-7000-8000-000000000010'",
		"date":        "'2026-09-30', '2026-10-01'",
		"timestamptz": "'2026-03-01 12:00:00+00', '2026-03-01 12:00:00.45+00', '2026-03-01 12:00:00.5+00'",
		"timestamp":   "'2026-03-01 12:00:00', '2026-03-01 12:00:00.5'",
		"bytea":       `'\x09', '\x10'`, "boolean": "'f', 't'",
	} {
		d.Exec("DROP TABLE IF EXISTS outbox")
		d.Exec("CREATE TABLE outbox (k " + typ + ")")
		d.Exec("INSERT INTO outbox SELECT unnest(ARRAY[" + values + "]::" + typ + "[])")
		ordered :=
			d.Text(
				`SELECT (array_agg(k ORDER BY k) = array_agg(k ORDER BY k::text COLLATE "C"))::text
					FROM outbox`) == "true"
		table, err := d.table()
		must.Succeed(t, err)
		if typ == "text" {
			ordered = true // it is compared as it is printed, whatever the column's collation
		}
		if column, _ := table.Column("k"); column.PrintsUnordered() == ordered {
			t.Errorf("%s: the text sorts as the values do: %v; refused as a key: %v", typ, ordered,
				column.PrintsUnordered())
		}
	}
}
