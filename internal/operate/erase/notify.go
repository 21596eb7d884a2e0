package erase

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/producer"
)

// actor is who writes the last event, where the table says that of its rows.
const actor = "outflow erase"

// notify writes the last event of the document. Its row stays, and its message: by its id they are known.
func (c *command) notify(ctx context.Context) error {
	m := c.l.Layout.Mapping
	if c.l.Layout.ID == "" {
		return &outbox.Fault{Class: outbox.Usage, Code: "erase_notify",
			Message: "--notify: the table has no id column: nothing tells the last event from others"}
	}
	p, err := producer.New(producer.Config{
		Table: c.l.PGC.Table, MaxPayload: c.cfg.Sink.MaxPayload, Publication: c.cfg.Publication,
		Columns: producer.Columns{ID: c.l.Layout.ID, Document: m.Doc, Actor: cmp.Or(m.Actor, "-"),
			Counter: cmp.Or(m.Counter, "-"), Key: cmp.Or(m.Key, "-"), Payload: m.Payload},
	})
	if err != nil {
		return err
	}
	e := producer.Event{Document: c.o.Doc, Payload: c.o.Notify, Key: c.o.Key}
	if m.Actor != "" {
		e.Actor = actor
	}
	if m.Counter != "" {
		e.Counter = time.Now().UnixMilli() // its own, for this actor: a request has one event
	}
	return c.ledger.Notify(ctx, c.rec, func(tx pgx.Tx) (string, error) {
		receipts, err := p.Enqueue(ctx, tx, e)
		if invalid := (*producer.Invalid)(nil); errors.As(err, &invalid) {
			return "", &outbox.Fault{Class: outbox.Usage, Code: "erase_notify", Message: "--notify: " +
				invalid.Error()}
		}
		if err != nil {
			return "", err
		}
		return receipts[0].ID, nil
	})
}
