package drivers

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/lib/pq"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/consumertest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const count = `INSERT INTO stock VALUES ($1, $2) ON CONFLICT (item) DO UPDATE SET n = stock.n * 2 + excluded.n`

// lib/pq knows neither arrays nor durations, sends everything as text, and has errors of its own.
func TestEffectsAreExactlyOnceWithLibPQ(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	db, err := sql.Open("postgres", url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := db.ExecContext(t.Context(),
		"CREATE TABLE stock (item text PRIMARY KEY, n bigint NOT NULL)"); err != nil {
		t.Fatal(err)
	}
	var events []consumertest.Event
	for i := range 12 {
		events = append(events, consumertest.Event{Document: fmt.Sprintf(`d"%d\`, i%4),
			Data: []byte(strings.Repeat("\xff", i)), Type: []string{"put", "refused", "swallows"}[i%3]})
	}
	kit := consumertest.Kit{Pool: pool, SQL: db, Events: events, Parks: true, MaxCrashes: 60,
		Effects: consumertest.Tables(pool, "stock"), Config: consumer.Config{MaxAttempts: 2, ParkAfter: 1}}
	kit.Handler = consumer.Mux{Types: map[string]consumer.Handler{
		"put": func(ctx context.Context, _ pgx.Tx, e *consumer.Event) error {
			_, err := e.SQLTx().ExecContext(ctx, count, e.Document, len(e.Data))
			return err
		},
		"refused": func(ctx context.Context, _ pgx.Tx, e *consumer.Event) error {
			if e.Document == `d"1\` {
				return consumer.Poison(errors.New("refused"))
			}
			_, err := e.SQLTx().ExecContext(ctx, "INSERT INTO stock VALUES ($1, 'no number')", e.Document)
			return fmt.Errorf("what the database refuses is no outage: %w", err)
		},
		"swallows": func(ctx context.Context, _ pgx.Tx, e *consumer.Event) error {
			if e.Attempt == 1 {
				_, _ = e.SQLTx().ExecContext(ctx, "SELECT 1/0")
				return nil
			}
			_, err := e.SQLTx().ExecContext(ctx, count, e.Document, len(e.Data))
			return err
		},
	}}.Handle
	if err := kit.Check(t.Context()); err != nil {
		t.Error(err)
	}
}
