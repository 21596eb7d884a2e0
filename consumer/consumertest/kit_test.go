package consumertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
)

// stock is a database with a table that a handler counts in.
func stock(t testing.TB) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), pgtest.Database(t, pgtest.Server(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := pool.Exec(t.Context(),
		`CREATE TABLE stock (item text PRIMARY KEY, n bigint NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	return pool
}

const count = `INSERT INTO stock VALUES ($1, $2) ON CONFLICT (item) DO UPDATE SET n = stock.n * 2 + excluded.n`

// counts is a handler whose effect depends on the order of a document's events.
func counts(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
	_, err := tx.Exec(ctx, count, e.Document, len(e.Data))
	return err
}

// some are events of a few documents.
func some(n int) (events []Event) {
	for i := range n {
		events = append(events, Event{Document: fmt.Sprintf("d%d", i%3),
			Data: []byte(strings.Repeat("x", i+1)), Type: "put"})
	}
	return events
}

func TestHandlersAreHeldToExactlyOnce(t *testing.T) {
	t.Parallel()
	pool := stock(t)
	ExactlyOnce(t, pool, counts, some(7), Tables(pool, "stock"))
	var left int
	err := pool.QueryRow(t.Context(),
		`SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'consumertest%'`).Scan(&left)
	if err != nil || left != 0 {
		t.Errorf("%d schemas are left, %v", left, err)
	}
}

// TestARecordedSessionHasItsEffectExactlyOnce: a recorded editing session, the document's text as the effect.
func TestARecordedSessionHasItsEffectExactlyOnce(t *testing.T) {
	t.Parallel()
	pool := stock(t)
	ops, err := recording.Load(recording.FriendsForever)
	if err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	for _, op := range ops[:40] {
		fmt.Fprintf(&lines, `{"doc_id": %q, "actor_id": %q, "counter": %d, "op": %s}`+"\n", op.Doc, op.Actor,
			op.Counter, op.Payload)
	}
	events, err := Lines(strings.NewReader(lines.String()))
	if err != nil {
		t.Fatal(err)
	}
	edit := func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
		var patches [][3]any
		if err := json.Unmarshal(e.Data, &patches); err != nil {
			return consumer.Poison(err)
		}
		for _, p := range patches {
			_, err := tx.Exec(ctx, `INSERT INTO text VALUES ($1, $4) ON CONFLICT (doc) DO UPDATE
				SET body = left(text.body, $2) || $4 || substr(text.body, $2 + $3 + 1)`, e.Document, int(p[0].(float64)), int(p[1].(float64)), p[2])
			if err != nil {
				return err
			}
		}
		return nil
	}
	if _, err := pool.Exec(t.Context(),
		`CREATE TABLE text (doc text PRIMARY KEY, body text NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	k := Kit{Pool: pool, Events: events, Effects: Tables(pool, "text"), Handler: edit, MaxCrashes: 20}
	if err := k.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// With database/sql as with pgx.
func TestHandlersOfDatabaseSQLAreHeldToExactlyOnce(t *testing.T) {
	t.Parallel()
	pool := stock(t)
	db := stdlib.OpenDB(*pool.Config().ConnConfig)
	t.Cleanup(func() { _ = db.Close() })
	k := Kit{Pool: pool, SQL: db, Events: some(7), Effects: Tables(pool, "stock")}
	k.Handler = func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
		if tx != nil {
			return consumer.Poison(errors.New("it has two transactions"))
		}
		_, err := e.SQLTx().ExecContext(ctx, count, e.Document, len(e.Data))
		return err
	}
	if err := k.Check(t.Context()); err != nil {
		t.Error(err)
	}
	k.Handler = func(ctx context.Context, _ pgx.Tx, e *consumer.Event) error {
		_, err := db.ExecContext(ctx, count, e.Document, len(e.Data))
		return err
	}
	var d *Difference
	if err := k.Check(t.Context()); !errors.As(err, &d) {
		t.Errorf("an effect outside of the transaction: %v", err)
	}
}

// A handler with an effect outside of its transaction is found, and where.
func TestBuggyHandlersAreFound(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		make func(pool *pgxpool.Pool) func() consumer.Handler
		want string
	}{
		"outside of the transaction": {func(pool *pgxpool.Pool) func() consumer.Handler {
			h := func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
				_, err := pool.Exec(ctx, count, e.Document, len(e.Data))
				return err
			}
			return func() consumer.Handler { return h }
		}, "each event fails after the handler at the first attempt: the effects are not those"},
		"only in the memory of the process": {func(*pgxpool.Pool) func() consumer.Handler {
			return func() consumer.Handler {
				sum := 0 // a new process begins with nothing
				return func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
					if e.Document != "d0" {
						return nil
					}
					sum++
					_, err := tx.Exec(ctx,
						`INSERT INTO stock VALUES ($1, $2) ON CONFLICT (item) DO UPDATE SET n = excluded.n`,
						e.Document, sum)
					return err
				}
			}
		}, "the effects are not those"},
		"done before it is committed": {func(pool *pgxpool.Pool) func() consumer.Handler {
			var done sync.Map // a cache that outlives what is rolled back; partitions run at the same time
			h := func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
				if _, was := done.LoadOrStore(e.ID, true); was || e.Document != "d0" {
					return nil
				}
				return counts(ctx, tx, e)
			}
			return func() consumer.Handler { return h }
		}, "the effects are not those"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := stock(t)
			k := Kit{Pool: pool, Events: some(9), Effects: Tables(pool, "stock"), Start: c.make(pool)}
			err := k.Check(t.Context())
			var d *Difference
			if !errors.As(err, &d) || !strings.Contains(err.Error(), c.want) || d.Want == d.Got {
				t.Errorf("%v, want %s", err, c.want)
			}
			t.Log(err)
		})
	}
}

