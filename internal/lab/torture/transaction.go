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

func (op *operation) columns() []string {
	names := []string{"doc_id", "actor_id", "counter", "payload", "span"}
	if op.span == 0 {
		names = names[:4]
	}
	return names
}

func (op *operation) values() []any {
	return []any{op.doc, op.actor, op.counter, string(op.payload), op.span}[:len(op.columns())]
}

// insert is a statement that inserts so many rows with the columns of op.
func insert(table string, op *operation, rows int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "INSERT INTO %s (%s) VALUES ", pgx.Identifier{table}.Sanitize(),
		strings.Join(op.columns(), ", "))
	n, separator := 0, "("
	for range rows {
		for range op.columns() {
			n++
			fmt.Fprintf(&b, "%s$%d", separator, n)
			separator = ", "
		}
		separator = "), ("
	}
	return b.String() + ")"
}

func queue(batch *pgx.Batch, table string, op *operation) {
	sql, args := op.statement(table)
	batch.Queue(sql, args...)
}

// single is a statement that is a transaction.
func single(ctx context.Context, conn *pgx.Conn, table string, ops []operation, _ *rand.Rand) (int, error) {
	_, err := conn.Exec(ctx, insert(table, &ops[0], 1), ops[0].values()...)
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
	_, err := conn.Exec(ctx, insert(table, &ops[0], len(ops)), args...)
	return 0, err
}

// copyIn is a COPY: all its rows have the same LSN. It writes no messages.
func copyIn(ctx context.Context, conn *pgx.Conn, table string, ops []operation, _ *rand.Rand) (int, error) {
	for i := range ops {
		ops[i].message = false
	}
	_, err := conn.CopyFrom(ctx, pgx.Identifier{table}, ops[0].columns(),
		pgx.CopyFromSlice(len(ops), func(i int) ([]any, error) { return ops[i].values(), nil }))
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
