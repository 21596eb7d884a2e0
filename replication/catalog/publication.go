package catalog

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// CheckPublication reads and checks the publication. Messages do not come through it: without a table it only
// has to exist, because the stream can't be asked for without one, and it has no identity: whoever makes it
// anew has taken nothing out of the stream.
func CheckPublication(ctx context.Context, q Querier, version int, cfg Config,
	columns []string) (id relay.PublicationIdentity, err error) {
	if cfg.Table == "" {
		var exists bool
		err := q.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = $1)",
			cfg.Publication).Scan(&exists)
		if err != nil {
			return id, fmt.Errorf("read publication %s: %w", cfg.Publication, err)
		}
		if !exists {
			return id, postgres.Fatal(nil, "publication_missing", emptyPublicationHint,
				"publication %q does not exist", cfg.Publication)
		}
		return id, nil
	}
	if err := checkShardVersion(cfg.Shard, version); err != nil {
		return id, err
	}
	t, err := ReadTable(ctx, q, cfg.Table)
	if err != nil {
		return id, err
	}
	p, err := readPublication(ctx, q, version, cfg, t)
	if err != nil {
		return id, err
	}
	if id, err = p.check(t, columns); err != nil {
		return id, err
	}
	err = checkCluster(ctx, q, version, cfg, &id)
	return id, err
}

// publication is what the catalog says of a publication and a table's membership in it.
type publication struct {
	name                       string
	oid, xmin                  uint32
	allTables, insert, viaRoot bool
	update                     bool
	members                    []member // the table's own before those of what it is a partition of
	// the topmost table of the partition tree that the table is in; "" if it is its own
	root string
	// a partition whose rows never reach the stream of changes; "" if none
	bad       string
	generated bool   // it publishes generated columns without being told which
	rewritten string // see [relay.PublicationIdentity]

	shard   relay.Shard // the part of the table that it is to publish
	shardBy string      // the column that decides, as the server prints it
}

// member is a way in which the table is in a publication: by its own row or by that of a table that it is a
// partition of, in pg_publication_rel or, for whole schemas, in pg_publication_namespace.
type member struct {
	relation  uint32 // the table itself or an ancestor
	name      string
	depth     int // 0: the table itself, 1 its parent, ...
	oid, xmin uint32
	schema    bool
	path      string // see [relay.PublicationIdentity]
	attrs     string // column numbers, space-separated; "" for all
	filter    string // as the server prints it; "" for none
}

