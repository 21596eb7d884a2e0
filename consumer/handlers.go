package consumer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Handler applies one event. With [Postgres], tx is the transaction that also moves the offset, so what the
// handler writes through it takes effect exactly once. The handler must not commit it, roll it back or use it
// after returning. With other offsets tx is nil: [PostgresSQL] has [Event.SQLTx] in its place, and without a
// database an event may be delivered again after a crash.
//
// Events of one document are handled one at a time, in stream order; different documents are handled
// concurrently. An error, a panic or a timeout rolls the transaction back, and the event is tried again
// ([Config.MaxAttempts]); what the error says decides when: [Poison], [RetryAfter], [Halt].
type Handler func(ctx context.Context, tx pgx.Tx, e *Event) error

// Middleware makes a handler of a handler: what all events need, such as tracing, a decryption, or a setting
// of the transaction. See [Config.Use].
type Middleware func(next Handler) Handler

// JSON is a handler whose payloads are JSON, each decoded into a T of its own as [json.Unmarshal] does. What
// can't be decoded, or is null, is parked at once ([Poison]).
func JSON[T any](h func(ctx context.Context, tx pgx.Tx, e *Event, payload T) error) Handler {
	return func(ctx context.Context, tx pgx.Tx, e *Event) error {
		var payload T
		if err := json.Unmarshal(e.Data, &payload); err != nil {
			return Poison(fmt.Errorf("decode the payload: %w", err))
		}
		if string(bytes.TrimSpace(e.Data)) == "null" {
			return Poison(errors.New("decode the payload: it is null"))
		}
		return h(ctx, tx, e, payload)
	}
}

// Mux gives each event to the handler of its type ([Event.Type]). It must not be changed while it is used.
// Its method Handle is the [Handler]:
//
//	c.Run(ctx, consumer.Mux{Types: map[string]consumer.Handler{
//		"received": consumer.JSON(receive),
//		"shipped":  consumer.JSON(ship),
//	}}.Handle)
type Mux struct {
	Types map[string]Handler // by type; "" for events that have none
	// Unknown is given the other events. Nil: they are parked ([Poison] of [ErrUnknownType]). [Skip]: they
	// are passed over for good. One that returns an error has them fail like any others; with
	// Halt(ErrUnknownType) they wait until an instance knows them, as in a deploy of the new type.
	Unknown Handler
}

// ErrUnknownType is why an event fails for which a [Mux] has no handler.
var ErrUnknownType = errors.New("no handler for the event's type")

// Handle gives the event to the handler of its type. It is a [Handler].
func (m Mux) Handle(ctx context.Context, tx pgx.Tx, e *Event) error {
	if h := m.Types[e.Type]; h != nil {
		return h(ctx, tx, e)
	}
	if m.Unknown != nil {
		return m.Unknown(ctx, tx, e)
	}
	if e.Type == "" {
		return Poison(fmt.Errorf("%w: it has none. The column that holds it has to be mapped to the header "+
			"Event-Type (outflow's setting headers)", ErrUnknownType))
	}
	return Poison(fmt.Errorf("%w: %q. Add it to Mux.Types, or say in Mux.Unknown what to do with others",
		ErrUnknownType, e.Type))
}

// Skip is a handler that does nothing: such events count as done. It is for [Mux.Unknown].
func Skip(context.Context, pgx.Tx, *Event) error { return nil }

// wrapped is a handler within its middleware, the first one outermost.
func wrapped(h Handler, use []Middleware) Handler {
	for i := len(use) - 1; i >= 0; i-- {
		h = use[i](h)
	}
	return h
}
