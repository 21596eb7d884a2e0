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
		older, err := c.olderThan(ctx, s, r.Age)
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

// olderThan is older by the broker's clock.
func (c *command) olderThan(ctx context.Context, s *stream, age time.Duration) (uint64, error) {
	found, err := older(s.State.First, s.State.Last, s.Now, age, func(from uint64) (*jsapi.Message, error) {
		return c.conn.API().Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: from, Next: ">"})
	})
	if err != nil {
		err = fmt.Errorf("stream %s: %w", c.cfg.Stream, err)
	}
	return found, err
}

// older finds the newest of the messages at the front of a stream that are older than age; next reads the
// first one from a sequence on. Where the broker's clock has jumped, times do not ascend, and old ones may
// lie behind young ones, which have to stay. So it does not begin in the middle, but looks twice as far from
// the front each time, and goes by halves once it has found a young one: what is much further behind does not
// count. One that is to come says nothing: the clock was ahead then, or is back now.
func older(first, last uint64, now time.Time, age time.Duration,
	next func(from uint64) (*jsapi.Message, error)) (found uint64, err error) {
	step, young := uint64(0), false
	for end := last + 1; first < end; {
		seq := first + (end-first)/2
		if !young {
			seq = min(seq, first+step)
			step = 2*step + 1
		}
		switch m, err := next(seq); {
		case err != nil:
			return 0, err
		case m != nil && m.Seq < end && m.Time.After(now):
			first = m.Seq + 1
		case m != nil && m.Seq < end && now.Sub(m.Time) > age:
			found, first = m.Seq, m.Seq+1
		default:
			end, young = seq, true
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
