// Command effects is a consumer for the tests: three tables whose content depends on the order and the number
// of the events.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
)

// tables: a hash over each document's events in their order, a log of them with a number of its own, and how
// often the actor changed.
const tables = `
CREATE TABLE state (document text PRIMARY KEY, events int NOT NULL, hash text NOT NULL);
CREATE TABLE log (document text, n int, key text NOT NULL, operations int NOT NULL, PRIMARY KEY (document,
n));
CREATE TABLE turns (document text PRIMARY KEY, actor text NOT NULL, turns int NOT NULL);`

func main() {
	var database, server string
	var work int
	cfg := consumer.Config{Stream: "OUTBOX"}
	flag.StringVar(&database, "database", "", "")
	flag.StringVar(&server, "nats", "", "")
	flag.StringVar(&cfg.Name, "name", "", "of the consumer, and of the schema of its tables")
	flag.StringVar(&cfg.DatabaseSchema, "marks", "", "the schema of the marks, if it is another one")
	flag.IntVar(&cfg.Partitions, "partitions", 8, "")
	flag.DurationVar(&cfg.Lease, "lease", time.Second, "")
	flag.DurationVar(&cfg.Timeout, "timeout", 2*time.Second, "")
	flag.IntVar(&work, "work", 0, "how many kB of hashing an event costs besides its effects")
	flag.Parse()
	if work > 0 {
		cfg.Use = []consumer.Middleware{busy(work)}
	}
	if err := run(database, server, cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(database, server string, cfg consumer.Config) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	pc, err := pgxpool.ParseConfig(database)
	if err != nil {
		return err
	}
	pc.MaxConns = int32(cfg.Partitions) + 2
	pc.ConnConfig.RuntimeParams["search_path"] = cfg.Name
	pc.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := create(ctx, pool, cfg.Name); err != nil {
		if ctx.Err() != nil {
			return nil // stopped while it was still starting
		}
		return err
	}
	nc, err := nats.Connect(server, nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	c, err := consumer.New(js, consumer.Postgres(pool), cfg)
	if err != nil {
		return err
	}
	return c.Run(ctx, handle)
}

func create(ctx context.Context, pool *pgxpool.Pool, schema string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(1)`); err != nil {
			return err
		}
		var there bool
		err := tx.QueryRow(ctx, `SELECT to_regnamespace($1) IS NOT NULL`, schema).Scan(&there)
		if err == nil && !there {
			_, err = tx.Exec(ctx, `CREATE SCHEMA `+pgx.Identifier{schema}.Sanitize()+`;`+tables)
		}
		return err
	})
}

// busy stands for a handler that needs the processor itself.
func busy(kilobytes int) consumer.Middleware {
	return func(next consumer.Handler) consumer.Handler {
		return func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
			h, block := sha256.New(), make([]byte, 1000)
			for range kilobytes {
				h.Write(block)
			}
			return next(ctx, tx, e)
		}
	}
}

func handle(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
	var operations []json.RawMessage
	if err := json.Unmarshal(e.Data, &operations); err != nil {
		return consumer.Poison(err)
	}
	actor, _, _ := strings.Cut(e.Key, ":")
	batch := &pgx.Batch{}
	batch.Queue(
		`INSERT INTO state VALUES ($1, 1, md5($2)) ON CONFLICT (document) DO UPDATE
			SET events = state.events + 1, hash = md5(state.hash || $2)`,
		e.Document, e.Key+string(e.Data))
	batch.Queue(`INSERT INTO log SELECT $1, events, $2, $3 FROM state WHERE document = $1`, e.Document, e.Key,
		len(operations))
	batch.Queue(
		`INSERT INTO turns VALUES ($1, $2, 1) ON CONFLICT (document) DO UPDATE
			SET turns = turns.turns + (turns.actor <> $2)::int, actor = $2`,
		e.Document, actor)
	return tx.SendBatch(ctx, batch).Close()
}
