package catalog

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

const (
	partitionedTable = `CREATE TABLE outbox (id uuid, doc_id text NOT NULL, actor_id text NOT NULL,
		counter bigint NOT NULL, seq_key text,
		payload jsonb NOT NULL) PARTITION BY HASH (doc_id);
		CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
		CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)`
	generatedTable = `CREATE TABLE outbox (id uuid, doc_id text, actor_id text, counter bigint,
		seq_key text GENERATED ALWAYS AS (actor_id || ':' || counter::text) STORED, payload jsonb)`
)

func TestPublicationsThatHideRowsAreRefused(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := newDatabase(t, srv)
		d.Exec("SET client_min_messages = error")
		d.cfg.Columns = outboxdb.Columns
		for _, c := range []struct {
			name  string
			since int // major
			table string
			make  string
			which string // table; "" for public.outbox
			code  string // "" for fine
		}{
			{name: "as init makes it", make: "CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish = " +
				"'insert', publish_via_partition_root)"},
			{name: "publishes more", make: "CREATE PUBLICATION outflow FOR TABLE outbox"},
			{name: "all tables", make: "CREATE PUBLICATION outflow FOR ALL TABLES"},
			{name: "schema", since: 15, make: "CREATE PUBLICATION outflow FOR TABLES IN SCHEMA public"},
			{name: "none", make: "SELECT 1", code: "publication_missing"},
			{name: "of another name", make: `CREATE PUBLICATION "Outflow" FOR TABLE outbox`,
				code: "publication_missing"},
			{name: "of no table", make: "CREATE PUBLICATION outflow", code: "publication_table"},
			{name: "of another table", make: "CREATE TABLE other (id int); CREATE PUBLICATION outflow FOR " +
				"TABLE other", code: "publication_table"},
			{
				name: "of another schema", since: 15,
				make: "CREATE SCHEMA other; CREATE PUBLICATION outflow FOR TABLES IN SCHEMA other",
				code: "publication_table",
			},
			{
				name: "without inserts",
				make: "CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish = 'update, delete')",
				code: "publication_insert",
			},
			{name: "a filter", since: 15, make: "CREATE PUBLICATION outflow FOR TABLE outbox WHERE " +
				"(counter > 0) WITH (publish = 'insert')", code: "publication_filter"},
			{
				name: "a filter that lets everything through", since: 15,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox WHERE (true) WITH (publish = 'insert')",
				code: "publication_filter",
			},
			{
				name: "a column list", since: 15,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox (payload, seq_key, counter, actor_id, " +
					"doc_id, id)",
			},
			{name: "a short column list", since: 15, make: "CREATE PUBLICATION outflow FOR TABLE outbox " +
				"(id, doc_id, actor_id, counter, payload)", code: "publication_columns"},
			{
				// The list of numbers stays what it was: a check by names alone would take the renamed column
				// for the one needed.
				name: "a column list whose columns have other names now", since: 15,
				make: `CREATE PUBLICATION outflow FOR TABLE outbox (id, doc_id, actor_id, counter, payload);
					ALTER TABLE outbox RENAME COLUMN payload TO old;
					ALTER TABLE outbox RENAME COLUMN seq_key TO payload;
					ALTER TABLE outbox ADD COLUMN seq_key text`, code: "publication_columns",
			},
			{
				name: "a generated column outside the column list", since: 15, table: generatedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox (id, doc_id, actor_id, counter, payload)",
				code: "publication_columns",
			},
			{name: "a generated column", table: generatedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox", code: "publication_columns"},
			{name: "a generated column, all tables", table: generatedTable,
				make: "CREATE PUBLICATION outflow FOR ALL TABLES", code: "publication_columns"},
			{
				name: "a generated column that is published", since: 18, table: generatedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish_generated_columns = stored)",
			},
			{
				name: "a generated column in the column list", since: 18, table: generatedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox (id, doc_id, actor_id, counter, " +
					"seq_key, payload)",
			},
			{name: "a column that is not there", table: outboxdb.PlainTable +
				"; ALTER TABLE outbox DROP COLUMN payload", make: "CREATE PUBLICATION outflow FOR ALL TABLES",
				code: "column_missing"},
			{name: "partitions through the root", table: partitionedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish_via_partition_root)"},
			{name: "partitions on their own", table: partitionedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox", code: "publication_root"},
			{
				name: "partitions, all tables", table: partitionedTable,
				make: "CREATE PUBLICATION outflow FOR ALL TABLES WITH (publish_via_partition_root)",
			},
			{name: "only a partition", table: partitionedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox_0 WITH (publish_via_partition_root)",
				code: "publication_table"},
			{
				name: "a partition is the outbox", table: partitionedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox_0", which: "public.outbox_0",
			},
			{
				name: "a partition is the outbox and is published with its root", table: partitionedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox", which: "public.outbox_0",
			},
			{
				name: "a partition is the outbox and is published as its root", table: partitionedTable,
				make:  "CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish_via_partition_root)",
				which: "public.outbox_0", code: "publication_root",
			},
			{
				name: "a partition is the outbox, all tables, through the root", table: partitionedTable,
				make:  "CREATE PUBLICATION outflow FOR ALL TABLES WITH (publish_via_partition_root)",
				which: "public.outbox_0", code: "publication_root",
			},
			{
				name: "an unlogged partition", table: partitionedTable +
					"; ALTER TABLE outbox_1 SET UNLOGGED",
				make: "CREATE PUBLICATION outflow FOR ALL TABLES WITH (publish_via_partition_root)",
				code: "publication_partition",
			},
			{
				name: "a partition that is a foreign table", table: partitionedTable + `; CREATE FOREIGN DATA WRAPPER away; CREATE SERVER away FOREIGN DATA WRAPPER away;
					DROP TABLE outbox_1; CREATE FOREIGN TABLE outbox_1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1) SERVER away`,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish_via_partition_root)",
				code: "publication_partition",
			},
			{name: "a table that inherits", make: "CREATE PUBLICATION outflow FOR TABLE outbox; CREATE " +
				"UNLOGGED TABLE heir () INHERITS (outbox)"},
			{name: "an unlogged table", table: strings.Replace(outboxdb.PlainTable, "TABLE", "UNLOGGED TABLE",
				1), make: "CREATE PUBLICATION outflow FOR ALL TABLES", code: "table_unlogged"},
			{name: "a view", table: outboxdb.PlainTable, make: "CREATE VIEW v AS SELECT * FROM outbox; " +
				"CREATE PUBLICATION outflow FOR ALL TABLES", which: "v", code: "table_kind"},
			{name: "no table", table: "SELECT 1", make: "CREATE PUBLICATION outflow FOR ALL TABLES",
				code: "table_missing"},
		} {
			if srv.Installation.Major < c.since {
				continue
			}
			t.Run(c.name, func(t *testing.T) {
				if c.table == "" {
					c.table = outboxdb.PlainTable
				}
				const anew = `DROP PUBLICATION IF EXISTS outflow; DROP PUBLICATION IF EXISTS "Outflow";
					DROP SCHEMA IF EXISTS other CASCADE; DROP SCHEMA public CASCADE; CREATE SCHEMA public; `
				if _, err := d.Conn.PgConn().Exec(within(t), anew+c.table+"; "+c.make).ReadAll(); err != nil {
					t.Fatal(err)
				}
				if d.cfg.Table = c.which; c.which == "" {
					d.cfg.Table = "public.outbox"
				}
				s := d.setup()
				defer s.Close()
				id, err := s.Publication(within(t))
				if err == nil {
					err = hiddenFault(id)
				}
				if c.code != "" {
					wantFault(t, err, outbox.Fatal, c.code)
					return
				}
				if err != nil || id.OID == 0 || id.Xmin == 0 || id.TableOID == 0 {
					t.Fatal(id, err)
				}
				if member := id.RelOID != 0 ||
					id.SchemaOID != 0; member == strings.Contains(c.make, "ALL TABLES") {
					t.Errorf("identity %+v", id)
				}
			})
		}
	})
}

