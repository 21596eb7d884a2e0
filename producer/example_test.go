package producer_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/producer"
)

// An event that can't be published is refused before anything is sent: the transaction can go on.
func ExampleOutbox_Enqueue_invalid() {
	outbox, err := producer.Message(producer.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	var tx pgx.Tx // the service's own
	_, err = outbox.Enqueue(context.Background(), tx,
		producer.Event{Document: "n1", Payload: []byte(`{"title": `)})
	if bad := (*producer.Invalid)(nil); errors.As(err, &bad) {
		fmt.Println(bad.Index, bad.Field, bad.Problem)
	}
	// Output:
	// 0 Payload not JSON: no value where one must be, at byte 10
}

// The table of counters that NextCounter needs goes into the service's own migrations.
func ExampleOutbox_Schema() {
	outbox, err := producer.New(producer.Config{Table: "shop.outbox", NextCounter: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(outbox.Schema())
	// Output:
	// CREATE TABLE IF NOT EXISTS "shop"."outflow_counter" (
	//   doc_id text COLLATE "C" NOT NULL,
	//   actor_id text COLLATE "C" NOT NULL,
	//   counter bigint NOT NULL,
	//   PRIMARY KEY (doc_id, actor_id)
	// ) WITH (fillfactor = 50)
}
