package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/outbox"
)

// sequence is the events of one person in one document, which are numbered from 1 without gaps.
type sequence struct{ doc, actor string }

// actorAt is a person at a cluster, so that an event says where it was written.
func actorAt(actor string, cluster int) string { return fmt.Sprintf("%s@%d", actor, cluster) }

// homeOf is the cluster at which an actor writes.
func homeOf(actor string) int {
	_, cluster, _ := strings.Cut(actor, "@")
	n, _ := strconv.Atoi(cluster) // 0 is no cluster
	return n
}

// tally counts what a reader of a stream gets. It knows nothing of how the stream is made.
type tally struct {
	mu     sync.Mutex
	read   uint64                // message of the stream, the newest that was read
	events map[sequence][]copies // by the event's counter less one
	count  [clusters + 1]figures // of each home; at 0 of none
	err    error
}

// copies are of one event: how many came, and when the first of them was stored.
type copies struct {
	n     int
	first time.Time
}

func newTally() *tally { return &tally{events: map[sequence][]copies{}} }

// figures are of the events of one home.
type figures struct {
	events int // different ones
	twice  int // messages with an event that had come before
	late   int // events behind a later one of their sequence
}

func (t *tally) add(seq uint64, stored time.Time, doc, key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.read = seq
	actor, number, _ := strings.Cut(key, ":")
	n, err := strconv.Atoi(number)
	home := homeOf(actor)
	if err != nil || n < 1 || home > clusters {
		t.err = fmt.Errorf("message %d of %s has the key %q", seq, doc, key)
		return
	}
	of, f := sequence{doc, actor}, &t.count[home]
	switch known := t.events[of]; {
	case n <= len(known) && known[n-1].n > 0:
		f.twice++
	case n <= len(known):
		f.events++
		f.late++
	default:
		f.events++
		t.events[of] = append(known, make([]copies, n-len(known))...)
	}
	c := &t.events[of][n-1]
	if c.n++; c.n == 1 {
		c.first = stored
	}
}

func (t *tally) of(home int) figures {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.count[home]
}

// readAll has each cluster read the stream of each home, and what the naive relays publish.
func (m *mesh) readAll(ctx context.Context) error {
	for _, c := range m.all {
		for home := range clusters {
			t, err := c.read(ctx, streamOf(home+1), outbox.HeaderName, func(header string) (string, error) {
				h, err := outbox.ParseHeader(header)
				return h.Key, err
			})
			if err != nil {
				return err
			}
			c.streams = append(c.streams, t)
		}
		var err error
		if c.relayed, err = c.read(ctx, relayStream, relayKey, func(header string) (string, error) {
			return header, nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// read counts the events of a stream. keyOf makes an event's key of a header.
func (c *cluster) read(ctx context.Context, stream, header string,
	keyOf func(string) (string, error)) (*tally, error) {
	consumer, err := c.js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	t := newTally()
	_, err = consumer.Consume(func(msg jetstream.Msg) {
		meta, err := msg.Metadata()
		if err != nil {
			t.fail(err)
			return
		}
		if msg.Headers().Get(outbox.HeaderCut) != "" { // no event: where another cluster went on
			t.mu.Lock()
			t.read = meta.Sequence.Stream
			t.mu.Unlock()
			return
		}
		key, err := keyOf(msg.Headers().Get(header))
		if err != nil {
			t.fail(err)
			return
		}
		_, doc, _ := strings.Cut(msg.Subject(), ".")
		t.add(meta.Sequence.Stream, meta.Timestamp, doc, key)
	})
	return t, err
}

func (t *tally) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.err = err
}
