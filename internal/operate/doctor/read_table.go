package doctor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// TableStats are the table's counters, those of its partitions added up.
type TableStats struct {
	Rows int64 `json:"rows"`
	Dead int64 `json:"dead"`
}

func (r *pgReader) readTable(ctx context.Context) error {
	return r.reading(ctx, func(q catalog.Querier) error {
		l, err := wiring.Apply(ctx, r.f.Config, tableReader{r, q})
		if f := outbox.FaultOf(err); f != nil && f.Code == "table_missing" &&
			(r.o.BeforeInit || r.nothing()) {
			return nil // init makes it
		}
		if err == nil {
			l.Follow(r.f.Config, r.f.Readings.Record)
			r.f.Layout = l
		}
		return err
	})
}

func (r *pgReader) readPartitions(ctx context.Context) error {
	if !r.f.hasTable() {
		return nil
	}
	return r.reading(ctx, func(q catalog.Querier) (err error) {
		r.f.Partitions, err = partition.Look(ctx, q, r.f.Layout.Table, r.f.Config.Retain.OtherSlots)
		return err
	})
}

// nothing reports whether there is neither slot nor record: that outflow init was not run is what has to be
// said then.
func (r *pgReader) nothing() bool {
	return r.f.known(srcSlots, srcRecord) && !r.f.Readings.Slot.Exists && r.f.Readings.Record == nil
}

// reading lends out a transaction that may only read.
func (r *pgReader) reading(ctx context.Context, do func(catalog.Querier) error) error {
	return pgx.BeginTxFunc(ctx, r.conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if err := limit(ctx, tx); err != nil {
			return err
		}
		return do(tx)
	})
}

type tableReader struct {
	r *pgReader
	q catalog.Querier
}

func (t tableReader) Table(ctx context.Context) (catalog.Table, error) {
	return catalog.ReadTable(ctx, t.q, t.r.f.Config.Table)
}

func (t tableReader) Cluster(ctx context.Context) (catalog.Cluster, error) {
	c, err := catalog.ReadCluster(ctx, t.q, t.r.f.Postgres.Number, wiring.Catalog(t.r.f.Config))
	if f := outbox.FaultOf(err); f != nil && f.Code == "control_table" &&
		(t.r.o.BeforeInit || t.r.nothing()) {
		return c, nil // init makes it
	}
	return c, err
}

func (r *pgReader) readTableStats(ctx context.Context) error {
	if !r.f.hasTable() {
		return nil
	}
	// The tree is read from pg_inherits: pg_partition_tree waits for whoever has locked a partition.
	return query(ctx, r.conn, &r.f.Table, one(`WITH RECURSIVE tree AS (
			SELECT $1::oid AS relid UNION SELECT i.inhrelid FROM tree t JOIN pg_inherits i ON i.inhparent = t.relid
			JOIN pg_class p ON p.oid = t.relid AND p.relkind = 'p')
		SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint AS rows,
			coalesce(sum(pg_stat_get_dead_tuples(c.oid)), 0)::bigint AS dead
		FROM tree t JOIN pg_class c ON c.oid = t.relid WHERE c.relkind = 'r'`), r.f.Layout.Table.OID)
}

func (r *pgReader) readPublication(ctx context.Context) error {
	if r.f.Layout == nil || r.nothing() {
		return nil
	}
	return r.reading(ctx, func(q catalog.Querier) error {
		id, err := catalog.CheckPublication(ctx, q, r.f.Postgres.Number,
			wiring.Catalog(r.f.Config), r.f.Layout.Needed())
		if err != nil {
			return err
		}
		r.f.Publication.Identity, r.f.Readings.Publication = id, id
		err = q.QueryRow(ctx, "SELECT puballtables FROM pg_publication WHERE pubname = $1",
			r.f.Config.Publication).Scan(&r.f.Publication.AllTables)
		if err != nil || r.f.Config.Cluster.Control == "" {
			return err
		}
		r.f.Publication.NoDeletes, err = withoutDeletes(ctx, q, r.f.Config)
		return err
	})
}

// withoutDeletes lists the publications by which others replicate rows of the control table, and not that
// another one took their place. What publishes inserts alone, by the root, is an Outflow's: init makes it so.
func withoutDeletes(ctx context.Context, q catalog.Querier, cfg config.Config) (names []string, err error) {
	schema, table, err := catalog.SplitTable(cfg.Cluster.Control)
	if err != nil {
		return nil, err
	}
	return names, q.QueryRow(ctx, `SELECT coalesce(array_agg(p.pubname::text ORDER BY p.pubname), '{}')
		FROM pg_publication p WHERE p.pubname <> $1 AND p.pubinsert AND NOT p.pubdelete
		AND (p.pubupdate OR p.pubtruncate OR NOT p.pubviaroot)
		AND EXISTS (SELECT FROM pg_publication_tables t
			WHERE t.pubname = p.pubname AND t.schemaname = $2 AND t.tablename = $3)`,
		cfg.Publication, schema, table).Scan(&names)
}

// tables lists the schemas in which consumers have a table, and fails without the right to read one.
func (r *pgReader) tables(ctx context.Context, name string) (schemas []string, err error) {
	var tables []struct {
		Schema  string `json:"nspname"`
		Allowed bool   `json:"allowed"`
	}
	err = query(ctx, r.conn, &tables, many(fmt.Sprintf(`SELECT n.nspname,
			has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE') AS allowed
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relname = '%s' AND c.relkind = 'r' ORDER BY 1 LIMIT 16`, name)))
	for _, t := range tables {
		if !t.Allowed {
			return nil, noRight(fmt.Sprintf("GRANT SELECT ON %s TO %s",
				pgx.Identifier{t.Schema, name}.Sanitize(), postgres.Quote(r.f.Postgres.Role)))
		}
		schemas = append(schemas, t.Schema)
	}
	return schemas, err
}
