package pipeline

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
)

// renewals is how often an owner gives a sign of life in the time after which others suspect it.
const renewals = 4

// errSuspected ends the session of whoever stands by while the owner gives no sign of life.
var errSuspected = fmt.Errorf("the owner of the stream is silent: %w", errAnew)

// errTaken ends the start that has taken the stream over.
var errTaken = fmt.Errorf("this cluster has taken the stream over: %w", errAnew)

// lookInterval is how often whoever stands by reads the home's record.
func (p *Pipeline) lookInterval() time.Duration {
	if p.maximumDelay == 0 {
		return monitorInterval
	}
	return min(max(p.maximumDelay/(2*renewals), standbyPoll), monitorInterval)
}

// suspect ends a session that stands by when the home's record was not written for maximumDelay, by this
// process's monotonic clock, and what was in the own WAL was read. The slot is free then, and the next start
// takes the stream over if the record is still the same ([Pipeline.mayTake]). The suspicion may be wrong, and
// then costs a change of owner: what counts is what the stream holds.
func (f *follower) suspect() error {
	if f.p.maximumDelay == 0 || time.Since(f.alive) < f.p.maximumDelay || f.end < f.server.WALEnd {
		return nil
	}
	f.p.silent = f.revision
	return errSuspected
}

// mayTake reports whether a start may take the stream over from the owner that a revision of the record
// names: one that is silent, or any if this is the home, which does not wait: nobody has its rows sooner.
//
// What follows is a start as any other, which makes the stream again from this cluster's own WAL up to its
// end, and a cut ([session.offerCut]) where the home does not close what is held.
func (p *Pipeline) mayTake(conns *Conns, revision uint64) bool {
	return p.maximumDelay > 0 && (!conns.Checkpoint.Mapping.Away() || revision == p.silent)
}

// takeEpoch takes the next epoch, by compare-and-set, if a start from the record would go on then.
func (p *Pipeline) takeEpoch(ctx context.Context, conns *Conns) error {
	r, err := conns.read(ctx)
	if err != nil {
		return err
	}
	if r.Slot.Active {
		return p.standBy(ctx, conns, r.Slot)
	}
	if r.Record != nil {
		r.Record = r.Record.TakenBy(conns.Checkpoint.Cluster)
	}
	if _, err := checkpoint.Resolve(conns.Checkpoint, r); err != nil {
		return err
	}
	if _, err := conns.save(ctx, r.Record, r.Revision); err != nil {
		return fmt.Errorf("take epoch %d of the stream: %w", r.Record.Epoch, err)
	}
	p.log.Info("this cluster takes the stream over", "epoch", r.Record.Epoch)
	return errTaken
}

// save saves the record within the time limit of a write.
func (c *Conns) save(ctx context.Context, rec *checkpoint.Record, revision uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return c.Store.Save(ctx, rec, revision)
}

// renewal is how often an owner writes the record without having anything new for it, interval being that of
// other writes; 0: it need not.
func (p *Pipeline) renewal(interval time.Duration) time.Duration {
	if p.maximumDelay == 0 {
		return 0
	}
	return max(p.maximumDelay/renewals, interval)
}

// mustRenew reports whether the record is to say that its owner lives. One that has not the rows to go on
// with says nothing: another cluster may have them.
func (s *session) mustRenew(now time.Time) bool {
	every := s.p.renewal(s.tracker.SaveInterval())
	if every == 0 || !s.in.shared || now.Sub(s.saved) < every {
		return false
	}
	return s.in.away == nil || s.thru == unknownThru || max(s.in.seen, s.in.due) >= s.thru
}