func TestPublicationIdentityChangesWithEachAbsence(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	s := d.setup()
	defer s.Close()
	read := func() relay.PublicationIdentity {
		t.Helper()
		id, err := s.Publication(within(t))
		must.Succeed(t, err)
		return id
	}
	first := read()
	d.Exec("CREATE TABLE other (id int)")
	d.Exec("ALTER PUBLICATION outflow ADD TABLE other")
	if id := read(); id != first {
		t.Errorf("another table changed %+v to %+v", first, id)
	}
	last := first
	for _, away := range []struct{ gone, back string }{
		{"ALTER PUBLICATION outflow DROP TABLE outbox", "ALTER PUBLICATION outflow ADD TABLE outbox"},
		{"ALTER PUBLICATION outflow SET (publish = 'update')",
			"ALTER PUBLICATION outflow SET (publish = 'insert')"},
		{
			"DROP PUBLICATION outflow",
			"CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish = 'insert', " +
				"publish_via_partition_root = true)",
		},
	} {
		d.Exec(away.gone)
		if _, err := s.Publication(within(t)); outbox.ClassOf(err) != outbox.Fatal {
			t.Errorf("%s: %v", away.gone, err)
		}
		d.Exec(away.back)
		if id := read(); id == last {
			t.Errorf("%s; %s: the identity is the same", away.gone, away.back)
		} else {
			last = id
		}
	}
}

