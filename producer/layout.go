package producer

import (
	"fmt"
	"strings"
)

// layout is what the catalog says of the table: which columns there are and of which types. It is read once,
// by the first call in its own transaction, rather than configured: a type in a configuration would be a
// second truth, and the one that is wrong decides whether a payload is held to be JSON. A statement that
// fails because the table is another now makes the next call read it again.
type layout struct {
	columns                               map[string]*column
	id, doc, actor, counter, key, payload *column // nil: the table has none
}

// column is a column of the table.
type column struct {
	name      string
	typ       string // of its values, quoted, with schema; of a domain the type under it
	kind      kind
	length    int  // characters that varchar(n) or char(n) takes; 0: no such limit
	generated bool // GENERATED ALWAYS AS (...) STORED
	identity  bool // GENERATED ALWAYS AS IDENTITY
	byItself  bool // it has a value where none is given: a default or an identity
}

// kind is a type as far as values are checked here.
type kind uint8

const (
	other kind = iota // PostgreSQL alone knows
	text
	document // json
	documentB
	bytea
	uuid
	int2
	int4
	int8
)

var kinds = map[uint32]kind{
	17: bytea, 20: int8, 21: int2, 23: int4, 25: text, 114: document, 1042: text, 1043: text, 2950: uuid,
	3802: documentB,
}

func (k kind) json() bool { return k == document || k == documentB }

// layoutSQL reads the columns, a domain's as the type under it, and whether the publication has the table.
// The type's name is given without its modifier: a cast to varchar(3) would cut in silence what an assignment
// to the column refuses.
const layoutSQL = `WITH RECURSIVE base AS (
    SELECT a.attnum, a.attname, a.atttypid AS typ, a.atttypmod AS mod, a.attgenerated <> ''
    AS generated, a.attidentity = 'a' AS identity,
      a.atthasdef AND a.attgenerated = '' OR a.attidentity <> '' AS by_itself, a.attrelid
    FROM pg_catalog.pg_attribute a WHERE a.attrelid = pg_catalog.to_regclass($1::pg_catalog.text)
    AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
    SELECT b.attnum, b.attname, t.typbasetype, t.typtypmod, b.generated, b.identity, b.by_itself
    OR t.typdefault IS NOT NULL, b.attrelid
    FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typ WHERE t.typtype = 'd')
SELECT b.attname::pg_catalog.text, pg_catalog.format('%I.%I', n.nspname, t.typname), t.oid::pg_catalog.int8,
b.mod,
  b.generated, b.identity, b.by_itself,
  $2::pg_catalog.text = '' OR EXISTS (SELECT FROM pg_catalog.pg_publication_tables p
  JOIN pg_catalog.pg_publication u ON u.pubname = p.pubname
    WHERE p.pubname = $2::pg_catalog.text AND u.pubinsert
      AND pg_catalog.format('%I.%I', p.schemaname, p.tablename)::pg_catalog.regclass = b.attrelid)
FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typ JOIN pg_catalog.pg_namespace n
ON n.oid = t.typnamespace
WHERE t.typtype <> 'd' ORDER BY b.attnum`

// layoutRow is a row of layoutSQL.
type layoutRow struct {
	name, typ                                string
	oid                                      int64
	mod                                      int32
	generated, identity, byItself, publishes bool
}

func (r *layoutRow) fields() []any {
	return []any{&r.name, &r.typ, &r.oid, &r.mod, &r.generated, &r.identity, &r.byItself, &r.publishes}
}

// newLayout applies the configuration to the columns.
func (o *Outbox) newLayout(rows []layoutRow) (*layout, error) {
	if len(rows) == 0 {
		return nil, fmt.Errorf("producer: table %s is not there, or not on the search path. "+
			"Run `outflow init`, or set Table to the outbox's name", o.cfg.Table)
	}
	if !rows[0].publishes {
		return nil, fmt.Errorf("producer: publication %q does not publish inserts into %s: an event there "+
			"would be skipped in silence. "+
			"Run `outflow init`, or correct Table or Publication", o.cfg.Publication, o.cfg.Table)
	}
	l := &layout{columns: map[string]*column{}}
	var names []string
	for _, r := range rows {
		c := &column{name: r.name, typ: r.typ, kind: kinds[uint32(r.oid)], generated: r.generated,
			identity: r.identity, byItself: r.byItself}
		if c.kind == text && r.mod >= 4 {
			c.length = int(r.mod) - 4
		}
		l.columns[r.name] = c
		names = append(names, r.name)
	}
	c := o.cfg.Columns
	for _, role := range []struct {
		to                 **column
		field, given, name string
		needed             bool
	}{
		{&l.id, "ID", c.ID, "id", false}, {&l.doc, "Document", c.Document, "doc_id", true},
		{&l.actor, "Actor", c.Actor, "actor_id", false},
		{&l.counter, "Counter", c.Counter, "counter", false}, {&l.key, "Key", c.Key, "seq_key", false},
		{&l.payload, "Payload", c.Payload, "payload", true},
	} {
		name := role.given
		if name == "" {
			name = role.name
		}
		if *role.to = l.columns[name]; *role.to == nil &&
			(role.needed || role.given != "" && role.given != "-") {
			return nil, fmt.Errorf("producer: table %s has no column %q (Columns.%s); it has %s. Set "+
				"Columns.%s to one of them",
				o.cfg.Table, name, role.field, strings.Join(names, ", "), role.field)
		}
	}
	if o.cfg.NextCounter && l.counter == nil {
		return nil, fmt.Errorf("producer: NextCounter: table %s has no column for the counter; it has %s. "+
			"Set Columns.Counter, or leave NextCounter off", o.cfg.Table, strings.Join(names, ", "))
	}
	return l, nil
}

// computesKey reports whether a plain key column can be filled from actor and counter.
func (l *layout) computesKey() bool { return l.actor != nil && l.counter != nil }

// role reports whether a column has a field of Event of its own, and which.
func (l *layout) role(c *column) (field string, ok bool) {
	switch c {
	case l.doc:
		return "Document", true
	case l.actor:
		return "Actor", true
	case l.counter:
		return "Counter", true
	case l.key:
		return "Key", true
	case l.payload:
		return "Payload", true
	case l.id:
		return "ID", true
	}
	return "", false
}

// text is what an event has in a column, as far as that is one of the plain roles.
func (l *layout) text(name string, e *Event) string {
	switch c := l.columns[name]; {
	case c == nil:
		return ""
	case c == l.doc:
		return e.Document
	case c == l.actor:
		return e.Actor
	case c == l.counter:
		return fmt.Sprint(e.Counter)
	case c == l.key && e.Key == "" && l.computesKey():
		return fmt.Sprintf("%s:%020d", e.Actor, e.Counter)
	case c == l.key:
		return e.Key
	case c == l.id:
		return e.ID
	}
	s, _, err := plain(e.Columns[name])
	if err != nil {
		return ""
	}
	return s.text
}