func readPublication(ctx context.Context, q Querier, version int, cfg Config, t Table) (publication, error) {
	name := cfg.Publication
	p := publication{name: name, shard: cfg.Shard}
	fail := func(err error) (publication, error) {
		return publication{}, fmt.Errorf("read publication %s: %w", name, err)
	}
	// Row filters, column lists and whole schemas came with PostgreSQL 15.
	attrs, filter, schemas := "''", "''", ""
	if version >= 150000 {
		attrs, filter = "coalesce(r.prattrs::text, '')", "coalesce(pg_get_expr(r.prqual, r.prrelid), '')"
		schemas = `UNION ALL SELECT a.relid, a.depth, a.name, n.oid, n.xmin, true, concat_ws(',', nullif(a.path, ''), (
				SELECT d.xmin FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = a.relid AND d.objsubid = 0
				AND d.refclassid = 'pg_namespace'::regclass AND d.refobjid = a.schema)), '', ''
			FROM above a JOIN pg_publication_namespace n ON n.pnnspid = a.schema JOIN pub ON pub.oid = n.pnpubid`
	}
	generated := "false"
	if version >= 180000 {
		generated = "pubgencols = 's'"
	}
	// The tree is read from pg_inherits: pg_partition_tree waits for whoever has locked a partition, VACUUM
	// FULL for example. Only what has partitions is followed down: leaves in the recursion would each be held
	// against all rows of pg_inherits.
	rows, err := q.Query(ctx, `WITH RECURSIVE pub AS (
			SELECT oid, xmin, puballtables, pubinsert, pubupdate, pubviaroot, `+generated+` AS generated FROM pg_publication WHERE pubname = $1
		), ancestors AS (
			SELECT $2::oid AS relid, 1 AS ordinality UNION SELECT relid, ordinality
				FROM pg_partition_ancestors($2::oid) WITH ORDINALITY a(relid, ordinality)
		), above AS (
			SELECT c.oid AS relid, c.relnamespace AS schema, concat(n.nspname, '.', c.relname) AS name, (x.ordinality - 1)::int AS depth,
				coalesce((SELECT string_agg(i.xmin::text, ',' ORDER BY b.ordinality) FROM ancestors b JOIN pg_inherits i ON i.inhrelid = b.relid
					WHERE b.ordinality < x.ordinality), '') AS path
			FROM ancestors x JOIN pg_class c ON c.oid = x.relid JOIN pg_namespace n ON n.oid = c.relnamespace
		), members AS (
			SELECT a.relid, a.depth, a.name, r.oid, r.xmin, false AS schema, a.path, `+attrs+` AS attrs, `+filter+` AS filter
			FROM above a JOIN pg_publication_rel r ON r.prrelid = a.relid JOIN pub ON pub.oid = r.prpubid `+schemas+`
		), parents AS (
			SELECT oid AS relid FROM pg_class WHERE oid = $2::oid AND relkind = 'p' UNION SELECT c.oid
				FROM parents t JOIN pg_inherits i ON i.inhparent = t.relid JOIN pg_class c ON c.oid = i.inhrelid AND c.relkind = 'p'
		), leaves AS (
			SELECT c.oid, concat(n.nspname, '.', c.relname) AS name, c.relpersistence = 'p' AND c.relkind = 'r' AS logged, c.relfilenode AS file
			FROM (SELECT $2::oid AS relid UNION SELECT i.inhrelid FROM parents t JOIN pg_inherits i ON i.inhparent = t.relid) x
				JOIN pg_class c ON c.oid = x.relid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind <> 'p'
		)
		SELECT pub.oid, pub.xmin::text, puballtables, pubinsert, pubupdate, pubviaroot, generated,
			coalesce((SELECT name FROM above WHERE depth > 0 ORDER BY depth DESC LIMIT 1), ''),
			coalesce((SELECT min(name) FROM leaves WHERE NOT logged AND oid <> $2::oid), ''),
			coalesce((SELECT left(encode(sha256(convert_to(string_agg(concat(oid, ':', file), ',' ORDER BY oid), 'UTF8')), 'hex'), 16)
				FROM leaves WHERE file <> oid), ''),
			quote_ident($3), m.relid, m.depth, m.name, m.oid, m.xmin::text, m.schema, m.path, m.attrs, m.filter
		FROM pub LEFT JOIN members m ON true ORDER BY m.depth, m.schema, m.oid`, name, t.OID, cfg.ShardBy)
	if err != nil {
		return fail(err)
	}
	defer rows.Close()
	for rows.Next() {
		var xmin string
		var relation, oid *uint32
		var depth *int
		var label, mxmin, path, list, filter *string
		var schema *bool
		if err := rows.Scan(&p.oid, &xmin, &p.allTables, &p.insert, &p.update, &p.viaRoot, &p.generated,
			&p.root, &p.bad, &p.rewritten,
			&p.shardBy, &relation, &depth, &label, &oid, &mxmin, &schema, &path, &list, &filter); err != nil {
			return fail(err)
		}
		if p.xmin, err = parseXID(xmin); err != nil {
			return fail(err)
		}
		if oid == nil {
			continue
		}
		m := member{
			relation: *relation, depth: *depth, name: *label, oid: *oid, schema: *schema, path: *path,
			attrs: *list, filter: *filter,
		}
		if m.xmin, err = parseXID(*mxmin); err != nil {
			return fail(err)
		}
		p.members = append(p.members, m)
	}
	if err := rows.Err(); err != nil {
		return fail(err)
	}
	if p.oid == 0 {
		return publication{}, postgres.Fatal(nil, "publication_missing", publicationHint,
			"publication %q does not exist", name)
	}
	return p, nil
}

func parseXID(s string) (uint32, error) {
	x, err := strconv.ParseUint(s, 10, 32)
	return uint32(x), err
}

// check reports what is wrong with the publication as the outbox's, and its identity if nothing is.
func (p publication) check(t Table, columns []string) (relay.PublicationIdentity, error) {
	none := relay.PublicationIdentity{}
	pub, table := postgres.Quote(p.name), t.Schema+"."+t.Name
	if !p.insert {
		return none, postgres.Fatal(nil, "publication_insert",
			fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert')", pub),
			"publication %q does not publish inserts", p.name)
	}
	if len(p.members) == 0 && !p.allTables {
		return none, postgres.Fatal(nil, "publication_table",
			fmt.Sprintf("ALTER PUBLICATION %s ADD TABLE %s, or set publication to another name. If outflow "+
				"published the table before, find out "+
				"who took it out: rows that were written meanwhile are not in the stream of changes, and "+
				"outflow stops with exit code 4 and the range",
				pub, t.Quoted()),
			"publication %q does not publish table %s", p.name, table)
	}
	if t.Partitioned && !p.viaRoot {
		return none, postgres.Fatal(nil, "publication_root",
			fmt.Sprintf("ALTER PUBLICATION %s SET (publish_via_partition_root = true)", pub),
			"table %s is partitioned and publication %q publishes its partitions as tables of their own",
			table, p.name)
	}
	for _, name := range columns {
		if _, ok := t.Column(name); !ok {
			return none, postgres.Fatal(nil, "column_missing",
				"Add it, or map another column (columns, subject, headers)",
				"table %s has no column %q", table, name)
		}
	}
	if err := p.checkFilters(); err != nil {
		return none, err
	}
	if p.update && !p.shard.Whole() {
		return none, postgres.Fatal(nil, "publication_update",
			fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert'). A start with a checkpoint record "+
				"then ends "+
				"with exit code 4, and `outflow repair --accept publication_changed` lets it go on", pub),
			"publication %q publishes updates, too: PostgreSQL sends one that moves a row into shard %v as "+
				"an insert, which would be published twice",
			p.name, p.shard)
	}
	for _, m := range p.members {
		if err := p.checkColumns(m, t, columns); err != nil {
			return none, err
		}
	}
	if p.allTables && len(p.members) == 0 {
		if err := p.checkColumns(member{}, t, columns); err != nil {
			return none, err
		}
	}
	return p.identity(t), nil
}

