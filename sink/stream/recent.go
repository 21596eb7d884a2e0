package stream

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// leastPage is how many sequences a page has at least, from the second one on. There is a second one where
// the first had holes or foreign messages.
const leastPage = 1024

// Recent reads the counters of the newest n messages of ours above one sequence and up to another, newest
// first: fewer, if there are not so many. One without a counter has Span 0. Sequences without a message,
// messages without a header of ours, and cuts do not count.
//
// It reads headers only, through consumers. A consumer may be on a replica that lags behind the leader, so
// the leader is asked first which message is the newest, and the consumer is read up to that one. A replica
// stores messages in the leader's order: where that message is, all before it have been stored, so none is
// missing. One that was removed a moment ago may still be found.
func (s *Stream) Recent(ctx context.Context, above, upTo uint64, n int) ([]outbox.Counter, error) {
	var all []outbox.Counter // newest first
	for span := n; len(all) < n && upTo > above; span = max(2*(n-len(all)), leastPage) {
		newest, err := s.AtOrBelow(ctx, upTo)
		if err != nil || newest <= above {
			return all, err
		}
		first := newest - min(newest-above, uint64(span)) + 1
		page, err := s.counters(ctx, first, newest, n-len(all))
		if err != nil {
			return nil, err
		}
		slices.Reverse(page)
		all = append(all, page...)
		upTo = first - 1
	}
	return all, nil
}

// AtOrBelow asks the leader for the newest sequence up to one that has a message; 0: there is none.
func (s *Stream) AtOrBelow(ctx context.Context, upTo uint64) (uint64, error) {
	if upTo == 0 {
		return 0, nil
	}
	m, err := s.api.Message(ctx, s.name, jsapi.MessageRequest{Seq: upTo})
	if m == nil && err == nil {
		m, err = s.newestBelow(ctx, 1, upTo)
	}
	if m == nil {
		return 0, err
	}
	return m.Seq, nil
}

// consumerWait is how long a consumer may take for the next message. One on a replica that has just started
// may take much longer. It is not shorter because the leader takes longer still: it is asked for the payloads
// as well.
const consumerWait = 3 * time.Second

// counters reads the counters of our messages of the sequences from first to last, where there is a message:
// the last n of them, oldest first. Where no consumer brings them the leader does, several times slower.
func (s *Stream) counters(ctx context.Context, first, last uint64, n int) ([]outbox.Counter, error) {
	found, err := s.consume(ctx, first, last, n)
	switch {
	case err == nil || ctx.Err() != nil:
		return found, err
	case s.api.Lost != nil && s.api.Lost() != nil:
		return nil, s.api.Lost()
	}
	s.log.Debug("a consumer can't read the stream now: its leader is asked", "err", err)
	stored, err := s.Last(ctx, first-1, last, last-first+1, math.MaxInt)
	found = found[:0]
	for _, m := range stored {
		if m.Header != nil {
			found = append(found, m.Header.Counter)
		}
	}
	return found[max(len(found)-n, 0):], err
}

// consume is counters by a consumer.
func (s *Stream) consume(ctx context.Context, first, last uint64, n int) ([]outbox.Counter, error) {
	js, err := s.api.JetStream()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stalled := time.AfterFunc(consumerWait, cancel)
	defer stalled.Stop()
	var found []outbox.Counter
	err = jsapi.ReadStream(ctx, js, s.name, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: first, HeadersOnly: true,
	}, last, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		stalled.Reset(consumerWait)
		if seq := meta.Sequence.Stream; seq < first || seq > last {
			return nil // a replica that lags begins below first; last may be gone
		}
		if h, err := outbox.ParseHeader(m.Headers().Get(outbox.HeaderName)); err == nil {
			if found = append(found, h.Counter); len(found) >= 2*n {
				found = slices.Delete(found, 0, len(found)-n)
			}
		}
		return nil
	})
	return found[max(len(found)-n, 0):], err
}
