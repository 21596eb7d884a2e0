package producer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
)

var errChanged = errors.New("the caller changed its mind")

// TestNextCounterIsGapless: many writers of the same documents and actors, several events in a call, half of
// the transactions rolled back, in every isolation level: the counters of what committed are 1, 2, 3 … in the
// order of the commits, and each caller was told its own.
func TestNextCounterIsGapless(t *testing.T) {
	t.Parallel()
	const writers, calls = 6, 40
	d := newDatabase(t, defaultTable, "ALTER TABLE outbox ADD xid bigint NOT NULL DEFAULT txid_current()")
	o := outboxOf(t, Config{NextCounter: true})
	d.exec(o.Schema())
	d.exec(o.Schema()) // again is nothing
	var all sync.WaitGroup
	var mu sync.Mutex
	told := map[string]int64{} // by id
	write := func(seed int) error {
		conn, err := pgx.Connect(t.Context(), d.url)
		if err != nil {
			return err
		}
		defer conn.Close(context.Background()) //nolint:errcheck // the test is over
		random := rand.New(rand.NewPCG(1, uint64(seed)))
		level := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[seed%3]
		for range calls {
			for {
				events := make([]Event, 1+random.IntN(5))
				for i := range events {
					events[i] = Event{Document: fmt.Sprint("d", random.IntN(3)), Actor: fmt.Sprint("a",
						random.IntN(2)), Payload: []byte("{}")}
				}
				var receipts []Receipt
				keep := random.IntN(2) == 0
				err := pgx.BeginTxFunc(t.Context(), conn, pgx.TxOptions{IsoLevel: level},
					func(tx pgx.Tx) (err error) {
						if receipts, err = o.Enqueue(t.Context(), tx, events...); err == nil && !keep {
							err = errChanged
						}
						return err
					})
				var again interface{ SQLState() string }
				switch {
				case errors.Is(err, errChanged):
				case errors.As(err, &again) && again.SQLState() == stateSerialize:
					if strings.Contains(err.Error(), "producer:") &&
						!strings.Contains(err.Error(), "run the whole transaction again") {
						return err
					}
					continue
				case err != nil:
					return err
				default:
					mu.Lock()
					for _, r := range receipts {
						told[r.ID] = r.Counter
					}
					mu.Unlock()
				}
				break
			}
		}
		return nil
	}
	failed := make([]error, writers)
	for w := range writers {
		all.Go(func() { failed[w] = write(w) })
	}
	all.Wait()
	if err := errors.Join(failed...); err != nil {
		t.Fatal(err)
	}
	rows := d.texts("SELECT concat_ws(' ', doc_id, actor_id, counter, id) FROM outbox ORDER BY doc_id, " +
		"actor_id, counter")
	if len(rows) != len(told) || len(rows) < writers*calls/4 {
		t.Fatalf("%d rows, %d were told", len(rows), len(told))
	}
	next := map[string]int64{}
	for _, row := range rows {
		f := strings.Fields(row)
		next[f[0]+f[1]]++
		if want := fmt.Sprint(next[f[0]+f[1]]); f[2] != want || fmt.Sprint(told[f[3]]) != want {
			t.Fatalf("row %s; want counter %s, the caller was told %d", row, want, told[f[3]])
		}
	}
}

// TestNextCounterFollowsTheOrderOfTheCall: the events of a call get their counters in the order of the call,
// whatever is between them, and the next call counts on.
func TestNextCounterFollowsTheOrderOfTheCall(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, `CREATE TABLE outbox (id int GENERATED ALWAYS
		AS IDENTITY, doc_id uuid NOT NULL, actor_id char(3) NOT NULL, counter int NOT NULL,
		seq_key text NOT NULL, payload jsonb NOT NULL)`, `CREATE TABLE bare (doc_id text, counter int,
			payload text)`)
	d.both(t, func(t *testing.T, call inTx) {
		o := outboxOf(t, Config{NextCounter: true})
		d.exec("DROP TABLE IF EXISTS outflow_counter")
		_, err := call(t.Context(), o, many(1, true)...)
		wantError(t, err, "not a UUID")
		lower, upper := "6f1c7a52-0b5e-4d7c-8f7e-0123456789ab", "6F1C7A52-0B5E-4D7C-8F7E-0123456789AB"
		e := Event{Document: lower, Actor: "a", Payload: []byte("1")}
		_, err = call(t.Context(), o, e)
		wantError(t, err, "outflow_counter", "outflow init --sql-api")
		d.exec(o.Schema())
		same, other := e, e
		same.Document, same.Actor = upper, "a  " // the same document and actor, as their columns see it
		other.Actor = "b"
		events := []Event{e, other, same, other, e}
		for _, want := range [][]int64{{1, 1, 2, 2, 3}, {4, 3, 5, 4, 6}} {
			taken := countersOf(mustCall(t, call, o, events...))
			if !slices.Equal(taken, want) {
				t.Errorf("counters %v, want %v", taken, want)
			}
		}
		want := []string{"a:00000000000000000001", "b:00000000000000000001", "a:00000000000000000002",
			"b:00000000000000000002", "a:00000000000000000003"}
		if got := d.texts("SELECT seq_key FROM outbox ORDER BY id LIMIT 5"); !slices.Equal(got, want) {
			t.Errorf("keys %q, want %q", got, want)
		}
		bare := outboxOf(t, Config{Table: "bare", NextCounter: true})
		mustCall(t, call, bare, Event{Document: "d", Payload: []byte("x")},
			Event{Document: "d", Payload: []byte("y")})
		if got := d.texts("SELECT counter || payload FROM bare"); !slices.Equal(got, []string{"1x", "2y"}) {
			t.Errorf("bare has %q", got)
		}
		d.exec("TRUNCATE outbox, bare RESTART IDENTITY")
	})
}

// TestCallsDoNotDeadlock: calls that take counters of the same documents, named in opposite orders, wait for
// each other and never both.
func TestCallsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, defaultTable)
	o := outboxOf(t, Config{NextCounter: true})
	d.exec(o.Schema())
	var calls [][]Event // of 2, 6, 18 … documents
	for n := 2; n < 1000; n *= 3 {
		events := make([]Event, n)
		for i := range events {
			events[i] = Event{Document: fmt.Sprint(i), Payload: []byte("1")}
		}
		reversed := slices.Clone(events)
		slices.Reverse(reversed)
		calls = append(calls, events, reversed)
	}
	var all sync.WaitGroup
	failed := make([]error, 4)
	for w := range failed {
		all.Go(func() {
			db, err := sql.Open("pgx", d.url)
			if err != nil {
				failed[w] = err
				return
			}
			defer db.Close() //nolint:errcheck // the test is over
			mine := &database{t: t, sql: db}
			for i := range 6 * len(calls) {
				if _, err := mine.std(t.Context(), o, calls[(i*(w+1)+w)%len(calls)]...); err != nil {
					failed[w] = err
					return
				}
			}
		})
	}
	all.Wait()
	if err := errors.Join(failed...); err != nil {
		t.Fatal(err)
	}
}
