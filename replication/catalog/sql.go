package catalog

import (
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// Statements are those that make table, publication and slot, in their order, for a role that may do so to
// run by hand. The slot comes last, in a transaction of its own: a publication that did not exist when a row
// was written does not publish it.
func Statements(cfg SetupConfig) ([]string, error) {
	slot := fmt.Sprintf("SELECT lsn FROM pg_create_logical_replication_slot(%s, 'pgoutput')",
		postgres.Literal(cfg.Slot))
	if cfg.Table == "" {
		return []string{createPublication(cfg, nil), slot}, nil
	}
	schema, name, err := SplitTable(cfg.Table)
	if err != nil {
		return nil, err
	}
	table := pgx.Identifier{schema, name}
	all := append([]string{createTable(cfg, table)}, firstPartitions(cfg, schema, name, time.Now())...)
	if cfg.Control != "" {
		if schema, name, err = SplitTable(cfg.Control); err != nil {
			return nil, err
		}
		all = append(all, createControl(pgx.Identifier{schema, name}))
	}
	return append(all, createPublication(cfg, table), slot), nil
}

// createTable is the outbox as documented, with the columns that the mapping names. seq_key is made from
// actor and counter where both exist; "C" makes PostgreSQL compare it as Outflow does, byte by byte.
func createTable(cfg SetupConfig, table pgx.Identifier) string {
	m, created := cfg.Mapping, cfg.CreatedAt
	if created == "" {
		created = "created_at"
	}
	var columns []string
	add := func(name, definition string) {
		if name != "" {
			columns = append(columns, "  "+postgres.Quote(name)+" "+definition)
		}
	}
	key, partitioned := " PRIMARY KEY", cfg.PartitionEvery > 0
	if partitioned {
		key = ""
	}
	add(cfg.ID, "uuid"+key+" DEFAULT gen_random_uuid()")
	add(m.Doc, "text NOT NULL")
	add(m.Actor, "text NOT NULL")
	add(m.Counter, "bigint NOT NULL")
	add(m.Span, "bigint NOT NULL DEFAULT 1")
	if m.Actor != "" && m.Counter != "" {
		add(m.Key,
			fmt.Sprintf(
				`text COLLATE "C" NOT NULL GENERATED ALWAYS AS (%s || ':' || lpad(%s::text, 20, '0')) STORED`,
				postgres.Quote(m.Actor), postgres.Quote(m.Counter)))
	} else {
		add(m.Key, `text COLLATE "C" NOT NULL`)
	}
	add(m.Payload, "jsonb NOT NULL")
	for _, name := range cfg.Further {
		add(name, "text")
	}
	add(created, "timestamptz NOT NULL DEFAULT now()")
	by := ""
	if partitioned {
		by = "\nPARTITION BY RANGE (" + postgres.Quote(created) + ")"
		if cfg.ID != "" { // a unique key has to hold the column that the partitions go by
			columns = append(columns, "  PRIMARY KEY "+
				"("+postgres.Quote(cfg.ID)+", "+postgres.Quote(created)+")")
		}
	}
	return "CREATE TABLE " + table.Sanitize() + " (\n" + strings.Join(columns, ",\n") + "\n)" + by
}

// firstAhead is how many partitions a new table gets beside the one of now, until `outflow partition apply`
// is run for the first time.
const firstAhead = 4

// firstPartitions are the statements that make the first partitions of a new table; none where it has none.
func firstPartitions(cfg SetupConfig, schema, root string, now time.Time) (statements []string) {
	if cfg.PartitionEvery == 0 {
		return nil
	}
	at := now.UTC().Truncate(cfg.PartitionEvery)
	for range firstAhead + 1 {
		name := PartitionName(root, at, cfg.PartitionEvery)
		upper := at.Add(cfg.PartitionEvery)
		statements = append(statements, fmt.Sprintf("CREATE TABLE %s PARTITION OF %s FOR VALUES FROM (%s) "+
			"TO (%s)",
			pgx.Identifier{schema, name}.Sanitize(), pgx.Identifier{schema, root}.Sanitize(),
			PartitionBound(at),
			PartitionBound(upper)))
		at = upper
	}
	return statements
}

// maxName is the longest name that PostgreSQL keeps, in bytes.
const maxName = 63

// PartitionName is the name of a partition: the outbox's, and when the range begins.
func PartitionName(root string, lower time.Time, every time.Duration) string {
	suffix := "_p" + lower.Format("20060102")
	if every%(24*time.Hour) != 0 || lower.Truncate(24*time.Hour) != lower {
		suffix += lower.Format("_150405")
	}
	cut := root[:min(len(root), maxName-len(suffix))]
	for len(cut) < len(root) && len(cut) > 0 && root[len(cut)]&0xC0 == 0x80 {
		cut = cut[:len(cut)-1] // not within a character
	}
	return cut + suffix
}

// PartitionBound is an end of a partition's range in SQL, for a key of timestamptz, timestamp or date.
func PartitionBound(t time.Time) string {
	return postgres.Literal(t.UTC().Format("2006-01-02 15:04:05.999999+00"))
}

// PlannedTable is the description of the table that init would make.
func PlannedTable(cfg SetupConfig) (Table, error) {
	schema, name, err := SplitTable(cfg.Table)
	if err != nil {
		return Table{}, err
	}
	t, m, created := Table{Schema: schema, Name: name, Partitioned: cfg.PartitionEvery > 0}, cfg.Mapping,
		cfg.CreatedAt
	if created == "" {
		created = "created_at"
	}
	for _, c := range []Column{
		{Name: cfg.ID, TypeOID: pgtype.UUIDOID, Default: true},
		{Name: m.Doc, TypeOID: pgtype.TextOID},
		{Name: m.Actor, TypeOID: pgtype.TextOID},
		{Name: m.Counter, TypeOID: pgtype.Int8OID},
		{Name: m.Span, TypeOID: pgtype.Int8OID, Default: true},
		{Name: m.Key, TypeOID: pgtype.TextOID, Generated: m.Actor != "" && m.Counter != ""},
		{Name: m.Payload, TypeOID: pgtype.JSONBOID},
		{Name: created, TypeOID: pgtype.TimestamptzOID, Default: true},
	} {
		if c.Name != "" {
			c.NotNull, c.Default = true, c.Default || c.Generated
			t.Columns = append(t.Columns, c)
		}
	}
	for _, name := range cfg.Further {
		t.Columns = append(t.Columns, Column{Name: name, TypeOID: pgtype.TextOID})
	}
	return t, nil
}

// createPublication leaves PostgreSQL 18's publish_generated_columns off: seq_key is made from actor and
// counter on every version, so the same rows give the same order on all of them. Without a table it publishes
// nothing: the stream can't be asked for without one.
func createPublication(cfg SetupConfig, table pgx.Identifier) string {
	if table == nil {
		return fmt.Sprintf("CREATE PUBLICATION %s WITH (publish = 'insert')", postgres.Quote(cfg.Publication))
	}
	filter, control := "", ""
	if cfg.Control != "" {
		if schema, name, err := SplitTable(cfg.Control); err == nil { // else it was refused before
			control = ", " + pgx.Identifier{schema, name}.Sanitize()
		}
	}
	if condition := rowfilter.Condition(cfg.Shard, postgres.Quote(cfg.ShardBy)); condition != "" {
		filter = " WHERE (" + condition + ")"
	}
	return fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE %s%s%s WITH (publish = 'insert', "+
		"publish_via_partition_root = true)",
		postgres.Quote(cfg.Publication), table.Sanitize(), filter, control)
}
