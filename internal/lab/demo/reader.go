package demo

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/outbox"
)

// reader is an ordinary consumer: it shows what arrives and measures from the return of the commit to here.
type reader struct {
	js     jetstream.JetStream
	w      *writers
	screen *screen
	byKey  map[string]int // operation by seq_key

	mu    sync.Mutex
	down  bool // the streamer is dead, or has not published anything new since
	begun time.Time

	all, undisturbed []time.Duration
	seen             map[string]bool
	inversions       int // messages that were committed before one that stands ahead of them
	newest           outbox.Position
}

func newReader(js jetstream.JetStream, w *writers, s *screen) *reader {
	r := &reader{js: js, w: w, screen: s, byKey: make(map[string]int, len(w.ops)),
		seen: make(map[string]bool, len(w.ops))}
	for i, op := range w.ops {
		r.byKey[fmt.Sprintf("%s:%020d", op.Actor, op.Counter)] = i
	}
	return r
}

// run reads until all operations have been seen.
func (r *reader) run(ctx context.Context, want int) error {
	cons, err := r.js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return err
	}
	it, err := cons.Messages()
	if err != nil {
		return err
	}
	defer it.Stop()
	for n := 1; len(r.seen) < want; n++ {
		next, cancel := context.WithTimeout(ctx, quietLimit)
		msg, err := it.Next(jetstream.NextContext(next))
		cancel()
		if err != nil {
			return fmt.Errorf("%d of %d operations arrived: %w", len(r.seen), want, err)
		}
		h, err := outbox.ParseHeader(msg.Headers().Get(outbox.HeaderName))
		if err != nil {
			return err
		}
		r.message(n, msg, &h)
	}
	return nil
}

func (r *reader) message(n int, msg jetstream.Msg, h *outbox.Header) {
	now := time.Now()
	r.seen[h.ID] = true
	if h.Pos.Compare(r.newest) < 0 {
		r.inversions++
	} else {
		r.newest = h.Pos
	}
	op := r.byKey[h.Key]
	// The stream may be faster than the return of the commit to its writer.
	latency := time.Duration(0)
	if at := r.w.committed[op].Load(); at != 0 {
		latency = max(0, now.Sub(time.Unix(0, at)))
	}
	r.all = append(r.all, latency)
	r.mu.Lock()
	recovered := !r.begun.IsZero() && !r.down
	if r.begun.IsZero() {
		r.undisturbed = append(r.undisturbed, latency)
	} else if recovered && latency < 100*time.Millisecond {
		r.screen.event("caught up %v after the kill", now.Sub(r.begun).Round(time.Millisecond))
		r.begun = time.Time{}
	}
	r.mu.Unlock()
	r.screen.message(n, msg.Subject(), h, r.w.ops[op].Payload, latency)
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

// figures are what the reader measured.
type figures struct {
	took             time.Duration
	n, inversions    int
	all, undisturbed []time.Duration // ascending
}

func (r *reader) figures(took time.Duration) figures {
	slices.Sort(r.all)
	slices.Sort(r.undisturbed)
	return figures{took, len(r.all), r.inversions, r.all, r.undisturbed}
}

// quantile of ascending values.
func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	return d[min(int(q*float64(len(d))), len(d)-1)].Round(10 * time.Microsecond)
}
