package tablesnapshot

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Bound is a condition on the rows of a Query.
type Bound struct {
	By     string   // a column, SortDoc or SortKey
	Op     string   // =, >= or <=; = holds if one of the values does
	Values []string // as an event has them; of a bytea its bytes
}

// SortID is the id, as a column of a Query: text, "" where there is none.
const SortID = "\x00id"

// Cursor is a row's position in the order of a sorted RowQuery.
type Cursor struct{ Doc, Key, ID string }

const typeBytea = 17

// conditions are the bounds as SQL. Documents and keys are compared as the bytes of their text; beside it
// stands a condition that an index of the column can serve.
func (s *Snapshot) conditions(q Query) (sql []string) {
	for _, b := range q.Bounds {
		switch {
		case b.By == SortKey && b.Op == "=":
			sql = append(sql, fmt.Sprintf("%s IN (%s)", s.sortKey(q.Mapping), list(b.Values)))
		case b.By == SortKey:
			sql = append(sql, fmt.Sprintf(`%s COLLATE "C" %s %s`, s.sortKey(q.Mapping), b.Op,
				text(b.Values[0])))
		case b.By == SortDoc:
			sql = append(sql, s.equal(q.Mapping.Doc, b.Values))
		case b.Op == "=":
			sql = append(sql, s.equal(b.By, b.Values))
		default:
			sql = append(sql, fmt.Sprintf("%s %s %s", postgres.Quote(b.By), b.Op, text(b.Values[0])))
		}
	}
	if q.After != nil {
		sql = append(sql, s.after(q, *q.After))
	}
	return sql
}

// after is the condition of the rows behind p in the order. Where ids are compared as numbers or times, rows
// without one come last, and no comparison holds for them.
func (s *Snapshot) after(q Query, p Cursor) string {
	before := fmt.Sprintf(`%s COLLATE "C", %s COLLATE "C"`, s.sortDoc(q.Mapping), s.sortKey(q.Mapping))
	tie := s.tiebreaker(q, sortID(q.ID))
	switch {
	case tie != postgres.Quote(q.ID):
		return fmt.Sprintf("(%s, %s) > (%s, %s, %s)", before, tie, text(p.Doc), text(p.Key), text(p.ID))
	case p.ID == "":
		return fmt.Sprintf("(%s) > (%s, %s)", before, text(p.Doc), text(p.Key))
	}
	return fmt.Sprintf("((%[1]s, %[2]s) > (%[3]s, %[4]s, %[5]s) OR (%[1]s) = (%[3]s, %[4]s) AND %[2]s IS "+
		"NULL)",
		before, tie, text(p.Doc), text(p.Key), text(p.ID))
}

// CountAt counts the rows at one position of a sorted query. If there is more than one, a cursor can't tell
// them apart.
func (s *Snapshot) CountAt(ctx context.Context, q Query, p Cursor) (n int, err error) {
	tie := s.tiebreaker(q, sortID(q.ID))
	id := tie + " = " + text(p.ID)
	if tie == postgres.Quote(q.ID) && p.ID == "" {
		id = tie + " IS NULL"
	}
	conditions := append(s.shardCondition(), fmt.Sprintf(`%s = %s AND %s = %s AND %s`,
		s.sortDoc(q.Mapping), text(p.Doc), s.sortKey(q.Mapping), text(p.Key), id))
	err = s.conn.QueryRow(ctx, "SELECT count(*) FROM "+s.rows()+" AS "+
		postgres.Quote(s.table.Name)+" WHERE "+
		strings.Join(conditions, " AND ")).Scan(&n)
	if err != nil {
		return 0, s.rowsFault(q, err)
	}
	return n, nil
}

// Ordered reports whether a sorted query has each document's rows in a meaningful order: by a key or, without
// one, by ids that count up.
func (s *Snapshot) Ordered(q Query) bool {
	c, _ := s.table.Column(q.ID)
	return q.Mapping.Keyed() || slices.Contains(countable, c.TypeOID)
}

// equal compares a column with values: as its type does, and as text, where 1 is not 01.
func (s *Snapshot) equal(column string, values []string) string {
	if c, ok := s.table.Column(column); ok && c.TypeOID == typeBytea {
		printed := make([]string, len(values))
		for i, v := range values {
			printed[i] = `\x` + hex.EncodeToString([]byte(v))
		}
		values = printed
	}
	return fmt.Sprintf("%s IN (%s) AND %s IN (%s)", postgres.Quote(column), list(values), printed(column),
		list(values))
}

func list(values []string) string {
	quoted := make([]string, len(values))
	for i, v := range values {
		quoted[i] = text(v)
	}
	return strings.Join(quoted, ", ")
}

// text is a value in SQL, whatever standard_conforming_strings is.
func text(v string) string {
	if strings.Contains(v, `\`) {
		return " E" + postgres.Literal(strings.ReplaceAll(v, `\`, `\\`))
	}
	return postgres.Literal(v)
}

func sortID(column string) string {
	if column == "" {
		return "''"
	}
	return printed(column)
}

// boundsFault says that a value can't be one of its column, where that is what the server says.
func (q Query) boundsFault(err error) error {
	if len(q.Bounds) == 0 || !strings.HasPrefix(postgres.SQLState(err), "22") {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Usage, Code: "row_value", Message: "a value that was given can't be one of its column",
		Err:  err,
		Hint: "Write it as PostgreSQL prints it",
	}
}
