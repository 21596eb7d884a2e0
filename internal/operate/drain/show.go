package drain

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/outbox"
)

// phase is what a drain waits for.
type phase int

const (
	phaseNone       phase = iota // nothing was read yet
	phasePublishing              // until the goal is reached
	phaseHeld                    // until gap mode lets go what it holds back
	phaseRecorded                // until a checkpoint at the goal is recorded
	phaseDurable                 // until that checkpoint is confirmed
	phaseOpen                    // until open transactions have ended
	phaseLast                    // until it is certain that nothing is left
	phaseProblem                 // until everything can be read again
)

// shower shows how far a drain has come. It belongs to the drainer's goroutine.
type shower struct {
	phase   phase
	said    Report        // what the last line that stays was about
	durable time.Duration // sink.durable_after
	task    *progress.Task
	from    outbox.LSN             // where the round began
	newest  atomic.Pointer[string] // of phaseOpen and phaseProblem: what is waited for
}

// phaseOf says what the drain waits for, and for phaseDurable until when.
func (s *shower) phaseOf(rep *Report, r *checkpoint.Readings, published outbox.LSN) (p phase,
	until time.Time) {
	switch {
	case rep.Problem != "":
		return phaseProblem, until
	case rep.Goal == 0:
		return phaseNone, until
	case rep.Confirmed >= rep.Goal && len(rep.Open) > 0:
		return phaseOpen, until
	case rep.Confirmed >= rep.Goal:
		return phaseLast, until
	}
	if r != nil && r.Record != nil {
		for _, c := range r.Record.Checkpoints {
			if c.Start() >= rep.Goal {
				return phaseDurable, c.Since.Add(s.durable)
			}
		}
	}
	switch {
	case rep.Holding > 0 && published >= rep.Goal:
		return phaseHeld, until
	case published >= rep.Goal:
		return phaseRecorded, until
	}
	return phasePublishing, until
}

// show shows the report; r is what it was made of, nil if that could not be read. published may be beyond
// what is recorded.
func (s *shower) show(ctx context.Context, rep Report, r *checkpoint.Readings, published outbox.LSN) {
	p, until := s.phaseOf(&rep, r, published)
	if p == phaseNone {
		return
	}
	what := rep.Problem
	if p == phaseOpen {
		what = rep.open()
	}
	s.newest.Store(&what)
	if p == s.phase && rep.Rounds == s.said.Rounds && rep.Holder == s.said.Holder {
		s.count(&rep, published)
		return
	}
	if rep.Rounds != s.said.Rounds {
		s.from = max(published, rep.Confirmed)
	}
	s.phase, s.said = p, rep
	s.task.End()
	switch p {
	case phaseProblem, phaseOpen:
		progress.Step(ctx, "%s", what)
		s.task = progress.Show(ctx, func(time.Time) string { return *s.newest.Load() })
	case phasePublishing:
		progress.Step(ctx, "publishing all that is committed, up to %v: %s", rep.Goal, rep.who())
		left := outbox.Distance(min(s.from, rep.Goal), rep.Goal)
		s.task = progress.Count(ctx, "publishing", progress.WAL, int64(left))
		s.count(&rep, published)
	case phaseHeld:
		progress.Step(ctx, "%s", rep.held())
		s.task = progress.Show(ctx, func(time.Time) string { return rep.held() })
	case phaseRecorded:
		s.task = progress.Show(ctx, func(time.Time) string {
			return "all of it is published; waiting for the next checkpoint record"
		})
	case phaseDurable:
		progress.Step(ctx, "all that was committed up to %v is published and recorded, and durable after "+
			"sink.durable_after: %s", rep.Goal, rep.who())
		s.task = progress.Until(ctx, "all of it is published", until, "until it is durable")
	case phaseLast:
		s.task = progress.Show(ctx, func(time.Time) string {
			return "all of it is confirmed; looking whether more was written"
		})
	}
}

// count sets how much of the WAL of this round is published.
func (s *shower) count(rep *Report, published outbox.LSN) {
	if s.phase == phasePublishing {
		s.task.Set(int64(outbox.Distance(s.from, max(s.from, min(published, rep.Goal)))))
	}
}

// who says who publishes, and whether the writers go on.
func (r *Report) who() string {
	who := "drain publishes itself"
	if r.Holder != 0 {
		who = fmt.Sprintf("the outflow that holds the slot (pid %d) publishes", r.Holder)
	}
	if r.Meanwhile > 0 {
		who += fmt.Sprintf("; %s %s written meanwhile: are the writers stopped?",
			units.Of(r.Meanwhile, "event"), units.Agree(r.Meanwhile, "was", "were"))
	}
	return who
}

// open says which transactions are waited for.
func (r *Report) open() string {
	return fmt.Sprintf(
		"what %s writes to the table may not be committed yet: it is waited for (`COMMIT PREPARED` or "+
			"`ROLLBACK PREPARED` what is prepared)",
		strings.Join(r.Open, ", "),
	)
}

// held says what gap mode holds back.
func (r *Report) held() string {
	return fmt.Sprintf("events of %d sequences are held back until the counters before them are committed, "+
		"or reorder.bound has passed", r.Holding)
}
