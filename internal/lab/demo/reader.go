package demo

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/outbox"
)

// reader is an ordinary consumer: it measures from the return of the commit to here, and may show what
// arrives.
type reader struct {
	mode   *mode
	w      *writers
	screen *screen
	shows  bool
	byKey  map[[2]string]int // operation by document and seq_key

	mu    sync.Mutex
	down  bool // the streamer is dead, or has not published anything new since
	begun time.Time

	undisturbed []time.Duration // ascending, at the end
	windows     []window
	seen        map[string]bool
	newest      map[[2]string]int64 // the highest counter of each document and actor
	late        int                 // messages behind one with a higher counter
}

// window says of a message which operation it is, which transaction wrote it, and which let it go.
type window struct {
	op       int
	at, thru oracle.LSN
}

func newReader(m *mode, w *writers, s *screen, shows bool) *reader {
	r := &reader{mode: m, w: w, screen: s, shows: shows, byKey: make(map[[2]string]int, len(w.ops)),
		seen: make(map[string]bool, len(w.ops)), newest: map[[2]string]int64{}}
	for i, op := range w.ops {
		r.byKey[[2]string{op.Doc, fmt.Sprintf("%s:%020d", op.Actor, op.Counter)}] = i
	}
	return r
}

// run reads until all operations have been seen. It gives up if no message comes for as long as quiet.
func (r *reader) run(ctx context.Context, want int, quiet time.Duration) error {
	cons, err := r.mode.js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return err
	}
	it, err := cons.Messages()
	if err != nil {
		return err
	}
	defer it.Stop()
	for n := 1; len(r.seen) < want; n++ {
		next, cancel := context.WithTimeout(ctx, quiet)
		msg, err := it.Next(jetstream.NextContext(next))
		cancel()
		if err != nil {
			return fmt.Errorf("%s: %d of %d operations arrived: %w", r.mode.name, len(r.seen), want, err)
		}
		h, err := outbox.ParseHeader(msg.Headers().Get(outbox.HeaderName))
		if err != nil {
			return err
		}
		r.message(n, msg, &h)
	}
	return nil
}

func (r *reader) message(number int, msg jetstream.Msg, h *outbox.Header) {
	now := time.Now()
	r.seen[h.ID] = true
	n := r.byKey[[2]string{strings.TrimPrefix(msg.Subject(), "outbox."), h.Key}]
	r.windows = append(r.windows, window{n, oracle.LSN(h.Pos.LSN), oracle.LSN(h.Thru)})
	op := &r.w.ops[n]
	sequence := [2]string{op.Doc, op.Actor}
	if op.Counter < r.newest[sequence] {
		r.late++
	}
	r.newest[sequence] = max(r.newest[sequence], op.Counter)
	// The stream may be faster than the return of the commit to its writer.
	latency := time.Duration(0)
	if at := r.w.committed[n].Load(); at != 0 {
		latency = max(0, now.Sub(time.Unix(0, at)))
	}
	r.mu.Lock()
	recovered := !r.begun.IsZero() && !r.down
	if r.begun.IsZero() {
		r.undisturbed = append(r.undisturbed, latency)
	} else if recovered && latency < 100*time.Millisecond {
		r.screen.event("%s: caught up %v after the kill", r.mode.name,
			now.Sub(r.begun).Round(time.Millisecond))
		r.begun = time.Time{}
	}
	r.mu.Unlock()
	if r.shows {
		r.screen.message(number, msg.Subject(), h, op.Payload, latency)
	}
}

// mark notes that the streamer was killed (down) or started again.
func (r *reader) mark(down bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down = down
	if down {
		r.begun = time.Now()
	}
}

// added is how long ordering made each message wait, by the commit times in the WAL: the machine's speed is
// not in it. inVain is how much of that came after all operations before it in its sequence had committed,
// for which any exact order waits. Both ascend.
func (r *reader) added(t *oracle.Truth) (added, inVain []time.Duration, err error) {
	from := r.complete()
	for _, w := range r.windows {
		a, ok := t.Between(w.at, w.thru)
		v, also := t.Between(min(from[w.op], w.thru), w.thru) // commit times need not ascend
		if !ok || !also {
			return nil, nil, fmt.Errorf("%s: the WAL has no transactions at %v, %v and %v", r.mode.name, w.at,
				from[w.op], w.thru)
		}
		added, inVain = append(added, max(0, a)), append(inVain, max(0, v))
	}
	slices.Sort(added)
	slices.Sort(inVain)
	return added, inVain, nil
}

// complete says of each operation with which transaction all of its sequence up to it had committed, those
// that never did left out.
func (r *reader) complete() []oracle.LSN {
	all := make([]oracle.LSN, len(r.w.ops))
	for _, w := range r.windows {
		all[w.op] = w.at
	}
	last := map[[2]string]oracle.LSN{}
	for i, op := range r.w.ops { // the counters of a sequence ascend
		sequence := [2]string{op.Doc, op.Actor}
		all[i] = max(all[i], last[sequence])
		last[sequence] = all[i]
	}
	return all
}

// quantile of ascending values.
func quantile(all []time.Duration, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	return all[min(int(q*float64(len(all))), len(all)-1)]
}
