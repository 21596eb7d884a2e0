package pipeline

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/outbox"
)

// idleInterval is how often the loop looks at its timers when nothing else happens.
const idleInterval = 100 * time.Millisecond

// flushInterval is how long messages may stay unwritten while there is always more to read: what follows them
// may be a transaction that takes minutes to read and yields nothing.
const flushInterval = 5 * time.Millisecond

// loop takes what comes until something fails. It never waits for one thing alone.
func (s *session) loop(ctx context.Context) error {
	timer := time.NewTimer(idleInterval)
	defer timer.Stop()
	batches := s.conns.Source.Batches()
	for {
		if err := s.work(ctx); err != nil {
			return err
		}
		now := time.Now()
		if s.in.batch == nil {
			select { // more is ready: nothing to flush yet
			case b, ok := <-batches:
				if !ok {
					return replicationEnded(s.conns.Source)
				}
				s.in.take(b, now)
				if err := s.between(ctx, now); err != nil {
					return err
				}
				continue
			default:
			}
		} else if s.out.window != nil && !s.pub.Full() { // a long window
			if err := s.between(ctx, now); err != nil {
				return err
			}
			continue
		}
		wait, err := s.flush(now)
		if err != nil {
			return err
		}
		if err := s.housekeep(now, true); err != nil {
			return err
		}
		if err := s.offerCut(ctx, now); err != nil {
			return err
		}
		timer.Reset(s.sleep(now, wait))

		in := batches
		if s.in.batch != nil { // the publisher is full: back-pressure
			in = nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case b, ok := <-in:
			if !ok {
				return replicationEnded(s.conns.Source)
			}
			s.in.take(b, time.Now())
		case <-s.pub.Notify():
		case result := <-s.questions.done:
			if err := s.questions.take(result); err != nil {
				return err
			}
		case result := <-s.heartbeats.worker.done:
			if err := s.heartbeats.worker.take(result); err != nil {
				return err
			}
		case <-s.conns.JetStream.Lost():
			return connectionLost(s.conns.JetStream)
		case <-timer.C:
		}
	}
}

// between is what must not wait for a pause, as there may always be more to read or to publish.
func (s *session) between(ctx context.Context, now time.Time) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case result := <-s.questions.done:
		if err := s.questions.take(result); err != nil {
			return err
		}
	case result := <-s.heartbeats.worker.done:
		if err := s.heartbeats.worker.take(result); err != nil {
			return err
		}
	default:
	}
	if now.Sub(s.flushed) >= flushInterval {
		if _, err := s.flush(now); err != nil {
			return err
		}
	}
	return s.housekeep(now, false)
}

// flush sends what was published, if others can't have claimed it since.
func (s *session) flush(now time.Time) (time.Duration, error) {
	if s.island != nil && s.pub.Acked() != s.pub.Sent() {
		switch {
		case !s.island.lively(now):
			return 0, errSilent
		case s.island.May(0, 0) == claim.Wait:
			return 0, errWait
		}
	}
	s.flushed = now
	return s.pub.Flush(now), nil
}

// housekeep moves the watermarks. idle says that nothing is ready to be read.
func (s *session) housekeep(now time.Time, idle bool) error {
	acked := s.acked()
	if now.Sub(s.reported) >= idleInterval {
		s.report(now)
	}
	if err := s.pub.Check(now); err != nil {
		return ofJetStream(err)
	}
	s.settleOutage(now, acked)
	s.say(now)
	if i := s.island; i != nil && !i.Starting() && !i.lively(now) {
		return errSilent // also where nothing is to be published: the others may answer now, and not later
	}
	if !s.check.Verified() {
		return nil
	}
	if s.reader != nil {
		s.settled()
	}
	if s.clusters != nil && (acked > s.monitor.start || idle && s.nothingToStore()) {
		s.natsStores()
	}
	if idle && s.out.window == nil && s.in.batch == nil {
		s.whenIdle(now)
	}
	in, ok := s.tracker.SaveIn(now)
	again := s.mustRenew(now) || s.full() && now.Sub(s.saved) >= s.tracker.SaveInterval()
	if (ok && in == 0 || again) && !s.questions.busy {
		s.save(now)
	}
	if s.monitor.due(now) && !s.questions.busy {
		s.askStates(now)
	}
	s.confirm()
	s.offerWatermark(now)
	return nil
}

// whenIdle does what is done only when nothing is ready to be read or published.
func (s *session) whenIdle(now time.Time) {
	held, _ := s.buffer.Held()
	// a checkpoint may lie between two inputs
	between := held == 0 || s.in.away != nil && s.mayHold() || !s.in.atInputs()
	if between && s.in.keepalive > s.tracker.Newest().At() && !s.tracker.Unacknowledged() {
		cp, ok := s.buffer.Marker(s.in.quiet())
		if ok && (s.reader == nil || s.reader.Settled(cp.Due)) {
			s.tracker.Keepalive(s.located(cp))
		}
	}
	if due, ok := s.heartbeatDue(); ok {
		s.heartbeats.offerHeartbeat(now, due)
	}
	if s.in.end() >= s.server.WALEnd {
		s.heartbeats.offerChange(now, s.buffer.Settings())
	}
}

// heartbeatDue returns when a heartbeat is due; ok is false while none can be.
func (s *session) heartbeatDue() (at time.Time, ok bool) {
	set := s.buffer.Settings()
	if !s.heartbeats.enabled || !s.check.Verified() {
		return time.Time{}, false
	}
	if set.ByGap() {
		deadline, ok := s.buffer.Deadline()
		if !ok {
			return time.Time{}, false
		}
		return s.heartbeats.dueFor(s.in.passes(deadline), s.in.lastInput), true
	}
	oldest, ok := s.in.oldestReceived()
	if !ok || set.Horizon == 0 {
		return time.Time{}, false
	}
	return s.heartbeats.due(set.Horizon, oldest, s.in.lastInput), true
}

// sleep is how long the loop may wait when nothing happens.
func (s *session) sleep(now time.Time, flush time.Duration) time.Duration {
	d := idleInterval
	if flush > 0 {
		d = min(d, flush)
	}
	// else something other than time comes first
	if at, ok := s.heartbeatDue(); ok && s.in.batch == nil && !s.heartbeats.worker.busy {
		d = min(d, max(at.Sub(now), 0))
	}
	return max(d, 10*time.Microsecond)
}

// connectionLost says why the connection to NATS is gone.
func connectionLost(js JetStream) error {
	err := js.Err()
	if outbox.FaultOf(err) == nil {
		err = fmt.Errorf("nats connection lost: %w", err)
	}
	return ofJetStream(err)
}

func replicationEnded(source Source) error {
	if err := source.Err(); err != nil {
		return fmt.Errorf("replication: %w", err)
	}
	return errors.New("replication: the server ended the stream")
}
