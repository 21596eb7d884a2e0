package publish

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// badContents can't be published: each leaves a dead letter in its place.
var badContents = []string{
	"", "[]", `{"doc_id":"d"`, `{"doc_id":"","payload":1}`, `{"doc_id":"d"}`, `{"payload":{}}`,
	`{"doc_id":"d","payload":1}`, `{"doc_id":7,"payload":1}`,
	`{"doc_id":"d","actor_id":"a","counter":-1,"payload":1}`,
	`{"doc_id":"d","actor_id":"a","counter":1,"payload":1,"docid":"d"}`,
	`{"doc_id":"d","doc_id":"e","seq_key":"k","payload":1}`, `{"doc_id":"d","seq_key":"\u0000","payload":1}`,
	`{"doc_id":"d","seq_key":"k","headers":{"event_type":1},"payload":1}`,
	`{"doc_id":"d","seq_key":"k","payload":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + `}`,
}

// bothLoad writes rows and messages in every mixture that a transaction can have.
type bothLoad struct {
	group sync.WaitGroup
	mu    sync.Mutex
	bad   int // committed messages that can't be published
	err   error
}

func startBothLoad(t *testing.T, url string, writers, rounds, large int, seed uint64) *bothLoad {
	t.Helper()
	l := &bothLoad{}
	t.Cleanup(l.group.Wait)
	for n := range writers {
		l.group.Go(func() {
			w := &bothWriter{rnd: rand.New(rand.NewPCG(seed, uint64(n))), actor: fmt.Sprint("writer ", n),
				counter: 10, large: large}
			err := w.run(t.Context(), url, rounds)
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.bad += w.bad; l.err == nil {
				l.err = err
			}
		})
	}
	return l
}

func (l *bothLoad) wait(t *testing.T) {
	t.Helper()
	l.group.Wait()
	if l.err != nil {
		t.Fatalf("write: %v", l.err)
	}
}

type bothWriter struct {
	rnd     *rand.Rand
	actor   string
	counter int
	bad     int
	large   int // events of a transaction that spills
}

func (w *bothWriter) run(ctx context.Context, url string, rounds int) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // every commit was answered
	for n := range rounds {
		if err := w.transaction(ctx, conn, n); err != nil {
			return err
		}
	}
	return nil
}

// transaction is one of rows and messages, some of them in savepoints that are rolled back, ended in one way
// or the other.
func (w *bothWriter) transaction(ctx context.Context, conn *pgx.Conn, round int) error {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	bad, events := w.bad, 1+w.rnd.IntN(12)
	if w.large > 0 && round == 3 {
		events = w.large
	}
	for range events {
		if err := w.event(ctx, tx); err != nil {
			return err
		}
	}
	if w.rnd.IntN(3) == 0 {
		if err := w.copyIn(ctx, tx); err != nil {
			return err
		}
		if err := w.event(ctx, tx); err != nil {
			return err
		}
	}
	if w.rnd.IntN(6) == 0 {
		w.bad = bad
		return tx.Rollback(ctx)
	}
	return tx.Commit(ctx)
}

func (w *bothWriter) event(ctx context.Context, tx pgx.Tx) error {
	switch w.rnd.IntN(12) {
	case 0: // a part that does not count, around messages and rows
		bad := w.bad
		point, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		for range 1 + w.rnd.IntN(3) {
			if err := w.event(ctx, point); err != nil {
				return err
			}
		}
		if w.rnd.IntN(2) == 0 {
			return point.Commit(ctx)
		}
		w.bad = bad
		return point.Rollback(ctx)
	case 1:
		w.bad++
		return w.exec(ctx, tx, harness.EmitEvent, badContents[w.rnd.IntN(len(badContents))])
	case 2: // no input beside events, and no event
		return w.exec(ctx, tx, "SELECT pg_logical_emit_message(true, 'outflow.tick', ''), "+
			"pg_logical_emit_message(false, 'outflow.event', $1)", w.content())
	case 3: // bytes, and more than a row of memory
		text := harness.EventContent("large", w.actor, w.next(), `"`+
			strings.Repeat("0123456789 ÷ ", w.rnd.IntN(4000))+`"`)
		return w.exec(ctx, tx, "SELECT pg_logical_emit_message(true, 'outflow.event', $1::bytea)",
			[]byte(text))
	case 4, 5, 6, 7:
		return w.exec(ctx, tx, harness.EmitEvent, w.content())
	}
	return w.exec(ctx, tx, insertRow, w.doc(), w.actor, w.next(), `{"n": 1.10, "row": true}`)
}

func (w *bothWriter) exec(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	_, err := tx.Exec(ctx, sql, args...)
	return err
}

func (w *bothWriter) copyIn(ctx context.Context, tx pgx.Tx) error {
	var rows [][]any
	for range 1 + w.rnd.IntN(20) {
		rows = append(rows, []any{w.doc(), w.actor, int64(w.next()), `[]`})
	}
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"outbox"}, []string{"doc_id", "actor_id", "counter", "payload"},
		pgx.CopyFromRows(rows))
	return err
}

