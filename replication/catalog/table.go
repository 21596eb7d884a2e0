package catalog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Table is what the catalog says of the outbox.
type Table struct {
	OID          uint32
	Schema, Name string
	Partitioned  bool     // it is the root, or an inner node, of a partition tree
	Unlogged     bool     // or temporary: what is written to it never reaches the WAL
	Columns      []Column // in the table's order
}

// Column is a column of the outbox.
type Column struct {
	Name       string
	Number     int16  // attnum
	TypeOID    uint32 // of a domain: the domain's
	TypeName   string // as in CREATE TABLE
	NotNull    bool
	Generated  bool   // GENERATED ALWAYS AS (...); its values are not in the WAL's stream by default
	Expression string // of a generated column, as PostgreSQL prints it
	Default    bool   // it has a value where none is given: a default, an identity, or it is generated
	Identity   bool   // GENERATED ALWAYS AS IDENTITY
	// of the type, a domain's is that of what it is made of: N for numbers, T for intervals, ...
	Category string
	BaseOID  uint32 // of the type; of a domain that of the type that it is made of
	Values   string // its name, without length, precision and scale: a cast to these would cut a value
}

// PrintsUnordered reports whether the values of the column's type, in the form in which PostgreSQL prints
// them, sort otherwise than the values do. Of times, uuids and bytes they do not.
func (c Column) PrintsUnordered() bool {
	return c.Category == "N" || c.Category == "T" || slices.Contains(numbersOfItsOwn, c.TypeOID)
}

// numbersOfItsOwn are numbers that PostgreSQL does not count among the numeric types: xid, xid8 and pg_lsn.
var numbersOfItsOwn = []uint32{28, 5069, 3220}

// Column returns the column of that name.
func (t Table) Column(name string) (Column, bool) {
	for _, c := range t.Columns {
		if c.Name == name {
			return c, true
		}
	}
	return Column{}, false
}

// SplitTable reads schema.name, or name for a table of the schema public, whatever a search_path says; a part
// that holds dots stands in double quotes. Names are taken as they are: nothing is folded to lower case.
func SplitTable(table string) (schema, name string, err error) {
	var parts []string
	for rest := table; ; {
		var part string
		if q, ok := strings.CutPrefix(rest, `"`); ok {
			for {
				head, tail, found := strings.Cut(q, `"`)
				if !found {
					return "", "", badTable(table)
				}
				part += head
				if q, ok = strings.CutPrefix(tail, `"`); !ok {
					rest = tail
					break
				}
				part += `"`
			}
			if rest != "" && rest[0] != '.' {
				return "", "", badTable(table)
			}
		} else if i := strings.IndexByte(rest, '.'); i >= 0 {
			part, rest = rest[:i], rest[i:]
		} else {
			part, rest = rest, ""
		}
		if part == "" || len(parts) == 2 {
			return "", "", badTable(table)
		}
		parts = append(parts, part)
		if rest == "" {
			break
		}
		rest = rest[1:]
	}
	if len(parts) == 1 {
		return "public", parts[0], nil
	}
	return parts[0], parts[1], nil
}

func badTable(table string) error {
	return &outbox.Fault{
		Class: outbox.Usage, Code: "table", Message: fmt.Sprintf("table %q is not a table's name", table),
		Hint: `Write schema.name, or name; a part that holds dots in double quotes`,
	}
}

// ReadTable reads the description of a table. One that does not exist is a fault with code table_missing.
func ReadTable(ctx context.Context, q Querier, table string) (Table, error) {
	schema, name, err := SplitTable(table)
	if err != nil {
		return Table{}, err
	}
	t := Table{Schema: schema, Name: name}
	var kind, persistence string
	err = q.QueryRow(ctx, `SELECT c.oid, c.relkind::text, c.relpersistence::text
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2`, schema, name).Scan(&t.OID, &kind, &persistence)
	if errors.Is(err, pgx.ErrNoRows) {
		var database string // postgres.url and retain.postgres_url may name two
		if err := q.QueryRow(ctx, `SELECT current_database()`).Scan(&database); err != nil {
			return Table{}, fmt.Errorf("read the database's name: %w", err)
		}
		return Table{}, postgres.Fatal(nil, "table_missing",
			"Run `outflow init`, or set table to the outbox's name, or the URL to its database",
			"database %s has no table %s.%s", database, schema, name)
	}
	if err != nil {
		return Table{}, fmt.Errorf("read table %s.%s: %w", schema, name, err)
	}
	if kind != "r" && kind != "p" {
		return Table{}, postgres.Fatal(nil, "table_kind", "Set table to the table that the services write to",
			"%s.%s is not a table or a partitioned table", schema, name)
	}
	t.Partitioned, t.Unlogged = kind == "p", persistence != "p"
	rows, err := q.Query(ctx, `SELECT a.attname, a.attnum, a.atttypid, format_type(a.atttypid, a.atttypmod),
		a.attnotnull,
			a.attgenerated <> '', coalesce(CASE WHEN a.attgenerated <> '' THEN pg_get_expr(d.adbin, d.adrelid)
			END, ''),
			a.atthasdef OR a.attidentity <> '', a.attidentity = 'a',
			y.typcategory::text, b.oid, format_type(b.oid, -1)
		FROM pg_attribute a JOIN pg_catalog.pg_type y ON y.oid = a.atttypid
			CROSS JOIN LATERAL (SELECT CASE WHEN y.typtype = 'd' THEN y.typbasetype ELSE y.oid END) b (oid)
			LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
		WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum`, t.OID)
	if err != nil {
		return Table{}, t.unread(err)
	}
	t.Columns, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Column])
	if err != nil {
		return Table{}, t.unread(err)
	}
	return t, nil
}

// unread is the error of a table whose columns can't be read. Printing an expression takes a lock on the
// table: an ALTER TABLE or LOCK TABLE that does not end is the one thing for which this waits.
func (t Table) unread(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || postgres.SQLState(err) == postgres.StateQueryCanceled {
		err = fmt.Errorf("%w. Somebody seems to hold a lock on the table: SELECT pid, mode FROM pg_locks "+
			"WHERE relation = %d AND granted", err, t.OID)
	}
	return fmt.Errorf("read the columns of %s.%s: %w", t.Schema, t.Name, err)
}

// unlogged is the fault of a table whose rows never reach the WAL; nil if they do.
func (t Table) unlogged() *outbox.Fault {
	if !t.Unlogged {
		return nil
	}
	return postgres.Fatal(nil, "table_unlogged", fmt.Sprintf("ALTER TABLE %s SET LOGGED", t.Quoted()),
		"table %s.%s is unlogged or temporary: what is written to it never reaches the WAL", t.Schema, t.Name)
}

// Quoted is the table's name as it stands in SQL.
func (t Table) Quoted() string { return pgx.Identifier{t.Schema, t.Name}.Sanitize() }

// Only is the table, as it stands in FROM, without the tables that inherit from it: their rows are in the
// stream as their own.
func (t Table) Only() string {
	if t.Partitioned {
		return t.Quoted()
	}
	return "ONLY " + t.Quoted()
}
