package consumertest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/consumertest"
)

// A test of your own has these: t from its argument, and a database of its own.
var (
	pool *pgxpool.Pool
	t    testing.TB = new(testing.T)
)

// A handler that reserves stock is run undisturbed, and with a crash at every point of every event: the table
// must be the same.
func ExampleExactlyOnce() {
	reserve := func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
		var order struct {
			Item string
			N    int
		}
		if err := json.Unmarshal(e.Data, &order); err != nil {
			return consumer.Poison(err) // no attempt will mend it
		}
		_, err := tx.Exec(ctx, "UPDATE stock SET n = n - $2 WHERE item = $1", order.Item, order.N)
		return err
	}
	events := []consumertest.Event{
		{Document: "order-1", Type: "created", Data: []byte(`{"item": "pear", "n": 2}`)},
		{Document: "order-2", Type: "created", Data: []byte(`{"item": "pear", "n": 1}`)},
	}
	consumertest.ExactlyOnce(t, pool, reserve, events, consumertest.Query(pool,
		"TRUNCATE stock; INSERT INTO stock VALUES ('pear', 10)", // how each run begins
		"SELECT item, n FROM stock ORDER BY item"))
}

// Events come from a file that outflow replay --to stdout wrote, or are written by hand.
func ExampleLines() {
	events, err := consumertest.Lines(strings.NewReader(`
		{"doc_id": "order-1", "payload": {"item": "pear"}}
		{"doc_id": "order-2", "payload": {"item": "fig"}, "headers": {"schema_version": "2"}}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, e := range events {
		fmt.Printf("%s %s %v\n", e.Document, e.Data, e.Header)
	}
	// Output:
	// order-1 {"item": "pear"} map[]
	// order-2 {"item": "fig"} map[schema_version:[2]]
}

// A file for each old version holds the upcasters to what they make of it today.
func ExampleGolden() {
	schema := &consumer.Schema{
		Current: "2",
		From:    consumer.HeaderVersion("schema_version"),
		Up: map[string]consumer.Up{"1": {To: "2", Do: func(data []byte) ([]byte, error) {
			return []byte(strings.Replace(string(data), `"item"`, `"items"`, 1)), nil
		}}},
	}
	consumertest.Golden(t, schema, filepath.Join("testdata", "orders")) // 1.json and 1.golden
	fmt.Println("failed:", t.Failed())
	// Output:
	// failed: false
}

// A consumer crashes after it has handled an event, and before it could tell anybody. Without a database the
// event comes again.
func ExampleNewConsumer() {
	stream := consumertest.NewStream()
	stream.Add(
		consumertest.Event{Document: "order-1", Type: "created"},
		consumertest.Event{Document: "order-1", Type: "paid"},
	)
	ctx, stop := context.WithCancel(context.Background())
	handle := func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
		fmt.Println(e.Document, e.Type)
		if e.Type == "paid" {
			stop()
		}
		return nil
	}
	offsets := consumer.Memory()
	run := func(crash *consumertest.Crash) error {
		c, err := consumertest.NewConsumer(stream, crash, offsets, consumer.Config{
			Name: "orders", Stream: "OUTBOX", Lease: 100 * time.Millisecond,
		})
		if err != nil {
			return err
		}
		return c.Run(ctx, handle)
	}
	err := run(&consumertest.Crash{Point: consumertest.AtDone, Sequence: 1})
	fmt.Println("crashed:", errors.Is(err, consumertest.ErrCrash))
	fmt.Println("stopped:", run(nil))
	// Output:
	// order-1 created
	// crashed: true
	// order-1 created
	// order-1 paid
	// stopped: <nil>
}
