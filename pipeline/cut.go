package pipeline

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// errCutRecorded ends a session whose record of a cut is durable.
var errCutRecorded = fmt.Errorf("the cut at the stream's end is recorded: %w", errAnew)

// errCutStored ends a session that has stored a cut: what it closes follows when the cut is recorded.
var errCutStored = fmt.Errorf("a cut is the stream's newest message: %w", errAnew)

// newestCut returns the sequence of the cut that each message of a session names, 0 if there is none: where
// clusters share the stream, the newest one at or below its end as it was read. A message that was made
// without knowing of another one is refused.
func newestCut(ctx context.Context, js JetStream, r checkpoint.Readings) (uint64, error) {
	if r.Record.Epoch == 0 {
		return 0, nil
	}
	cut, err := limited("newest cut", func(ctx context.Context) (*relay.Stored, error) {
		return js.NewestCut(ctx, r.Stream.LastSeq)
	})(ctx)
	if err != nil || cut == nil {
		return 0, err
	}
	return cut.Seq, nil
}

// settleCut lets nothing follow a cut that is the stream's newest message until it is recorded and nothing
// that the broker may lose takes it back: whoever starts behind it after a loss has to know of it. The error
// ends the session, also when all went well. nil: there is nothing to wait for.
//
// Somebody stored the cut and did not come further, or this process did. Its message has to be durable before
// the record has it, because a record with a cut that the stream does not have is of no use to anybody.
func (p *Pipeline) settleCut(ctx context.Context, conns *Conns, r checkpoint.Readings,
	start checkpoint.Start) error {
	newest := r.Stream.NewestSeq
	settled := newest == p.settledCut && start.NewCut == nil // not one that has come in its place
	if !start.Shared || r.Stream.Cut == nil || newest <= start.Accepted || settled {
		return nil
	}
	p.health.busy(true)
	defer p.health.busy(false)
	p.log.Info("the stream's newest message is a cut: nothing follows it until that is durable", "seq",
		newest, "cut", r.Stream.Cut.LSN, "recorded", start.NewCut == nil, "after",
		conns.Checkpoint.DurableAfter)
	if start.NewCut != nil {
		if err := p.untilDurable(ctx, conns, &r); err != nil {
			return err
		}
		next, err := conns.Checkpoint.WithCut(r.Record, *start.NewCut)
		if err != nil {
			return err
		}
		if r.Revision, err = conns.save(ctx, next, r.Revision); err != nil {
			return fmt.Errorf("record the cut at %v: %w", start.NewCut.Cut.LSN, err)
		}
		r.Record = next
	}
	if err := p.untilDurable(ctx, conns, &r); err != nil {
		return err
	}
	_, revision, err := conns.load(ctx)
	if err != nil {
		return err
	}
	if revision != r.Revision {
		return fmt.Errorf("the checkpoint record was written while its cut at %v became durable",
			r.Stream.Cut.LSN)
	}
	p.settledCut = newest
	return errCutRecorded
}

// untilDurable waits until what the broker has of r is durable: it has had that for durable_after, and still
// has all of it. The record is renewed meanwhile.
func (p *Pipeline) untilDurable(ctx context.Context, c *Conns, r *checkpoint.Readings) (err error) {
	begun := time.Now()
	for left := c.Checkpoint.DurableAfter; left > 0; left = c.Checkpoint.DurableAfter - time.Since(begun) {
		every := p.renewal(c.Checkpoint.SaveInterval())
		if every == 0 {
			every = left
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.JetStream.Lost():
			return c.JetStream.Err()
		case <-time.After(min(every, left)):
		}
		if every < left {
			if r.Revision, err = c.save(ctx, r.Record, r.Revision); err != nil {
				return fmt.Errorf("renew the checkpoint record: %w", err)
			}
		}
	}
	st, err := limited("stream", c.JetStream.Tail)(ctx)
	if err != nil {
		return err
	}
	if st.NewestSeq != r.Stream.NewestSeq || st.Cut == nil || *st.Cut != *r.Stream.Cut {
		return fmt.Errorf("the stream ends at sequence %d, and not any more with the cut at %d", st.NewestSeq,
			r.Stream.NewestSeq)
	}
	return nil
}

// carryOut closes by a cut what is held, in the place that the record says. Its message is in the stream.
func (s *session) carryOut(ctx context.Context, cut checkpoint.StoredCut) (err error) {
	if s.reader == nil { // the end of a claimed range has no message
		if err := s.check.Cut(cut); err != nil {
			return err
		}
		s.tracker.Made(1)
	}
	s.in.carriedOut(cut)
	if err := s.whenVerified(ctx); err != nil {
		return err
	}
	s.out.n, s.out.left = 0, 0
	s.out.window, err = s.buffer.Cut(cut.LSN)
	return err
}

// unknownThru stands for the thru of a newest message that can't be read.
const unknownThru outbox.LSN = math.MaxUint64

// thruOf is the input that closed the stream's newest message, as a start has found it; 0: there is none.
func thruOf(start checkpoint.Start) outbox.LSN {
	if start.Thru == 0 && start.LastSeq > start.Accepted {
		return unknownThru
	}
	return start.Thru
}

// offerCut closes by a cut what a silent home has left open: all up to the newest input, which is all that is
// held. The cut is a message of the stream, at the sequence that the next one would have. What follows it
// waits until it is recorded, so the session ends, whatever has become of it.
func (s *session) offerCut(ctx context.Context, now time.Time) error {
	if !s.mayCut(now) {
		return nil
	}
	cut, err := s.checkpointer.record.CutAt(s.in.seen, s.in.away.home.Timeline)
	if err != nil {
		return err
	}
	s.log.Info("the home is silent: what is held is closed by a cut", "cut", cut.LSN, "seq", s.pub.Sent()+1,
		"epoch", cut.Epoch)
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if err := s.conns.JetStream.StoreCut(ctx, cut, s.pub.Sent(), s.fence); err != nil {
		return fmt.Errorf("store a cut at %v: %w", cut.LSN, err)
	}
	return errCutStored
}

// mayCut reports whether a cut is due, and everything before it is in the stream. That the home is silent is
// a reason, not a proof: if it is not, a window closes early.
func (s *session) mayCut(now time.Time) bool {
	held, _ := s.buffer.Held()
	patience := s.p.cfg.MaximumDelay
	if set := s.buffer.Settings(); !set.ByGap() {
		patience = max(patience, set.Horizon) // until then a home that lives may have nothing to say
	}
	switch {
	case s.p.cfg.MaximumDelay == 0 || !s.in.shared || s.in.away == nil || held == 0:
		return false
	case now.Sub(s.p.input.came) < patience || s.in.end() < s.monitor.walEnd:
		return false // the home, or what it has sent, may still close it
	case !s.verified || s.in.decoder.InTransaction() || len(s.in.cuts) > 0 || s.tracker.Unacknowledged() ||
		s.questions.busy:
		return false
	case s.heard.Sub(s.asked) < s.conns.Checkpoint.DurableAfter:
		return false // of an epoch that the record may lose again it would be nobody's
	}
	// Whoever has not read what closed the newest message, or what the record knows, has nothing to add.
	return s.in.seen >= max(s.thru, s.tracker.Newest().Due)
}
