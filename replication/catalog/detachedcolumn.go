package catalog

import (
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/replication/postgres"
)

// CodePartitionColumns is the code of a detached partition that has a column otherwise than the outbox.
const CodePartitionColumns = "partition_columns"

// ColumnOf returns the outbox's column of that name, as SQL, as a table has it that was one of its
// partitions, or the outbox, before: ALTER TABLE does not reach that one any more. A column that it lacks is
// NULL if it was added to the outbox since. One that may have been renamed since is a fault, and so is one
// whose former type can't be read as that of now without losing something.
func (t Table) ColumnOf(former Table, name string) (sql string, err error) {
	c, ok := t.Column(name)
	if !ok {
		return "", fmt.Errorf("table %s has no column %q", t.Quoted(), name)
	}
	was, ok := former.Column(name)
	switch {
	case !ok && c.TypeOID == pgtype.ByteaOID: // its bytes are read, of which nothing else has the type
		return "NULL::bytea", t.lacks(former, c)
	case !ok:
		return "NULL", t.lacks(former, c)
	}
	sql = postgres.Quote(name)
	if alike(was.BaseOID, c.BaseOID) {
		return sql, nil
	}
	switch as := castTo(was.BaseOID, c.BaseOID); {
	case as == "text" && slices.Contains(otherwise, was.BaseOID):
		return fmt.Sprintf("CASE WHEN %[1]s IS NOT NULL THEN concat(%[1]s) END", sql), nil
	case as != "":
		return "CAST(" + sql + " AS " + as + ")", nil
	}
	return "", postgres.Fatal(nil, CodePartitionColumns, fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s TYPE "+
		"%s, with the USING that it had for the outbox", former.Quoted(), sql, c.TypeName),
		"column %q of table %s is of type %s, and of the outbox %s of type %s", name, former.Quoted(),
		was.TypeName, t.Quoted(), c.TypeName)
}

// lacks is the fault of a table that lacks a column which may have been renamed. It can only have been added
// since if it comes behind all that both tables have, and the former has none that the outbox lacks.
func (t Table) lacks(former Table, c Column) error {
	var same, others []string // that the outbox lacks: of the same type, and of another one
	old := false
	for _, o := range t.Columns {
		_, both := former.Column(o.Name)
		old = old || both && o.Number > c.Number
	}
	for _, was := range former.Columns {
		switch _, both := t.Column(was.Name); {
		case both:
		case was.BaseOID == c.BaseOID:
			same = append(same, postgres.Quote(was.Name))
		default:
			others = append(others, postgres.Quote(was.Name))
		}
	}
	name, has := "...", ""
	switch names := append(same, others...); {
	case len(names) > 0:
		name, has = names[0], ", and has "+strings.Join(names, ", ")+" instead"
	case !old:
		return nil
	}
	return postgres.Fatal(nil, CodePartitionColumns, fmt.Sprintf("If it was renamed: ALTER TABLE %[1]s "+
		"RENAME COLUMN %[2]s TO %[3]s. If it is a new one: ALTER TABLE %[1]s ADD COLUMN %[3]s %[4]s",
		former.Quoted(), name, postgres.Quote(c.Name), c.TypeName),
		"table %s lacks column %q of the outbox %s%s: it may have been renamed", former.Quoted(), c.Name,
		t.Quoted(), has)
}

// Types whose values are each other's: whole numbers, text and JSON.
var (
	wholes = []uint32{pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID}
	texts  = []uint32{pgtype.TextOID, pgtype.VarcharOID}
	jsons  = []uint32{pgtype.JSONOID, pgtype.JSONBOID}
)

// otherwise are types of which a cast to text makes another one than messages have: true and not t, and
// 1.2.3.4/32.
var otherwise = []uint32{pgtype.BoolOID, pgtype.InetOID}

// alike reports whether PostgreSQL compares and unites values of two types by itself, and prints the same.
func alike(was, now uint32) bool {
	whole := slices.Contains(wholes, was)
	return was == now || whole && (now == pgtype.NumericOID || slices.Contains(wholes, now)) ||
		slices.Contains(texts, was) && slices.Contains(texts, now)
}

// castTo is the type to which a cast makes values of now of those that were of another, and loses nothing;
// "": there is none. It has no length, to which a cast would cut.
func castTo(was, now uint32) string {
	switch {
	case slices.Contains(texts, now) && was != pgtype.ByteaOID && was != pgtype.BPCharOID:
		return "text"
	case slices.Contains(jsons, was) && now == pgtype.JSONBOID:
		return "jsonb"
	case slices.Contains(jsons, was) && now == pgtype.JSONOID:
		return "json"
	}
	return ""
}
