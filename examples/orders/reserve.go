package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/producer"
)

const prefix = "shop." // of the subjects in outflow.yaml; the topic follows

// reserve reserves stock for the orders of the stream until ctx ends.
func reserve(ctx context.Context, natsURL string, pool *pgxpool.Pool, outbox *producer.Outbox,
	lease time.Duration,
	log *slog.Logger,
) error {
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
	c, err := consumer.New(js, consumer.Postgres(pool), consumer.Config{
		Name: "reserve", Stream: "SHOP", Filters: []string{prefix + "orders.>"}, Lease: lease, Log: log,
		Document: func(subject string, _ nats.Header) string { return strings.TrimPrefix(subject, prefix) },
	})
	if err != nil {
		return err
	}
	return c.Run(ctx, reserver(outbox))
}

// reserver returns the handler. What it writes through tx is there exactly once for each event, because the
// consumer's mark moves in the same transaction; so is the event that it enqueues.
func reserver(outbox *producer.Outbox) consumer.Handler {
	return func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
		var o order
		if err := json.Unmarshal(e.Data, &o); err != nil {
			return consumer.Poison(err) // it would not be better the next time
		}
		if err := o.check(); err != nil {
			return consumer.Poison(err)
		}
		tag, err := tx.Exec(ctx, "UPDATE stock SET available = available - $2 WHERE item = $1 AND "+
			"available >= $2", o.Item, o.Quantity)
		if err != nil {
			return err
		}
		reserved := tag.RowsAffected() == 1
		_, err = tx.Exec(ctx, "INSERT INTO reservation (order_id, item, quantity, reserved) VALUES ($1, "+
			"$2, $3, $4)",
			o.ID, o.Item, o.Quantity, reserved)
		if err != nil {
			return err
		}
		topic := "refused."
		if reserved {
			topic = "reserved."
		}
		_, err = outbox.Enqueue(ctx, tx, producer.Event{Document: topic + o.Item, Payload: e.Data})
		return err
	}
}
