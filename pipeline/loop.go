package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// heartbeat is how often the loop looks at its timers when nothing else happens.
const heartbeat = 100 * time.Millisecond

// burst is how many messages of a window are handed out before the loop looks around: a window has no limit.
const burst = 1024

// session is the state of one session. All of it belongs to the loop's goroutine.
type session struct {
	p       *Pipeline
	log     *slog.Logger
	metrics *metrics
	links   *Links
	server  outbox.ServerState
	from    outbox.LSN // the place's due: what ends there or before is no input

	decoder *decoder.Decoder
	buffer  *reorder.Buffer
	proof   *checkpoint.Proof
	tracker *checkpoint.Tracker
	pub     Publisher

	batch  *outbox.Batch // being read, nil if none
	next   int           // its next message
	window *reorder.Window
	n      int // the window's next event

	result decoder.Result // reused
	event  outbox.Event   // reused
	header outbox.Header  // reused

	last      outbox.LSN // newest transaction read
	confirmed outbox.LSN
	marker    outbox.LSN // newest keepalive since the last WAL data, 0 if none
	lastData  time.Time  // when WAL data last came in
	held      arrivals   // when what is held came in
	latency   latencies

	announced bool      // that the session is proved
	levelsAt  time.Time // when the figures were last set

	recorder *recorder
	scribe   *scribe
}

func newSession(p *Pipeline, links *Links, r readings, start checkpoint.Start) *session {
	now := time.Now()
	s := &session{
		p: p, log: p.log, metrics: p.metrics, links: links, server: r.Server,
		decoder: decoder.New(links.Decoder),
		buffer: reorder.New(reorder.Config{
			Settings: start.Place.Settings, Start: start.Place.Due, Taken: start.Place.Taken,
			Unkeyed: !links.Decoder.Mapping.Keyed(), Scratch: p.cfg.Scratch,
		}),
		from:     start.Place.Due,
		proof:    checkpoint.NewProof(links.Checkpoint, start),
		tracker:  checkpoint.NewTracker(links.Checkpoint, start, now),
		pub:      links.Broker.Publisher(start.LastSeq),
		lastData: now,
	}
	p.metrics.lateSeen = 0
	s.confirmed = start.Confirmed
	s.recorder = newRecorder(links, r.Record, r.revision)
	s.scribe = newScribe(links.Writer, p.effective(links.Decoder.Mapping))
	return s
}

// effective returns the ordering settings that this outflow wants in force.
func (p *Pipeline) effective(m outbox.Mapping) outbox.Settings {
	if !m.Keyed() {
		return p.cfg.Settings.Unkeyed()
	}
	return p.cfg.Settings
}

func (s *session) close() {
	s.recorder.close()
	s.scribe.close()
	s.buffer.Discard()
	if s.batch != nil {
		s.batch.Release()
	}
}

// run runs the loop until ctx is cancelled or something fails.
func (s *session) run(ctx context.Context) error {
	s.p.health.set(StateCatchingUp, nil)
	err := s.whenProved(ctx)
	if err == nil {
		err = s.loop(ctx)
	}
	if ctx.Err() != nil && (err == nil || errors.Is(err, context.Canceled)) {
		return s.drain()
	}
	if outbox.ClassOf(err) == outbox.Poison {
		// What comes before the row is published; let it be acknowledged and recorded, so that the next start is short.
		if drainErr := s.drain(); drainErr != nil {
			s.log.Warn("not all that comes before the row was acknowledged", "err", drainErr)
		}
	}
	return err
}

func (s *session) loop(ctx context.Context) error {
	timer := time.NewTimer(heartbeat)
	defer timer.Stop()
	batches := s.links.Upstream.Batches()
	for {
		if err := s.work(ctx); err != nil {
			return err
		}
		now := time.Now()
		if s.batch == nil {
			select { // more is ready: nothing to flush yet
			case b, ok := <-batches:
				if !ok {
					return s.upstreamEnded()
				}
				s.take(b, now)
				if err := s.between(ctx, now); err != nil {
					return err
				}
				continue
			default:
			}
		} else if s.window != nil && !s.pub.Full() { // a long window
			if err := s.between(ctx, now); err != nil {
				return err
			}
			continue
		}
		wait := s.pub.Flush(now)
		if err := s.housekeep(now, true); err != nil {
			return err
		}
		timer.Reset(s.sleep(now, wait))

		in := batches
		if s.batch != nil { // the publisher is full: back-pressure
			in = nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case b, ok := <-in:
			if !ok {
				return s.upstreamEnded()
			}
			s.take(b, time.Now())
		case <-s.pub.Notify():
		case r := <-s.recorder.done:
			if err := s.recorded(r); err != nil {
				return err
			}
		case r := <-s.scribe.done:
			s.scribe.finished(r, time.Now(), s.log, s.metrics)
		case <-s.links.Broker.Lost():
			return s.brokerLost()
		case <-timer.C:
		}
	}
}

