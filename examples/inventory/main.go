// Command inventory is a warehouse: movements of stock are events, and a consumer keeps count.
//
//	inventory move -events 1000 -format 3    moves stock at random, and writes an event for each movement
//	inventory stock -deploy 1                counts, exactly once
//	inventory shipped -stream STOCK_PAST     adds up what was shipped, in a stream filled by a replay
//	inventory undo -deploy 2                 takes back what a deploy has counted, prints where to rewind to
//
// DATABASE_URL and NATS_URL say where PostgreSQL and NATS are. Beside it runs `outflow run --config
// outflow.yaml`.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/consumer"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "inventory:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("inventory move, stock, shipped, or undo")
	}
	flags := flag.NewFlagSet(args[0], flag.ExitOnError)
	events := flags.Int("events", 1000, "move: how many movements")
	format := flags.Int("format", 3,
		"move: version of the payload, 1 to 3; 0: version 1, before the column schema_version")
	deploy := flags.String("deploy", "1",
		"stock: what the ledger says of who counted; undo: whose count it is")
	bug := flags.Bool("bug", false, "stock: count what is shipped as if it were received, as the second "+
		"deploy did")
	lease := flags.Duration("lease", 10*time.Second,
		"stock: after which another instance takes over from one that died")
	stream := flags.String("stream", "STOCK_PAST", "shipped: the stream that was filled")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	switch args[0] {
	case "stock":
		return consumer.Main(ctx, counting(*lease), counter(*deploy, *bug))
	case "shipped":
		return consumer.Main(ctx, shipping(*stream, *lease), ship())
	}
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	switch args[0] {
	case "move":
		return move(ctx, pool, *events, *format)
	case "undo":
		return undo(ctx, pool, *deploy)
	}
	return fmt.Errorf("%s is none of move, stock, shipped, undo", args[0])
}
