package main

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

const feedBuffer = 256 // what a slow reader may be behind; then it connects again

// news is what a feed passes on: an operation or a presence.
type news struct {
	event   string // "op" or "presence"
	version int64
	data    []byte
}

// hub reads Outflow's stream once and passes each operation on to the feeds of its document. Presence is not
// stored anywhere: it goes through NATS, so that the feeds of other instances see it as well.
type hub struct {
	js  jetstream.JetStream
	log *slog.Logger

	mu     sync.Mutex
	feeds  map[string]map[chan news]struct{} // by document
	here   map[string]map[string]seen        // by document and actor
	closed bool
}

type seen struct {
	at   time.Time
	data []byte
}

func newHub(js jetstream.JetStream, log *slog.Logger) *hub {
	return &hub{js: js, log: log, feeds: map[string]map[chan news]struct{}{},
		here: map[string]map[string]seen{}}
}

// run reads until ctx is cancelled. Whatever fails, it goes on behind the last message that it has passed on.
func (h *hub) run(ctx context.Context) error {
	sub, err := h.js.Conn().Subscribe(presenceSubject+"*", h.passPresence)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe() //nolint:errcheck // the connection is closed next
	defer h.close()
	var last uint64
	for ctx.Err() == nil {
		if err := h.read(ctx, &last); err != nil && ctx.Err() == nil {
			h.log.Warn("the feed reads the stream again", "from", last+1, "err", err)
			sleep(ctx, relayPause)
		}
	}
	return nil
}

func (h *hub) read(ctx context.Context, last *uint64) error {
	from := jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverNewPolicy}
	if *last > 0 {
		from = jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy,
			OptStartSeq: *last + 1}
	}
	c, err := h.js.OrderedConsumer(ctx, outflowStream, from)
	if err != nil {
		return err
	}
	messages, err := c.Messages()
	if err != nil {
		return err
	}
	defer messages.Stop()
	for {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return err
		}
		if op, err := decode(msg.Data()); err == nil {
			h.pass(op.Doc, news{"op", op.Version, msg.Data()})
		}
		*last = meta.Sequence.Stream
	}
}

func (h *hub) pass(doc string, n news) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for feed := range h.feeds[doc] {
		select {
		case feed <- n:
		default: // too slow: its client connects again and gets what it lacks from the database
			delete(h.feeds[doc], feed)
			close(feed)
		}
	}
}

// join returns a document's news from now on and who is there.
func (h *hub) join(doc string) (feed chan news, present [][]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	feed = make(chan news, feedBuffer)
	if h.closed {
		close(feed)
		return feed, nil
	}
	if h.feeds[doc] == nil {
		h.feeds[doc] = map[chan news]struct{}{}
	}
	h.feeds[doc][feed] = struct{}{}
	for _, s := range h.here[doc] {
		if time.Since(s.at) <= presenceLasts {
			present = append(present, s.data)
		}
	}
	return feed, present
}

func (h *hub) leave(doc string, feed chan news) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.feeds[doc], feed)
	if len(h.feeds[doc]) == 0 {
		delete(h.feeds, doc)
		delete(h.here, doc)
	}
}

// close ends all feeds: a service that stops does not wait for those who look on.
func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, feeds := range h.feeds {
		for feed := range feeds {
			close(feed)
		}
	}
	clear(h.feeds)
}
