package doctor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/replication/postgres"
)

// Parked are a consumer's parked events, in the database that postgres.url names.
type Parked struct {
	Table    string  `json:"-"`
	Consumer string  `json:"name"`
	Events   int64   `json:"events"`
	Seconds  float64 `json:"seconds"` // since the oldest was parked
}

// Shared is a consumer of the stream whose instances share its partitions, in the database that postgres.url
// names.
type Shared struct {
	Table      string   `json:"-"`
	Consumer   string   `json:"name"`
	Filters    []string `json:"filters"`
	Partitions int      `json:"partitions"`
	Wanted     int      `json:"wanted"`  // partitions that it is to have; 0: no change is under way
	Barrier    uint64   `json:"barrier"` // where it happens
	Running    int      `json:"running"` // instances
	Silent     []string `json:"silent"`  // instances that neither run nor ended
	Unowned    int      `json:"unowned"` // partitions that nobody works on
	Holed      int      `json:"holed"`   // partitions whose newest done message the broker has lost
	Least      uint64   `json:"least"`   // the slowest partition is done up to here
}

// readShared reads the consumers of the stream that share their partitions, in whichever schema they have
// their tables. Those of an earlier version, without a table of instances, are left out.
func (r *pgReader) readShared(ctx context.Context) error {
	var schemas []string
	for _, table := range []string{"outflow_consumer", "outflow_mark", "outflow_member"} {
		var err error
		if schemas, err = r.tables(ctx, table); err != nil {
			return err
		}
	}
	for _, schema := range schemas {
		table := func(name string) string { return pgx.Identifier{schema, name}.Sanitize() }
		var found []Shared
		err := query(ctx, r.conn, &found, many(fmt.Sprintf(`SELECT c.name, c.filters, c.partitions,
				coalesce(c.wanted_partitions, 0) AS wanted, coalesce(c.barrier, 0) AS barrier, m.*, k.*
			FROM %s c, LATERAL (
				SELECT count(*) FILTER (WHERE expires > clock_timestamp()) AS running,
					coalesce(jsonb_agg(instance) FILTER (WHERE expires <= clock_timestamp()), '[]') AS silent
				FROM %[2]s WHERE name = c.name) m, LATERAL (
				SELECT count(*) FILTER (WHERE holed) AS holed, coalesce(min(seq), 0) AS least,
					count(*) FILTER (WHERE NOT EXISTS (SELECT FROM %[2]s o WHERE o.name = c.name
						AND o.instance = owner AND o.expires > clock_timestamp())) AS unowned
				FROM %s WHERE name = c.name AND source = 'live') k
			WHERE c.stream = %s AND c.partitions > 0 ORDER BY c.name LIMIT %d`, table("outflow_consumer"),
			table("outflow_member"), table("outflow_mark"), postgres.Literal(r.f.Config.Stream), most)))
		if err != nil {
			return err
		}
		for _, s := range found {
			s.Table = table("outflow_consumer")
			r.f.Shared = append(r.f.Shared, s)
		}
	}
	return nil
}

// readParked reads the tables of parked events of this database, in whichever schema consumers have them.
func (r *pgReader) readParked(ctx context.Context) error {
	schemas, err := r.tables(ctx, "outflow_parked")
	if err != nil {
		return err
	}
	for _, schema := range schemas {
		quoted := pgx.Identifier{schema, "outflow_parked"}.Sanitize()
		var found []Parked
		if err := query(ctx, r.conn, &found, many(fmt.Sprintf(`SELECT name, count(*) AS events,
				extract(epoch FROM clock_timestamp() - min(parked_at)) AS seconds
			FROM %s GROUP BY name ORDER BY name LIMIT %d`, quoted, most))); err != nil {
			return err
		}
		for _, p := range found {
			p.Table = quoted
			r.f.Parked = append(r.f.Parked, p)
		}
	}
	return nil
}
