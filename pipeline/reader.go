package pipeline

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// errClaimed ends the session that has read a claim of this cluster and recorded it: the next one makes the
// messages of the range.
var errClaimed = fmt.Errorf("this cluster publishes for another one: %w", errAnew)

// reader reads the rows of another home, and publishes for it what this cluster has claimed: what
// [claim.Reader] asks of its driver.
//
// The session is one of any reader of another home's rows. It makes the windows of all that the home's WAL
// has, and leaves out each message that is in no claimed range of the record. At the end of a range it closes
// what is open, so the messages of a range come before those of the next one: the stream is a function of
// the home's WAL and the ranges. A checkpoint that goes beyond what is settled would pass over messages that
// may have to be claimed still. It waits until that is settled, and so does the slot.
type reader struct {
	claim.Reader
	rowsRead
	home    int
	claimed []relay.Claimed // by rows that were read, and not in the record
	claims  prometheus.Counter

	heard     time.Time // when the newest row of the home was committed there
	publishes bool      // this cluster has claimed last, and the home is silent since, or has yielded

	asked  time.Time  // the server was last asked for the end of its WAL
	walEnd outbox.LSN // what it has answered; 0: nothing yet
}

// readerFrom returns the reader at the begin of a session. What a process knows outlives sessions, unless the
// record is another one than it has left: the broker has lost some, or another process has read more.
func (p *Pipeline) readerFrom(cfg *decoder.Config, r *checkpoint.Readings) *reader {
	if p.reader == nil || r.Revision != p.reader.revision {
		home := cfg.Clusters[cfg.Origin]
		rd := &reader{rowsRead: rowsRead{cfg: *p.cfg.Islands, begun: time.Now()}, home: home,
			claims: p.metrics.claims, publishes: len(r.Record.Claimed) > 0}
		rd.Reader = claim.NewReader(rd.cfg, home)
		if kept := r.Record.Reader; kept != nil {
			rd.Reader, rd.read, rd.timeline = claim.ReaderFrom(rd.cfg, home, *kept), kept.At, kept.Timeline
		}
		rd.Start(0)
		rd.lacks = r.Server.WALEnd
		p.reader = rd
	}
	p.reader.on(&r.Server.History)
	p.reader.revision = r.Revision
	return p.reader
}

// state is what a start from the record goes on from; nil: nothing that the record lacks, or not without what
// was claimed.
func (r *reader) state() *relay.ReaderState {
	if r.read == 0 || len(r.claimed) > 0 {
		return nil
	}
	return r.stateAt()
}

func (r *reader) stateAt() *relay.ReaderState {
	s := r.State()
	s.At, s.Timeline = r.read, r.timeline
	return &s
}

// ofHome reports whether the home has written the row.
func (r *reader) ofHome(row relay.ClusterRow) bool { return row.By == r.home }

// take takes a commit, once in a process.
func (r *reader) take(result *decoder.Result) {
	c := &result.Commit
	if c.Read <= r.read {
		return
	}
	if c.Kind == relay.Events || slices.ContainsFunc(result.ClusterRows, r.ofHome) {
		r.First(c.LSN)
	}
	now := r.clock(time.Now())
	if c.Kind == relay.Events {
		r.Commit(now, c.LSN)
	}
	for n := range result.ClusterRows {
		if r.ofHome(result.ClusterRows[n]) && result.ClusterRows[n].Home == 0 {
			r.heard = relay.CommitTime(c.Time)
		}
		if own := r.Row(now, &result.ClusterRows[n]); own != (claim.Range{}) {
			r.claimed = append(r.claimed, relay.Claimed{From: own.From, To: own.To})
			r.claims.Inc()
		}
		r.publishes = r.last(&result.ClusterRows[n])
	}
	r.read = c.Read
}

// last reports whether this cluster has claimed last, after a row was taken.
func (r *reader) last(row *relay.ClusterRow) bool {
	switch {
	case row.Home == r.home && row.Kind == relay.Claim:
		return row.By == r.cfg.Self
	case row.By == r.home && row.Home == 0 && !r.State().Yielded:
		return false
	}
	return r.publishes
}

