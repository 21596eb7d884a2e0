package catalog

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// describeFilter says what a row filter lets through.
func describeFilter(filter string) string {
	if filter == "" {
		return "all rows"
	}
	if shard, column, ok := rowfilter.Parse(filter); ok {
		return fmt.Sprintf("shard %s by column %s", shard, column)
	}
	return "only the rows that a filter lets through"
}

const ownNames = "Each shard has a publication, a slot and a stream of its own"

// checkFilters makes sure that the publication lets through the rows of the shard, or all where the table is
// not divided.
func (p publication) checkFilters() error {
	want := rowfilter.Condition(p.shard, p.shardBy)
	if want != "" && p.allTables {
		return postgres.Fatal(nil, "publication_filter", ownNames+": set publication to another name",
			"publication %q publishes all tables whole, the configuration says shard %v", p.name, p.shard)
	}
	for _, m := range p.members {
		if m.filter == want {
			continue
		}
		hint := fmt.Sprintf("ALTER PUBLICATION %s SET TABLE without a WHERE clause for %s",
			postgres.Quote(p.name), m.name)
		if shard, _, ok := rowfilter.Parse(m.filter); ok {
			hint = fmt.Sprintf("Set shard to %s, or publication to one that publishes all rows", shard)
		}
		if want != "" {
			hint = ownNames + ": set publication to another name, and shard to what this outflow is to " +
				"publish. " +
				"The number of shards is changed as docs/upgrades.md says"
		}
		return postgres.Fatal(nil, "publication_filter", hint,
			"publication %q publishes %s of %s, the configuration says %s",
			p.name, describeFilter(m.filter), m.name, describeFilter(want))
	}
	return nil
}

// checkShardVersion refuses a shard on a server that has no row filters.
func checkShardVersion(s relay.Shard, version int) error {
	if s.Whole() || version >= rowfilter.MinVersion {
		return nil
	}
	return postgres.Fatal(nil, "shard_version", "Leave shard out, or upgrade PostgreSQL",
		"shard %v needs PostgreSQL 15 or later, which can filter rows; the server has version %d", s,
		version/10000)
}

// checkShardColumn makes sure that the server can hash the document's column: a row filter that fails ends
// the stream each time.
func (s *Setup) checkShardColumn(ctx context.Context) error {
	if s.cfg.Shard.Whole() || s.cfg.Table == "" {
		return nil
	}
	if err := checkShardVersion(s.cfg.Shard, s.version); err != nil {
		return err
	}
	t, err := s.Table(ctx)
	if err != nil {
		return err
	}
	c, ok := t.Column(s.cfg.ShardBy)
	if !ok {
		return nil // the check of the columns says it
	}
	_, err = s.conn.Exec(ctx, "SELECT hash_array(ARRAY[NULL::"+c.TypeName+"])")
	if postgres.SQLState(err) == postgres.StateUndefinedFunction {
		return shardColumn(t, c, err)
	}
	return err
}

// shardRefused explains a publication that could not be made, if it is for its filter.
func (s *Setup) shardRefused(ctx context.Context, err error) error {
	if s.cfg.Shard.Whole() || postgres.SQLState(err) != postgres.StateFeatureNotSupported {
		return err
	}
	t, tableErr := s.Table(ctx)
	if c, ok := t.Column(s.cfg.ShardBy); tableErr == nil && ok {
		return shardColumn(t, c, err)
	}
	return err
}

func shardColumn(t Table, c Column, err error) error {
	return postgres.Fatal(err, "shard_column", "Make it a column of type text, varchar, uuid or bigint, "+
		"for example, with the database's own collation; "+
		"or leave shard out. A row filter takes only built-in types and collations",
		"table %s.%s can't be divided by column %q of type %s", t.Schema, t.Name, c.Name, c.TypeName)
}
