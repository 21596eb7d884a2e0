package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

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
		wanted, err = w.toRelease(ctx, tx, maxReleases, 1, []int64{0})
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
