package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

var (
	// errWait says that a message may not be published before more cluster rows were read.
	errWait = errors.New("the home may not publish before the other clusters have answered")
	// errSilent ends a session whose rows were not committed for so long that others may soon publish.
	errSilent = errors.New("the home has given no sign of life for too long")
)

// codeGapMode is the code of the fault of gap mode where others publish for a home.
const codeGapMode = "cluster_gap_mode"

// island is a home for which other clusters publish when it is silent: what [claim.Home] asks of its driver.
type island struct {
	claim.Home
	rowsRead
	// The others have had a sign of life since then, and each was less than half of the delay after the one
	// before: the newest row that is known to be committed was asked for then, or the start began whose sign
	// of life was read.
	alive  time.Time
	speaks bool // the stream was compared with the WAL since the last fault: who can't publish says nothing
}

func newIsland(cfg *claim.Config) *island {
	if cfg == nil {
		return nil
	}
	return &island{rowsRead: rowsRead{cfg: *cfg, begun: time.Now()}}
}

// begin begins a session. It is a start for [claim.Home] unless the others have had a sign of life just now.
// It goes on from what the process knows, unless the record is another one than the process has left, which
// the broker has lost or another process has written; or may lack something: whoever finds a difference then
// has to know no more than what was read up to there.
func (i *island) begin(r *checkpoint.Readings) {
	if i.lacks > 0 || !i.isOwn(r) {
		*i = island{rowsRead: rowsRead{cfg: i.cfg, begun: i.begun, lacks: r.Server.WALEnd}}
		i.Home = claim.NewHome(i.cfg)
		if kept := r.Record.Heard; kept != nil {
			i.Home, i.read, i.timeline = claim.HomeFrom(i.cfg, *kept), kept.At, kept.Timeline
		}
	}
	i.revision = r.Revision
	i.on(&r.Server.History)
	if !i.lively(r.Asked) {
		i.Start(r.Server.WALEnd)
		i.alive = r.Asked
	}
}

// lively reports whether no other cluster can take this home for silent yet.
func (i *island) lively(now time.Time) bool { return now.Sub(i.alive) < i.cfg.Delay/2 }

// refuseGapMode refuses it where others publish for this home, or it for another one: gap mode remembers what
// is in the stream, and what others publish is not there. A record that is in the mode already keeps it out.
func (p *Pipeline) refuseGapMode(m relay.Mapping, rec *checkpoint.Record) error {
	what := "reorder.mode is gap"
	switch joined := rec.Hello > 0 || rec.Reader != nil; {
	case p.cfg.Islands == nil:
		return nil
	case p.effective(m).ByGap():
	case !joined && slices.ContainsFunc(rec.Checkpoints, func(c checkpoint.StoredCheckpoint) bool {
		return c.Settings.ByGap()
	}):
		what = fmt.Sprintf("the checkpoint record of slot %s is from gap mode", rec.Slot)
	default:
		return nil
	}
	return &outbox.Fault{Class: outbox.Fatal, Code: codeGapMode,
		Message: what + ", in which no cluster can publish for another one"}
}

// state is what a start from the record goes on from.
func (i *island) state() *relay.HomeState {
	s := i.State()
	s.At, s.Timeline = i.read, i.timeline
	return &s
}

// take takes the cluster rows of a commit, once in a process.
func (i *island) take(r *decoder.Result) {
	c := &r.Commit
	if c.LSN <= i.read {
		return
	}
	for n := range r.ClusterRows {
		i.Row(&r.ClusterRows[n], c.LSN, time.Duration(c.Time)*time.Microsecond)
	}
	i.read = c.LSN
}

// mayPublish asks for a message that is not in the stream. An error ends the session, or lets it listen.
func (s *session) mayPublish(ctx context.Context, h *outbox.Header) (bool, error) {
	i := s.island
	verdict := i.May(h.Due, h.Pos.LSN)
	switch {
	case verdict == claim.Wait:
		return false, errWait
	case !i.lively(time.Now()): // now: to leave the message before to others may have taken seconds
		return false, errSilent
	case verdict == claim.Publish, s.publishedBefore(h):
		return true, nil
	}
	return false, s.leave(ctx, h)
}

// publishedBefore reports whether the message lies before one that was left to others, and was not left
// itself: then it was published, and the stream has lost it.
func (s *session) publishedBefore(h *outbox.Header) bool {
	n := len(s.left)
	return n > 0 && relay.LeftFrom(h, 0).Before(s.left[n-1])
}

