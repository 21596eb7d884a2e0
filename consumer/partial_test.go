package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
)

// A stop that commits part of a batch parks nothing of the rest: a release would have its effect, and the
// next session would have it again.
func TestAStopParksNothingBeyondTheOffset(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(20, 2)
	src.publish(all...)
	cfg := w.config(src)
	cfg.Partitions = 1
	var newest atomic.Pointer[running]
	started := make(chan struct{})
	r := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		<-started
		switch {
		case e.seq == 1:
			await.True(func() bool { return src.read() == 20 })
			return Poison(errors.New("refused"))
		case e.Document == "d0":
			return fmt.Errorf("event %d was not parked", e.seq)
		case e.seq == 6:
			newest.Load().stop()
		}
		return handler(ctx, tx, e)
	})
	newest.Store(r)
	close(started)
	if err := r.ends(); err != nil {
		t.Fatal(err)
	}
	at := w.offsets()[0]
	var beyond int
	if err := w.mine.QueryRow(t.Context(), "SELECT count(*) FROM outflow_parked WHERE seq > $1", at).
		Scan(&beyond); err != nil || beyond != 0 {
		t.Errorf("the offset is %d, and %d events beyond it are parked, %v", at, beyond, err)
	}
	// The next session releases the document before it has read the rest.
	w.exec("UPDATE outflow_parked SET release = 'retry' WHERE seq = 1")
	rest := newMemoryStream().publish(all[:at]...)
	rest.created = src.created
	cfg.hooks.Source = rest
	c := w.consumer(cfg)
	c.cfg.poll = 10 * time.Millisecond
	w.start(c, handler)
	await.Until(t, "the release", func() error {
		var n int
		err := w.mine.QueryRow(t.Context(), "SELECT count(*) FROM outflow_parked").Scan(&n)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d are parked", n)
		}
		return err
	})
	rest.publish(all[at:]...)
	w.awaitOffsets(int64(len(all)))
	w.exactly(all)
}

// Whatever the handler does to the search path, a stop in the middle of a batch skips nothing.
func TestAStopSkipsNothingWhenTheHandlerSetsTheSearchPath(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(20, 1)
	src.publish(all...)
	w.exec("CREATE SCHEMA tenant")
	w.exec(Tables("tenant"))
	cfg := w.config(src)
	var newest atomic.Pointer[running]
	started := make(chan struct{})
	r := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		<-started
		if e.seq == 1 {
			await.True(func() bool { return src.read() == 20 })
		}
		if e.seq == 5 {
			newest.Load().stop()
		}
		if err := handler(ctx, tx, e); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "SET LOCAL search_path = tenant, public")
		return err
	})
	newest.Store(r)
	close(started)
	if err := r.ends(); err != nil {
		t.Fatal(err)
	}
	w.readAll(cfg, all)
	w.exactly(all)
}

// A handler that commits and then fails is told, though the consumer has nothing to commit any more.
func TestAHandlerThatCommitsAndFailsIsTold(t *testing.T) {
	t.Parallel()
	const behindPooler = "an error in another session"
	for how, fail := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"an error": func(context.Context, pgx.Tx) error { return errors.New("refused") },
		"a failed statement": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "SELECT 1/0")
			return err
		},
		behindPooler: func(ctx context.Context, tx pgx.Tx) error {
			for _, sql := range []string{"COMMIT", "RESET outflow.committed"} {
				if _, err := tx.Exec(ctx, sql); err != nil {
					return err
				}
			}
			return errors.New("refused")
		},
	} {
		for _, released := range []bool{false, true} {
			if released && how == behindPooler { // nothing tells it
				continue
			}
			t.Run(fmt.Sprint(how, ", released=", released), func(t *testing.T) {
				t.Parallel()
				w, s, src := newHarness(t), &publisher{}, newMemoryStream()
				all := s.events(10, 1)
				src.publish(all...)
				cfg := w.config(src)
				c := w.consumer(cfg)
				c.cfg.poll = 10 * time.Millisecond
				var parked atomic.Bool
				parked.Store(!released)
				r := w.start(c, func(ctx context.Context, tx pgx.Tx, e *Event) error {
					if !parked.Load() {
						return Poison(errors.New("to be released"))
					}
					if e.seq == 1 && !released {
						await.True(func() bool { return src.read() == 10 })
					}
					if err := handler(ctx, tx, e); err != nil || e.seq != 2 {
						return err
					}
					if _, err := tx.Exec(ctx, "COMMIT AND CHAIN"); err != nil {
						return err
					}
					return fail(ctx, tx)
				})
				if released {
					w.awaitOffsets(10)
					parked.Store(true)
					w.exec("UPDATE outflow_parked SET release = 'retry' WHERE seq = 1")
				}
				if err := r.ends(); !errors.Is(err, ErrHandler) || !strings.Contains(err.Error(),
					"ended the transaction") {
					t.Errorf("Run: %v", err)
				}
			})
		}
	}
}

