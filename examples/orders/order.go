package main

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/producer"
)

// order is a row of orders, and the message of the event that it was placed.
type order struct {
	ID       string `json:"order"`
	Item     string `json:"item"`
	Quantity int    `json:"quantity"`
}

var (
	uuids = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	items = regexp.MustCompile(`^[a-z]{1,40}$`)
)

// invalidError is what the customer did wrong.
type invalidError struct{ text string }

func (e *invalidError) Error() string { return e.text }

func (o order) check() error {
	switch {
	case !uuids.MatchString(o.ID):
		return &invalidError{fmt.Sprintf("order %q: want a UUID in lower case", o.ID)}
	case !items.MatchString(o.Item):
		return &invalidError{fmt.Sprintf("item %q: want 1 to 40 letters a-z", o.Item)}
	case o.Quantity < 1 || o.Quantity > 1000:
		return &invalidError{fmt.Sprintf("quantity %d: want 1 to 1000", o.Quantity)}
	}
	return nil
}

// place writes an order and the event that says so, in one transaction: both are there, or neither. An order
// that is there already was sent again by a customer who got no answer: it is left as it is, and makes no
// second event.
func (s *shop) place(ctx context.Context, o order) (placed bool, err error) {
	message, err := json.Marshal(o)
	if err != nil {
		return false, err
	}
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, "INSERT INTO orders (id, item, quantity) VALUES ($1, $2, $3) ON CONFLICT "+
			"DO NOTHING", o.ID, o.Item, o.Quantity)
		if placed = tag.RowsAffected() == 1; err != nil || !placed {
			return err
		}
		_, err = s.outbox.Enqueue(ctx, tx, producer.Event{Document: "orders." + o.Item, Payload: message})
		return err
	})
	return placed && err == nil, err
}
