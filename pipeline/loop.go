package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// heartbeat is how often the loop looks at its timers when nothing else happens.
const heartbeat = 100 * time.Millisecond

// burst is how many messages of a window are handed out before the loop looks around: a window has no limit.
const burst = 1024

// flushInterval is how long messages may stay unwritten while there is always more to read: what follows them may be a transaction
// that takes minutes to read and yields nothing.
const flushInterval = 5 * time.Millisecond

// session is the state of one session. All of it belongs to the loop's goroutine.
type session struct {
	p       *Pipeline
	log     *slog.Logger
	metrics *metrics
	links   *Conns
	server  relay.ServerState
	from    outbox.LSN // the place's due: what ends there or before is no input

	decoder *decoder.Decoder
	buffer  *reorder.Buffer
	proof   *checkpoint.TailCheck
	tracker *checkpoint.Tracker
	pub     Publisher

	batch  *relay.Batch // being read, nil if none
	next   int          // its next message
	window *reorder.Window
	n      int  // the window's next event
	made   bool // event and header are the window's next message, which the publisher did not take

	result decoder.Result // reused
	event  relay.Event    // reused
	header outbox.Header  // reused

	last      outbox.LSN // newest transaction read
	confirmed outbox.LSN
	marker    outbox.LSN // newest keepalive or empty transaction since the last WAL data, 0 if none
	lastData  time.Time  // when WAL data last came in
	lastInput time.Time  // when a part of an input last did
	heard     time.Time  // the broker was alive then
	held      arrivals   // when what is held came in
	latency   latencies

	told      relay.Settings // in force, as Config.InForce knows
	flushedAt time.Time      // when Flush was last called
	announced bool           // that the session is proved
	levelsAt  time.Time      // when the figures were last set

	recorder    *recorder
	watchedSeq  uint64 // acknowledged when the recorder was last told to look
	startSeq    uint64 // the stream's last sequence at the start
	startNewest uint64 // and that of its newest message
	scribe      *scribe
	hiccup      hiccup
}

func newSession(ctx context.Context, p *Pipeline, links *Conns, r checkpoint.Readings, start checkpoint.Start) *session {
	now := time.Now()
	s := &session{
		p: p, log: p.log, metrics: p.metrics, links: links, server: r.Server,
		decoder: decoder.New(links.Decoder),
		buffer: reorder.New(reorder.Config{
			Settings: start.Checkpoint.Settings, Start: start.Checkpoint.Due, PublishedAhead: start.Checkpoint.PublishedAhead,
			Unkeyed: !links.Decoder.Mapping.Keyed(), Scratch: p.cfg.Scratch, MaxSpill: p.cfg.MaxSpill,
			Stop: ctx.Err, // a large transaction is read and sorted for minutes
		}),
		from:     start.Checkpoint.Due,
		proof:    checkpoint.NewTailCheck(links.Checkpoint, start),
		tracker:  checkpoint.NewTracker(links.Checkpoint, start, now),
		pub:      links.JetStream.Publisher(start.LastSeq),
		lastData: now, lastInput: now, heard: r.Asked, startSeq: start.LastSeq, startNewest: r.Stream.NewestSeq,
		hiccup: hiccup{created: r.Stream.Created, newest: r.Stream.Newest},
	}
	p.metrics.lateSeen = 0
	s.tellInForce()
	s.confirmed = start.Confirmed
	s.metrics.confirmed(start.Confirmed)
	s.recorder = newRecorder(links, p.log, r.Record, r.Revision)
	s.scribe = newScribe(links.Writer, p.effective(links.Decoder.Mapping), &p.wroteChanges)
	return s
}

// effective returns the ordering settings that this outflow wants in force.
func (p *Pipeline) effective(m relay.Mapping) relay.Settings {
	if !m.Keyed() {
		return p.cfg.Settings.Unkeyed()
	}
	return p.cfg.Settings
}

// tellInForce says which settings are in force, if that was not said before. It is not said for each change: to take note of them may stop
// everything for a moment.
func (s *session) tellInForce() {
	set := s.buffer.Settings()
	if set != s.told && s.p.cfg.InForce != nil {
		s.p.cfg.InForce(set)
	}
	s.told = set
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
	s.p.health.set(StateComparing, nil)
	err := s.compare(ctx)
	if err == nil {
		err = s.whenProved(ctx)
	}
	for err == nil {
		if err = s.loop(ctx); s.keeps(err) {
			err = s.rejoin(ctx, err)
		}
	}
	if ctx.Err() != nil && (err == nil || errors.Is(err, ctx.Err())) { // also when its time is up
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

// compare reads what the messages that are made again are compared with.
func (s *session) compare(ctx context.Context) error {
	above, upTo := s.proof.Compares()
	all, err := stored(ctx, s.links.JetStream, above, upTo)
	if err != nil {
		return err
	}
	return s.proof.Stored(all)
}

func (s *session) loop(ctx context.Context) error {
	timer := time.NewTimer(heartbeat)
	defer timer.Stop()
	batches := s.links.Source.Batches()
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
		wait := s.flush(now)
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
		case <-s.links.JetStream.Lost():
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
	if now.Sub(s.flushedAt) >= flushInterval {
		s.flush(now)
	}
	return s.housekeep(now, false)
}

func (s *session) flush(now time.Time) time.Duration {
	s.flushedAt = now
	return s.pub.Flush(now)
}

// brokerLost says why the connection to NATS is gone.
func (s *session) brokerLost() error {
	err := s.links.JetStream.Err()
	if outbox.FaultOf(err) == nil {
		err = fmt.Errorf("nats connection lost: %w", err)
	}
	return ofBroker(err)
}

// ranged puts what was seen to happen to the stream, rather than read, into the range that it may concern.
func ranged(err error, from, to outbox.LSN) error {
	fault := outbox.FaultOf(err)
	if fault == nil || fault.Class != outbox.Gap || fault.To != 0 {
		return err
	}
	ranged := *fault
	ranged.From, ranged.To = from, to
	return &ranged
}

func (s *session) upstreamEnded() error {
	if err := s.links.Source.Err(); err != nil {
		return fmt.Errorf("replication: %w", err)
	}
	return errors.New("replication: the server ended the stream")
}
