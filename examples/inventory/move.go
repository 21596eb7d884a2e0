package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/producer"
)

const (
	skus   = 12
	shared = 4  // events of one transaction, at most
	perBox = 12 // pieces
)

// move writes events about movements of stock, a few in a transaction, each with all of them or none.
func move(ctx context.Context, pool *pgxpool.Pool, events, format int) error {
	outbox, err := producer.New(producer.Config{
		Table: "public.outbox_events",
		Columns: producer.Columns{ID: "event_id", Document: "partition_key", Payload: "payload", Actor: "-",
			Counter: "-", Key: "-"},
		Headers: map[string]string{"Event-Type": "event_type", "Schema-Version": "schema_version"},
	})
	if err != nil {
		return err
	}
	for events > 0 {
		some := make([]producer.Event, min(1+rand.IntN(shared), events))
		for i := range some {
			if some[i], err = randomMovement(format); err != nil {
				return err
			}
		}
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := outbox.Enqueue(ctx, tx, some...)
			return err
		})
		if err != nil {
			return err
		}
		events -= len(some)
	}
	return nil
}

// randomMovement makes an event as the service wrote it when the payload had that form.
func randomMovement(format int) (producer.Event, error) {
	sku := fmt.Sprintf("sku-%d", rand.IntN(skus))
	kind := []string{"received", "shipped", "received", "shipped", "counted"}[rand.IntN(5)]
	boxes := rand.Int64N(9)
	var payload any
	switch format {
	case 0, 1:
		payload = movementV1{Item: sku, Boxes: boxes, PerBox: perBox}
	case 2:
		payload = movementV2{SKU: sku, Quantity: boxes * perBox}
	case 3:
		payload = movement{SKU: sku, Quantity: boxes * perBox, Warehouse: "main"}
	default:
		return producer.Event{}, fmt.Errorf("-format %d: want 0 to 3", format)
	}
	data, err := json.Marshal(payload)
	columns := map[string]any{"aggregate_type": "item", "aggregate_id": sku, "event_type": kind,
		"schema_version": nil}
	if format > 0 {
		columns["schema_version"] = format
	}
	return producer.Event{Document: sku, Payload: data, Columns: columns}, err
}
