package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// opening is a stream to which something happens after a session has compared it with the offsets, and before
// it reads.
type opening struct {
	*memoryStream
	before func()
}

func (o *opening) Open(ctx context.Context, after uint64) (stream.Reader, error) {
	if o.before != nil {
		o.before()
		o.before = nil
	}
	return o.memoryStream.Open(ctx, after)
}

// A hole appears when a session has looked at the stream and has read nothing yet. What it begins to read may
// be before the hole.
func TestALossBeforeTheStreamIsReadIsSeen(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		differ bool // the offsets do
		lost   int
	}{{false, 40}, {true, 40}, {false, 1}, {true, 1}} {
		t.Run(fmt.Sprintf("differ=%t,lost=%d", c.differ, c.lost), func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, &opening{memoryStream: newMemoryStream()}
			all := s.events(100, 3) // most partitions have nothing
			src.publish(all...)
			w.readAll(w.config(src), all)
			if c.differ {
				used := map[int]bool{}
				for _, m := range all[:3] {
					p, err := w.consumer(w.config(src)).partition(m)
					if err != nil {
						t.Fatal(err)
					}
					used[p] = true
				}
				for p := range 8 {
					if !used[p] {
						w.exec(
							`UPDATE outflow_mark SET seq = 10, due = '0/0', n = 0, lsn = '0/0', i = 0
								WHERE partition = $1`, p)
					}
				}
			}
			more := s.events(20, 3)
			src.before = func() {
				src.lose(uint64(101-c.lost), false)
				src.publish(slices.Concat(all[100-c.lost:], more)...)
			}
			w.readAll(w.config(src), slices.Concat(all, more))
		})
	}
}

// Before a loss that is seen only later, a filtered consumer has moved on over what the filter leaves out.
func TestAFilteredConsumerIsNotMisledByALaterLoss(t *testing.T) {
	t.Parallel()
	s, src := &publisher{}, newMemoryStream()
	all := s.events(30, 3)
	src.publish(all...)
	heads := make([]outbox.Header, len(all))
	for i, m := range all {
		h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
		if err != nil {
			t.Fatal(err)
		}
		heads[i] = h
	}
	cfg := &Config{Name: "orders", Stream: "OUTBOX", Filters: []string{"outbox.d1"}}
	p := newDispatcher(&run{cfg: cfg, source: live, src: src}, 0, offset{})
	p.work = t.Context()
	p.at = offsetOf(30, &heads[29]) // as idle leaves it
	src.lose(21, false)
	if err := p.checkOrder(offsetOf(31, &heads[22]), &heads[22], all[22]); !errors.Is(err, errLostEnd) {
		t.Errorf("an event that comes again behind a hole is taken for a new one (%v)", err)
	}
}

