package archive

import (
	"context"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// lost returns those of the sequences without a message that nothing explains: they were not erased, and the
// header of the message behind them, if there is one, does not say that the broker had lost them, and that
// what they were comes again.
func (c *command) lost(ctx context.Context, from, to uint64, behind nats.Header) (outbox.Sequences, error) {
	if seq, err := strconv.ParseUint(behind.Get(outbox.HeaderLost), 10, 64); err == nil && seq <= to {
		to = max(seq, from) - 1
	}
	if len(c.erased.Lacking(from, to)) == 0 {
		return nil, nil
	}
	var err error
	c.erased, err = c.erasedNow(ctx)
	return c.erased.Lacking(from, to), err
}

// lostBefore is lost, with the header of a message that was read from the leader; nil: there is none.
func (c *command) lostBefore(ctx context.Context, from, to uint64, m *jsapi.Message) (outbox.Sequences,
	error) {
	var behind nats.Header
	if m != nil && len(m.Header) > 0 {
		var err error
		if behind, err = nats.DecodeHeadersMsg(m.Header); err != nil {
			return nil, fmt.Errorf("message %d of stream %s: %w", m.Seq, c.cfg.Stream, err)
		}
	}
	return c.lost(ctx, from, to, behind)
}

// allLost returns what is lost if no message from next on is left to be archived, and the front of the stream
// has come beyond it. It fails if that is not accepted.
func (c *command) allLost(ctx context.Context, next uint64) (outbox.Sequences, error) {
	m, err := c.first(ctx, 1)
	if err != nil || m != nil && m.Seq <= max(next, c.to) {
		return nil, err
	}
	to := c.upTo
	if m != nil {
		to = min(m.Seq-1, c.upTo)
	}
	lost, err := c.lostBefore(ctx, next, to, m)
	if err == nil && len(lost) > 0 && !c.accepts(lost) {
		err = c.gap(ctx, lost)
	}
	return lost, err
}

func (c *command) accepts(lost outbox.Sequences) bool {
	return lost[0].From >= c.o.AcceptGap.From && lost[len(lost)-1].To <= c.o.AcceptGap.To
}

// skip makes a segment without a message, where all that is confirmed is lost, and that is accepted.
func (c *command) skip(ctx context.Context, lost outbox.Sequences) error {
	s, err := c.a.NewSegment()
	if err != nil {
		return err
	}
	s.Gap(lost, c.erased.Within(s.Next(), c.upTo))
	s.Skip(c.upTo)
	return c.end(ctx, s, c.to)
}

// tail notes what is lost behind the newest confirmed message, up to the confirmed checkpoint: the segment
// says that it has all events below that.
func (c *command) tail(ctx context.Context, s *archive.Segment) error {
	if s.Next() > c.upTo {
		return nil
	}
	behind, err := c.first(ctx, s.Next())
	if err != nil {
		return err
	}
	lost, err := c.lostBefore(ctx, s.Next(), c.upTo, behind)
	if err == nil && len(lost) > 0 {
		s.Gap(lost, c.erased.Within(s.Next(), c.upTo))
		s.Skip(c.upTo)
	}
	return err
}

// hole notes that there is no message up to a sequence. behind is the header of the message behind them.
// Where the stream's front has come beyond them, they were taken before they could be archived: it fails if
// that is not accepted. What was taken from within, by a limit for each subject or by somebody, is only
// noted.
func (c *command) hole(ctx context.Context, s *archive.Segment, to uint64, behind nats.Header) error {
	from := s.Next()
	lost, err := c.lost(ctx, from, to, behind)
	if err != nil {
		return err
	}
	if len(lost) > 0 {
		there, err := c.first(ctx, from)
		switch {
		case err != nil:
			return err
		case there != nil && there.Seq <= to:
			return fmt.Errorf("stream %s: the server that it was read from lacks message %d, which the "+
				"leader has: run it again", c.cfg.Stream, there.Seq)
		}
		front, err := c.first(ctx, 1)
		if err != nil {
			return err
		}
		if front == nil || front.Seq > from {
			if !c.accepts(lost) {
				return c.gap(ctx, lost)
			}
			c.o.Now = true // the next run does not know of it, unless a segment says so
		}
	}
	s.Gap(lost, c.erased.Within(from, to))
	return nil
}

// gap refuses that messages are lost, unless another run has archived some meanwhile: then they may go.
func (c *command) gap(ctx context.Context, lost outbox.Sequences) error {
	next := c.a.Next()
	if err := c.a.Refresh(ctx); err != nil {
		return err
	}
	if c.a.Next() > next {
		return archive.ErrOvertaken
	}
	from, to := lost[0].From, lost[len(lost)-1].To
	look := ""
	if len(c.a.Segments) == 0 { // accepting would begin an archive beside the one that has them
		look = "The archive has nothing of this stream: see first that archive.url is where it was before, " +
			"and mounted. "
	}
	return &outbox.Fault{Class: outbox.Gap, Code: archive.CodeGap,
		Message: fmt.Sprintf("stream %s has removed messages %d to %d, which are not archived", c.cfg.Stream,
			from, to),
		Hint: fmt.Sprintf("%sIf that is accepted: `outflow archive run --accept-gap %d-%d`. Then set the "+
			"stream's limits to none, or archive more often.", look, from, to)}
}
