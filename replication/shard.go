package replication

import (
	"context"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"
	"github.com/outflowhq/outflow/internal/relay"
)

// shardVersion is the first PostgreSQL that has row filters.
const shardVersion = 150000

// shardFilter is the condition of a shard's rows, as the row filter of its publication and wherever the table itself is read. Each row
// belongs to exactly one shard. A row filter may call immutable built-in functions only, which casts to text mostly are not: hash_array
// takes every built-in type that has a hash, and NULL. PostgreSQL prints a filter that was written like this in the same words again.
func shardFilter(s relay.Shard, column string) string {
	return fmt.Sprintf("(((hash_array(ARRAY[%s]) & 2147483647) %% %d) = %d)", column, s.Of, s.Index)
}

var shardPattern = regexp.MustCompile(`^\(\(\(hash_array\(ARRAY\[(.+)\]\) & 2147483647\) % (\d+)\) = (\d+)\)$`)

// describeFilter says what a row filter lets through.
func describeFilter(filter string) string {
	switch m := shardPattern.FindStringSubmatch(filter); {
	case filter == "":
		return "all rows"
	case m != nil:
		return fmt.Sprintf("shard %s/%s by column %s", m[3], m[2], m[1])
	}
	return "only the rows that a filter lets through"
}

const ownNames = "Each shard has a publication, a slot and a stream of its own"

// checkFilters makes sure that the publication lets through the rows of the shard, or all where the table is not divided.
func (p publication) checkFilters() error {
	want := ""
	if !p.shard.Whole() {
		want = shardFilter(p.shard, p.shardBy)
		if p.allTables {
			return fatal("publication_filter", ownNames+": set publication to another name",
				"publication %q publishes all tables whole, the configuration says shard %v", p.name, p.shard)
		}
	}
	for _, m := range p.members {
		if m.filter == want {
			continue
		}
		what, cure := describeFilter(m.filter), ""
		switch found := shardPattern.FindStringSubmatch(m.filter); {
		case !p.shard.Whole():
			cure = ownNames + ": set publication to another name, and shard to what this outflow is to publish. " +
				"The number of shards is changed as docs/upgrades.md says"
		case found != nil:
			cure = fmt.Sprintf("Set shard to %s/%s, or publication to one that publishes all rows", found[3], found[2])
		default:
			cure = fmt.Sprintf("ALTER PUBLICATION %s SET TABLE without a WHERE clause for %s", pgx.Identifier{p.name}.Sanitize(), m.name)
		}
		wanted := "all rows"
		if want != "" {
			wanted = "shard " + p.shard.String() + " by column " + p.shardBy
		}
		return fatal("publication_filter", cure, "publication %q publishes %s of %s, the configuration says %s", p.name, what, m.name, wanted)
	}
	return nil
}

// checkShardVersion refuses a shard on a server that has no row filters.
func checkShardVersion(s relay.Shard, version int) error {
	if s.Whole() || version >= shardVersion {
		return nil
	}
	return fatal("shard_version", "Leave shard out, or upgrade PostgreSQL",
		"shard %v needs PostgreSQL 15 or later, which can filter rows; the server has version %d", s, version/10000)
}

// checkShardColumn makes sure that the server can hash the document's column: a row filter that fails ends the stream each time.
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
	if sqlState(err) == codeUndefinedFunction {
		return shardColumn(t, c, err)
	}
	return err
}

// shardRefused explains a publication that could not be made, if it is for its filter.
func (s *Setup) shardRefused(ctx context.Context, err error) error {
	if s.cfg.Shard.Whole() || sqlState(err) != codeNotSupported {
		return err
	}
	t, tableErr := s.Table(ctx)
	if c, ok := t.Column(s.cfg.ShardBy); tableErr == nil && ok {
		return shardColumn(t, c, err)
	}
	return err
}

func shardColumn(t Table, c Column, err error) error {
	f := fatal("shard_column", "Make it a column of type text, varchar, uuid or bigint, for example, with the database's own collation; "+
		"or leave shard out. A row filter takes only built-in types and collations",
		"table %s.%s can't be divided by column %q of type %s", t.Schema, t.Name, c.Name, c.TypeName)
	f.Err = err
	return f
}
