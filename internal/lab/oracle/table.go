package oracle

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// TableCheck is what the comparison of the WAL with the table found.
type TableCheck struct {
	Rows      int    // in the table
	Unseen    int    // rows that the WAL does not hold
	Gone      int    // events whose row is not there any more
	Different int    // rows with another value of a column that has a role
	First     string // the first difference in words; rows that are gone are none
}

// OK reports whether WAL and table agree. Rows that were deleted are to be expected with some users of the
// table: gone says whether they may be missing.
func (c *TableCheck) OK(gone bool) bool {
	return c.Unseen == 0 && c.Different == 0 && (gone || c.Gone == 0)
}

// CheckTable compares each committed event with the row of its id: document, actor, key and payload. The
// table, a name as SQL has it, must have an id column.
func (t *Truth) CheckTable(ctx context.Context, conn *pgx.Conn, table string, c Columns) (check TableCheck,
	err error) {
	byID := make(map[string]*Event, t.Events)
	for i := range t.commits {
		for _, e := range t.commits[i].events {
			if e.Message {
				continue // it has no row
			}
			if byID[e.ID] != nil {
				return check, fmt.Errorf("table %s: %v and %v have one id", table, byID[e.ID], e)
			}
			byID[e.ID] = e
		}
	}
	tx, err := conn.Begin(ctx)
	if err != nil {
		return check, err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // nothing was written
	if err := pin(ctx, tx); err != nil {
		return check, err
	}
	roles := []string{c.ID, c.Doc, c.Payload}
	for _, name := range []string{c.Actor, c.Key} {
		if name != "" {
			roles = append(roles, name)
		}
	}
	quoted := make([]string, len(roles))
	for i, name := range roles {
		quoted[i] = pgx.Identifier{name}.Sanitize()
	}
	rows, err := tx.Query(ctx, "SELECT "+strings.Join(quoted, ", ")+" FROM "+table,
		pgx.QueryResultFormats{pgx.TextFormatCode})
	if err != nil {
		return check, fmt.Errorf("table %s: %w", table, err)
	}
	defer rows.Close()
	for rows.Next() {
		check.Rows++
		values := make([]string, len(roles))
		for i, raw := range rows.RawValues() {
			values[i] = string(raw)
			const bytea = 17
			if rows.FieldDescriptions()[i].DataTypeOID == bytea {
				b, err := hex.DecodeString(strings.TrimPrefix(values[i], `\x`))
				if err != nil {
					return check, fmt.Errorf("table %s: column %s: %w", table, roles[i], err)
				}
				values[i] = string(b)
			}
		}
		e := byID[values[0]]
		if e == nil {
			check.Unseen++
			check.note("row %s is not in the WAL, or twice in the table", values[0])
			continue
		}
		delete(byID, values[0])
		same := values[1] == e.Doc && e.hasPayload([]byte(values[2]))
		for i, name := range roles[3:] {
			same = same && (name == c.Actor && values[3+i] == e.Actor || name == c.Key &&
				values[3+i] == e.Key)
		}
		if !same {
			check.Different++
			check.note("row %s is %.200q, in the WAL %v with %d bytes %q", values[0], values[1:], e, e.Size,
				e.Head)
		}
	}
	check.Gone = len(byID)
	return check, rows.Err()
}

func (c *TableCheck) note(format string, args ...any) {
	if c.First == "" {
		c.First = fmt.Sprintf(format, args...)
	}
}

// pin sets what decides how values are printed, until the transaction ends.
func pin(ctx context.Context, tx pgx.Tx) error {
	for _, p := range pins {
		if _, err := tx.Exec(ctx, "SELECT set_config($1, $2, true)", p[0], p[1]); err != nil {
			return fmt.Errorf("set %s: %w", p[0], err)
		}
	}
	return nil
}
