package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
)

type amount struct{ Cents int }

func TestPayloadsThatAreNotOfTheTypeArePoison(t *testing.T) {
	t.Parallel()
	var got []int
	h := JSON(func(_ context.Context, _ pgx.Tx, _ *Event, a amount) error {
		got = append(got, a.Cents)
		return nil
	})
	for data, want := range map[string]string{
		`{"cents": 7}`:   "",
		`{"cents": "7"}`: "cannot unmarshal",
		``:               "unexpected end",
		` null `:         "it is null",
		`{"cents": 7} x`: "invalid character",
	} {
		err := h(t.Context(), nil, &Event{Data: []byte(data)})
		if (err == nil) != (want == "") ||
			err != nil && (!poison(err) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", data, err, want)
		}
	}
	if fmt.Sprint(got) != "[7]" {
		t.Errorf("the handler was given %v", got)
	}
}

func TestAMuxHasARuleForTypesThatItDoesNotKnow(t *testing.T) {
	t.Parallel()
	refuse := errors.New("refused")
	answer := func(err error) Handler { return func(context.Context, pgx.Tx, *Event) error { return err } }
	m := Mux{Types: map[string]Handler{"a": answer(refuse), "b": nil}}
	for _, c := range []struct {
		unknown Handler
		kind    string
		want    error
		parks   bool
	}{
		{nil, "a", refuse, false},
		{nil, "c", ErrUnknownType, true},
		{nil, "b", ErrUnknownType, true},
		{nil, "", ErrUnknownType, true},
		{Skip, "c", nil, false},
		{Skip, "a", refuse, false},
		{answer(Halt(ErrUnknownType)), "c", ErrUnknownType, false},
	} {
		m.Unknown = c.unknown
		if err := m.Handle(t.Context(), nil, &Event{Type: c.kind}); !errors.Is(err, c.want) ||
			poison(err) != c.parks {
			t.Errorf("type %q: %v, want %v", c.kind, err, c.want)
		}
	}
}

// Middleware is part of the handler: around its transaction, before the upcasters, and when it misbehaves the
// event fails, not the process.
func TestMiddlewareIsPartOfTheHandler(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(6, 1)
	for _, m := range all {
		m.Data = bytes.ToUpper(m.Data)
	}
	all[4].Header.Set(deadLetterHeader, "too large")
	all[4].Data = []byte(`{"doc_id":"d0"}`)
	src.publish(all...)
	cfg := w.config(src)
	cfg.Batch, cfg.MaxAttempts, cfg.DeadLetters = 1, 100, handler
	cfg.Schema = &Schema{Current: "2", Missing: "1", From: HeaderVersion("v"), Up: map[string]Up{
		"1": {"2", suffix("+2")}}}
	var outer, dead atomic.Int32
	fails := map[uint64]func() error{
		2: func() error { panic("middleware") },
		3: func() error { var none *amountError; return none },
		4: func() error { return errors.New("not yet") },
	}
	cfg.Use = []Middleware{
		func(next Handler) Handler {
			return func(ctx context.Context, tx pgx.Tx, e *Event) error {
				outer.Add(1)
				if fail := fails[e.seq]; fail != nil && e.Attempt == 1 {
					return fail()
				}
				if e.DeadLetter != "" {
					dead.Add(1)
				}
				return next(ctx, tx, e)
			}
		},
		func(next Handler) Handler {
			return func(ctx context.Context, tx pgx.Tx, e *Event) error {
				if outer.Load() == 0 {
					t.Error("the second one is outermost")
				}
				e.Data = bytes.ToLower(e.Data) // as a decryption would
				return next(ctx, tx, e)
			}
		},
	}
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if want := e.ID + "+2"; string(e.Data) != want {
			t.Errorf("the handler reads %s, want %s", e.Data, want)
		}
		return handler(ctx, tx, e)
	})
	w.await(all)
	if calls := outer.Load(); calls != 9 || dead.Load() != 1 {
		t.Errorf("%d calls, %d of them with the dead letter, want 9 and 1", calls, dead.Load())
	}
}

type amountError struct{ text string }

func (e *amountError) Error() string { return e.text }

// The event is tried again after that time, in a batch as well, and is not parked however often it asks.
func TestRetryAfterWaitsAndCountsNoAttempt(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(12, 1)
	src.publish(all...)
	cfg := w.config(src)
	cfg.MaxAttempts = 2
	const pause = 30 * time.Millisecond
	var newest time.Time
	calls := 0
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if e.seq != 7 {
			return handler(ctx, tx, e)
		}
		if e.Attempt != 1 {
			t.Errorf("attempt %d", e.Attempt)
		}
		if d := time.Since(newest); d < pause {
			t.Errorf("called again after %v", d)
		}
		newest = time.Now()
		if calls++; calls < 6 {
			return RetryAfter(Poison(errors.New("not yet")), pause) // the outermost counts
		}
		return handler(ctx, tx, e)
	})
	w.await(all)
}

