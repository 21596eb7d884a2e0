package consumer

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// A backlog larger than everything that may be in flight is read to its end, also by an instance that is
// stopped in its midst: the client library has room for all that was asked for, and drops nothing.
func TestALargeBacklogIsReadToItsEnd(t *testing.T) {
	t.Parallel()
	js, nc := realStream(t, jetstream.StreamConfig{})
	dropped := make(chan error, 1)
	nc.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		select {
		case dropped <- err:
		default:
		}
	})
	s := &publisher{}
	events, inFlight := 5_000, 128
	if tier.Long() {
		events, inFlight = 20_000, 0 // the default
	}
	all := s.events(events, 200)
	for i, m := range all {
		if _, err := js.PublishMsgAsync(&nats.Msg{Subject: m.Subject, Header: m.Header,
			Data: m.Data}); err != nil {
			t.Fatal(err)
		}
		if i%1000 == 999 {
			<-js.PublishAsyncComplete()
		}
	}
	w := newHarness(t)
	var mu sync.Mutex
	seen, half := map[uint64]int{}, make(chan struct{})
	count := func(_ context.Context, _ pgx.Tx, e *Event) error {
		mu.Lock()
		defer mu.Unlock()
		if seen[e.Sequence]++; len(seen) == len(all)/2 {
			close(half)
		}
		return nil
	}
	batched := func(c *Config) { c.Batch, c.MaxInFlight = 64, inFlight }
	r := w.start(w.onStream(js, batched), count)
	select { // it is stopped while much is on its way
	case <-half:
	case <-r.ended:
		t.Fatal(r.err)
	}
	r.stopped()
	r = w.start(w.onStream(js, batched), count)
	await.Until(t, "the events", func() error {
		mu.Lock()
		defer mu.Unlock()
		if len(seen) < len(all) {
			return fmt.Errorf("%d of %d were read", len(seen), len(all))
		}
		return nil
	})
	r.stopped()
	select {
	case err := <-dropped:
		t.Error(err)
	default:
	}
}
