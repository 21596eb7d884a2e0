package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
)

const name = "stock" // of the consumer

// counter keeps count of the stock.
type counter struct {
	deploy string
	bug    bool
}

// count reads the stream until ctx ends.
func count(ctx context.Context, natsURL string, pool *pgxpool.Pool, c counter, lease time.Duration,
	log *slog.Logger) error {
	nc, err := nats.Connect(natsURL, nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true),
		nats.Timeout(30*time.Second))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	reader, err := consumer.New(js, consumer.Postgres(pool), consumer.Config{
		Name: name, Stream: "STOCK", Subject: "stock.{aggregate_type}.{doc_id}", Schema: payloads,
		Lease: lease, Log: log,
	})
	if err != nil {
		return err
	}
	return reader.Run(ctx, c.handle)
}

// handle has an event's effect. The order matters: a count replaces what was received and shipped before it.
func (c counter) handle(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
	var m movement
	if err := json.Unmarshal(e.Data, &m); err != nil {
		return consumer.Poison(err)
	}
	var sum string
	switch e.Type {
	case "received":
		sum = "stock.quantity + $3"
	case "shipped":
		if sum = "stock.quantity - $3"; c.bug {
			sum = "stock.quantity + $3"
		}
	case "counted":
		sum = "$3"
	default:
		return consumer.Poison(fmt.Errorf("event_type %q: want received, shipped or counted", e.Type))
	}
	_, err := tx.Exec(ctx, "INSERT INTO stock (warehouse, sku, quantity) VALUES ($1, $2, 0) ON CONFLICT DO "+
		"NOTHING", m.Warehouse, m.SKU)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `WITH now AS (UPDATE stock SET quantity = `+sum+` WHERE warehouse = $1 AND sku = $2 RETURNING quantity)
		INSERT INTO ledger (sequence, warehouse, sku, quantity, deploy) SELECT $4, $1, $2, quantity, $5 FROM now`,
		m.Warehouse, m.SKU, m.Quantity, int64(e.Sequence),
		c.deploy) //nolint:gosec // a stream has no 2^63 messages
	return err
}
