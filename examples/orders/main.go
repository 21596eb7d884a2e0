// Command orders is a shop: orders come in over HTTP, and stock is reserved for each of them, exactly once.
//
//	orders api -listen 127.0.0.1:8080    PUT /orders/{id} takes an order
//	orders reserve -lease 10s            reserves stock for what the stream brings; start several
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

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/producer"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "orders:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("orders api, or orders reserve")
	}
	flags := flag.NewFlagSet(args[0], flag.ExitOnError)
	listen := flags.String("listen", "127.0.0.1:8080", "where the api answers")
	lease := flags.Duration("lease", 10*time.Second,
		"after which another instance takes over from one that died")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	outbox, err := newOutbox()
	if err != nil {
		return err
	}
	switch args[0] {
	case "api":
		return serve(ctx, *listen, outbox)
	case "reserve":
		return consumer.Main(ctx, reserving(*lease), reserver(outbox))
	}
	return fmt.Errorf("%s is none of api, reserve", args[0])
}

// newOutbox describes the table as outflow.yaml does.
func newOutbox() (*producer.Outbox, error) {
	return producer.New(producer.Config{
		Table: "public.outbox",
		Columns: producer.Columns{ID: "id", Document: "topic", Payload: "message", Actor: "-", Counter: "-",
			Key: "-"},
	})
}