// Whatever hides rows for a while leaves another identity; what hides none leaves the same one, but for the
// files of partitions.
func TestThePublicationIdentityChangesWhenRowsAreHidden(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := newDatabase(t, srv)
		d.Exec("SET client_min_messages = error")
		through := "CREATE PUBLICATION outflow FOR ALL TABLES WITH (publish = 'insert', " +
			"publish_via_partition_root = true)"
		schema := "CREATE PUBLICATION outflow FOR TABLES IN SCHEMA public WITH (publish = 'insert', " +
			"publish_via_partition_root = true)"
		swap := "ALTER TABLE outbox RENAME TO outbox_old; CREATE TABLE outbox (LIKE outbox_old INCLUDING ALL)"
		ordinary := `ALTER TABLE outbox ADD COLUMN more float8 DEFAULT random(); ALTER TABLE outbox
			ALTER COLUMN counter TYPE numeric;
			GRANT SELECT ON outbox TO PUBLIC; ANALYZE outbox; ALTER TABLE outbox RENAME TO away;
			ALTER TABLE away RENAME TO outbox; TRUNCATE outbox`
		for _, c := range []struct {
			name               string
			since              int // major
			table, make, do    string
			which              string // table; "" for public.outbox
			differs, rewritten bool
		}{
			{name: "all tables, another table", make: through, do: swap, differs: true},
			{name: "a schema, another table", since: 15, make: schema, do: swap, differs: true},
			{
				name: "a schema, out of it and back", since: 15, make: schema,
				do: "CREATE SCHEMA other; ALTER TABLE outbox SET SCHEMA other; ALTER TABLE " +
					"other.outbox SET SCHEMA public",
				differs: true,
			},
			{
				name: "all tables, to another schema and back", make: through, // it is published there, too
				do: "CREATE SCHEMA other; ALTER TABLE outbox SET SCHEMA other; ALTER TABLE other.outbox " +
					"SET SCHEMA public",
			},
			{
				name: "a partition, out of the tree and back", table: partitionedTable,
				make: "CREATE PUBLICATION outflow FOR TABLE outbox", which: "public.outbox_0",
				do: `ALTER TABLE outbox DETACH PARTITION outbox_0; ALTER TABLE outbox
					ATTACH PARTITION outbox_0 FOR VALUES WITH (MODULUS 2, REMAINDER 0)`,
				differs: true,
			},
			{name: "ordinary life", make: "CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish = " +
				"'insert', publish_via_partition_root = true)", do: ordinary},
			{name: "ordinary life, all tables", make: through, do: ordinary, rewritten: true},
			{name: "ordinary life, a schema", since: 15, make: schema, do: ordinary, rewritten: true},
			{name: "ordinary life, partitions", table: partitionedTable, make: through, do: ordinary,
				rewritten: true},
			{
				name: "partitions come and go", make: through,
				table: strings.Replace(partitionedTable, "MODULUS 2, REMAINDER 1", "MODULUS 4, REMAINDER 1",
					1),
				do: `CREATE TABLE outbox_3 PARTITION OF outbox FOR VALUES WITH (MODULUS 4, REMAINDER 3);
					ALTER TABLE outbox DETACH PARTITION outbox_1;
					ALTER TABLE outbox ATTACH PARTITION outbox_1 FOR VALUES WITH (MODULUS 4, REMAINDER 1);
					ALTER TABLE outbox DETACH PARTITION outbox_0;
					DROP TABLE outbox_0`,
			},
			{name: "a partition, rewritten", table: partitionedTable, make: through,
				do: "VACUUM FULL outbox_1", rewritten: true},
			{
				name: "a partition, unlogged for a while", table: partitionedTable, make: through,
				do: "ALTER TABLE outbox_1 SET UNLOGGED; ALTER TABLE outbox_1 SET LOGGED", rewritten: true,
			},
		} {
			if srv.Installation.Major < c.since {
				continue
			}
			t.Run(c.name, func(t *testing.T) {
				if c.table == "" {
					c.table = outboxdb.PlainTable
				}
				d.Exec("DROP PUBLICATION IF EXISTS outflow")
				for _, sql := range []string{"DROP SCHEMA IF EXISTS other CASCADE; DROP SCHEMA public " +
					"CASCADE; CREATE SCHEMA public; " + c.table, c.make} {
					if _, err := d.Conn.PgConn().Exec(within(t), sql).ReadAll(); err != nil {
						t.Fatal(err)
					}
				}
				if d.cfg.Table = c.which; c.which == "" {
					d.cfg.Table = "public.outbox"
				}
				s := d.setup()
				defer s.Close()
				read := func() relay.PublicationIdentity {
					t.Helper()
					id, err := s.Publication(within(t))
					if err == nil {
						err = hiddenFault(id)
					}
					must.Succeed(t, err)
					return id
				}
				before := read()
				// each in a transaction of its own: VACUUM wants it
				for _, sql := range strings.Split(c.do, ";") {
					d.Exec(sql)
				}
				after := read()
				if before.Rewritten != "" || (after.Rewritten != "") != c.rewritten {
					t.Errorf("rewritten %q, then %q", before.Rewritten, after.Rewritten)
				}
				if after.Rewritten = ""; (before != after) != c.differs {
					t.Errorf("%+v, then %+v", before, after)
				}
			})
		}
	})
}

