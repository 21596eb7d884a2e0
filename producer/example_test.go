package producer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/producer"
)

// A service changes a note and enqueues the event of the change, in one transaction.
func ExampleOutbox_Enqueue() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	outbox, err := producer.New(producer.Config{}) // once; the table that outflow init makes
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var version int64
		err := tx.QueryRow(ctx, "UPDATE note SET version = version + 1 WHERE id = 'n1' RETURNING version").
			Scan(&version)
		if err != nil {
			return err
		}
		event, err := producer.JSONEvent("n1", map[string]any{"op": "set", "text": "hello"})
		if err != nil {
			return err
		}
		event.Actor, event.Counter = "alice", version
		receipts, err := outbox.Enqueue(ctx, tx, event)
		if err != nil {
			return err
		}
		fmt.Println(len(receipts[0].ID), receipts[0].Counter) // 36 1
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}

// The same with database/sql and any driver of PostgreSQL.
func ExampleOutbox_EnqueueSQL() {
	ctx := context.Background()
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close() //nolint:errcheck // the program ends
	outbox, err := producer.New(producer.Config{})
	if err != nil {
		log.Fatal(err)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback() //nolint:errcheck // nothing, once it is committed
	if _, err := tx.ExecContext(ctx, "UPDATE note SET body = 'bye' WHERE id = 'n1'"); err != nil {
		log.Fatal(err)
	}
	receipts, err := outbox.EnqueueSQL(ctx, tx,
		producer.Event{Document: "n1", Actor: "bob", Counter: 1, Payload: []byte(`{"op": "clear"}`)},
		producer.Event{Document: "n1", Actor: "bob", Counter: 2, Payload: []byte(`{"op": "set", "text": "bye"}`)})
	if err != nil {
		log.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(receipts)) // 2
}

// A service that has no counters of its own lets the producer take them. The receipt says which.
func ExampleReceipt() {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx) //nolint:errcheck // the program ends
	outbox, err := producer.New(producer.Config{NextCounter: true})
	if err != nil {
		log.Fatal(err)
	}
	event := producer.Event{Document: "n2", Actor: "carol", Payload: []byte("{}")}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		receipts, err := outbox.Enqueue(ctx, tx, event, event)
		if err == nil {
			fmt.Println(receipts[0].Counter, receipts[1].Counter) // 1 2
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// A connection on which a transaction has begun does as well. Without a table, an event is a message in the
// WAL.
func ExampleMessage() {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx) //nolint:errcheck // the program ends
	outbox, err := producer.Message(producer.Config{})
	if err != nil {
		log.Fatal(err)
	}
	event := producer.Event{Document: "n3", ID: "e1", Payload: []byte(`{"price": 1.10}`)}
	if _, err := outbox.Enqueue(ctx, conn, event); err != nil {
		fmt.Println(err) // no transaction is open ...
	}
	if _, err := conn.Exec(ctx, "BEGIN"); err != nil {
		log.Fatal(err)
	}
	receipts, err := outbox.Enqueue(ctx, conn, event)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := conn.Exec(ctx, "COMMIT"); err != nil {
		log.Fatal(err)
	}
	fmt.Println(receipts[0].ID) // e1
}

// The payload is what encoding/json makes of a value; the rest of the event is set as usual.
func ExampleJSONEvent() {
	event, err := producer.JSONEvent("n1", struct {
		Op   string `json:"op"`
		Text string `json:"text"`
	}{"set", "hello"})
	if err != nil {
		log.Fatal(err)
	}
	event.Columns = map[string]any{"event_type": "NoteEdited"}
	fmt.Println(event.Document, string(event.Payload))
	// Output:
	// n1 {"op":"set","text":"hello"}
}

// An event that can't be published is refused before anything is sent: the transaction can go on.
func ExampleInvalid() {
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
