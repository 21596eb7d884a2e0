package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer"
)

const name = "stock" // of the consumer

func counting(lease time.Duration) consumer.Config {
	return consumer.Config{
		Name: name, Stream: "STOCK", Subject: "stock.{aggregate_type}.{doc_id}", Schema: payloads,
		Lease: lease,
	}
}

// counter returns the handler. The order matters: a count replaces what was received and shipped before it.
func counter(deploy string, bug bool) consumer.Handler {
	shipped := setStock("stock.quantity - $3", deploy)
	if bug {
		shipped = setStock("stock.quantity + $3", deploy)
	}
	return consumer.Mux{Types: map[string]consumer.Handler{
		"received": setStock("stock.quantity + $3", deploy),
		"shipped":  shipped,
		"counted":  setStock("$3", deploy),
	}}.Handle
}

// setStock is the handler of movements behind which there is so much of an item.
func setStock(sum, deploy string) consumer.Handler {
	return consumer.JSON(func(ctx context.Context, tx pgx.Tx, e *consumer.Event, m movement) error {
		_, err := tx.Exec(ctx, "INSERT INTO stock VALUES ($1, $2, 0) ON CONFLICT DO NOTHING",
			m.Warehouse, m.SKU)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `WITH now AS (
				UPDATE stock SET quantity = `+sum+` WHERE warehouse = $1 AND sku = $2 RETURNING quantity)
			INSERT INTO ledger SELECT $4, $1, $2, quantity, $5 FROM now`,
			m.Warehouse, m.SKU, m.Quantity, int64(e.Sequence), deploy) //nolint:gosec // fewer than 2^63
		return err
	})
}
