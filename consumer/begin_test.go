package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
)

// fullStream is full: with each question, a message comes and takes the first one.
type fullStream struct {
	*pulling
	publisher
}

func (f *fullStream) State(ctx context.Context) (stream.State, error) {
	st, err := f.pulling.State(ctx)
	f.publish(f.event("a"))
	f.removeTo(int64(st.First))
	return st, err
}

// TestANewConsumerOfAFullStreamBegins: what was the first message when the offsets were made is gone when
// they are compared, and what is then the first one when it comes to read. What goes after that is a gap.
func TestANewConsumerOfAFullStreamBegins(t *testing.T) {
	t.Parallel()
	for _, filter := range []string{">", "outbox.>"} {
		t.Run(filter, func(t *testing.T) {
			t.Parallel()
			src := &fullStream{pulling: &pulling{memoryStream: newMemoryStream()}}
			for range 20 {
				src.publish(src.event("a"))
			}
			cfg := (&harness{t: t, log: slog.New(slog.NewTextHandler(t.Output(), nil))}).config(src)
			cfg.Filters = []string{filter}
			c, err := New(nil, Memory(), cfg)
			must.Succeed(t, err)
			c.cfg.confirm, c.cfg.interval = time.Millisecond, 5*time.Millisecond
			var last, n atomic.Uint64
			var jumps atomic.Bool
			r := (&harness{t: t}).start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
				if was := last.Swap(e.Sequence); n.Add(1) > 1 && e.Sequence != was+1 || e.Sequence == 1 {
					jumps.Store(true)
				}
				return nil
			})
			await.Until(t, "events", func() error {
				select {
				case <-r.ended:
					t.Fatalf("Run ended: %v", r.err)
				default:
				}
				if n := n.Load(); n < 30 {
					return fmt.Errorf("%d", n)
				}
				return nil
			})
			if jumps.Load() {
				t.Error("it did not begin at one of the first messages and go on from there")
			}
			await.Until(t, "the gap", func() error {
				select {
				case <-r.ended:
					return nil
				default:
					src.change(func() {
						src.last += 2
						clear(src.held)
					})
					return errors.New("Run goes on")
				}
			})
			if err := r.ends(); !errors.Is(err, ErrGap) {
				t.Errorf("Run: %v", err)
			}
		})
	}
}

// TestWhatTheFilterOfANewConsumerLeavesOutIsNoGap: it has ended before it moved on over that, and the first
// of it goes.
func TestWhatTheFilterOfANewConsumerLeavesOutIsNoGap(t *testing.T) {
	t.Parallel()
	s, src, offsets := &publisher{}, &pulling{memoryStream: newMemoryStream()}, Memory()
	others := s.events(9, 1)
	for _, m := range others {
		m.Subject = "other.a"
	}
	src.publish(others...)
	w := &harness{t: t, log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	cfg := w.config(src)
	cfg.Filters = []string{"outbox.>"}
	var got atomic.Uint64
	begin := func() (*Consumer, *running) {
		c, err := New(nil, offsets, cfg)
		must.Succeed(t, err)
		c.cfg.confirm = time.Millisecond
		return c, w.start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
			got.Store(e.Sequence)
			return nil
		})
	}
	c, r := begin()
	await.Until(t, "it to begin", func() error {
		if st := c.State(); st.Status != Active {
			return errors.New(string(st.Status))
		}
		return nil
	})
	r.stopped()
	src.removeTo(5)
	src.publish(s.event("a"))
	_, r = begin()
	await.Until(t, "the first event", func() error {
		if n := got.Load(); n != 10 {
			return fmt.Errorf("sequence %d", n)
		}
		return nil
	}, func() error {
		select {
		case <-r.ended:
			return fmt.Errorf("Run ended: %v", r.err)
		default:
			return nil
		}
	})
}

// coming is a stream into which two messages come, each of another filter, while it is asked about the second
// filter.
type coming struct {
	*pulling
	come []*stream.Message
}

func (c *coming) Next(ctx context.Context, seq uint64) (uint64, error) {
	if next, err := c.pulling.Next(ctx, seq); c.come == nil || next > 0 || err != nil {
		return next, err
	}
	c.publish(c.come...)
	c.come = nil
	st, err := c.State(ctx)
	return st.Last, err
}

// TestANewConsumerWithFiltersLeavesOutNothingThatComes: in a stream without messages of its filters.
func TestANewConsumerWithFiltersLeavesOutNothingThatComes(t *testing.T) {
	t.Parallel()
	s, src := &publisher{}, &coming{pulling: &pulling{memoryStream: newMemoryStream()}}
	src.publish(s.event("a"))
	src.held[1].Subject = "third.a"
	src.come = s.events(2, 1)
	src.come[1].Subject = "other.a"
	w := &harness{t: t, log: logOf(t)}
	cfg := w.config(src)
	cfg.Filters = []string{"outbox.>", "other.>"}
	cfg.Document = func(subject string, _ nats.Header) string { return subject }
	c, err := New(nil, Memory(), cfg)
	must.Succeed(t, err)
	var got atomic.Uint64
	w.start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
		got.CompareAndSwap(0, e.seq)
		return nil
	})
	await.Until(t, "the first event", func() error {
		if got.Load() == 0 {
			return errors.New("none")
		}
		return nil
	})
	if seq := got.Load(); seq != 2 {
		t.Errorf("the first event has sequence %d", seq)
	}
}

