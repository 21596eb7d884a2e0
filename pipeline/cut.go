package pipeline

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
)

// errCutRecorded ends a session whose record of a cut is durable: everything is read anew.
var errCutRecorded = errors.New("the cut at the stream's end is recorded")

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
	after := conns.Checkpoint.DurableAfter
	p.health.busy(true)
	defer p.health.busy(false)
	p.log.Info("the stream's newest message is a cut: nothing follows it until that is durable", "seq",
		newest,
		"cut", r.Stream.Cut.LSN, "recorded", start.NewCut == nil, "after", after)
	if start.NewCut != nil {
		if err := conns.waitFor(ctx, after, r); err != nil {
			return err
		}
		next, err := conns.Checkpoint.WithCut(r.Record, *start.NewCut)
		if err != nil {
			return err
		}
		save, cancel := context.WithTimeout(ctx, writeTimeout)
		defer cancel()
		if r.Revision, err = conns.Store.Save(save, next, r.Revision); err != nil {
			return fmt.Errorf("record the cut at %v: %w", start.NewCut.Cut.LSN, err)
		}
	}
	if err := conns.waitFor(ctx, after, r); err != nil {
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

// waitFor waits until what the broker had when r was read is durable: it has had that long, and has all of it
// still.
func (c *Conns) waitFor(ctx context.Context, after time.Duration, r checkpoint.Readings) error {
	if after > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.JetStream.Lost():
			return c.JetStream.Err()
		case <-time.After(after):
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
	if err := s.check.Cut(cut); err != nil {
		return err
	}
	s.tracker.Made(1)
	s.in.carriedOut(cut)
	if err := s.whenVerified(ctx); err != nil {
		return err
	}
	s.out.n, s.out.left = 0, 0
	s.out.window, err = s.buffer.Cut(cut.LSN)
	return err
}
