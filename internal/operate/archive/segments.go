package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// inactive is how long the consumer of a run that was killed stays, and holds the front of the stream. A run
// that takes longer to write a segment gets another one: retention takes nothing that is not archived.
const inactive = 30 * time.Second

// What a run has read when it is stopped makes a segment if it is at least that part of archive.segment_size:
// so a process that is stopped again and again gets on, and makes so many times as many segments at most. All
// else is read again by the next run. It has this long to write one.
const (
	stopShare = 16
	stopTime  = 20 * time.Second
)

// first returns the first message of the stream from a sequence on, as the leader has it; nil: there is none.
func (c *command) first(ctx context.Context, from uint64) (*jsapi.Message, error) {
	return c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: from, Next: ">"})
}

// end ends a segment. last is the newest message that it may have.
func (c *command) end(ctx context.Context, s *archive.Segment, last uint64) error {
	var complete outbox.LSN
	if last == c.to {
		if err := c.tail(ctx, s); err != nil {
			return err
		}
		complete = c.complete
		s.Comes(c.system, c.timeline)
	}
	m, err := c.a.Append(ctx, s, complete)
	if err != nil {
		return err
	}
	c.report.Segments = append(c.report.Segments, segmentOf(c.a, m))
	return nil
}

// begin returns the segment behind the last one, as this process has left it, or a new one. until is where it
// ends if a run was killed that had written it; 0: there was none.
func (c *command) begin(ctx context.Context) (s *archive.Segment, until uint64, err error) {
	if until, err = c.a.Unfinished(ctx); err != nil {
		return nil, 0, err
	}
	if s = c.a.Begun(); s != nil && s.Next() <= c.to+1 && (until == 0 || until >= s.Next()) {
		err := s.Agrees(ctx, c.api)
		if f := outbox.FaultOf(err); f == nil || f.Code != archive.CodeDiffers {
			return s, until, err
		}
	}
	s, err = c.a.NewSegment()
	return s, until, err
}

// pass makes segments, from the first sequence that is not archived.
func (c *command) pass(ctx context.Context) error {
	s, until, err := c.begin(ctx)
	if err != nil {
		return err
	}
	end := func(ctx context.Context, last uint64) error {
		err := c.end(ctx, s, last)
		if err == nil {
			s, err = c.a.NewSegment()
		}
		return err
	}
	add := func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		seq := meta.Sequence.Stream
		if seq < s.Next() {
			return nil // a replica that lags begins below it
		}
		if seq > c.to {
			return c.removed()
		}
		if until >= s.Next() && until < seq && !s.Empty() { // a segment that ends without a message
			if err := c.hole(ctx, s, until, m.Headers()); err != nil {
				return err
			}
			s.Skip(until)
			if err := end(ctx, until); err != nil {
				return err
			}
		}
		if seq > s.Next() {
			err := c.hole(ctx, s, seq-1, m.Headers())
			if f := outbox.FaultOf(err); f != nil && f.Code == archive.CodeGap && !s.Empty() {
				err = cmp.Or(end(ctx, s.Next()-1), err)
			}
			if err != nil {
				return err
			}
		}
		err := s.Add(&archive.Message{
			Seq: seq, Time: meta.Timestamp, Subject: m.Subject(), Header: m.Headers(), Data: m.Data(),
		})
		if err == nil && (s.Size() >= c.cfg.Archive.SegmentSize || s.Full() || seq == until) {
			err = end(ctx, seq)
		}
		if c.o.Hit != nil {
			c.o.Hit("archive.message")
		}
		if err = cmp.Or(err, ctx.Err()); err == nil && !c.until.IsZero() && time.Now().After(c.until) {
			err = jsapi.ErrStop
		}
		return err
	}
	err = c.read(ctx, s.Next(), add)
	if err != nil && c.stopped() && s.Size() >= c.cfg.Archive.SegmentSize/stopShare {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
		defer cancel()
		defer progress.Wait(limited, "writing what was read to the archive")()
		if failed := end(limited, s.Next()-1); failed != nil {
			return errors.Join(err, failed)
		}
	}
	if err != nil || s.Empty() {
		return err
	}
	if s.Next() <= c.to { // its turn is over
		c.a.Leave(s)
		return nil
	}
	if c.o.Now || c.isOld(s.First()) {
		return end(ctx, c.to)
	}
	c.a.Leave(s)
	return nil
}

// isOld reports whether a segment ends whose first message was stored then. One that was stored as far ahead
// counts too: the broker's clock has gone back, and may not get there for a year.
func (c *command) isOld(first time.Time) bool {
	return c.now.Sub(first).Abs() >= c.cfg.Archive.SegmentAge
}

// read calls add with each message from a sequence on that may be archived.
func (c *command) read(ctx context.Context, first uint64,
	add func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	if first > c.to {
		return nil
	}
	js, err := c.api.JetStream()
	if err != nil {
		return err
	}
	if lost, err := c.allLost(ctx, first); err != nil {
		return err
	} else if len(lost) > 0 {
		return c.removed()
	}
	task := progress.Count(ctx, "archiving stream "+c.cfg.Stream, "messages", int64(c.to-first+1))
	defer task.End()
	due, each := time.Now(), min(c.o.Over/time.Duration(c.to-first+1), slowest)
	return jsapi.ReadStream(ctx, js, c.cfg.Stream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: first,
		InactiveThreshold: inactive,
		Metadata:          map[string]string{jsapi.MetadataReader: "outflow archive run"},
	}, c.to, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		if seq := meta.Sequence.Stream; seq >= first && seq <= c.to {
			task.Set(int64(seq - first + 1))
		}
		if due = due.Add(each); time.Until(due) >= nap {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Until(due)):
			}
		}
		return add(m, meta)
	})
}

// slowest is how long each message may take where reading is spread over a time: the server deletes a
// consumer that does not ask for more. nap is the shortest time that it sleeps for.
const (
	slowest = time.Millisecond
	nap     = 2 * time.Millisecond
)

func (c *command) removed() error {
	return fmt.Errorf("message %d of stream %s was removed while it was read: run it again", c.to,
		c.cfg.Stream)
}

func (c *command) stopped() bool {
	select {
	case <-c.stop:
		return true
	default:
		return false
	}
}
