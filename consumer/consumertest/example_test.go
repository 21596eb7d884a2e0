package consumertest_test

import (
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/consumertest"
)

// pool would be a database of the test's own.
var (
	pool *pgxpool.Pool
	t    *testing.T
)

// handle reserves stock.
func handle(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
	var order struct {
		Item string
		N    int
	}
	if err := json.Unmarshal(e.Data, &order); err != nil {
		return consumer.Poison(err) // it will not get better
	}
	_, err := tx.Exec(ctx, "UPDATE stock SET n = n - $2 WHERE item = $1", order.Item, order.N)
	return err
}

// A handler is run undisturbed, and with a crash at every point; the tables must be the same.
func ExampleExactlyOnce() {
	events := []consumertest.Event{
		{Document: "order-1", Type: "created", Data: []byte(`{"item": "pear", "n": 2}`)},
		{Document: "order-2", Type: "created", Data: []byte(`{"item": "pear", "n": 1}`)},
	}
	consumertest.ExactlyOnce(t, pool, handle, events, consumertest.Query(pool,
		"TRUNCATE stock; INSERT INTO stock VALUES ('pear', 10)", // how each run begins
		"SELECT item, n FROM stock ORDER BY item"))
}

// Events that were recorded with outflow replay --to stdout, or written by hand.
func ExampleLines() {
	events, err := consumertest.Lines(strings.NewReader(`
		{"doc_id": "order-1", "payload": {"item": "pear", "n": 2}}
		{"doc_id": "order-2", "payload": {"item": "fig", "n": 1}, "headers": {"schema_version": "2"}}`))
	if err != nil {
		t.Fatal(err)
	}
	k := consumertest.Kit{
		Pool: pool, Handler: handle, Events: events, Effects: consumertest.Tables(pool, "stock"),
		Config: consumer.Config{Partitions: 2, Batch: 8},
	}
	if err := k.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// Upcasters are held to a file for each old version.
func ExampleGolden() {
	schema := &consumer.Schema{
		Current: "2", From: consumer.HeaderVersion("schema_version"),
		Up: map[string]consumer.Up{"1": {To: "2", Do: func(data []byte) ([]byte, error) { return data, nil }}},
	}
	consumertest.Golden(t, schema, filepath.Join("testdata", "orders")) // 1.json, 1.golden, ...
}

// A consumer that crashes between the commit and the moment when it could tell somebody.
func ExampleCrash() {
	stream := consumertest.NewStream()
	stream.Add(consumertest.Event{Document: "order-1", Data: []byte(`{"item": "pear", "n": 2}`)})
	c, err := consumer.New(nil, consumer.Postgres(pool), consumer.Config{
		Name: "orders", Stream: "OUTBOX", Source: stream, Faults: &consumertest.Crash{Point: consumer.AtDone, Sequence: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	err = c.Run(t.Context(), handle) // consumertest.ErrCrash
}