// TestWhatComesAgainIsNoGapForAFilter: the broker lost the end of its stream, retention took all before that,
// and the filter has nothing behind it. What retention has taken without being read still is one.
func TestWhatComesAgainIsNoGapForAFilter(t *testing.T) {
	t.Parallel()
	for read, gap := range map[uint64]string{3: "sequences 4 to 5", 5: "", 7: ""} {
		s, src := &publisher{}, newMemoryStream()
		all := s.events(8, 1)
		src.publish(all...)
		src.lose(6, false)
		src.publish(all[5:]...)
		src.removeTo(5)
		h, err := outbox.ParseHeader(all[read-1].Header.Get(outbox.HeaderName))
		if err != nil {
			t.Fatal(err)
		}
		cfg := Config{Name: "orders", Stream: "OUTBOX", Filters: []string{"outbox.d1"}, Log: slog.Default()}
		met, err := newMetrics(nil, cfg.Name, 1)
		if err != nil {
			t.Fatal(err)
		}
		d := newDispatcher(&run{cfg: &cfg, source: live, src: src, met: met,
			work: t.Context(), stop: t.Context()}, 0, offsetOf(read, &h))
		st, err := src.State(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		d.check.created, d.reader = st.Created.Truncate(time.Microsecond), &memoryReader{s: src}
		err = d.inspect(flowState{})
		if gap == "" && (err != nil || d.at.Seq != 8) ||
			gap != "" && (!errors.Is(err, ErrGap) || !strings.Contains(err.Error(), gap)) {
			t.Errorf("%d were read: at %d, %v", read, d.at.Seq, err)
		}
	}
}

// moving is a store that only moves offsets.
type moving struct {
	store
	to []offset
}

func (m *moving) move(_ context.Context, _ string, _ int, _, to offset,
	_ func(context.Context, pgx.Tx) error) error {
	m.to = append(m.to, to)
	return nil
}

// The offset of a worker that has nothing to do follows the others. Behind a hole it stays while it knows
// more of what comes again than the message that it would move to: that is how events are told that have had
// their effect.
func TestAnIdleOffsetDoesNotMoveWhileEventsComeAgain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		holed, again bool
		to           offset
		moves        bool
	}{
		"events come again, from before it": {true, true, offset{Seq: 110, Due: 650}, false},
		"up to before it in its window":     {true, true, offset{Seq: 110, Due: 1000, N: 4}, false},
		"up to its own message":             {true, true, offset{Seq: 110, Due: 1000, N: 5}, true},
		"and beyond it":                     {true, true, offset{Seq: 110, Due: 1010}, true},
		"to a sequence before it":           {true, true, offset{Seq: 100, Due: 1010}, false},
		"no events come again":              {true, false, offset{Seq: 110, Due: 650}, true},
		"its message is there":              {false, true, offset{Seq: 110, Due: 650}, true},
	} {
		st := &moving{}
		l := newWorker(&run{cfg: &Config{}, source: live, store: st}, 0,
			offset{Seq: 100, Due: 1000, N: 5, Lost: c.holed})
		if err := l.advance(item{to: c.to, republished: c.again}); err != nil || len(st.to) != b2i(c.moves) {
			t.Errorf("%s: moved to %v, %v", name, st.to, err)
		}
		if c.moves != (l.offset == c.to) {
			t.Errorf("%s: the mark is %v", name, l.offset)
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// TestWhatWasRemovedBeforeABarrierIsAGapForAFilter: the message behind which another layout begins is not of
// the filter, so a session moves to it, but not over what retention took and nobody had read.
func TestWhatWasRemovedBeforeABarrierIsAGapForAFilter(t *testing.T) {
	t.Parallel()
	for removed, gap := range map[int64]string{3: "", 5: "sequences 4 to 5", 7: "sequences 4 to 6"} {
		s, src := &publisher{}, newMemoryStream()
		all := s.events(8, 1)
		src.publish(all...)
		src.removeTo(removed)
		h, err := outbox.ParseHeader(all[2].Header.Get(outbox.HeaderName))
		if err != nil {
			t.Fatal(err)
		}
		cfg := Config{Name: "orders", Stream: "OUTBOX", Filters: []string{"outbox.d1"}, Log: slog.Default()}
		d := newDispatcher(&run{cfg: &cfg, source: live, src: &unmatched{src}, work: t.Context()}, 6,
			offsetOf(3, &h))
		d.reader = &memoryReader{s: src, at: 3}
		err = d.skipToBarrier()
		if gap == "" && (err != nil || d.at.Seq != 6) ||
			gap != "" && (!errors.Is(err, ErrGap) || !strings.Contains(err.Error(), gap)) {
			t.Errorf("up to %d was removed: at %d, %v", removed, d.at.Seq, err)
		}
	}
}

// flying is a reader of a stream that has handed out a message, which has not come.
type flying struct {
	memoryReader
	asked bool
}

func (f *flying) Check(context.Context) (uint64, error) { f.asked = true; return 6, nil }

func (f *flying) Buffered() int {
	if f.asked {
		return 1
	}
	return 0
}

// TestWhatIsOnItsWayIsAwaitedAtABarrier: the newest message before another layout was handed out, and removed
// from the stream before it has come.
func TestWhatIsOnItsWayIsAwaitedAtABarrier(t *testing.T) {
	t.Parallel()
	for _, filter := range []string{">", "outbox.d1"} {
		all, src := (&publisher{}).events(7, 2), newMemoryStream()
		src.publish(all...)
		src.removeTo(6)
		h, err := outbox.ParseHeader(all[2].Header.Get(outbox.HeaderName))
		must.Succeed(t, err)
		cfg := Config{Name: "orders", Stream: "OUTBOX", Filters: []string{filter}, Log: slog.Default()}
		d := newDispatcher(&run{cfg: &cfg, source: live, src: &unmatched{src}, work: t.Context()}, 6,
			offsetOf(3, &h))
		d.reader = &flying{}
		if err := d.skipToBarrier(); err != nil || d.at.Seq != 3 {
			t.Errorf("filter %s: at %d, %v", filter, d.at.Seq, err)
		}
	}
}

// delivered is a consumer that has delivered one message.
type delivered struct{ jetstream.Consumer }

func (delivered) Info(context.Context) (*jetstream.ConsumerInfo, error) {
	return &jetstream.ConsumerInfo{Delivered: jetstream.SequenceInfo{Consumer: 1, Stream: 5}}, nil
}

// A message that the server has handed out counts before it has come.
func TestWhatIsOnItsWayCounts(t *testing.T) {
	t.Parallel()
	r := &streamReader{source: &streamSource{}, cons: delivered{}}
	for range 2 {
		if handed, err := r.Check(t.Context()); err != nil || handed != 5 || r.Buffered() != 1 {
			t.Errorf("handed out up to %d, %v; %d are to be read", handed, err, r.Buffered())
		}
	}
	if r.delivered++; r.Buffered() != 0 {
		t.Error("it has been read, and is still to come")
	}
}

// unmatched is a stream that has nothing for the filter.
type unmatched struct{ *memoryStream }

func (*unmatched) Next(context.Context, uint64) (uint64, error) { return 0, nil }

// pulling is a stream whose readers take all that there is at once, as a pull does. Its filter is outbox.>
type pulling struct {
	*memoryStream
	states atomic.Int64 // how often its state was asked for
}

func (p *pulling) State(ctx context.Context) (stream.State, error) {
	p.states.Add(1)
	return p.memoryStream.State(ctx)
}

func (p *pulling) Next(ctx context.Context, seq uint64) (uint64, error) {
	for {
		next, err := p.memoryStream.Next(ctx, seq)
		m, _ := p.Get(ctx, next)
		if m == nil || err != nil || strings.HasPrefix(m.Subject, "outbox.") {
			return next, err
		}
		seq = next + 1
	}
}

func (p *pulling) Open(ctx context.Context, after uint64) (stream.Reader, error) {
	r, err := p.memoryStream.Open(ctx, after)
	return &pullingReader{Reader: r, of: p}, err
}

type pullingReader struct {
	stream.Reader
	of   *pulling
	come []*stream.Message
}

func (r *pullingReader) Read(ctx context.Context) (*stream.Message, error) {
	for len(r.come) == 0 || r.of.more() {
		m, err := r.Reader.Read(ctx)
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(m.Subject, "outbox.") {
			r.come = append(r.come, m)
		}
	}
	m := r.come[0]
	r.come = r.come[1:]
	return m, nil
}

func (r *pullingReader) Buffered() int { return len(r.come) }

// slowly runs a consumer whose handler returns when it is told to.
type slowly struct {
	*running
	handling chan uint64
	goOn     chan struct{}
}

func (p *pulling) slowly(t *testing.T, offsets Offsets, change func(*Config)) *slowly {
	t.Helper()
	w := &harness{t: t, log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	cfg := w.config(p)
	cfg.MaxInFlight, cfg.Lease = 1, time.Minute
	change(&cfg)
	c, err := New(nil, offsets, cfg)
	must.Succeed(t, err)
	c.cfg.confirm, c.cfg.interval = time.Millisecond, 5*time.Millisecond
	s := &slowly{handling: make(chan uint64), goOn: make(chan struct{})}
	s.running = w.start(c, func(ctx context.Context, _ pgx.Tx, e *Event) error {
		select {
		case s.handling <- e.Sequence:
		case <-ctx.Done():
		}
		select {
		case <-s.goOn:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return s
}

// begins waits until the handler is given the event of a sequence.
func (s *slowly) begins(want uint64) {
	s.t.Helper()
	got := uint64(0)
	await.Until(s.t, fmt.Sprint("event ", want), func() error {
		select {
		case got = <-s.handling:
		case <-s.ended:
			s.t.Fatalf("before event %d Run ended: %v", want, s.err)
		default:
			return errors.New("it does not come")
		}
		return nil
	})
	if got != want {
		s.t.Fatalf("event %d comes, want %d", got, want)
	}
}

// returns lets the handler return.
func (s *slowly) returns() {
	s.t.Helper()
	select {
	case s.goOn <- struct{}{}:
	case <-s.ended:
		s.t.Fatalf("Run ended: %v", s.err)
	}
}

// inspected waits until the consumer has looked at the stream a few times.
func (p *pulling) inspected(t *testing.T) {
	t.Helper()
	before := p.states.Load()
	await.Until(t, "inspections", func() error {
		if n := p.states.Load() - before; n < 10 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// TestWhatCameBeforeItWasRemovedIsReadUpToABarrier: the handler is slow, and retention passes the messages
// that wait for it, up to where another layout begins.
func TestWhatCameBeforeItWasRemovedIsReadUpToABarrier(t *testing.T) {
	t.Parallel()
	for _, filter := range []string{">", "outbox.>"} {
		t.Run(filter, func(t *testing.T) {
			t.Parallel()
			s, src, offsets := &publisher{}, &pulling{memoryStream: newMemoryStream()}, Memory()
			run := func(partitions int) *slowly {
				return src.slowly(t, offsets, func(cfg *Config) {
					cfg.Filters, cfg.Partitions = []string{filter}, partitions
				})
			}
			src.publish(s.events(1, 1)...)
			r := run(1)
			r.begins(1)
			r.returns()
			r.stopped()
			src.publish(s.events(6, 1)...)
			r = run(2)
			r.begins(2)
			src.removeTo(7)
			src.inspected(t)
			r.returns()
			src.publish(s.events(1, 1)...) // behind the barrier
			for seq := uint64(3); seq <= 8; seq++ {
				r.begins(seq)
				r.returns()
			}
			r.stopped()
		})
	}
}

// TestWhatCameBeforeItWasRemovedIsHandledWithAFilter: the handler is slow, and retention passes the messages
// that wait for it. The filter has nothing more then, or what it had is gone as well, which is accepted.
func TestWhatCameBeforeItWasRemovedIsHandledWithAFilter(t *testing.T) {
	t.Parallel()
	for _, gap := range []bool{false, true} {
		t.Run(fmt.Sprintf("gap=%t", gap), func(t *testing.T) {
			t.Parallel()
			s, src := &publisher{}, &pulling{memoryStream: newMemoryStream()}
			other := func() *stream.Message {
				m := s.event("a")
				m.Subject = "other.a"
				return m
			}
			src.publish(s.event("a"), s.event("b"), s.event("a"), other())
			r := src.slowly(t, Memory(), func(cfg *Config) {
				cfg.Filters, cfg.Partitions, cfg.AcceptGap = []string{"outbox.>"}, 2, gap
			})
			r.begins(1)
			if gap {
				src.inspected(t) // what comes now is not pulled before there is room
				src.publish(s.event("a"), s.event("b"))
				src.publish(other())
				src.removeTo(6)
			} else {
				src.removeTo(3)
			}
			src.inspected(t)
			r.returns()
			r.begins(2)
			r.returns()
			r.begins(3)
			r.returns()
			src.publish(s.event("a"))
			r.begins(src.last)
			r.returns()
			r.stopped()
		})
	}
}

// bothOffsets are offsets of each kind.
func bothOffsets(t *testing.T) map[string]Offsets {
	t.Helper()
	return map[string]Offsets{"document": Memory(), "database": Postgres(newHarness(t).pool)}
}

func logOf(t *testing.T) *slog.Logger {
	t.Helper()
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}