// A single crash that makes the difference is named.
func TestTheCrashThatMakesTheDifferenceIsNamed(t *testing.T) {
	t.Parallel()
	pool := stock(t)
	tries := map[uint64]int{}
	k := Kit{Pool: pool, Events: some(4), Effects: Tables(pool, "stock"),
		Config: consumer.Config{Partitions: 1}}
	k.Handler = func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
		if e.Attempt > 1 {
			return counts(ctx, tx, e) // it has thought of attempts, not of crashes
		}
		if tries[e.Sequence]++; e.Sequence == 3 {
			if _, err := pool.Exec(ctx, count, "outside", 1); err != nil {
				return err
			}
		}
		return counts(ctx, tx, e)
	}
	k.Effects = Query(pool, "TRUNCATE stock", "SELECT item, n FROM stock ORDER BY item")
	err := k.Check(t.Context())
	t.Log(err)
	if want := "a crash after the handler, before the commit of event 3: the effects"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("want %s", want)
	}
}

func TestKitSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	pool := stock(t)
	k := Kit{Pool: pool, Events: some(3), Effects: Tables(pool, "stock"), Handler: counts}
	for want, change := range map[string]func(*Kit){
		"a kit needs":                  func(k *Kit) { k.Events = nil },
		"Effects.Reset":                func(k *Kit) { k.Effects = Tables(pool, "nothing") },
		"Partitions -1":                func(k *Kit) { k.Config.Partitions = -1 },
		"the handler refuses an event": func(k *Kit) { k.Handler = refuse },
		"makes no such subject":        func(k *Kit) { k.Config.Subject = "orders.{doc_id}" },
		"unknown version of the payload": func(k *Kit) {
			k.Config.Schema = &consumer.Schema{Current: "1", From: consumer.HeaderVersion("v")}
		},
	} {
		other := k
		change(&other)
		if err := other.Check(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	k.Handler, k.Parks = refuse, true
	if err := k.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

func refuse(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
	if e.Document == "d1" {
		return consumer.Poison(errors.New("no"))
	}
	return counts(ctx, tx, e)
}