// between is what may not wait for a pause while there is always more to read or to publish.
func (s *session) between(ctx context.Context, now time.Time) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case r := <-s.recorder.done:
		if err := s.recorded(r); err != nil {
			return err
		}
	case r := <-s.scribe.done:
		s.scribe.finished(r, now, s.log, s.metrics)
	default:
	}
	return s.housekeep(now, false)
}

// brokerLost says why the connection to NATS is gone. What was seen to happen to the stream, rather than read, is put into the range that
// it may concern: from the newest place on.
func (s *session) brokerLost() error {
	err := s.links.Broker.Err()
	fault := outbox.FaultOf(err)
	switch {
	case fault == nil:
		return fmt.Errorf("nats connection lost: %w", err)
	case fault.Class == outbox.Gap && fault.To == 0:
		ranged := *fault
		ranged.From = s.tracker.Newest().Due
		ranged.To = max(s.last, ranged.From)
		return &ranged
	}
	return err
}

func (s *session) upstreamEnded() error {
	if err := s.links.Upstream.Err(); err != nil {
		return fmt.Errorf("replication: %w", err)
	}
	return errors.New("replication: the server ended the stream")
}

func (s *session) take(b *outbox.Batch, now time.Time) {
	s.batch, s.next = b, 0
	for i := range b.Messages {
		if !b.Messages[i].Keepalive {
			s.lastData = now
			break
		}
	}
}

// work goes on with the window and the batch in hand until they are done or the publisher is full.
func (s *session) work(ctx context.Context) error {
	for {
		if s.window != nil {
			if done, err := s.publish(ctx); err != nil || !done {
				return err
			}
		}
		if s.batch == nil {
			return nil
		}
		if s.next == len(s.batch.Messages) {
			s.batch.Release()
			s.batch = nil
			return nil
		}
		m := &s.batch.Messages[s.next]
		s.next++
		if err := s.read(m); err != nil {
			return err
		}
	}
}

// read takes one message of the replication stream.
func (s *session) read(m *outbox.WALMessage) error {
	if m.Keepalive {
		if !s.decoder.InTransaction() {
			if err := s.proof.Input(m.WALEnd); err != nil {
				return err
			}
			s.marker = max(s.marker, m.WALEnd)
			s.metrics.received(m.WALEnd)
		}
		return nil
	}
	s.marker = 0
	if err := s.decoder.Decode(m.Data, &s.result); err != nil {
		return err
	}
	if s.result.Malformed != nil {
		s.metrics.malformed.Inc()
		s.log.Warn("a change of ordering settings is malformed and has no effect", "err", s.result.Malformed)
	}
	switch s.result.Kind {
	case decoder.Event:
		return s.buffer.Append(&s.result.Event)
	case decoder.Commit:
		return s.commit(&s.result.Commit)
	}
	return nil
}

func (s *session) commit(c *outbox.Commit) error {
	if c.Kind != outbox.NoInput && c.LSN > s.from {
		if err := s.proof.Input(c.LSN); err != nil {
			return err
		}
		if c.Kind == outbox.SettingsChange {
			s.log.Info("ordering settings changed in the WAL", "lsn", c.LSN, "settings", c.Settings)
			s.scribe.read(c.Settings)
		}
		if c.Kind == outbox.Events {
			s.held.add(c.LSN, s.lastData)
		}
	}
	s.last = max(s.last, c.LSN)
	s.metrics.received(c.LSN)
	if err := s.buffer.Commit(*c); err != nil {
		return err
	}
	w, err := s.buffer.Close()
	if err != nil {
		return err
	}
	s.window, s.n = w, 0
	if oldest, held := s.buffer.OldestLSN(); held {
		s.held.of(oldest) // forgets what is older
	} else {
		s.held.clear()
	}
	return nil
}

