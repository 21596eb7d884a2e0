package pipeline

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// errListened ends a session that has read on for cluster rows alone: it begins again from its checkpoint.
var errListened = fmt.Errorf("the session begins again from its checkpoint: %w", errAnew)

// listens reports whether the session reads on for cluster rows alone after an error: while it may not
// publish, and while NATS is away, in which the others hear from it, and it from them.
func (s *session) listens(err error) bool {
	var failure *jetStreamFailure
	return s.clusters != nil && s.conns.Reopen != nil &&
		(errors.Is(err, errWait) || errors.As(err, &failure))
}

// listen reads on for cluster rows alone. What they wait for may lie behind any number of events, so these
// are dropped; when the home may publish, the session ends and begins again from its checkpoint. So it does
// when NATS is back: the stream is compared first.
func (s *session) listen(ctx context.Context, cause error) error {
	s.buffer.Discard()
	s.out = output{}
	s.p.health.sessionEnded() // as to what it held
	if errors.Is(cause, errWait) {
		s.p.health.set(StateEchoes, nil)
		s.log.Info("waiting for the other clusters: reading on for their rows alone")
	} else if err := s.natsLost(cause); err != nil {
		return err
	}
	probe := &natsProbe{session: s}
	if s.clusters.lost && s.clusters.tries > 0 {
		probe.wait()
	}
	attempts, cancel := context.WithCancel(ctx)
	defer cancel()
	poll := time.NewTicker(idleInterval)
	defer poll.Stop()
	for {
		for m := s.in.message(); m != nil; m = s.in.message() {
			if err := s.rows(m); err != nil {
				return err
			}
		}
		waits := s.island != nil && s.island.May(0, 0) == claim.Wait
		if !s.clusters.lost && !waits && !s.questions.busy {
			return errListened
		}
		now := time.Now()
		s.p.health.listened(s.agreement(), now)
		s.say(now)
		var lost <-chan struct{}
		if s.clusters.lost {
			probe.begin(attempts, now)
		} else {
			lost = s.conns.JetStream.Lost()
		}
		err := error(nil)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case b, ok := <-s.conns.Source.Batches():
			if !ok {
				return replicationEnded(s.conns.Source)
			}
			s.in.take(b, now)
		case result := <-s.questions.done:
			err = s.questions.take(result)
		case result := <-s.heartbeats.worker.done:
			err = s.heartbeats.worker.take(result)
		case <-lost:
			err = connectionLost(s.conns.JetStream)
		case err = <-probe.answer:
			if probe.over(err) {
				return errListened
			}
			err = nil
		case <-poll.C:
		}
		if err != nil {
			if !s.listens(err) {
				return err
			}
			if err = s.natsLost(err); err != nil {
				return err
			}
		}
	}
}

// rows takes the cluster rows of a message.
func (s *session) rows(m *relay.WALMessage) error {
	if m.Keepalive {
		if s.in.away != nil && !s.in.decoder.InTransaction() {
			s.in.away.read = max(s.in.away.read, m.WALEnd)
		}
		return nil
	}
	if err := s.in.decoder.Decode(m.Data, &s.in.result); err != nil {
		return err
	}
	if s.in.result.Kind == decoder.Commit {
		s.in.takeRows()
	}
	return nil
}

// natsLost takes note that NATS has failed. An error is for the next start to judge.
func (s *session) natsLost(cause error) error {
	if err := s.conns.JetStream.Err(); outbox.ClassOf(err) != outbox.Transient {
		return err
	}
	if s.verified && !s.clusters.lost && s.acked() > s.monitor.start {
		s.natsStores()
	}
	s.conns.JetStream.Close() // nothing that it still says counts
	s.p.natsFailed(cause)
	s.clusters.lost = true
	if s.island != nil {
		s.island.Away(s.island.clock(time.Now()))
	}
	return nil
}

// natsStores takes note that NATS has stored a message of this session, or that there is none to be stored.
func (s *session) natsStores() {
	s.clusters.tries = 0
	if s.island != nil {
		s.island.Stored()
	}
}

// natsProbe tries to reach NATS again while a session listens: at once, but with pauses, also from session to
// session, as long as it stores nothing.
type natsProbe struct {
	*session
	answer chan error // of an attempt; nil: none is under way
	next   time.Time
}

// wait puts the next attempt off.
func (p *natsProbe) wait() {
	p.next = time.Now().Add(backoff(p.clusters.tries, p.p.jitter))
	p.clusters.tries++
}

// begin begins an attempt if it is time to.
func (p *natsProbe) begin(ctx context.Context, now time.Time) {
	if p.answer != nil || now.Before(p.next) {
		return
	}
	p.answer = make(chan error, 1)
	reopen, answer := p.conns.Reopen, p.answer
	go func() {
		defer crash.Guard()
		open, cancel := context.WithTimeout(ctx, openTimeout)
		defer cancel()
		js, _, err := reopen(open)
		if err == nil {
			err = js.Check(open)
			js.Close()
		}
		answer <- err
	}()
}

// over takes the answer of an attempt, and reports whether NATS is back. A fault of it is for the next start
// to judge.
func (p *natsProbe) over(err error) bool {
	p.answer = nil
	p.wait()
	if err == nil || outbox.ClassOf(err) != outbox.Transient {
		return true
	}
	p.p.health.set(StateAway, err)
	p.log.Debug("NATS is away", reason(err)...)
	return false
}
