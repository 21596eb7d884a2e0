package consumertest

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Effects are what a handler leaves behind, wherever that is.
type Effects struct {
	Reset    func(ctx context.Context) error           // removes them, before each run
	Snapshot func(ctx context.Context) (string, error) // prints them, after each run, deterministically
}

// Tables are effects in tables: these are emptied before each run, and all their rows are compared, in any
// order. To leave out a column that differs from run to run, such as a time or a number from a sequence, use
// [Query].
func Tables(pool *pgxpool.Pool, names ...string) Effects {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = pgx.Identifier(strings.Split(name, ".")).Sanitize()
	}
	return Effects{
		Reset: func(ctx context.Context) error {
			_, err := pool.Exec(ctx, "TRUNCATE "+strings.Join(quoted, ", ")+" RESTART IDENTITY CASCADE")
			return err
		},
		Snapshot: func(ctx context.Context) (string, error) {
			var b strings.Builder
			for i, table := range quoted {
				fmt.Fprintf(&b, "%s:\n", names[i])
				if err := dump(ctx, pool, &b, `SELECT to_jsonb(t)::text FROM `+table+
					` t ORDER BY to_jsonb(t)::text COLLATE "C"`); err != nil {
					return "", err
				}
			}
			return b.String(), nil
		},
	}
}

// Query are effects that queries return, in an order that each query specifies. reset is SQL that removes
// them.
func Query(pool *pgxpool.Pool, reset string, queries ...string) Effects {
	return Effects{
		Reset: func(ctx context.Context) error {
			_, err := pool.Exec(ctx, reset)
			return err
		},
		Snapshot: func(ctx context.Context) (string, error) {
			var b strings.Builder
			for _, query := range queries {
				fmt.Fprintf(&b, "%s:\n", query)
				if err := dump(ctx, pool, &b, query); err != nil {
					return "", err
				}
			}
			return b.String(), nil
		},
	}
}

// dump prints the rows of a query.
func dump(ctx context.Context, pool *pgxpool.Pool, b *strings.Builder, query string) error {
	rows, err := pool.Query(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		values, err := rows.Values()
		if err != nil {
			return err
		}
		for i, v := range values {
			if i > 0 {
				b.WriteByte('\t')
			}
			fmt.Fprintf(b, "%v", v)
		}
		b.WriteByte('\n')
	}
	return rows.Err()
}