// meeting is a stream that tells nobody its state before two have asked.
type meeting struct {
	*memoryStream
	asked atomic.Int32
	both  chan struct{}
}

func (m *meeting) State(ctx context.Context) (stream.State, error) {
	if m.asked.Add(1) == 2 {
		close(m.both)
	}
	<-m.both
	return m.memoryStream.State(ctx)
}

// TestAnInstanceThatStoodByBeginsNothing: two instances make the offsets of a new consumer, and one of them
// stands by. What goes while the other one tries the first event is a gap for that one, too.
func TestAnInstanceThatStoodByBeginsNothing(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	src := &meeting{memoryStream: newMemoryStream(), both: make(chan struct{})}
	src.publish(s.events(9, 1)...)
	cfg := w.config(src)
	cfg.Partitions = 1
	var passed atomic.Bool
	consumers := []*Consumer{w.consumer(cfg), w.consumer(cfg)}
	var instances []*running
	for _, c := range consumers {
		instances = append(instances, w.start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
			passed.CompareAndSwap(false, e.seq > 5)
			return Halt(errors.New("not yet"))
		}))
	}
	waits := 0
	await.Until(t, "one to try and the other to stand by", func() error {
		a, b := consumers[0].State(), consumers[1].State()
		if waits = 0; a.Status != Standby {
			waits, a, b = 1, b, a
		}
		if a.Status != Standby || len(b.Failing) != 1 {
			return fmt.Errorf("%s and %s", a.Status, b.Status)
		}
		return nil
	})
	src.removeTo(5)
	instances[1-waits].stopped()
	await.Until(t, "the gap", func() error {
		select {
		case <-instances[waits].ended:
			return nil
		default:
		}
		if passed.Load() {
			instances[waits].stop()
		}
		return errors.New("Run goes on")
	})
	if err := instances[waits].err; !errors.Is(err, ErrGap) {
		t.Errorf("Run: %v", err)
	}
}

// standing are offsets of an instance that does something between making those of a new consumer and its
// first claim.
type standing struct {
	Offsets
	then func() error
}

type standingStore struct {
	store
	then func() error
}

func (s standing) open(ctx context.Context, js jetstream.JetStream, cfg *Config) (store, error) {
	opened, err := s.Offsets.open(ctx, js, cfg)
	return standingStore{opened, s.then}, err
}

func (s standingStore) begin(ctx context.Context, l layout, filters []string, at offset,
	created time.Time) error {
	if err := s.store.begin(ctx, l, filters, at, created); err != nil {
		return err
	}
	return s.then()
}

// TestAnInstanceThatStoodStillBeginsNothing: it has made the offsets, and until its first claim another one
// has tried the first event.
func TestAnInstanceThatStoodStillBeginsNothing(t *testing.T) {
	t.Parallel()
	for name, offsets := range bothOffsets(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, src, w := &publisher{}, newMemoryStream(), &harness{t: t, log: logOf(t)}
			src.publish(s.events(9, 1)...)
			cfg := w.config(src)
			cfg.Partitions = 1
			var passed atomic.Bool
			begin := func(o Offsets) (*Consumer, *running) {
				c, err := New(nil, o, cfg)
				must.Succeed(t, err)
				c.cfg.confirm = time.Millisecond
				return c, w.start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
					passed.CompareAndSwap(false, e.seq > 5)
					return Halt(errors.New("not yet"))
				})
			}
			begun, goOn := make(chan struct{}), make(chan struct{})
			_, stands := begin(standing{offsets, func() error {
				close(begun)
				<-goOn
				return nil
			}})
			<-begun
			c, other := begin(offsets)
			await.Until(t, "the other one to try", func() error {
				if st := c.State(); len(st.Failing) != 1 {
					return errors.New(string(st.Status))
				}
				return nil
			})
			src.removeTo(5)
			other.stopped()
			close(goOn)
			await.Until(t, "the gap", func() error {
				select {
				case <-stands.ended:
					return nil
				default:
				}
				if passed.Load() {
					stands.stop()
				}
				return errors.New("Run goes on")
			})
			if !errors.Is(stands.err, ErrGap) {
				t.Errorf("Run: %v", stands.err)
			}
		})
	}
}

// TestAConsumerWhoseFirstInstanceDiedBegins: before its first claim, and the stream is full.
func TestAConsumerWhoseFirstInstanceDiedBegins(t *testing.T) {
	t.Parallel()
	for name, offsets := range bothOffsets(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, src, w := &publisher{}, newMemoryStream(), &harness{t: t, log: logOf(t)}
			src.publish(s.events(9, 1)...)
			var got atomic.Uint64
			begin := func(o Offsets) *running {
				c, err := New(nil, o, w.config(src))
				must.Succeed(t, err)
				c.cfg.confirm = time.Millisecond
				return w.start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
					got.CompareAndSwap(0, e.seq)
					return nil
				})
			}
			died := begin(standing{offsets, func() error { return crashError{errors.New("died")} }})
			if err := died.ends(); !isCrash(err) {
				t.Fatalf("Run: %v", err)
			}
			src.removeTo(5)
			r := begin(offsets)
			await.Until(t, "the first event", func() error {
				if n := got.Load(); n != 6 {
					return fmt.Errorf("sequence %d", n)
				}
				return nil
			}, func() error {
				select {
				case <-r.ended:
					return fmt.Errorf("Run ended: %v", r.err)
				default:
					return nil
				}
			})
		})
	}
}
