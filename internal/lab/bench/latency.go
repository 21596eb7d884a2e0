package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	latencyWarm    = time.Second
	latencyFor     = 4 * time.Second
	latencyWriters = 8
)

// delays are times from a commit's return, ascending: until JetStream had stored the message, by the
// message's timestamp, and until a consumer had it. What was there before the commit returned counts as 0.
type delays struct{ Stream, Consumer []time.Duration }

func (d *delays) add(s sample) {
	for _, m := range []struct {
		of    []time.Duration
		share float64
		as    metric
	}{
		{d.Stream, 0.5, streamP50}, {d.Stream, 0.99, streamP99}, {d.Stream, 0.999, streamP999},
		{d.Consumer, 0.5, consumerP50}, {d.Consumer, 0.99, consumerP99}, {d.Consumer, 0.999, consumer999},
	} {
		s[m.as] = milliseconds(percentile(m.of, m.share))
	}
}

// reader is the consumer: JetStream pushes to it.
type reader struct {
	nc *nats.Conn

	mu      sync.Mutex
	stored  map[int]time.Time // by number, of the first message of each
	arrived map[int]time.Time
	err     error
	moved   chan struct{}
}

func newReader(t task) (*reader, error) {
	nc, err := nats.Connect(t.NATS, nats.Timeout(attempt))
	if err != nil {
		return nil, err
	}
	r := &reader{nc: nc, stored: map[int]time.Time{}, arrived: map[int]time.Time{},
		moved: make(chan struct{}, 1)}
	js, err := nc.JetStream(nats.MaxWait(attempt))
	if err == nil {
		_, err = js.Subscribe(t.Subject+".>", r.take, nats.OrderedConsumer(), nats.BindStream(t.Stream),
			nats.DeliverNew())
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	return r, nc.FlushTimeout(attempt)
}

func (r *reader) close() { r.nc.Close() }

func (r *reader) take(m *nats.Msg) {
	now := time.Now()
	n, err := number(m.Data)
	meta, metaErr := m.Metadata()
	r.mu.Lock()
	defer r.mu.Unlock()
	if err = errors.Join(err, metaErr); err != nil {
		r.err = err
	} else if _, again := r.arrived[n]; again {
		r.err = fmt.Errorf("event %d came twice", n)
	} else {
		r.stored[n], r.arrived[n] = meta.Timestamp, now
	}
	select {
	case r.moved <- struct{}{}:
	default:
	}
}

// number reads an event's number, the first thing in its payload.
func number(payload []byte) (int, error) {
	text, ok := strings.CutPrefix(string(payload[:min(len(payload), 40)]), `{"n": `)
	digits, _, comma := strings.Cut(text, ",")
	n, err := strconv.Atoi(digits)
	if !ok || !comma || err != nil {
		return 0, fmt.Errorf("a payload of ours does not begin with %.40q", payload)
	}
	return n, nil
}

// delays waits until all events have come. The first ones do not count: they found everything cold.
func (r *reader) delays(ctx context.Context, returned []time.Time, skip int) (d delays, err error) {
	for {
		r.mu.Lock()
		come, err := len(r.arrived), r.err
		r.mu.Unlock()
		if err != nil {
			return d, err
		}
		if come == len(returned) {
			break
		}
		select {
		case <-r.moved:
		case <-ctx.Done():
			return d, ctx.Err()
		case <-time.After(patience):
			return d, fmt.Errorf("%d of %d events have come to the consumer, and no more for %v", come,
				len(returned), patience)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for n, at := range returned {
		if n < skip {
			continue
		}
		stored, ok := r.stored[n]
		if !ok {
			return d, fmt.Errorf("event %d has not come", n)
		}
		// Wall clocks: the server's is one of another process.
		d.Stream = append(d.Stream, max(0, stored.Sub(at.Round(0))))
		d.Consumer = append(d.Consumer, max(0, r.arrived[n].Sub(at)))
	}
	slices.Sort(d.Stream)
	slices.Sort(d.Consumer)
	return d, nil
}
