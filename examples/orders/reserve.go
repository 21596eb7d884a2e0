package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/producer"
)

// reserving reads the orders: a topic such as orders.tea is the document, and the subject shop.orders.tea.
func reserving(lease time.Duration) consumer.Config {
	return consumer.Config{
		Name: "reserve", Stream: "SHOP", Subject: "shop.{doc_id:subject}", Filters: []string{"shop.orders.>"},
		Lease: lease,
	}
}

// reserver returns the handler. What it writes through tx is there exactly once for each event, because the
// consumer's mark moves in the same transaction; so is the event that it enqueues.
func reserver(outbox *producer.Outbox) consumer.Handler {
	return consumer.JSON(func(ctx context.Context, tx pgx.Tx, e *consumer.Event, o order) error {
		if err := o.check(); err != nil {
			return consumer.Poison(err) // it would not be better the next time
		}
		tag, err := tx.Exec(ctx, "UPDATE stock SET available = available - $2 WHERE item = $1 AND "+
			"available >= $2", o.Item, o.Quantity)
		if err != nil {
			return err
		}
		topic, reserved := "refused.", tag.RowsAffected() == 1
		if reserved {
			topic = "reserved."
		}
		_, err = tx.Exec(ctx, "INSERT INTO reservation VALUES ($1, $2, $3, $4)",
			o.ID, o.Item, o.Quantity, reserved)
		if err != nil {
			return err
		}
		_, err = outbox.Enqueue(ctx, tx, producer.Event{Document: topic + o.Item, Payload: e.Data})
		return err
	})
}
