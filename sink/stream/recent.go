package stream

import (
	"context"
	"slices"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// leastPage is how many sequences a page has at least, from the second one on. There is a second one where
// the first had holes or foreign messages.
const leastPage = 1024

// Recent reads the counters of the newest n messages of ours at or below a sequence, newest first: fewer, if
// there are not so many. One without a counter has Span 0. Sequences without a message, and messages without
// a header of ours, do not count.
//
// It reads headers only, through consumers. A consumer may be on a replica that lags behind the leader, so
// the leader is asked first which message is the newest, and the consumer is read up to that one. A replica
// stores messages in the leader's order: where that message is, all before it have been stored, so none is
// missing. One that was removed a moment ago may still be found. If the newest message is removed while it is
// waited for, that is an error, and a second call does without it.
func (s *Stream) Recent(ctx context.Context, upTo uint64, n int) ([]outbox.Counter, error) {
	var all []outbox.Counter // newest first
	for span := n; len(all) < n && upTo > 0; span = max(2*(n-len(all)), leastPage) {
		newest, err := s.atOrBelow(ctx, upTo)
		if err != nil || newest == 0 {
			return all, err
		}
		first := newest - min(newest, uint64(span)) + 1
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

// atOrBelow asks the leader for the newest sequence up to one that has a message; 0: there is none.
func (s *Stream) atOrBelow(ctx context.Context, upTo uint64) (uint64, error) {
	m, err := s.api.Message(ctx, s.name, jsapi.MessageRequest{Seq: upTo})
	if m == nil && err == nil {
		m, err = s.newestBelow(ctx, 1, upTo)
	}
	if m == nil {
		return 0, err
	}
	return m.Seq, nil
}

// counters reads the counters of our messages of the sequences from first to last, where there is a message:
// the last n of them, oldest first.
func (s *Stream) counters(ctx context.Context, first, last uint64, n int) ([]outbox.Counter, error) {
	js, err := s.api.JetStream()
	if err != nil {
		return nil, err
	}
	var found []outbox.Counter
	err = jsapi.ReadStream(ctx, js, s.name, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: first, HeadersOnly: true,
	}, last, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
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
	if s.api.Lost != nil && err != nil {
		if lost := s.api.Lost(); lost != nil {
			return nil, lost
		}
	}
	return found[max(len(found)-n, 0):], err
}
