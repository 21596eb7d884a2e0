package catalog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// SampleLimits are how much of the table a sample reads at most.
type SampleLimits struct {
	Rows    int
	Blocks  int64         // pages of the table's file; what is stored outside of the row is not read
	Timeout time.Duration // for each statement
}

// DefaultSampleLimits read 32 MB at most, which take well below a second from a disk.
var DefaultSampleLimits = SampleLimits{Rows: 20_000, Blocks: 4096, Timeout: 5 * time.Second}

// maxSampledPartitions is how many partitions a sample reads.
const maxSampledPartitions = 16

// SampledRow is what a sample has of a row.
type SampledRow struct {
	Sequence [2]int64  // hashes of the document and the actor
	Counter  *string   // as PostgreSQL prints it
	Spans    []*string // of the columns that were asked for
	// The row is near an end of what was read, in the order of the table's file. What belongs beside it may
	// not be in the sample: it lies outside, or its transaction has not committed.
	Edge bool
}

// CounterSample is a part of the table, or all of it.
type CounterSample struct {
	Rows    []SampledRow
	Cut     bool   // the table has more rows
	Refused string // why PostgreSQL did not read it; "": it did
}

// SampleCounters reads the newest rows of the table, of a shard those alone: the end of its file, and of the
// partitions that were made last. It reads no more than the limits say, and what the server refuses is no
// error. spans are the columns to read beside the counter.
func (s *Setup) SampleCounters(ctx context.Context, t Table, m relay.Mapping, spans []string,
	limits SampleLimits) (sample CounterSample, err error) {
	begin, end := "BEGIN", "ROLLBACK"
	if s.dryRun {
		begin, end = "SAVEPOINT sample", "ROLLBACK TO SAVEPOINT sample"
	}
	if _, err := s.conn.Exec(ctx, begin); err != nil {
		return sample, err
	}
	sample, err = s.sampleCounters(ctx, t, m, spans, limits)
	if postgres.SQLState(err) != "" {
		sample, err = CounterSample{Refused: err.Error()}, nil
	}
	_, endErr := s.conn.Exec(ctx, end) // with it the settings of sampleCounters end
	return sample, errors.Join(err, endErr)
}

func (s *Setup) sampleCounters(ctx context.Context, t Table, m relay.Mapping, spans []string,
	limits SampleLimits) (sample CounterSample, err error) {
	if _, err := s.conn.Exec(ctx, fmt.Sprintf("SET LOCAL transaction_read_only = on; SET LOCAL "+
		"statement_timeout = %d",
		limits.Timeout.Milliseconds())); err != nil {
		return sample, err
	}
	parts, err := s.newestParts(ctx, t)
	if err != nil {
		return sample, err
	}
	sample.Cut = len(parts) > maxSampledPartitions
	for _, p := range parts[:min(len(parts), maxSampledPartitions)] {
		rows, blocks := limits.Rows-len(sample.Rows), min(p.blocks, limits.Blocks)
		if rows == 0 || blocks == 0 {
			sample.Cut = true
			break
		}
		limits.Blocks -= blocks
		got, err := s.lastRows(ctx, p, m, spans, p.blocks-blocks, rows)
		if err != nil {
			return sample, err
		}
		older, edge := 0, len(got)/4
		if p.blocks > blocks || len(got) == rows {
			older, sample.Cut = edge, true
		}
		for i := range got {
			got[i].Edge = i < older || i >= len(got)-edge
		}
		sample.Rows = append(sample.Rows, got...)
	}
	return sample, nil
}

// part is a table with a file: the outbox, or one of its partitions.
type part struct {
	Schema, Name string
	blocks       int64
}

// newestParts lists those that have rows, or had some; at most one more than are read.
func (s *Setup) newestParts(ctx context.Context, t Table) (parts []part, err error) {
	rows, err := s.conn.Query(ctx, `SELECT n.nspname, c.relname,
			pg_relation_size(c.oid) / current_setting('block_size')::int
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE (c.oid = $1 OR c.oid IN (SELECT relid FROM pg_partition_tree($1) WHERE isleaf))
			AND c.relkind = 'r' AND pg_relation_size(c.oid) > 0
		ORDER BY c.oid DESC LIMIT $2`, t.OID, maxSampledPartitions+1)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (p part, err error) {
		return p, row.Scan(&p.Schema, &p.Name, &p.blocks)
	})
}