// leave records that a message, and what follows it of what others have claimed, is left to them. It waits
// until the record has it.
func (s *session) leave(ctx context.Context, h *outbox.Header) error {
	if err := s.free(ctx); err != nil {
		return err
	}
	// What lies before it counts as published from then on.
	if err := s.settle(ctx); err != nil {
		return err
	}
	state := s.island.state()
	next, err := s.checkpointer.record.WithLeft(relay.LeftFrom(h, state.Claimed), state.Hello)
	if err != nil {
		return err
	}
	next.Heard = state
	if err := s.checkpointer.save(ctx, next); err != nil {
		return fmt.Errorf("record what is left to other clusters: %w", err)
	}
	s.left = next.Left
	return nil
}

// compared takes note that the stream was read and is what the WAL makes: NATS is back.
func (i *island) compared() {
	i.speaks = true
	i.Back()
}

// say writes what the others have to know: one row after the other. It is called again and again.
func (s *session) say(now time.Time) {
	i := s.island
	if s.reader != nil {
		s.answer(now)
	}
	if i == nil || !i.speaks {
		return
	}
	i.Published(s.tracker.Newest().Published())
	if i.Nameless() && !i.lost && !s.questions.busy {
		s.nameHello()
	}
	if s.heartbeats.worker.busy {
		return
	}
	if i.Starting() && !i.lively(now) {
		if !s.questions.busy {
			s.startLater(now)
		}
		return
	}
	if row := i.Next(i.clock(now)); row.Kind != 0 {
		if row.Kind == relay.Yield {
			s.metrics.yields.Inc()
		}
		s.writeRow(row, now, func() {
			// Behind a silence it is no sign of life: others may have claimed before it.
			if i.lively(now) && now.After(i.alive) {
				i.alive = now
			}
		})
	}
}

// startLater puts off a start that has not read its first sign of life for so long that others may soon
// publish: it is one at the present end of the WAL. What the process before it has left on its way, and what
// this one has asked for before, lies below, or is followed by others' silence from now on.
func (s *session) startLater(now time.Time) {
	s.questions.start(func(ctx context.Context) func() error {
		server, err := limited("server", s.conns.Source.Server)(ctx)
		return func() error {
			if i := s.island; err == nil && i.Starting() {
				i.Start(server.WALEnd)
				i.alive = now
				if i.lost {
					i.Away(i.clock(now))
				}
			}
			return err
		}
	})
}

// breathe lets a home give signs of life while its buffer puts a large window in order.
func (s *session) breathe(now time.Time) error {
	if s.island == nil || now.Sub(s.breathed) < idleInterval {
		return nil
	}
	s.breathed = now
	select {
	case result := <-s.heartbeats.worker.done:
		if err := s.heartbeats.worker.take(result); err != nil {
			return err
		}
	default:
	}
	s.say(now)
	return nil
}

// sayLast says what was published since the newest sign of life, at a clean stop: others publish that again
// otherwise.
func (s *session) sayLast(ctx context.Context) {
	i := s.island
	if i == nil || !i.speaks {
		return
	}
	now := time.Now()
	until := now.Add(min(i.cfg.Delay, s.p.cfg.StopTimeout) / 4)
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	err := error(nil)
	if s.heartbeats.worker.busy {
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case result := <-s.heartbeats.worker.done:
			_ = s.heartbeats.worker.take(result) // what it has written counts when it is read
		}
	}
	if err == nil {
		i.Published(s.tracker.Newest().Published())
		err = s.conns.Writer.ClusterRow(ctx, i.Sign(i.clock(now)), until)
	}
	if err != nil {
		s.log.Warn("the other clusters were not told what was published last: they may publish it again",
			reason(err)...)
	}
}

// nameHello starts to take the number of a hello. It is in the record before the hello is said.
func (s *session) nameHello() {
	next, err := s.checkpointer.record.NextHello(s.island.state())
	s.questions.start(func(ctx context.Context) func() error {
		if err == nil {
			err = s.checkpointer.save(ctx, next)
		}
		return func() error {
			if err != nil {
				return fmt.Errorf("record the number of a hello: %w", err)
			}
			s.island.Number(next.Hello)
			return nil
		}
	})
}
