package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// undo takes the stock back to where it was before a deploy counted its first event, and prints that event's
// sequence. Everything from there on has to come again: `outflow consumer rewind` sees to it. The consumer
// must not run before that.
func undo(ctx context.Context, pool *pgxpool.Pool, deploy string) error {
	var first int64
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := stopped(ctx, tx); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, "SELECT coalesce(min(sequence), 0) FROM ledger WHERE deploy = $1",
			deploy).Scan(&first); err != nil {
			return err
		}
		if first == 0 {
			return fmt.Errorf("deploy %q has counted nothing", deploy)
		}
		if _, err := tx.Exec(ctx, "DELETE FROM ledger WHERE sequence >= $1", first); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "DELETE FROM stock"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `INSERT INTO stock (warehouse, sku, quantity)
			SELECT DISTINCT ON (warehouse, sku) warehouse, sku, quantity FROM ledger
			ORDER BY warehouse, sku, sequence DESC`)
		return err
	})
	if err != nil {
		return err
	}
	fmt.Println(first)
	return nil
}

// stopped refuses while an instance of the consumer is active, and keeps one from becoming it while tx is
// open.
func stopped(ctx context.Context, tx pgx.Tx) error {
	var active bool
	const sql = "SELECT EXISTS (SELECT FROM outflow_member m WHERE m.name = c.name AND expires > " +
		"clock_timestamp()) FROM outflow_consumer c WHERE name = $1 FOR UPDATE"
	err := tx.QueryRow(ctx, sql, name).Scan(&active)
	if err == nil && active {
		return fmt.Errorf("consumer %s runs: stop all its instances, and start them again behind `outflow "+
			"consumer rewind %[1]s`", name)
	}
	return err
}