// lastRows reads the last rows from a block on, the oldest first.
func (s *Setup) lastRows(ctx context.Context, p part, m relay.Mapping, spans []string, from int64,
	limit int) ([]SampledRow, error) {
	rows, err := s.conn.Query(ctx, sampleQuery(s.cfg.Shard, s.cfg.ShardBy, p, m, spans, from, limit))
	if err != nil {
		return nil, err
	}
	got, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r SampledRow, err error) {
		return r, row.Scan(&r.Sequence[0], &r.Sequence[1], &r.Counter, &r.Spans)
	})
	slices.Reverse(got)
	return got, err
}

// sampleQuery calls nothing but functions of PostgreSQL's own: format prints a value by its type's output
// function, where a cast could be anybody's.
func sampleQuery(shard relay.Shard, shardBy string, p part, m relay.Mapping, spans []string, from int64,
	limit int) string {
	text := func(column string) string {
		if column == "" {
			return "''"
		}
		return "format('%s', " + postgres.Quote(column) + `) COLLATE "C"`
	}
	printed := func(column string) string {
		return fmt.Sprintf("CASE WHEN %s IS NOT NULL THEN %s END", postgres.Quote(column), text(column))
	}
	var all []string
	for _, column := range spans {
		all = append(all, printed(column))
	}
	condition := ""
	if c := rowfilter.Condition(shard, postgres.Quote(shardBy)); c != "" {
		condition = " AND " + c
	}
	return fmt.Sprintf("SELECT hashtextextended(%s, 0), hashtextextended(%s, 0), %s, ARRAY[%s]::text[] "+
		"FROM ONLY %s WHERE ctid >= '(%d,0)'::tid AND %s IS NOT NULL%s ORDER BY ctid DESC LIMIT %d",
		text(m.Doc), text(m.Actor), printed(m.Counter), strings.Join(all, ", "),
		pgx.Identifier{p.Schema, p.Name}.Sanitize(), from, postgres.Quote(m.Doc), condition, limit)
}

// SizeSample is what the newest rows of the table measure, as text.
type SizeSample struct {
	Rows    int
	Mean    float64 // bytes of payload, document, actor and key of a row
	Largest int64   // of payload
}

// sampledSizes is how many rows a sample of sizes reads: 10,000 would be 10 GB of the largest.
const sampledSizes = 1000

// SampleSizes measures the newest rows, within the default limits of a sample. What the server refuses is no
// error: there are no rows then.
func (s *Setup) SampleSizes(ctx context.Context, t Table, m relay.Mapping) (sample SizeSample, err error) {
	limits := DefaultSampleLimits
	if _, err := s.conn.Exec(ctx, "BEGIN READ ONLY"); err != nil {
		return sample, err
	}
	defer func() {
		_, endErr := s.conn.Exec(ctx, "ROLLBACK")
		if postgres.SQLState(err) != "" {
			sample, err = SizeSample{}, nil
		}
		err = errors.Join(err, endErr)
	}()
	if _, err := s.conn.Exec(ctx, fmt.Sprintf("SET LOCAL statement_timeout = %d",
		limits.Timeout.Milliseconds())); err != nil {
		return sample, err
	}
	parts, err := s.newestParts(ctx, t)
	if err != nil || len(parts) == 0 {
		return sample, err
	}
	length := func(column string) string {
		if column == "" {
			return "0"
		}
		if c, ok := t.Column(column); ok && c.TypeOID == pgtype.ByteaOID {
			return "coalesce(octet_length(" + postgres.Quote(column) + "), 0)"
		}
		return "octet_length(format('%s', " + postgres.Quote(column) + "))"
	}
	p := parts[0]
	err = s.conn.QueryRow(ctx, fmt.Sprintf("SELECT count(*), coalesce(avg(payload + rest), 0)::float8, "+
		"coalesce(max(payload), 0) FROM (SELECT %s AS payload, %s + %s + %s AS rest FROM ONLY %s "+
		"WHERE ctid >= '(%d,0)'::tid ORDER BY ctid DESC LIMIT %d) r", length(m.Payload), length(m.Doc),
		length(m.Actor), length(m.Key), pgx.Identifier{p.Schema, p.Name}.Sanitize(),
		max(0, p.blocks-limits.Blocks), sampledSizes)).Scan(&sample.Rows, &sample.Mean, &sample.Largest)
	return sample, err
}
