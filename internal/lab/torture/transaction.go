package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// transaction writes operations in one transaction and says how many rows it rolled back. It may be called
// again for the same operations if it was not committed.
type transaction func(ctx context.Context, conn *pgx.Conn, table string, ops []operation,
	r *rand.Rand) (rolled int, err error)

// shapes are the kinds of small transactions: how often, and of how many rows.
var shapes = []struct {
	weight, least, most int
	write               transaction
}{
	{40, 1, 1, single},
	{24, 2, 5, statements},
	{8, 10, 60, manyValues},
	{4, 100, 100, statements},
	{5, 50, 300, copyIn},
	{6, 1, 5, rolledBack},
	{8, 1, 8, savepoint},
	{5, 1, 12, long},
}

var totalWeight = func() (n int) {
	for _, s := range shapes {
		n += s.weight
	}
	return n
}()

var columns = []string{"doc_id", "actor_id", "counter", "payload"}

func insert(table string, rows int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "INSERT INTO %s (%s) VALUES ", pgx.Identifier{table}.Sanitize(),
		strings.Join(columns, ", "))
	for i := range rows {
		if i > 0 {
			b.WriteString(", ")
		}
		n := i * len(columns)
		fmt.Fprintf(&b, "($%d, $%d, $%d, $%d)", n+1, n+2, n+3, n+4)
	}
	return b.String()
}

func (op *operation) values() []any { return []any{op.doc, op.actor, op.counter, string(op.payload)} }

func queue(batch *pgx.Batch, table string, op *operation) {
	sql, args := op.statement(table)
	batch.Queue(sql, args...)
}

// single is a statement that is a transaction.
func single(ctx context.Context, conn *pgx.Conn, table string, ops []operation, _ *rand.Rand) (int, error) {
	_, err := conn.Exec(ctx, insert(table, 1), ops[0].values()...)
	return 0, err
}

// statements are several statements, sent at once.
func statements(ctx context.Context, conn *pgx.Conn, table string, ops []operation, _ *rand.Rand) (int,
	error) {
	batch := &pgx.Batch{}
	batch.Queue("BEGIN")
	for i := range ops {
		queue(batch, table, &ops[i])
	}
	batch.Queue("COMMIT")
	return 0, conn.SendBatch(ctx, batch).Close()
}

// manyValues is one statement with several rows; it writes no messages.
func manyValues(ctx context.Context, conn *pgx.Conn, table string, ops []operation, _ *rand.Rand) (int,
	error) {
	var args []any
	for i := range ops {
		ops[i].message = false
		args = append(args, ops[i].values()...)
	}
	_, err := conn.Exec(ctx, insert(table, len(ops)), args...)
	return 0, err
}

// copyIn is a COPY: all its rows have the same LSN. It writes no messages.
func copyIn(ctx context.Context, conn *pgx.Conn, table string, ops []operation, _ *rand.Rand) (int, error) {
	for i := range ops {
		ops[i].message = false
	}
	_, err := conn.CopyFrom(ctx, pgx.Identifier{table}, columns,
		pgx.CopyFromSlice(len(ops), func(i int) ([]any, error) {
			return []any{ops[i].doc, ops[i].actor, ops[i].counter, ops[i].payload}, nil
		}))
	return 0, err
}

// rolledBack writes everything, rolls it back, and writes it again for good.
func rolledBack(ctx context.Context, conn *pgx.Conn, table string, ops []operation, r *rand.Rand) (int,
	error) {
	batch := &pgx.Batch{}
	batch.Queue("BEGIN")
	for i := range ops {
		queue(batch, table, &ops[i])
	}
	batch.Queue("ROLLBACK")
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		return 0, err
	}
	_, err := statements(ctx, conn, table, ops, r)
	return len(ops), err
}

// savepoint rolls back a part, before and between what stays.
func savepoint(ctx context.Context, conn *pgx.Conn, table string, ops []operation, r *rand.Rand) (int,
	error) {
	batch := &pgx.Batch{}
	batch.Queue("BEGIN")
	rolled := 0
	for i := range ops {
		if i == 0 || r.IntN(3) == 0 {
			batch.Queue("SAVEPOINT s")
			for range 1 + r.IntN(4) {
				queue(batch, table, &ops[i])
				rolled++
			}
			batch.Queue("ROLLBACK TO SAVEPOINT s")
		}
		queue(batch, table, &ops[i])
	}
	batch.Queue("COMMIT")
	return rolled, conn.SendBatch(ctx, batch).Close()
}

// long keeps its transaction open while others commit.
func long(ctx context.Context, conn *pgx.Conn, table string, ops []operation, r *rand.Rand) (int, error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, err
	}
	for i := range ops {
		sql, args := ops[i].statement(table)
		if _, err := tx.Exec(ctx, sql, args...); err != nil {
			return 0, err
		}
		// Half of them end within the usual horizon, half long after it.
		if err := pause(ctx, between(r, 0,
			[]time.Duration{3 * time.Millisecond, 150 * time.Millisecond}[i%2])); err != nil {
			return 0, err
		}
	}
	return 0, tx.Commit(ctx)
}
