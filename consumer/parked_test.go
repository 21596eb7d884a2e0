package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// ward is a parking with its database, and what a worker would do with it.
type ward struct {
	*parking
	t       testing.TB
	pool    *pgxpool.Pool
	effects []string // what the handler did and was committed
	refuse  func(e *Event) error
	tried   []string // attempts, committed or not
	next    uint64
	replays uint64
	reg     *prometheus.Registry // of the session
}

func newWard(t testing.TB) *ward {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), pgtest.Database(t, pgtest.Server(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := pool.Exec(t.Context(), strings.ReplaceAll(parkedSchema, "%s", "")); err != nil {
		t.Fatal(err)
	}
	w := &ward{t: t, pool: pool, next: 1}
	w.restart()
	return w
}

// restart begins another session, which has all documents.
func (w *ward) restart() {
	w.t.Helper()
	w.restartWith(1, 0)
}

// restartWith begins another session, which has some of so many partitions.
func (w *ward) restartWith(partitions int, own ...int) {
	w.t.Helper()
	cfg, err := Config{
		Name: "orders", Stream: "OUTBOX", MaxAttempts: 3, ParkAfter: 1,
		Backoff: Backoff{First: time.Nanosecond, Max: time.Nanosecond},
	}.withDefaults()
	if err != nil {
		w.t.Fatal(err)
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	dec, err := newDecoder(&cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.reg = prometheus.NewRegistry()
	met, err := newMetrics(w.reg, cfg.Name, cfg.Partitions)
	if err != nil {
		w.t.Fatal(err)
	}
	met.session(true)
	w.parking = newParking(&cfg, dec, met)
	w.tx(func(ctx context.Context, tx pgx.Tx) error { return w.load(ctx, tx, partitions, own) })
}

// tx runs do in a transaction that must succeed.
func (w *ward) tx(do func(ctx context.Context, tx pgx.Tx) error) {
	w.t.Helper()
	if err := w.within(w.t.Context(), do); err != nil {
		w.t.Fatal(err)
	}
}

func (w *ward) within(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
	n := len(w.effects)
	err := pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error { return do(ctx, tx) })
	if err != nil {
		w.effects = w.effects[:n]
	}
	return err
}

func (w *ward) handle(_ context.Context, _ pgx.Tx, e *Event) error {
	word := fmt.Sprintf("%s%d", e.Document, e.seq)
	w.tried = append(w.tried, fmt.Sprintf("%s/%d", word, e.Attempt))
	if w.refuse != nil {
		if err := w.refuse(e); err != nil {
			return err
		}
	}
	w.effects = append(w.effects, word)
	return nil
}

// event is the next event of a document.
func (w *ward) event(document string) *Event {
	w.t.Helper()
	h := outbox.Header{Pos: outbox.Position{LSN: outbox.LSN(w.next), Index: 1}, Of: 1,
		ID: fmt.Sprint("id ", w.next), Key: "k"}
	e, err := w.dec.event(&stream.Message{
		Subject: "outbox." + string(outbox.AppendToken(nil, document)), Sequence: w.next, Time: time.Now(),
		Data:   []byte(`{"a": 1}`),
		Header: nats.Header{"Outflow": {h.String()}, "Bad": {"\xff\x00", "a"}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.next++
	return e
}

// fail parks the next event of a document as the first one.
func (w *ward) fail(document string) {
	w.t.Helper()
	e := w.event(document)
	e.Attempt = 3
	w.tx(func(ctx context.Context, tx pgx.Tx) error {
		return w.park(ctx, tx, e, errors.New("no\x00 good\xff"))
	})
	w.add(document)
}

// come lets the next events of documents come by: those that are parked go behind, the others have their
// effect.
func (w *ward) come(documents ...string) {
	w.t.Helper()
	var maybe, all []*Event
	for _, document := range documents {
		e := w.event(document)
		if all = append(all, e); w.may(document) {
			maybe = append(maybe, e)
		}
	}
	w.tx(func(ctx context.Context, tx pgx.Tx) error {
		parked, err := w.parkBehind(ctx, tx, maybe)
		for _, e := range all {
			if err == nil && !parked[e] {
				err = w.handle(ctx, tx, e)
			}
		}
		return err
	})
}

// word sets the word of release at the first row of a document, as the command does.
func (w *ward) word(document, how string) {
	w.t.Helper()
	tag, err := w.pool.Exec(w.t.Context(), `UPDATE outflow_parked SET release = $2
		WHERE ord = (SELECT ord FROM outflow_parked WHERE document = $1 ORDER BY source DESC, ord LIMIT 1)`,
		document, how)
	if err != nil || tag.RowsAffected() != 1 {
		w.t.Fatal(tag, err)
	}
}

// out releases what is wanted, to the end.
func (w *ward) out() {
	w.t.Helper()
	var wanted []parkedDocument
	w.tx(func(ctx context.Context, tx pgx.Tx) (err error) {
		wanted, err = w.toRelease(ctx, tx, 1, []int64{0})
		return err
	})
	for _, d := range wanted {
		for again := true; again; {
			var err error
			if _, again, err = w.release(w.t.Context(), w.t.Context(), d.document, w.within,
				w.handle); err != nil {
				w.t.Fatal(err)
			}
		}
	}
}

// rows is what is parked: document, sequence, cause, attempts, word.
func (w *ward) rows() string {
	w.t.Helper()
	rows, err := w.pool.Query(w.t.Context(), `SELECT format('%s%s %s %s %s', document, seq, cause, attempts,
		release)
		FROM outflow_parked ORDER BY ord`)
	if err != nil {
		w.t.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.t.Fatal(err)
	}
	for i := range all {
		all[i] = strings.TrimSpace(all[i])
	}
	return strings.Join(all, ", ")
}

func (w *ward) want(effects, rows string) {
	w.t.Helper()
	if got := strings.Join(w.effects, " "); got != effects {
		w.t.Errorf("effects %q, want %q", got, effects)
	}
	if got := w.rows(); got != rows {
		w.t.Errorf("parked are %q, want %q", got, rows)
	}
}

func TestParkedDocumentIsReleasedInOrder(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.come("b", "a", "b", "a")
	w.want("b2 b4", "a1 poison 3, a3 behind 0, a5 behind 0")
	w.out() // nobody asked
	w.restart()
	w.come("a", "b")
	w.want("b2 b4 b7", "a1 poison 3, a3 behind 0, a5 behind 0, a6 behind 0")
	w.word("a", "retry")
	w.out()
	w.come("a")
	w.want("b2 b4 b7 a1 a3 a5 a6 a8", "")
	if len(w.count) != 0 || w.may("a") {
		t.Errorf("%v is still kept", w.count)
	}
	if want := "a1/4"; !slices.Contains(w.tried, want) {
		t.Errorf("attempts %v, want %s", w.tried, want)
	}
}

func TestSkippedEventHasNoEffect(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.fail("b")
	w.come("a", "a")
	w.word("a", "skip")
	w.word("b", "skip")
	w.out()
	w.come("a", "b")
	w.want("a3 a4 a5 b6", "")
}

// A retry that fails parks the document again, with the attempts of before and those of now; what was behind
// stays behind.
func TestARetryThatFailsParksTheDocumentAgain(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.come("a", "a", "a")
	w.refuse = func(e *Event) error {
		if e.seq == 1 || e.seq == 3 {
			return errors.New("still not")
		}
		return nil
	}
	w.word("a", "retry")
	w.out()
	w.want("", "a1 poison 6, a2 behind 0, a3 behind 0, a4 behind 0")
	if got, want := strings.Join(w.tried, " "), "a1/4 a1/5 a1/6"; got != want {
		t.Errorf("attempts %s, want %s", got, want)
	}
	w.refuse = func(e *Event) error {
		if e.seq == 3 {
			return Poison(errors.New("never"))
		}
		return nil
	}
	w.word("a", "retry")
	w.out()
	w.want("a1 a2", "a3 poison 1, a4 behind 0")
	w.refuse = nil
	w.come("a")
	w.word("a", "retry")
	w.out()
	w.want("a1 a2 a3 a4 a5", "")
}

// While a document with many events is released, in batches, new ones come: they go behind the others.
func TestEventsThatComeDuringAReleaseGoBehind(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	var want []string
	for i := range 3 * releaseEvents {
		w.come("a")
		want = append(want, fmt.Sprintf("a%d", i+1))
	}
	w.word("a", "retry")
	steps := 0
	for again := true; again; steps++ {
		var err error
		if _, again, err = w.release(t.Context(), t.Context(), "a", w.within, w.handle); err != nil {
			t.Fatal(err)
		}
		if steps == 0 {
			if n := len(w.effects); n != releaseEvents {
				t.Errorf("%d events in one transaction, want %d", n, releaseEvents)
			}
			w.come("a", "b")
			w.restart() // the word is handed on: another session goes on
			w.out()
			again = false
		}
	}
	w.come("a")
	n := 3*releaseEvents + 1
	got := slices.DeleteFunc(slices.Clone(w.effects), func(s string) bool { return s[0] == 'b' })
	want = append(want, fmt.Sprintf("a%d", n), fmt.Sprintf("a%d", n+1), fmt.Sprintf("a%d", n+3))
	if !slices.Equal(got, want) {
		t.Errorf("effects\n%v, want\n%v", got, want)
	}
	w.effects = nil
	w.want("", "")
}

// What the commit refuses is the event's fault as well: the others of the transaction have their effect, it
// is parked again.
func TestAnEventThatTheCommitRefusesIsParkedAgain(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	if _, err := w.pool.Exec(t.Context(), `CREATE TABLE effect (seq bigint UNIQUE DEFERRABLE INITIALLY
		DEFERRED);
		INSERT INTO effect VALUES (3)`); err != nil {
		t.Fatal(err)
	}
	w.fail("a")
	w.come("a", "a", "a")
	w.word("a", "retry")
	handle := func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if _, err := tx.Exec(ctx, `INSERT INTO effect VALUES ($1)`, e.seq); err != nil {
			return err
		}
		return w.handle(ctx, tx, e)
	}
	for again := true; again; {
		var err error
		if _, again, err = w.release(t.Context(), t.Context(), "a", w.within, handle); err != nil {
			t.Fatal(err)
		}
	}
	w.want("a1 a2", "a3 poison 3, a4 behind 0")
}

// A release that a crash, a lost session or the end of its context cuts off leaves everything as it was.
func TestAReleaseThatIsCutOffChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.come("a")
	w.word("a", "retry")
	lost := errors.New("session lost")
	late := func(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
		return w.within(ctx, func(ctx context.Context, tx pgx.Tx) error {
			if err := do(ctx, tx); err != nil {
				return err
			}
			return lost
		})
	}
	if _, _, err := w.release(t.Context(), t.Context(), "a", late, w.handle); !errors.Is(err, lost) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	w.cfg.Backoff = Backoff{First: time.Hour, Max: time.Hour} // nobody waits any more
	w.refuse = func(*Event) error { cancel(); return errors.New("it failed while everything stopped") }
	if _, _, err := w.release(ctx, t.Context(), "a", w.within, w.handle); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	w.refuse = func(*Event) error {
		cancel()
		return errors.New("it failed while the consumer was told to stop")
	}
	if left, again, err := w.release(t.Context(), ctx, "a", w.within, w.handle); !left || again ||
		err != nil {
		t.Error(left, again, err)
	}
	// the operator thinks again, in the middle of it
	w.refuse = func(*Event) error { w.word("a", "skip"); return nil }
	if _, _, err := w.release(t.Context(), t.Context(), "a", w.within, w.handle); err == nil ||
		!strings.Contains(err.Error(), "1 of 2 rows") {
		t.Error(err)
	}
	w.want("", "a1 poison 3 skip, a2 behind 0")
}

// An event that comes again, since the consumer was rewound, is not parked twice.
func TestAParkedEventThatComesAgainIsNotParkedTwice(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.come("a")
	w.next = 1
	w.come("a", "a", "a")
	w.want("", "a1 poison 3, a2 behind 0, a3 behind 0")
}

// replayed lets events of a document come by that are replayed: those of the stream's sequences, each in a
// transaction of its own, from the stream or from the table. Those that fail for good are parked.
func (w *ward) replayed(document string, fromTable bool, seqs ...uint64) {
	w.t.Helper()
	for _, seq := range seqs {
		h := outbox.Header{Pos: outbox.Position{LSN: outbox.LSN(seq), Index: 1}, Of: 1,
			ID: fmt.Sprint("id ", seq)}
		m := &stream.Message{Subject: replayPrefix("OUTBOX", "orders") + "outbox." + document,
			Sequence: w.replays + 1, Replay: true, Time: time.Now(), Data: []byte("{}"),
			Header: nats.Header{replayHeader: {"again"}}}
		if w.replays++; fromTable {
			h.Pos = outbox.Position{}
		} else {
			m.Header.Set(replaySequenceHeader, fmt.Sprint(seq))
		}
		m.Header.Set("Outflow", h.String())
		e, err := w.dec.event(m)
		if err != nil {
			w.t.Fatal(err)
		}
		e.seq = seq // for the test to tell them by
		failed := w.within(w.t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			parked, err := w.parkBehind(ctx, tx, []*Event{e})
			if err == nil && !parked[e] {
				err = w.handle(ctx, tx, e)
			}
			return err
		})
		if failed != nil {
			w.tx(func(ctx context.Context, tx pgx.Tx) error { return w.park(ctx, tx, e, failed) })
			w.add(document)
		}
	}
}

// A replayed event at or behind the first parked one of its document is what waits there: released, each has
// its effect once. One before it has its effect again, and if it fails, it and what follows in the replay go
// before what was parked.
func TestAReplayDoesNotRepeatWhatIsParked(t *testing.T) {
	t.Parallel()
	for _, fromTable := range []bool{false, true} {
		w := newWard(t)
		w.come("a", "b", "a")
		w.fail("a")
		w.come("b", "a", "a") // 4 is poison, 6 and 7 are behind it
		w.effects = nil
		w.replayed("a", fromTable, 1, 3, 4, 6, 7)
		w.replayed("b", fromTable, 2, 5)
		w.want("a1 a3 b2 b5", "a4 poison 3, a6 behind 0, a7 behind 0")
		w.restart()
		w.word("a", releaseRetry)
		w.out()
		w.want("a1 a3 b2 b5 a4 a6 a7", "")
	}

	w := newWard(t)
	w.come("a", "a", "a")
	w.fail("a")
	w.come("a")
	w.effects = nil
	w.refuse = func(e *Event) error {
		if e.Replayed && e.Sequence == 2 {
			return errors.New("no good")
		}
		return nil
	}
	w.replayed("a", false, 1, 2, 3, 4, 5)
	const rows = "a4 poison 3, a5 behind 0, a2 poison 1, a3 behind 0"
	w.want("a1", rows)
	w.replayed("a", false, 1, 2, 3, 4, 5) // again
	w.want("a1 a1", rows)
	w.refuse = nil
	w.word("a", releaseRetry)
	w.out()
	w.want("a1 a1 a2 a3 a4 a5", "")
}

// What memory says too much the table corrects.
func TestTheTableCorrectsWhatMemoryTakesForParked(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.full = true
	w.come("a", "a")
	w.fail("b")
	w.come("b", "a")
	w.want("a1 a2 a5", "b3 poison 3, b4 behind 0")

	w.restart()
	w.add("c") // as would another document of the same hash
	w.add("c")
	if w.drop("c"); !w.may("c") {
		t.Error("a document is let go that is parked")
	}
}

// The metrics are of the instance's own partitions: documents of others are released by others, and it would
// show those for ever.
func TestParkedDocumentsAreCountedWhereTheyAreReleased(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	shows := func(documents int, least, most time.Duration) {
		t.Helper()
		w.out() // nothing: it looks what is to be released
		got := gather(t, w.reg)
		n, since := got["outflow_consumer_parked_documents consumer=orders"],
			got["outflow_consumer_oldest_parked_seconds consumer=orders"]
		if n != float64(documents) || since < least.Seconds() || since > most.Seconds() {
			t.Errorf("%v documents, for %v s; want %d, for %v to %v", n, since, documents, least, most)
		}
	}
	shows(0, 0, 0)
	own := int(w.event("a").hash % 1000)
	w.fail("a")
	w.come("a")
	w.fail("b")
	shows(2, 0, time.Hour)
	for document, at := range map[string]string{"a": "3 hours", "b": "5 hours"} {
		if _, err := w.pool.Exec(t.Context(), "UPDATE outflow_parked SET parked_at = now() - $2::interval "+
			"WHERE document = $1", document, at); err != nil {
			t.Fatal(err)
		}
	}
	w.restart()
	shows(2, 5*time.Hour, 6*time.Hour)
	w.restartWith(1000, own) // not the partition of b
	if !w.may("b") {
		t.Error("what is parked elsewhere is not known")
	}
	shows(1, 3*time.Hour, 4*time.Hour)
	w.fail("c")
	shows(2, 3*time.Hour, 4*time.Hour)
	w.drop("b") // which was never counted
	shows(2, 3*time.Hour, 4*time.Hour)
	w.word("a", releaseSkip)
	w.out()
	shows(1, 0, time.Hour)
	w.word("c", releaseSkip)
	w.out()
	shows(0, 0, 0)
}

// Names, headers and errors that PostgreSQL can't hold are parked all the same, and come out as they were.
func TestBytesThatPostgreSQLCannotHoldAreParkedUnchanged(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	documents := []string{"", "\xff", "a\x00b", strings.Repeat("é", 30), "=FF "}
	for _, document := range documents {
		w.fail(document)
		w.come(document)
		w.restart()
		if !w.may(document) {
			t.Errorf("%q is not kept", document)
		}
		w.word(storable(document), "retry")
	}
	var events []*Event
	w.refuse = func(e *Event) error { events = append(events, e); return nil }
	var wanted []parkedDocument
	w.tx(func(ctx context.Context, tx pgx.Tx) (err error) {
		wanted, err = w.toRelease(ctx, tx, 1, []int64{0})
		return err
	})
	for i, d := range wanted {
		if want := partitionHash(documents[i]); d.hash != want {
			t.Errorf("%q is looked for in the partition of hash %d, not %d", documents[i], d.hash, want)
		}
	}
	w.out()
	if len(events) != 2*len(documents) || w.rows() != "" {
		t.Fatalf("%d events; parked are %s", len(events), w.rows())
	}
	for i, e := range events {
		if e.Document != documents[i/2] || !slices.Equal(e.Header["Bad"], []string{"\xff\x00", "a"}) ||
			string(e.Data) != `{"a": 1}` || e.ID != fmt.Sprint("id ", e.seq) {
			t.Errorf("%+v", e)
		}
	}
}

// What one transaction releases is bounded in bytes too; an event that is larger than that goes alone.
func TestAReleaseIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	for range 3 {
		e := w.event("a")
		e.raw.Data = make([]byte, releaseBytes/2+1)
		w.tx(func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.parkBehind(ctx, tx, []*Event{e})
			return err
		})
	}
	w.word("a", "retry")
	var steps []int
	for again := true; again; {
		var err error
		if _, again, err = w.release(t.Context(), t.Context(), "a", w.within, w.handle); err != nil {
			t.Fatal(err)
		}
		steps = append(steps, len(w.effects))
	}
	if want := []int{2, 3, 4}; !slices.Equal(steps, want) {
		t.Errorf("after the steps %v effects, want %v", steps, want)
	}
}

func FuzzHeaderText(f *testing.F) {
	f.Add("Name", "a", "\xff\x00")
	f.Add("", "", "{}")
	f.Fuzz(func(t *testing.T, name, a, b string) {
		h := nats.Header{strings.ToValidUTF8(name, "?"): {a, b}}
		all := headerText(h)
		for _, values := range all {
			for _, v := range values {
				if s, ok := v.(string); ok && (strings.Contains(s, "\x00") || !utf8.ValidString(s)) {
					t.Errorf("PostgreSQL can't take %q", s)
				}
			}
		}
		text, err := json.Marshal(all)
		if err != nil {
			t.Fatal(err)
		}
		back, err := parseHeaderText(text)
		if err != nil || !reflect.DeepEqual(back, h) {
			t.Errorf("%q came back as %q, %v", h, back, err)
		}
	})
}
