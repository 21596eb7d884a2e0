package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/consumertest"
)

// Each document's events come in their order. A service reads a JetStream stream with [consumer.New] and
// gives it consumer.Postgres(pool); here the stream and the offsets are in memory.
func ExampleConsumer_Run() {
	stream := consumertest.NewStream()
	stream.Add(
		consumertest.Event{Document: "note", Data: []byte("hello")},
		consumertest.Event{Document: "note", Data: []byte(", world")},
	)
	c, err := consumertest.NewConsumer(stream, nil, consumer.Memory(),
		consumer.Config{Name: "texts", Stream: "OUTBOX"})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	text := ""
	err = c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
		if text += string(e.Data); strings.HasSuffix(text, "world") {
			stop() // as a signal would
		}
		return nil
	})
	fmt.Println(text, err)
	// Output:
	// hello, world <nil>
}

// An event that no attempt can mend is given to OnPoison at once. With PostgreSQL it would be parked, with
// the later events of its document.
func ExamplePoison() {
	stream := consumertest.NewStream()
	stream.Add(consumertest.Event{Document: "note", Data: []byte("?")})
	ctx, stop := context.WithCancel(context.Background())
	c, err := consumertest.NewConsumer(stream, nil, consumer.Memory(), consumer.Config{
		Name: "texts", Stream: "OUTBOX",
		OnPoison: func(_ context.Context, e *consumer.Event, cause error) error {
			fmt.Printf("event %d of %s: %v, attempt %d\n", e.Sequence, e.Document, cause, e.Attempt)
			stop()
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = c.Run(ctx, func(context.Context, pgx.Tx, *consumer.Event) error {
		return consumer.Poison(errors.New("not a text"))
	})
	fmt.Println(err)
	// Output:
	// event 1 of note: not a text, attempt 1
	// <nil>
}

// The handler knows version 2 only; what was written before there were versions is brought to it.
func ExampleSchema() {
	schema := &consumer.Schema{
		Current: "2",
		From:    consumer.FieldVersion("version"),
		Missing: "1",
		Up: map[string]consumer.Up{"1": {To: "2", Do: func(data []byte) ([]byte, error) {
			return []byte(strings.Replace(string(data), `"text"`, `"inserted"`, 1)), nil
		}}},
	}
	data, err := schema.Upcast("1", []byte(`{"text": "hello"}`))
	fmt.Println(string(data), err)
	// Output:
	// {"inserted": "hello"} <nil>
}
