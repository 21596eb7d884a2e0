package pipeline

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// session is what one session has, from when it holds the slot. It and its parts belong to the loop, the
// goroutine of Run; only the workers' jobs run elsewhere. A part knows other parts that it is given, never
// the session.
type session struct {
	p       *Pipeline
	log     *slog.Logger
	metrics *metrics
	conns   *Conns
	server  relay.ServerState // when the slot was taken

	in      *input
	buffer  *reorder.Buffer
	out     output
	check   *checkpoint.TailCheck
	pub     Publisher // of conns.JetStream
	tracker *checkpoint.Tracker
	left    []relay.Left // what the record says that others publish
	island  *island      // nil: nobody publishes for this home

	reader   *reader         // nil: this cluster publishes for no other home
	claimed  []relay.Claimed // what the record says that it publishes
	waiting  []waiting       // until what they cover is settled
	clusters *rowsRead       // of island or reader; nil: there is neither

	questions    *worker // one at a time: they share the connection to PostgreSQL and the record
	checkpointer *checkpointer
	monitor      monitor
	heartbeats   *heartbeatWriter
	outage       outage

	breathed time.Time // when breathe was last called

	asked time.Time  // the record was read after it
	saved time.Time  // when it was last written, or read
	fence uint64     // the newest cut, which each message names
	thru  outbox.LSN // the input that closed the stream's newest message

	verified  bool       // whenVerified has done what it does
	confirmed outbox.LSN // to PostgreSQL
	heard     time.Time  // JetStream was alive then
	flushed   time.Time  // when Flush was last called

	reported time.Time      // when the gauges were last set
	unlisted time.Time      // since when more sequences wait than a checkpoint lists; zero: they do not
	inForce  relay.Settings // as Config.InForce was last told
	latency  latencies
}

func newSession(ctx context.Context, p *Pipeline, conns *Conns, r checkpoint.Readings,
	start checkpoint.Start, recent []outbox.Counter, fence uint64) *session {
	now, cp := time.Now(), start.Checkpoint
	var s *session
	s = &session{
		p: p, log: p.log, metrics: p.metrics, conns: conns, server: r.Server,
		buffer: reorder.New(reorder.Config{
			Settings: cp.Settings, Start: cp.Published(), Due: cp.Due, PublishedAhead: cp.PublishedAhead,
			Holds: cp.Holds, Remembered: cp.Remembered, Recent: recent,
			MaxPublishedAhead: p.maxPublishedAhead,
			Unkeyed:           !conns.Decoder.Mapping.Keyed(), Scratch: p.cfg.Scratch,
			MaxSpill: p.cfg.MaxSpill,
			Stop: func() error { // a large transaction is read and sorted for minutes
				return cmp.Or(ctx.Err(), s.breathe(time.Now()))
			},
		}),
		check:     checkpoint.NewTailCheck(conns.Checkpoint, start),
		pub:       conns.JetStream.Publisher(start.LastSeq, start.LostFrom(), fence),
		left:      start.Left,
		tracker:   checkpoint.NewTracker(conns.Checkpoint, start, now),
		questions: newWorker(),
		checkpointer: &checkpointer{conns: conns, log: p.log, record: r.Record, revision: r.Revision,
			gaps: namedBefore(cp)},
		monitor: monitor{start: start.LastSeq, newest: r.Stream.NewestSeq, walEnd: r.Server.WALEnd},
		heartbeats: &heartbeatWriter{
			worker: newWorker(), writer: conns.Writer, enabled: p.cfg.Heartbeats && conns.Writer != nil,
			want: p.effective(conns.Decoder.Mapping), log: p.log, notices: &p.notices, metrics: p.metrics,
		},
		outage: outage{created: r.Stream.Created, start: start.LastSeq, newest: r.Stream.Newest},
		heard:  r.Asked, confirmed: start.Confirmed,
		asked: r.Asked, saved: now, fence: fence, thru: thruOf(start),
	}
	s.in = &input{
		source: conns.Source, decoder: decoder.New(conns.Decoder), buffer: s.buffer, check: s.check,
		heartbeats: s.heartbeats,
		metrics:    p.metrics, log: p.log, notices: &p.notices, from: cp.Published(), due: cp.Due,
		shared: start.Shared, cuts: start.Cuts, lastData: now, lastInput: now, everRead: &p.input,
	}
	p.input.begin(cp.Due, now)
	away := conns.Decoder.Mapping.Away()
	if away {
		s.in.away, s.heartbeats.writer, s.heartbeats.enabled = newAway(cp), nil, false
		// The start may be older than what its record knows of the home, which limits what is confirmed.
		s.in.away.heed(start.Checkpoints[len(start.Checkpoints)-1].Home)
	}
	switch {
	case p.island == nil:
	case away:
		s.reader = p.readerFrom(&conns.Decoder, &r)
		s.in.reader, s.clusters = s.reader, &s.reader.rowsRead
		s.claimed, s.in.cuts = start.Claimed, cutsOf(start.Claimed)
	default:
		s.island = p.island
		s.in.island, s.clusters = s.island, &s.island.rowsRead
		s.island.begin(&r)
	}
	if conns.Decoder.Mapping.Control != "" {
		s.in.tally = newTally(conns.Checkpoint, p.log, s.tracker.Newest())
	}
	p.metrics.lateSeen, p.metrics.gapsSeen = 0, reorder.GapCounts{}
	s.tellInForce()
	p.metrics.sessions.Inc()
	p.health.sessionBegan()
	return s
}

