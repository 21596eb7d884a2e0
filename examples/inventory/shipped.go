package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer"
)

// shipping reads what outflow replay has put into a stream: what there is of it in the archive, then in the
// live stream, as one.
func shipping(stream string, lease time.Duration) consumer.Config {
	return consumer.Config{
		Name: "shipped", Stream: stream, Subject: "replay." + stream + ".stock.{aggregate_type}.{doc_id}",
		Schema: payloads, Lease: lease,
	}
}

// ship adds up what was ever shipped.
func ship() consumer.Handler {
	return consumer.Mux{
		Types: map[string]consumer.Handler{"shipped": consumer.JSON(
			func(ctx context.Context, tx pgx.Tx, _ *consumer.Event, m movement) error {
				_, err := tx.Exec(ctx, `INSERT INTO shipped VALUES ($1, $2, $3, 1)
					ON CONFLICT (warehouse, sku) DO UPDATE SET events = shipped.events + 1,
						quantity = shipped.quantity + excluded.quantity`,
					m.Warehouse, m.SKU, m.Quantity)
				return err
			})},
		Unknown: consumer.Skip,
	}.Handle
}