func (w *bothWriter) content() string {
	return harness.EventContent(w.doc(), w.actor, w.next(),
		fmt.Sprintf(`{ "b" : 1.10, "a":9007199254740993, "s": "÷ \u00e9 %d" }`, w.rnd.IntN(10)))
}

func (w *bothWriter) doc() string { return fmt.Sprint("doc ", w.rnd.IntN(4)) }

// next is a counter that goes up, and now and then back a little.
func (w *bothWriter) next() int {
	w.counter += 2
	return w.counter - 3*(w.rnd.IntN(4)/3)
}

// TestRowsAndMessagesMakeOneExactStream is claims C1 to C6 for rows and messages on one slot: two outflows on
// two slots, one killed again and again; a second implementation of the rules computes from the WAL, as
// test_decoding prints it, what both streams have to be, byte by byte.
func TestRowsAndMessagesMakeOneExactStream(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	testBothSources(t, pgtest.Server(t), oracle.DefaultSettings,
		harness.EnvInt(t, "OUTFLOW_TEST_ROUNDS", 60), harness.EnvInt(t, "OUTFLOW_TEST_KILLS", 3), 6000)
}

// TestRowsAndMessagesMakeOneExactStreamInGapMode is the same where all that is committed later in a document
// waits for a missing counter, and most counters never come.
func TestRowsAndMessagesMakeOneExactStreamInGapMode(t *testing.T) {
	t.Parallel()
	set := oracle.DefaultSettings
	set.Horizon, set.Sort, set.Gap = 0, oracle.ByGap, oracle.Gap{Bound: 100 * time.Millisecond,
		Cold: 10 * time.Millisecond, Memory: 16384, First: 1, Document: true}
	testBothSources(t, pgtest.Server(t), set, 12, 1, 1000)
}

// TestRowsAndMessagesMakeOneExactStreamOnEveryMajor is the same on every major, shorter.
func TestRowsAndMessagesMakeOneExactStreamOnEveryMajor(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		testBothSources(t, pg, oracle.DefaultSettings, 12, 1, 400)
	})
}

func testBothSources(t *testing.T, pg *pgserver.Server, set oracle.Settings, rounds, kills, large int) {
	t.Helper()
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	t.Logf("seed %d", seed)
	ns := natstest.Server(t)
	set.MaxBytes = 200_000 // a large transaction spills
	settings := append(orderSettings(set), "SOURCE=both", "SINK_ON_POISON=dead_letter",
		"SINK_DEAD_LETTER_SUBJECT=dead.letters", "SUBJECT=both.{doc_id}.{counter}",
		"HEADERS=N=counter,Actor=actor_id")
	victim, conn, url := harness.Install(t, pg, ns.URL(), "both", settings...)
	victim.Init()
	twin := harness.New(t, url, ns.URL(), harness.SlotName("twin"), settings...)
	twin.UseStream(strings.ToUpper(twin.Slot))
	twin.Init()
	j := judgeEvents(victim, oracle.OfBoth, url, set)
	j.reader = oracle.NewReader(oracle.Source{
		Slot: victim.Slot + "_judge", Events: oracle.OfBoth,
		Headers: map[string]string{"N": "counter", "Actor": "actor_id"}, Subject: func(r oracle.Row) string {
			return "both." + oracle.Token(r.Text("doc_id")) + "." + oracle.Token(r.Text("counter"))
		},
	})
	j.cfg.DeadLetters = true
	victim.Start()
	twin.Start()
	l := startBothLoad(t, url, 3, rounds, large, seed)
	rnd := rand.New(rand.NewPCG(seed, 99))
	for range kills {
		time.Sleep(time.Duration(rnd.Int64N(int64(400 * time.Millisecond)))) // when it is killed is random
		victim.Kill()
		victim.Start()
	}
	l.wait(t)
	v := j.mustAgree(ns.URL())
	if v.DeadLetters != l.bad || l.bad == 0 {
		t.Errorf("%d dead letters, %d messages that can't be published were committed", v.DeadLetters, l.bad)
	}
	truth := j.read()
	if truth.Messages == 0 || truth.Messages == truth.Events {
		t.Errorf("%d events, %d of them messages: want both", truth.Events, truth.Messages)
	}
	t.Logf("%d events, %d of them messages", truth.Events, truth.Messages)
	harness.Eventually(t, "the twin", func() error {
		n, sum, err := oracle.Digest(t.Context(), harness.JetStream(t, ns.URL()), twin.Stream)
		if err == nil && (sum != v.Digest || n != v.Published) {
			err = fmt.Errorf("%d messages with digest %s, want %d with %s", n, sum, v.Published, v.Digest)
		}
		return err
	})
	if victim.Stop() != 0 || twin.Stop() != 0 {
		t.Error("the stop was not clean")
	}
	var left int
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&left); err != nil ||
		left+truth.Messages != truth.Events {
		t.Errorf("%d rows, %d messages, %d events: %v", left, truth.Messages, truth.Events, err)
	}
}
