package doctor

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// newestRows is how many of the table's newest rows are read at most, and newestPages in how many of its last
// pages they are looked for.
const (
	newestRows  = 100_000
	newestPages = 16_384
)

// Rows is what the table's newest rows show.
type Rows struct {
	Looked   int64      `json:"looked"`
	Gaps     []Sequence `json:"gaps"`     // counters that no row of the table has
	Disorder []Sequence `json:"disorder"` // later counters with keys that are not later
	Largest  int64      `json:"largest"`  // bytes of the largest payload, as text
}

// Sequence is a place in a sequence of counters.
type Sequence struct {
	Doc   string  `json:"doc"`
	Actor string  `json:"actor"`
	After float64 `json:"after"` // the last counter before it
	At    float64 `json:"at"`    // the next one that is there
}

// readRows reads the rows of the last pages of the table, which are the newest ones unless earlier ones were
// deleted. A partitioned table has no last pages.
func (r *pgReader) readRows(ctx context.Context) error {
	l := r.f.Layout
	if !r.f.hasTable() || l.Table.Partitioned {
		return nil
	}
	var allowed bool
	if err := query(ctx, r.conn, &allowed,
		"SELECT to_jsonb(has_table_privilege($1::oid, 'SELECT'))::text", l.Table.OID); err != nil {
		return err
	}
	if !allowed {
		return noRight(fmt.Sprintf("GRANT SELECT ON %s TO %s", l.Table.Quoted(),
			postgres.Quote(r.f.Postgres.Role)))
	}
	m, table := l.Mapping, l.Table.Only()
	column := func(name, otherwise string) string {
		if name == "" {
			return otherwise
		}
		return postgres.Quote(name)
	}
	size := "octet_length(" + column(m.Payload, "NULL") + "::text)"
	if c, ok := l.Table.Column(m.Payload); ok && c.TypeOID == pgtype.ByteaOID {
		size = "octet_length(" + column(m.Payload, "NULL") + ")"
	}
	where := "ctid >= format('(%s,0)', greatest(0, pg_relation_size($1::oid) / " +
		"current_setting('block_size')::bigint - $2))::tid"
	if shard := rowfilter.Condition(r.f.Config.Shard, column(m.Doc, "")); shard != "" {
		where += " AND (" + shard + ")"
	}
	counter := "NULL::numeric"
	if c, ok := l.Table.Column(m.Counter); ok &&
		(c.TypeOID == pgtype.Int2OID || c.TypeOID == pgtype.Int4OID ||
			c.TypeOID == pgtype.Int8OID) && m.Actor != "" {
		counter = column(m.Counter, "") + "::numeric"
	}
	sql := fmt.Sprintf(`WITH r AS MATERIALIZED (
			SELECT %s::text AS doc, %s::text AS actor, %s AS c, coalesce(%s::numeric, 1) AS s, %s::text AS k, %s AS size
			FROM %s WHERE %s LIMIT $3
		), o AS (SELECT *, lag(c + s - 1) OVER w AS before, lag(k) OVER w AS k_before FROM r WHERE c IS NOT NULL
			WINDOW w AS (PARTITION BY doc, actor ORDER BY c)
		), g AS MATERIALIZED (SELECT doc, actor, before, c FROM o WHERE c > before + 1 LIMIT 100)
		SELECT (SELECT count(*) FROM r) AS looked, (SELECT coalesce(max(size), 0) FROM r) AS largest,
			(SELECT jsonb_agg(jsonb_build_object('doc', doc, 'actor', actor, 'after', before, 'at', c)) FROM g
				WHERE NOT EXISTS (SELECT FROM %s t WHERE t.%s::text = g.doc AND t.%s::text = g.actor
					AND t.%s > g.before AND t.%s < g.c)) AS gaps,
			(SELECT jsonb_agg(jsonb_build_object('doc', doc, 'actor', actor, 'after', before, 'at', c)) FROM (
				SELECT * FROM o WHERE k COLLATE "C" <= k_before COLLATE "C" LIMIT 100) d) AS disorder`,
		column(m.Doc, "NULL"), column(m.Actor, "NULL"), counter, column(m.Span, "1"), column(m.Key, "NULL"),
		size, table, where, table, column(m.Doc, "ctid"), column(m.Actor, "ctid"), column(m.Counter, "ctid"),
		column(m.Counter, "ctid"))
	if counter == "NULL::numeric" { // nothing to compare
		sql = strings.Replace(sql, "t."+column(m.Counter, "ctid")+" > g.before AND t."+
			column(m.Counter, "ctid")+" < g.c", "true", 1)
	}
	return query(ctx, r.conn, &r.f.Rows, one(sql), l.Table.OID, newestPages, newestRows)
}