// cutsOf are the ends of the ranges, at which what is open is closed. One below the start closes nothing.
func cutsOf(claimed []relay.Claimed) (cuts []checkpoint.StoredCut) {
	for _, c := range claimed {
		cuts = append(cuts, checkpoint.StoredCut{LSN: c.To})
	}
	return cuts
}

// recordClaimed records what this cluster has claimed, if there is anything new. Then, or after a failure,
// the session ends.
func (s *session) recordClaimed(ctx context.Context) error {
	r := s.reader
	if r == nil || len(r.claimed) == 0 {
		return nil
	}
	if err := s.free(ctx); err != nil {
		return err
	}
	next, err := s.checkpointer.record.WithClaimed(r.claimed, r.stateAt())
	if err == nil {
		err = s.checkpointer.save(ctx, next)
	}
	if err != nil {
		return fmt.Errorf("record what was claimed of another home: %w", err)
	}
	r.claimed = nil
	return errClaimed
}

// isClaimed reports whether the record says that this cluster publishes the message.
func (s *session) isClaimed(h *outbox.Header) bool {
	return slices.ContainsFunc(s.claimed, func(c relay.Claimed) bool { return c.Covers(h.Pos.LSN) })
}

// full reports whether the record lists so many ranges that nothing is claimed until some of them go. They
// go with their checkpoints when it is saved, also where there is nothing else to save.
func (s *session) full() bool { return s.reader != nil && len(s.claimed) >= checkpoint.MaxClaimed/2 }

// maxWaiting is how many checkpoints wait until what they cover is settled. Beyond that every second one is
// dropped: a start reads more than it would have to.
const maxWaiting = 256

// waiting is a checkpoint that waits. The input that closed its window has to be settled as well: if the end
// of a range came before it, that closed the window, and made another one of it.
type waiting struct {
	relay.Checkpoint
	thru outbox.LSN
}

// await takes a checkpoint. It waits at least until the loop looks around.
func (s *session) await(cp waiting) {
	if len(s.waiting) == maxWaiting {
		for i := range maxWaiting / 2 {
			s.waiting[i] = s.waiting[2*i]
		}
		s.waiting = s.waiting[:maxWaiting/2]
	}
	s.waiting = append(s.waiting, cp)
}

// settled makes the newest one of them a checkpoint that has to wait no more. All messages made are of
// windows up to it: what is claimed is settled, and ends a window.
func (s *session) settled() {
	for i := len(s.waiting) - 1; i >= 0; i-- {
		if s.reader.Settled(s.waiting[i].thru) {
			s.tracker.Window(s.located(s.waiting[i].Checkpoint))
			s.waiting = slices.Delete(s.waiting, 0, i+1)
			return
		}
	}
}

// ends is how often a reader finds out, in the time of a slot, whether its WAL is read to its end.
const ends = 32

// answer writes what the others have to know of a home whose rows are read here: one row after the other. An
// echo is written also while NATS is away, or the stream differs: the home waits for it.
func (s *session) answer(now time.Time) {
	r, asked := s.reader, now
	claims := s.verified && !r.lost && !s.full()
	age := now.Sub(r.asked)
	reached := claims && r.walEnd != 0 && s.in.end() >= r.walEnd && age < r.cfg.Delay/4
	if reached {
		r.End(r.clock(r.asked))
		// What is claimed and not stored may stay so as long as NATS takes nothing: others claim the rest.
		if s.out.window == nil && !s.tracker.Unacknowledged() {
			asked = r.asked
		}
	}
	if !s.heartbeats.worker.busy {
		if row := r.Next(r.clock(asked)); row.Kind != 0 {
			s.writeRow(row, asked, func() {})
		}
	}
	// What is not reached yet may be soon: while the WAL grows, the end of it is always further.
	open := r.walEnd != 0 && !reached && age < r.cfg.Delay/8
	if claims && age >= r.cfg.Delay/ends && !open && !s.questions.busy {
		s.askEnd(now)
	}
}

// askEnd starts to ask for the end of the WAL.
func (s *session) askEnd(now time.Time) {
	s.reader.asked, s.reader.walEnd = now, 0
	s.questions.start(func(ctx context.Context) func() error {
		server, err := limited("server", s.conns.Source.Server)(ctx)
		return func() error {
			s.reader.walEnd = server.WALEnd
			return err
		}
	})
}