func (p publication) identity(t Table) relay.PublicationIdentity {
	id := relay.PublicationIdentity{OID: p.oid, Xmin: p.xmin, TableOID: t.OID, Rewritten: p.rewritten,
		Hidden: p.hidden(t)}
	if len(p.members) == 0 {
		return id
	}
	m := p.members[0]
	if id.Path = m.path; m.schema {
		id.SchemaOID, id.SchemaXmin = m.oid, m.xmin
	} else {
		id.RelOID, id.RelXmin = m.oid, m.xmin
	}
	if !m.schema && m.depth == 0 && !t.Partitioned {
		id.Rewritten = "" // PostgreSQL lets nobody make a table unlogged that has an entry of its own
	}
	return id
}

// hidden says why rows that are written now do not reach the stream of changes as rows of the table; nil if
// they do.
func (p publication) hidden(t Table) *outbox.Fault {
	if f := t.unlogged(); f != nil {
		return f
	}
	table := t.Schema + "." + t.Name
	if p.bad != "" {
		return postgres.Fatal(nil, "publication_partition", "Make it an ordinary logged table, or detach it",
			"%s, a partition of %s, is unlogged or foreign: what is written to it never reaches the stream "+
				"of changes", p.bad, table)
	}
	top := ""
	for _, m := range p.members {
		if m.depth > 0 {
			top = m.name
		}
	}
	if p.allTables {
		top = p.root
	}
	if !p.viaRoot || top == "" {
		return nil
	}
	return postgres.Fatal(nil, "publication_root", fmt.Sprintf("Set table to %s", top),
		"publication %q publishes the rows of %s as rows of %s", p.name, table, top)
}

func (p publication) checkColumns(m member, t Table, columns []string) error {
	list := strings.Fields(m.attrs)
	for _, name := range columns {
		c, _ := t.Column(name)
		// An ancestor's column numbers may differ from ours, so its list can't be compared; it applies to a
		// root's rows only.
		if m.depth > 0 || slices.Contains(list, strconv.Itoa(int(c.Number))) || len(list) == 0 &&
			(!c.Generated || p.generated) {
			continue
		}
		if c.Generated && len(list) == 0 {
			return postgres.Fatal(nil, "publication_columns",
				fmt.Sprintf("Map another column, fill it by a trigger, or, from PostgreSQL 18 on, ALTER "+
					"PUBLICATION %s SET (publish_generated_columns = stored)",
					postgres.Quote(p.name)),
				"publication %q does not publish column %q of %s.%s, which is generated", p.name, name,
				t.Schema, t.Name)
		}
		return postgres.Fatal(nil, "publication_columns",
			fmt.Sprintf("Add it to the column list of %s in publication %s (ALTER PUBLICATION ... SET "+
				"TABLE), or take the list away",
				t.Quoted(), postgres.Quote(p.name)),
			"publication %q does not publish column %q of %s.%s", p.name, name, t.Schema, t.Name)
	}
	return nil
}

const publicationHint = "Rows that were written while it did not exist are not in the stream of changes: " +
	"find out who dropped it, then run `outflow init`"

// emptyPublicationHint is that of a slot without a table.
const emptyPublicationHint = "Run `outflow init`: it makes an empty one. Nothing is missing for that. " +
	"Where the server can't read the WAL from before it was " +
	"made, set publication to one that existed all the time, whatever it publishes"

// PublicationMissing is what a stream or a peek finds; the catalog of the moment may say otherwise.
func PublicationMissing(name string, table bool, cause error) *outbox.Fault {
	hint := publicationHint
	if !table {
		hint = emptyPublicationHint
	}
	return postgres.Fatal(cause, "publication_missing", hint,
		"publication %q does not exist at this point of the WAL", name)
}