// The event is the handler's own at each call: what it does to it decides nothing.
func TestTheEventIsTheHandlersOwn(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(6, 2)
	src.publish(all...)
	cfg := w.config(src)
	cfg.MaxAttempts = 2
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if e.Document == "d0" {
			e.Document, e.DeadLetter, e.Attempt = "d1", "no", -100
			return errors.New("refused")
		}
		return handler(ctx, tx, e)
	})
	w.await([]*stream.Message{all[1], all[3], all[5]})
	w.awaitOffsets(6)
	var documents string
	if err := w.mine.QueryRow(t.Context(), "SELECT string_agg(DISTINCT document, ' ') FROM outflow_parked").
		Scan(&documents); err != nil || documents != "d0" {
		t.Errorf("parked: %s, %v", documents, err)
	}
}

// A handler that has returned by the time of the stop was not left behind.
func TestAHandlerThatReturnedAtLastIsNotLeftBehind(t *testing.T) {
	t.Parallel()
	c := &calls{track: newTracker()}
	h := &hangError{document: "d1", seq: 7}
	c.track.hangs(h)
	if err := c.leftBehind(); !errors.Is(err, ErrHandler) || !strings.Contains(err.Error(), "sequence 7") {
		t.Errorf("while it hangs: %v", err)
	}
	c.track.returned(h)
	if err := c.leftBehind(); err != nil {
		t.Error(err)
	}
}

// An instance that stands by, or has just lost the lease, leaves the gauges of the active one alone.
func TestTheActiveInstanceKeepsItsGauges(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	var all []*metrics
	for range 3 {
		m, err := newMetrics(reg, "orders", 1)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	before, active, standBy := all[0], all[1], all[2]
	before.session(true)
	before.read(5)
	active.session(true)
	active.read(7)
	before.session(false)
	standBy.session(false)
	before.read(6)
	if got := gather(t, reg)["outflow_consumer_read_sequence consumer=orders"]; got != 7 {
		t.Errorf("the active instance has read up to 7, not %v", got)
	}
	active.session(false)
	if got, ok := gather(t, reg)["outflow_consumer_read_sequence consumer=orders"]; ok {
		t.Errorf("nobody is active, and has read up to %v", got)
	}
}

// What takes events that failed for good is the application's code as well: a panic of it is an error.
func TestAPanicOfOnPoisonIsAnError(t *testing.T) {
	t.Parallel()
	src := newMemoryStream().publish((&publisher{}).events(1, 1)...)
	w := newHarness(t)
	cfg := w.config(src)
	cfg.OnPoison = func(context.Context, *Event, error) error { panic("no disk") }
	c, err := New(nil, Memory(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	err = w.start(c, func(context.Context, pgx.Tx, *Event) error { return Poison(errors.New("x")) }).ends()
	if !errors.Is(err, ErrPoison) || !strings.Contains(err.Error(), "no disk") {
		t.Errorf("Run: %v", err)
	}
}

// A nil pointer may also be inside of an error: that fails the event, not the process.
func TestANilPointerInsideOfAnErrorIsAnError(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(3, 3)
	src.publish(all...)
	cfg := w.config(src)
	cfg.MaxAttempts = 2
	var none *pgconn.PgError
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		switch e.seq {
		case 1:
			return fmt.Errorf("insert: %w", none)
		case 2:
			panic(none)
		}
		return handler(ctx, tx, e)
	})
	w.awaitOffsets(3)
	w.exactly(all[2:])
}
