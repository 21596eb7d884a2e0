package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer/internal/stream"
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

// unmatched is a stream that has nothing for the filter.
type unmatched struct{ *memoryStream }

func (*unmatched) Next(context.Context, uint64) (uint64, error) { return 0, nil }
