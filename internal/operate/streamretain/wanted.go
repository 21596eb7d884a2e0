package streamretain

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	streams "github.com/outflowhq/outflow/sink/stream"
)

// wanted is up to where the stream is beyond its age, size or number of messages.
func (c *command) wanted(ctx context.Context, s *stream, mayGo uint64) (to uint64, err error) {
	r := c.cfg.Retain.Stream
	// deleted ones may lie anywhere: so many messages stay at least
	if keep := uint64(r.Messages) + s.State.Deleted; r.Messages > 0 && s.State.Last > keep {
		to = s.State.Last - keep
	}
	if r.Age > 0 && s.State.Messages > 0 {
		older, err := c.olderThan(ctx, s, s.Now.Add(-r.Age))
		if err != nil {
			return 0, err
		}
		to = max(to, older)
	}
	if r.Size > 0 && s.State.Bytes > uint64(r.Size) {
		larger, err := c.beyondSize(ctx, s, s.State.Bytes-uint64(r.Size), mayGo)
		if err != nil {
			return 0, err
		}
		to = max(to, larger)
	}
	return to, nil
}

// olderThan finds, by halves, the newest message that was stored before a time.
func (c *command) olderThan(ctx context.Context, s *stream, before time.Time) (found uint64, err error) {
	for first, last := s.State.First, s.State.Last+1; first < last; {
		mid := first + (last-first)/2
		m, err := c.conn.API().Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: mid, Next: ">"})
		switch {
		case err != nil:
			return 0, fmt.Errorf("stream %s: %w", c.cfg.Stream, err)
		case m == nil || m.Seq >= last || !m.Time.Before(before):
			last = mid
		default:
			found, first = m.Seq, m.Seq+1
		}
	}
	return found, nil
}

// beyondSize finds the message up to which so many bytes are. Messages that may not go are not read: how many
// more of them would go is reckoned by their average size.
func (c *command) beyondSize(ctx context.Context, s *stream, bytes, mayGo uint64) (to uint64, err error) {
	freed := uint64(0)
	mayGo = min(mayGo, s.State.Last)
	there, err := streams.New(c.conn.API(), c.cfg.Stream, c.log).AtOrBelow(ctx, mayGo)
	if err != nil {
		return 0, err
	}
	if there >= s.State.First {
		task := progress.Count(ctx, "reading how large the messages are that may go", "bytes", int64(bytes))
		defer task.End()
		err = jsapi.ReadStream(ctx, c.js, c.cfg.Stream, jetstream.OrderedConsumerConfig{
			DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: s.State.First,
			HeadersOnly: true,
		}, there, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
			if meta.Sequence.Stream > there {
				return jsapi.ErrStop
			}
			to = meta.Sequence.Stream
			freed += storedSize(m)
			task.Set(int64(freed))
			if freed >= bytes {
				return jsapi.ErrStop
			}
			return nil
		})
		if err != nil || freed >= bytes {
			return to, err
		}
	}
	average := max(s.State.Bytes/max(s.State.Messages, 1), 1)
	to = max(mayGo, s.State.First-1)
	return min(to+(bytes-freed+average-1)/average, s.State.Last), nil
}

// storedSize is what a message takes in the stream's file, but for what the server has beside it.
func storedSize(m jetstream.Msg) uint64 {
	const beside = 34 // lengths, sequence, time, checksum
	size := beside + len(m.Subject())
	for name, values := range m.Headers() {
		if name == nats.MsgSize {
			n, err := strconv.Atoi(values[0])
			if err == nil {
				size += n
			}
			continue
		}
		for _, v := range values {
			size += len(name) + len(v) + len(": \r\n")
		}
	}
	return uint64(size)
}
