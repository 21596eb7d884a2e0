package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/consumertest"
	"github.com/outflowhq/outflow/outbox"
)

// The error of Run has a code to look up in docs/troubleshooting.md, and says what can be done. A program
// ends with it: to start again would not help.
func Example_errors() {
	ctx := context.Background()
	stream := consumertest.NewStream()
	stream.Add(consumertest.Event{Document: "note"})
	c, err := consumertest.NewConsumer(stream, nil, consumer.Memory(),
		consumer.Config{Name: "texts"})
	if err != nil {
		log.Fatal(err)
	}
	err = c.Run(ctx, func(context.Context, pgx.Tx, *consumer.Event) error {
		return consumer.Poison(errors.New("not a text"))
	})
	switch {
	case errors.Is(err, consumer.ErrGap):
		fmt.Println("messages were removed unread: restore them from a backup, or set AcceptGap")
	case errors.Is(err, consumer.ErrPoison):
		fmt.Println(outbox.FaultOf(err).Code, outbox.ClassOf(err) == outbox.Poison)
	}
	// Output:
	// consumer_poison true
}

// A handler that panics fails like one that returns an error. The value and the stack are there to look at.
func ExamplePanicError() {
	err := handle(consumer.Config{Name: "texts", MaxAttempts: 1, ParkAfter: time.Nanosecond},
		func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
			var words []string
			return errors.New(words[e.Attempt])
		}, consumertest.Event{Document: "note"})
	var panicked *consumer.PanicError
	fmt.Println(errors.As(err, &panicked))
	fmt.Println(panicked.Value, len(panicked.Stack) > 0)
	// Output:
	// true
	// runtime error: index out of range [1] with length 0 true
}

// Without Config.DeadLetters a dead letter fails for good at once, with the reason that Outflow had.
func ExampleDeadLetterError() {
	err := handle(consumer.Config{Name: "usage"}, consumer.Skip,
		consumertest.Event{Document: "note", Header: nats.Header{"Outflow-Dead-Letter": {"too_large"}}})
	var letter *consumer.DeadLetterError
	if errors.As(err, &letter) {
		fmt.Println(letter.Reason)
	}
	// Output:
	// too_large
}

// A message whose subject the template does not produce ends Run: its sequence says which one it is.
func ExampleForeignError() {
	err := handle(consumer.Config{Name: "texts", Subject: "outbox.{doc_id}"}, consumer.Skip,
		consumertest.Event{Document: "note", Subject: "elsewhere.note"})
	var foreign *consumer.ForeignError
	fmt.Println(errors.Is(err, consumer.ErrForeign), errors.As(err, &foreign))
	fmt.Println(foreign.Sequence, foreign.Subject)
	// Output:
	// true true
	// 1 elsewhere.note
}

// What a service has no handler for is parked, and its cause can be told from others.
func ExampleMux_unknown() {
	mux := consumer.Mux{Types: map[string]consumer.Handler{"received": consumer.Skip}}
	err := handle(consumer.Config{Name: "stock"}, mux.Handle,
		consumertest.Event{Document: "tea", Type: "inspected"})
	fmt.Println(errors.Is(err, consumer.ErrUnknownType))
	// Output:
	// true
}

// A version that Schema does not know is found before the handler is called.
func ExampleHeaderVersion() {
	schema := &consumer.Schema{Current: "1", From: consumer.HeaderVersion("schema_version")}
	err := handle(consumer.Config{Name: "texts", Schema: schema}, consumer.Skip,
		consumertest.Event{Document: "note", Header: nats.Header{"schema_version": {"2"}}})
	fmt.Println(errors.Is(err, consumer.ErrUnknownVersion))
	// Output:
	// true
}
