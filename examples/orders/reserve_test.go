package main

import (
	_ "embed"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/consumer/consumertest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

//go:embed schema.sql
var schema string

func TestMain(m *testing.M) { pgtest.Main(m) }

// TestEachCrashLeavesTheSameReservations crashes the consumer at every point of every event, and compares
// what is left with a run that nothing disturbed.
func TestEachCrashLeavesTheSameReservations(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("-short leaves out the slow tests")
	}
	pool, err := pgxpool.New(t.Context(), pgtest.Database(t, pgtest.Server(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := pool.Exec(t.Context(), schema); err != nil {
		t.Fatal(err)
	}
	outbox, err := newOutbox()
	if err != nil {
		t.Fatal(err)
	}
	var events []consumertest.Event
	for i := range 5 {
		item := []string{"tea", "milk"}[i%2]
		events = append(events, consumertest.Event{
			Document: "orders." + item, Subject: "shop.orders." + item,
			Data: fmt.Appendf(nil, `{"order": "00000000-0000-4000-8000-%012d", "item": %q, "quantity": %d}`,
				i, item, 1+i%3),
		})
	}
	kit := consumertest.Kit{
		Handler: reserver(outbox), Pool: pool, Events: events,
		Config: reserving(10 * time.Second),
		Effects: consumertest.Query(pool,
			"TRUNCATE reservation, outbox, stock; INSERT INTO stock VALUES ('tea', 100), ('milk', 5)",
			"SELECT * FROM stock ORDER BY item",
			"SELECT order_id::text, item, quantity, reserved FROM reservation ORDER BY 1, 2, 3, 4",
			"SELECT topic, message::text FROM outbox ORDER BY 1, 2"),
	}
	if err := kit.Check(t.Context()); err != nil {
		t.Error(err)
	}
}