// Whoever has locked a partition, VACUUM FULL for example, keeps nobody from reading what is published.
func TestReadingThePublicationWaitsForNoPartition(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	if _, err := d.Conn.PgConn().Exec(within(t), partitionedTable).ReadAll(); err != nil {
		t.Fatal(err)
	}
	d.Exec("CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish = 'insert', " +
		"publish_via_partition_root = true)")
	s := d.setup()
	defer s.Close()
	d.Exec("BEGIN")
	d.Exec("LOCK TABLE outbox_1 IN ACCESS EXCLUSIVE MODE")
	if _, err := s.conn.Exec(within(t), "SET lock_timeout = 1"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Publication(within(t)); err != nil {
		t.Error(err)
	}
}

// TestReadingThePublicationCostsLittleForEachPartition: reading what is published costs no more than so much
// for each partition, also where the server knows by its statistics that all of them have the same parent.
func TestReadingThePublicationCostsLittleForEachPartition(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	const n = 300
	d.Exec(`CREATE TABLE outbox (id uuid, doc_id text NOT NULL, actor_id text NOT NULL,
		counter bigint NOT NULL, seq_key text,
		payload jsonb NOT NULL) PARTITION BY LIST (counter)`)
	d.Exec("CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish_via_partition_root)")
	d.Exec(fmt.Sprintf(`DO $$ BEGIN FOR i IN 1 .. %d LOOP
		EXECUTE format('CREATE TABLE outbox_%%s PARTITION OF outbox FOR VALUES IN (%%1$s)', i); END LOOP;
		END $$`, n))
	d.Exec("ANALYZE pg_inherits; ANALYZE pg_class")
	q := &explained{Querier: d.Conn}
	version := pgtest.Server(t).Installation.Major * 10000
	if _, err := CheckPublication(within(t), q, version, d.cfg.Config, outboxdb.Columns); err != nil {
		t.Fatal(err)
	}
	if q.rows < n || q.rows > 30*n {
		t.Errorf("the server went through %.0f rows for %d partitions", q.rows, n)
	}
}

// explained counts the rows that the server goes through for a query.
type explained struct {
	Querier
	rows float64
}

func (e *explained) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	var plans []struct{ Plan planNode }
	if err := e.QueryRow(ctx, "EXPLAIN (ANALYZE, FORMAT JSON) "+sql, args...).Scan(&plans); err != nil {
		return nil, err
	}
	for _, p := range plans {
		e.rows += p.Plan.rows()
	}
	return e.Querier.Query(ctx, sql, args...)
}

// planNode is a node of a plan, with averages over its loops.
type planNode struct {
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Filtered float64 `json:"Rows Removed by Filter"`
	Unjoined float64 `json:"Rows Removed by Join Filter"`
	Plans    []planNode
}

func (p planNode) rows() float64 {
	n := (p.Rows + p.Filtered + p.Unjoined) * p.Loops
	for _, below := range p.Plans {
		n += below.rows()
	}
	return n
}
