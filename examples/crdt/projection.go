package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// projection is a view of the documents that is built from their events alone. What it holds depends on the
// order in which they come.
type projection struct {
	name string
	// SQL that makes them if they are absent
	tables string
	apply  func(ctx context.Context, tx pgx.Tx, op *Op, data []byte) error // one event's effect
	// a query: everything that it holds, in a fixed order
	dump string
	// a query: how many events it has had
	seen string
}

var projections = []*projection{&search, &audit, &billing}

// A projection's tables are in a schema of their own, so that the same projection can be there several times.
const (
	live    = "live"    // built from Outflow's stream as it comes
	rebuilt = "rebuilt" // built from Outflow's stream from the beginning
	relayed = "relayed" // built from the polling relay's stream
)

// open connects to a schema, which is made if it is absent, with the tables of all projections.
func open(ctx context.Context, url, schema string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("DATABASE_URL cannot be read: %w", err)
	}
	cfg.ConnConfig.RuntimeParams["search_path"] = schema
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	sql := "CREATE SCHEMA IF NOT EXISTS " + pgx.Identifier{schema}.Sanitize() + ";"
	for _, p := range projections {
		sql += p.tables
	}
	if err := makeAll(ctx, pool, sql); err != nil {
		pool.Close()
		return nil, fmt.Errorf("make the projections' tables in schema %s: %w", schema, err)
	}
	return pool, nil
}

// makeAll runs CREATE ... IF NOT EXISTS statements. PostgreSQL may refuse two sessions that do that at the
// same moment, so they take turns.
func makeAll(ctx context.Context, pool *pgxpool.Pool, sql string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtext('examples/crdt'));"+sql)
		return err
	})
}

// decode reads an event's payload.
func decode(data []byte) (*Op, error) {
	op := &Op{}
	if err := json.Unmarshal(data, op); err != nil {
		return nil, fmt.Errorf("the payload is no operation: %w", err)
	}
	if op.Doc == "" || op.Version < 1 {
		return nil, fmt.Errorf("the payload is no stored operation: doc %q, version %d", op.Doc, op.Version)
	}
	return op, nil
}