// publish hands out the window's events until it is empty (done), the publisher is full, or burst of them are out.
func (s *session) publish(ctx context.Context) (done bool, err error) {
	w := s.window
	for n := 0; n < burst && !s.pub.Full(); n++ {
		more, err := w.Next(&s.event)
		if err != nil {
			return false, err
		}
		if !more {
			s.windowDone()
			return true, nil
		}
		s.header = outbox.Header{
			Pos: s.event.Pos, N: s.n, Of: w.Of, Due: w.Due, Thru: w.Thru, Pull: w.Pull,
			Timeline: s.server.History.At(s.event.Pos.LSN), Sort: w.Sort, ID: s.event.ID, Key: s.event.Key,
		}
		s.n++
		skip, err := s.proof.Skip(&s.header)
		if err != nil {
			return false, err
		}
		if err := s.whenProved(ctx); err != nil {
			return false, err
		}
		if skip {
			continue
		}
		if err := s.pub.Publish(&s.event, &s.header); err != nil {
			return false, err
		}
		s.latency.sent(s.pub.Sent(), s.event.Time)
		s.metrics.sent(len(s.event.Payload))
	}
	return false, nil
}

func (s *session) windowDone() {
	w := s.window
	s.window = nil
	place := w.Place
	place.Timeline = s.server.History.At(place.Due)
	s.tracker.Made(w.Of)
	s.tracker.Window(place)
	s.metrics.window(w)
}

// whenProved notes, once, that the session is proved: all messages that are in the stream already have been made again. What the start
// found to be lost is recorded now, before anything is sent: a later start must not take the new messages for the lost ones.
func (s *session) whenProved(ctx context.Context) error {
	if !s.proof.Proved() || s.announced {
		return nil
	}
	s.announced = true
	if s.tracker.MustStore() {
		snap := s.tracker.Snapshot(time.Now())
		if err := s.recorder.store(ctx, &snap); err != nil {
			return fmt.Errorf("checkpoint record: %w", err)
		}
		s.tracker.Stored(time.Now())
	}
	s.p.suspect = suspect{}
	s.p.health.set(StateRunning, nil)
	s.log.Info("session proved: the stream ends where the WAL says", "last_seq", s.pub.Sent())
	return nil
}

// housekeep moves the watermarks. idle says that nothing is ready to be read.
func (s *session) housekeep(now time.Time, idle bool) error {
	acked := s.pub.Acked()
	s.latency.acked(acked, s.metrics)
	s.tracker.Acked(acked)
	if now.Sub(s.levelsAt) >= heartbeat {
		s.levelsAt = now
		s.report(now)
	}
	if err := s.pub.Check(now); err != nil {
		return err
	}
	if !s.proof.Proved() {
		return nil
	}
	events, _ := s.buffer.Held()
	if idle && s.window == nil && s.batch == nil {
		if s.marker > s.tracker.Newest().Due && events == 0 && !s.tracker.Unacknowledged() {
			place := s.buffer.Marker(s.marker)
			place.Timeline = s.server.History.At(place.Due)
			s.tracker.Marker(place)
		}
		s.offerTick(now, events)
		if max(s.last, s.marker) >= s.server.WALEnd {
			s.scribe.offerChange(now, s.buffer.Settings())
		}
	}
	if in, ok := s.tracker.SaveIn(now); ok && in == 0 && !s.recorder.busy {
		s.recorder.offer(s.tracker.Snapshot(now))
	}
	if s.recorder.watchDue(now) {
		s.recorder.watch(now)
	}
	s.confirm(now)
	return nil
}

// confirm tells PostgreSQL what it need not keep any more, if that moved.
func (s *session) confirm(now time.Time) {
	lsn := s.tracker.Confirmable(now)
	if lsn <= s.confirmed {
		return
	}
	s.confirmed = lsn
	s.links.Upstream.Confirm(lsn)
	s.tracker.Confirmed(lsn)
	s.metrics.confirmed(lsn)
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
	default:
		s.tracker.Stored(time.Now())
	}
	return nil
}
