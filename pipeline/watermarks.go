package pipeline

import (
	"fmt"
	"time"
)

// housekeep moves the watermarks. idle says that nothing is ready to be read.
func (s *session) housekeep(now time.Time, idle bool) error {
	acked := s.pub.Acked()
	s.latency.acked(acked, s.metrics)
	s.tracker.Acked(acked)
	if now.Sub(s.levelsAt) >= heartbeat {
		s.levelsAt = now
		s.report(now)
		s.tellInForce()
	}
	if err := s.pub.Check(now); err != nil {
		return ofBroker(err)
	}
	s.hiccup.well(acked, s.pub.Sent())
	if !s.proof.Verified() {
		return nil
	}
	events, _ := s.buffer.Held()
	if idle && s.window == nil && s.batch == nil {
		if s.marker > s.tracker.Newest().Due && events == 0 && !s.tracker.Unacknowledged() {
			place := s.buffer.Marker(s.marker)
			place.Timeline = s.server.History.At(place.Due)
			s.tracker.Keepalive(place)
		}
		s.offerTick(now, events)
		if max(s.last, s.marker) >= s.server.WALEnd {
			s.scribe.offerChange(now, s.buffer.Settings())
		}
	}
	if in, ok := s.tracker.SaveIn(now); ok && in == 0 && !s.recorder.busy {
		s.recorder.offer(s.tracker.BeginSave(now))
	}
	if s.recorder.watchDue(now) {
		s.watchedSeq = s.pub.Acked()
		s.recorder.watch(now)
	}
	s.confirm()
	return nil
}

// confirm tells PostgreSQL what it need not keep any more, if that moved.
func (s *session) confirm() {
	lsn := s.tracker.Confirmable(s.heard)
	if lsn <= s.confirmed {
		return
	}
	s.confirmed = lsn
	s.links.Source.Confirm(lsn)
	s.tracker.Confirmed(lsn)
	s.metrics.confirmed(lsn)
}

// newestSeq is the least that the newest message's sequence can be when the stream is watched.
func (s *session) newestSeq() uint64 {
	if s.watchedSeq > s.startSeq {
		return s.watchedSeq
	}
	return s.startNewest
}

// report sets the figures that probes and metrics show.
func (s *session) report(now time.Time) {
	l := levels{
		received: max(s.last, s.marker), published: s.tracker.Newest().Due, confirmed: s.confirmed,
		seq: s.pub.Acked(), oldest: s.latency.oldest(),
	}
	l.held, l.heldBytes = s.buffer.Held()
	l.inFlight, l.inFlightBytes = s.pub.InFlight()
	if oldest, held := s.buffer.OldestLSN(); held && l.oldest.IsZero() {
		l.oldest, _ = s.held.of(oldest)
	}
	s.metrics.levels(&l, s.buffer.Late())
	s.p.health.levels(&l, now)
}

// sleep is how long the loop may wait when nothing happens.
func (s *session) sleep(now time.Time, flush time.Duration) time.Duration {
	d := heartbeat
	if flush > 0 {
		d = min(d, flush)
	}
	if at, ok := s.tickAt(); ok && s.batch == nil && !s.scribe.busy { // else something other than time comes first
		d = min(d, max(at.Sub(now), 0))
	}
	return max(d, 10*time.Microsecond)
}

// recorded takes the recorder's answer.
func (s *session) recorded(r recorded) error {
	s.recorder.busy = false
	switch {
	case r.err != nil && r.snapshot == nil:
		return fmt.Errorf("read the server's state: %w", r.err)
	case r.err != nil:
		return fmt.Errorf("checkpoint record: %w", r.err)
	case r.snapshot == nil:
		s.metrics.server(r.end, r.slot)
		s.p.health.watched(r.end, r.slot)
		if !r.moved && (r.stream.LastSeq < s.watchedSeq || r.stream.Messages > 0 && r.stream.NewestSeq < s.newestSeq()) {
			return fmt.Errorf("the stream has lost its end: its newest message is %d, its last sequence %d, and %d was acknowledged",
				r.stream.NewestSeq, r.stream.LastSeq, s.watchedSeq)
		}
		s.heard = r.heard
	default:
		s.heard = r.heard
		s.tracker.Saved(time.Now())
	}
	return nil
}