// A halted partition waits at its event, which is neither parked nor counted, and says so.
func TestAHaltedPartitionWaitsAndSaysSo(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(20, 2)
	src.publish(all...)
	cfg := w.config(src)
	reg := prometheus.NewRegistry()
	cfg.MaxAttempts, cfg.Registerer = 1, reg
	held := func() float64 { return gather(t, reg)["outflow_consumer_held_partitions consumer=orders"] }
	down, calls := errors.New("the bank is down"), atomic.Int32{}
	var mended atomic.Bool
	c := w.consumer(cfg)
	w.start(c, func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if e.Document == "d1" && !mended.Load() {
			calls.Add(1)
			return Halt(down)
		}
		return handler(ctx, tx, e)
	})
	var d0 []*stream.Message
	for _, m := range all {
		if m.Subject == "outbox.d0" {
			d0 = append(d0, m)
		}
	}
	w.await(d0)
	if !await.True(func() bool { return calls.Load() > 5 }) {
		t.Fatal("it is not tried again")
	}
	st := c.State()
	if st.Status != Active || !errors.Is(st.Err, down) || len(st.Failing) != 1 || len(st.Partitions) != 8 {
		t.Fatalf("%+v", st)
	}
	if f := st.Failing[0]; !f.Held || f.Document != "d1" || f.Sequence != 2 || f.Attempt != 1 ||
		!errors.Is(f.Err, down) || f.Since.IsZero() {
		t.Errorf("%+v", f)
	}
	if n := held(); n != 1 {
		t.Errorf("%v partitions are held by the metrics", n)
	}
	mended.Store(true)
	w.await(all)
	if !await.True(func() bool {
		st = c.State()
		return st.Err == nil && len(st.Failing) == 0 && held() == 0
	}) {
		t.Errorf("%+v, %v held", st, held())
	}
}

// A parked event that is released may have to wait as well.
func TestAReleasedEventThatHaltsIsNotParkedAgain(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(3, 1)
	src.publish(all...)
	cfg := w.config(src)
	cfg.MaxAttempts = 2
	var released atomic.Int32
	c := w.consumer(cfg)
	c.cfg.poll = 10 * time.Millisecond
	w.start(c, func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if e.seq == 1 {
			switch n := released.Load(); {
			case n == 0:
				return Poison(errors.New("refused"))
			case n < 9:
				released.Add(1)
				if n%2 == 0 {
					return Halt(errors.New("down"))
				}
				return RetryAfter(errors.New("not yet"), time.Millisecond)
			}
		}
		return handler(ctx, tx, e)
	})
	w.awaitOffsets(3)
	released.Store(1)
	if err := NewParked(w.mine, "").Retry(t.Context(), "orders", "d0"); err != nil {
		t.Fatal(err)
	}
	w.await(all)
}

// OnParked is told once the event is in the table, with the error; what it does wrong harms nothing.
func TestOnParkedIsToldOfWhatIsParked(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(12, 4)
	src.publish(all...)
	cfg := w.config(src)
	refuse := errors.New("refused")
	told := make(chan string, 100)
	cfg.OnParked = func(ctx context.Context, e *Event, cause error) {
		var parked int
		err := w.mine.QueryRow(ctx, "SELECT count(*) FROM outflow_parked WHERE document = $1 AND cause = "+
			"'poison'", e.Document).Scan(&parked)
		told <- fmt.Sprintf("%s %s %d %t %v", e.Document, e.Data, parked, errors.Is(cause, refuse), err)
		if e.Document == "d2" {
			panic("OnParked")
		}
	}
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if e.Document == "d1" || e.Document == "d2" {
			return Poison(refuse)
		}
		return handler(ctx, tx, e)
	})
	w.awaitOffsets(12)
	got := map[string]bool{<-told: true, <-told: true}
	if !got["d1 id-2 1 true <nil>"] || !got["d2 id-3 1 true <nil>"] || len(told) != 0 {
		t.Errorf("%v, %d more", got, len(told))
	}
}

// failingSource can't be opened while fail is set.
type failingSource struct {
	*memoryStream
	fail atomic.Pointer[error]
}

func (f *failingSource) Open(ctx context.Context, after uint64) (stream.Reader, error) {
	if err := f.fail.Load(); err != nil {
		return nil, *err
	}
	return f.memoryStream.Open(ctx, after)
}

func TestTheStateIsThatOfTheInstance(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, &failingSource{memoryStream: newMemoryStream()}
	src.publish(s.events(3, 3)...)
	cfg := w.config(src)
	cfg.Partitions, cfg.Lease = 1, time.Hour // so that the second one stands by until the first one stops
	first := w.consumer(cfg)
	is := func(c *Consumer, status Status, partitions int, err error) {
		t.Helper()
		var st State
		if !await.True(func() bool {
			st = c.State()
			return st.Status == status && len(st.Partitions) == partitions && errors.Is(st.Err, err)
		}) {
			t.Fatalf("%+v, want %s with %d partitions, %v", st, status, partitions, err)
		}
		if st.Since.IsZero() || time.Since(st.Since) < 0 {
			t.Errorf("since %v", st.Since)
		}
	}
	is(first, Stopped, 0, errNotCalled)
	down := errors.New("no route")
	src.fail.Store(&down)
	r := w.start(first, handler)
	is(first, Retrying, 0, down)
	src.fail.Store(nil)
	is(first, Active, 1, nil)
	second := w.consumer(cfg)
	w.start(second, handler)
	is(second, Standby, 0, nil)
	r.stopped()
	is(first, Stopped, 0, errReturned)
	is(second, Active, 1, nil)
}
