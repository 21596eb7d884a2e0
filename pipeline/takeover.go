package pipeline

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/outbox"
)

// renewals is how often an owner gives a sign of life in the time after which others suspect it.
const renewals = 4

// errSuspected ends the session of whoever stands by while the owner gives no sign of life.
var errSuspected = fmt.Errorf("the owner of the stream is silent: %w", errAnew)

// errLags ends it while the owner lives and does not come further.
var errLags = fmt.Errorf("the owner of the stream does not go on to what was read here: %w", errAnew)

// errTaken ends the start that has taken the stream over.
var errTaken = fmt.Errorf("this cluster has taken the stream over: %w", errAnew)

// lookInterval is how often whoever stands by reads the home's record.
func (p *Pipeline) lookInterval() time.Duration {
	if p.cfg.MaximumDelay == 0 {
		return monitorInterval
	}
	return min(max(p.cfg.MaximumDelay/(2*renewals), standbyPoll), monitorInterval)
}

// suspect ends a session that stands by when the home's record was not written for MaximumDelay, by this
// process's monotonic clock, and what was in the own WAL was read. The slot is free then, and the next start
// takes the stream over if the record is still the same ([Pipeline.mayTake]). It does so as well when the
// owner lives, and has not come to what was read here: if the home is gone, nobody may have more of its rows.
// The suspicion may be wrong, and then costs a change of owner: what counts is what the stream holds.
func (f *follower) suspect() error {
	switch {
	case f.p.cfg.MaximumDelay == 0 || f.end < f.server.WALEnd:
	case time.Since(f.alive) >= f.p.cfg.MaximumDelay:
		f.p.silent = f.revision
		return errSuspected
	case time.Since(f.moved) >= f.patience():
		f.p.lags = f.progress.epoch
		return errLags
	}
	return nil
}

// progress is what a living owner changes while there is something that is not in the stream.
type progress struct {
	epoch uint64
	due   outbox.LSN // of the record's newest checkpoint
	cuts  int
	last  uint64 // the stream's last sequence
}

// compare takes note of how far the owner is. changing: the stream changes too fast to be read.
func (f *follower) compare(rec *checkpoint.Record, last uint64, changing bool) {
	now := progress{epoch: rec.Epoch, cuts: len(rec.Cuts), last: last}
	if n := len(rec.Checkpoints); n > 0 {
		now.due = rec.Checkpoints[n-1].Due
	}
	if changing || now != f.progress || f.newest <= now.due {
		f.moved = time.Now()
	}
	f.progress = now
}

// patience is how long the owner may take for its next step. What is held waits for the time of its window;
// whoever has just taken the stream cuts after another MaximumDelay at most, or that time, and all that
// follows becomes durable: the epoch, the cut, and its record.
func (f *follower) patience() time.Duration {
	return 2*f.p.cfg.MaximumDelay + f.window() + 3*f.conns.Checkpoint.DurableAfter
}

// newestInput is the newest input that was read, and when it came in. Sessions that follow each other without
// a failure go on with it, because what is read again was there before: a cut need not wait again for what
// the take-over has waited for.
type newestInput struct {
	lsn  outbox.LSN
	came time.Time
}

// begin counts the home's silence from now where nothing is known of it. What the own record knows, up to
// due, was read here before.
func (n *newestInput) begin(due outbox.LSN, now time.Time) {
	if n.came.IsZero() {
		n.lsn, n.came = due, now
	}
}

func (n *newestInput) read(lsn outbox.LSN, now time.Time) {
	if lsn > n.lsn {
		n.lsn, n.came = lsn, now
	}
}

// mayTake reports whether a start may take the stream over from the owner that the record names: one that is
// silent, or lags, or any if this is the home, which does not wait: nobody has its rows sooner.
//
// What follows is a start as any other, which makes the stream again from this cluster's own WAL up to its
// end, and a cut ([session.offerCut]) where the home does not close what is held.
func (p *Pipeline) mayTake(conns *Conns, r *checkpoint.Readings) bool {
	return p.cfg.MaximumDelay > 0 && (!conns.Checkpoint.Mapping.Away() || r.Revision == p.silent ||
		r.Record.Epoch == p.lags)
}

// takeEpoch takes the next epoch, by compare-and-set, if a start from the record would go on then. It is
// taken from the owner that was suspected, at a revision of the record: of two clusters that suspect it at
// once the second one stands by.
func (p *Pipeline) takeEpoch(ctx context.Context, conns *Conns, revision uint64) error {
	r, err := conns.read(ctx)
	if err != nil {
		return err
	}
	if r.Revision != revision {
		return fmt.Errorf("the owner of the stream has written the checkpoint record: %w", errAnew)
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
	_, err = conns.save(ctx, r.Record, r.Revision)
	if errors.Is(err, checkpoint.ErrConflict) {
		return fmt.Errorf("%w: %w", err, errAnew)
	}
	if err != nil {
		return fmt.Errorf("take epoch %d of the stream: %w", r.Record.Epoch, err)
	}
	p.log.Info("this cluster takes the stream over", "epoch", r.Record.Epoch)
	return errTaken
}

// mayHold reports whether a checkpoint that holds something may be recorded, which gap mode has beyond what
// it holds. Where clusters share the stream, a cut that another owner has sent may still arrive, and it lies
// below such a checkpoint if that one had read less: so first a message is stored in this session, and the
// cut is refused. A checkpoint behind that message waits until it is acknowledged.
func (s *session) mayHold() bool { return !s.in.shared || s.pub.Sent() > s.monitor.start }

// save saves the record within the time limit of a write.
func (c *Conns) save(ctx context.Context, rec *checkpoint.Record, revision uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return c.Store.Save(ctx, rec, revision)
}

// renewal is how often an owner writes the record without having anything new for it, interval being that of
// other writes; 0: it need not.
func (p *Pipeline) renewal(interval time.Duration) time.Duration {
	if p.cfg.MaximumDelay == 0 {
		return 0
	}
	return max(p.cfg.MaximumDelay/renewals, interval)
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
