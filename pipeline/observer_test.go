package pipeline

import (
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// watcher notes what it is told of each sequence.
type watcher struct {
	sent, acked, found []uint64
	last               uint64
	waited             []time.Duration
	unread             int // found without the broker's time
}

func (w *watcher) Sent(e *relay.Event, h *outbox.Header, seq uint64, received time.Time) {
	if e.Pos != h.Pos {
		panic("another event's header")
	}
	w.sent, w.waited = append(w.sent, seq), append(w.waited, time.Since(received))
}

func (w *watcher) Found(_ *relay.Event, _ *outbox.Header, seq uint64, _, stored time.Time) {
	w.found = append(w.found, seq)
	if stored.IsZero() {
		w.unread++
	}
}

func (w *watcher) Acked(seq uint64) {
	if seq > w.last {
		w.acked, w.last = append(w.acked, seq), seq
	}
}

// An observer is told of each message once: as sent and then acknowledged, with how long it was held, also
// when NATS fails in between; after a kill, as found.
func TestTheObserverIsToldOfEachMessage(t *testing.T) {
	set := relay.Settings{Horizon: 20 * time.Millisecond, MaxEvents: 1000, MaxBytes: 1 << 20}
	inBubble(t, set, 0, func(t *testing.T, w *harness) {
		first, second := &watcher{}, &watcher{}
		pr := w.running(options{open: func(c *Conns) { c.Observer = first }})
		w.write(5)
		w.published()
		w.cutBroker(pr, time.Second, false)
		w.write(5)
		w.published()
		var want []uint64
		w.with(func() {
			for seq := range len(w.js.messages) {
				want = append(want, uint64(seq+1))
			}
		})
		last := want[len(want)-1]
		w.sleep(time.Second)
		if !slices.Equal(first.sent, want) || first.last != last || len(first.found) != 0 {
			t.Errorf("sent %v, acknowledged %v, found %v; the stream has %v", first.sent, first.acked,
				first.found, want)
		}
		for i, d := range first.waited {
			if d < set.Horizon-granularity || d > 2*time.Second {
				t.Errorf("message %d was held for %v", i+1, d)
			}
		}
		pr.kill()
		w.running(options{open: func(c *Conns) { c.Observer = second }})
		w.write(1)
		w.published()
		w.sleep(time.Second)
		if n := len(second.found); n == 0 || second.found[n-1] != last || second.unread != 0 ||
			!slices.Equal(second.sent, []uint64{last + 1}) || second.last != last+1 {
			t.Errorf("the next process found %v, sent %v, saw %v acknowledged", second.found, second.sent,
				second.acked)
		}
	})
}