// effective returns the ordering settings that this outflow wants in force.
func (p *Pipeline) effective(m relay.Mapping) relay.Settings {
	if !m.Keyed() {
		return p.cfg.Settings.Unkeyed()
	}
	return p.cfg.Settings
}

func (s *session) close() {
	s.gauges(time.Now())
	s.logGaps()
	s.p.health.sessionEnded()
	s.questions.close()
	s.heartbeats.worker.close()
	if s.clusters != nil {
		s.clusters.revision, s.clusters.tried = s.checkpointer.revision, s.checkpointer.tried
	}
	s.buffer.Discard()
	s.in.release()
}

// run runs the loop until ctx is cancelled or something fails.
func (s *session) run(ctx context.Context) error {
	s.p.health.set(StateComparing, nil)
	err := s.readTail(ctx)
	if err == nil {
		err = s.whenVerified(ctx)
	}
	for err == nil {
		if err = s.loop(ctx); s.outlives(err) {
			err = s.reconnect(ctx, err)
		}
	}
	if s.mayLack(err) {
		err = s.findLost(ctx, err)
	} else if s.listens(err) {
		err = s.listen(ctx, err)
	}
	if ctx.Err() != nil && (err == nil || errors.Is(err, ctx.Err())) { // also when its time is up
		return s.stop()
	}
	if outbox.ClassOf(err) == outbox.Poison {
		// What comes before the row is published; let it be acknowledged and recorded, so that the next start
		// is short.
		if stopErr := s.stop(); stopErr != nil {
			s.log.Warn("not all that comes before the row was acknowledged", reason(stopErr)...)
		}
	}
	return err
}

// readTail reads what the messages that are made again are compared with.
func (s *session) readTail(ctx context.Context) error {
	above, upTo := s.check.Compares()
	all, err := stored(ctx, s.conns.JetStream, above, upTo, s.island != nil && s.island.lacks > 0)
	if err != nil {
		return ofJetStream(err)
	}
	return s.check.Stored(all)
}

// report sets the figures that probes and metrics show, and tells which settings are in force if others were
// told last. It does not do so for each change: to take note of one may stop everything for a moment.
func (s *session) report(now time.Time) {
	s.reported = now
	g := s.gauges(now)
	s.reportGaps(now)
	if s.verified && (g.seq > s.monitor.start || g.held+g.inFlight == 0 && g.received >= s.server.WALEnd) {
		s.p.recovered() // more than the fault let through, or all that there is
	}
	s.tellInForce()
}

// gauges sets the loop's figures, and returns them.
func (s *session) gauges(now time.Time) gauges {
	g := gauges{
		received: s.in.end(), published: s.tracker.Newest().At(), confirmed: s.confirmed,
		seq: s.pub.Acked(), oldest: s.latency.oldest(), limits: s.buffer.Settings(),
		agreed: s.agreement(),
	}
	g.held, g.heldBytes = s.buffer.Held()
	g.inFlight, g.inFlightBytes = s.pub.InFlight()
	g.idle = g.held == 0 && g.inFlight == 0 && s.out.window == nil
	if g.oldest.IsZero() {
		g.oldest, _ = s.in.oldestReceived()
	}
	if s.in.tally != nil {
		g.said, g.tally = s.in.tally.said, s.tracker.Newest().Tally
		g.kept = s.tracker.Kept(s.heard)
	}
	late := s.buffer.Late()
	g.newlyLate = late - s.metrics.lateSeen
	s.metrics.add(late)
	s.p.health.setGauges(&g, now)
	return g
}

func (s *session) tellInForce() {
	set := s.buffer.Settings()
	if set != s.inForce && s.p.cfg.InForce != nil {
		s.p.cfg.InForce(set)
	}
	s.inForce = set
}
