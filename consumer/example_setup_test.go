package consumer_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/consumertest"
)

// A service that has connections of its own shares its pool: two connections are enough, and with
// Partitions + 2 all partitions work at the same time.
func ExamplePostgres() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	nc, err := nats.Connect(os.Getenv("NATS_URL"), nats.MaxReconnects(-1))
	if err != nil {
		log.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		log.Fatal(err)
	}
	c, err := consumer.New(js, consumer.Postgres(pool), consumer.Config{Name: "usage", Partitions: 16})
	if err != nil {
		log.Fatal(err)
	}
	err = c.Run(ctx, func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
		_, err := tx.Exec(ctx, "UPDATE usage SET n = n + 1 WHERE doc_id = $1", e.Document)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// Mails are sent at least once: their offsets are in a bucket of JetStream.
func ExampleJetStream() {
	var js jetstream.JetStream // of your connection to NATS
	_, err := consumer.New(js, consumer.JetStream(), consumer.Config{
		Name: "mails", Start: consumer.FromNow, // nobody wants a mail for what is long past
		Backoff: consumer.Backoff{First: time.Second, Max: time.Minute},
	})
	fmt.Println(err)
	// Output:
	// consumer: no JetStream context
}

// Consumers that share a Memory go on from one another's offsets.
func ExampleMemory() {
	stream, offsets := consumertest.NewStream(), consumer.Memory()
	stream.Add(consumertest.Event{Document: "note", Data: []byte("one")})
	read := func() {
		ctx, stop := context.WithCancel(context.Background())
		c, err := consumertest.NewConsumer(stream, nil, offsets, consumer.Config{Name: "texts"})
		if err != nil {
			log.Fatal(err)
		}
		err = c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
			fmt.Printf("%s\n", e.Data)
			stop()
			return nil
		})
		if err != nil {
			log.Fatal(err)
		}
	}
	read()
	stream.Add(consumertest.Event{Document: "note", Data: []byte("two")})
	read()
	// Output:
	// one
	// two
}

// Whoever may delete a consumer's offsets, or look after its bucket, needs its name.
func ExampleBucket() {
	fmt.Println(consumer.Bucket("OUTBOX"))
	// Output:
	// outflow-consumers-OUTBOX
}

// A migration creates the tables where the service's own role may not. The consumer has NoCreate then.
func ExampleTables() {
	for line := range strings.Lines(consumer.Tables("billing")) {
		if name, ok := strings.CutPrefix(line, "CREATE TABLE IF NOT EXISTS "); ok {
			fmt.Println(name[:strings.Index(name, " (")])
		}
	}
	// Output:
	// "billing".outflow_consumer
	// "billing".outflow_member
	// "billing".outflow_mark
	// "billing".outflow_parked
}

// What is skipped counts as done: of these two events one is counted.
func ExampleSkip() {
	n := 0
	mux := consumer.Mux{
		Types: map[string]consumer.Handler{"paid": func(context.Context, pgx.Tx, *consumer.Event) error {
			n++
			return nil
		}},
		Unknown: consumer.Skip,
	}
	err := handle(consumer.Config{Name: "orders"}, mux.Handle,
		consumertest.Event{Document: "order-1", Type: "paid"},
		consumertest.Event{Document: "order-1", Type: "printed"})
	fmt.Println(n, err)
	// Output:
	// 1 <nil>
}

// A page for operators lists what is parked, and releases what was mended. The running consumer does it.
func ExampleParked() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	parked := consumer.NewParked(pool, "") // the tables are where the search_path finds them
	documents, err := parked.List(ctx, "usage", 100)
	if err != nil {
		log.Fatal(err)
	}
	for _, d := range documents {
		fmt.Printf("%s: %d events since %s: %s\n", d.Document, d.Events, d.First.ParkedAt, d.First.Error)
		if strings.Contains(d.First.Error, "usage_n_check") { // the constraint that was too narrow
			if err := parked.Retry(ctx, d.Consumer, d.Document); err != nil {
				log.Fatal(err)
			}
		}
	}
}

// Headers and data are shown as the JSON that they are, and as base64 where they are none.
func ExampleParkedBytes() {
	for _, data := range []string{`{"n": 1}`, "\xff"} {
		text, err := json.Marshal(consumer.ParkedRow{Sequence: 7, Data: consumer.ParkedBytes(data)}.Data)
		fmt.Println(string(text), err)
	}
	// Output:
	// {"n":1} <nil>
	// "/w==" <nil>
}
