// Package status is `outflow status`: it reads slot, checkpoint record, stream and server, as a start would,
// without changing anything. It shows what can be read where one of the servers does not answer.
package status

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

// Report is what was read. The JSON names are those of /status.json where the things are the same.
type Report struct {
	Health  string `json:"health"` // ok, not running, or the code of what is wrong
	Problem string `json:"problem,omitempty"`

	Source string `json:"source"` // table, message or both
	Table  string `json:"table"`  // "" if there is none
	Shard  string `json:"shard,omitempty"`
	*overview.Report
	Stream Stream `json:"stream"`

	Checkpoint *relay.Checkpoint `json:"place,omitempty"` // the newest recorded one
	Recorded   *time.Time        `json:"recorded,omitempty"`
	// the oldest gaps that were open then, as in pipeline of /status.json
	Gaps     []pipeline.Gap `json:"gaps,omitempty"`
	LagBytes uint64         `json:"lag_bytes"` // WAL between the newest recorded checkpoint and the end
	// why the last process stopped publishing, or holds a fault; absent: it did not stop at a fault, another
	// one publishes, or that can't be read
	LastEnd *checkpoint.End `json:"last_end,omitempty"`

	broker time.Time     // NATS's clock when it was asked; zero: not known
	pause  time.Duration // between attempts of a process that holds a fault, at most; 0: the least one
}

// again is how long it may be until a process that holds a fault tries again.
func (r *Report) again() time.Duration { return max(pipeline.HoldPause, r.pause) }

// held returns the fault at which a process waits, nil if none does, and for how long it has.
func (r *Report) held(now time.Time) (f *pipeline.Fault, since time.Duration) {
	e := r.LastEnd
	if e == nil || !e.Held {
		return nil, 0
	}
	ago := now.Sub(e.At)
	if !r.broker.IsZero() && !e.Stored.IsZero() { // else the clocks of two hosts have to do
		ago = r.broker.Sub(e.Stored)
	}
	// Nothing says that a process was killed. An attempt may take as long as the pause before it.
	if ago > 4*r.again() {
		return nil, 0
	}
	f = &pipeline.Fault{Code: e.Code, Message: e.Message, Hint: e.Hint, Since: cmp.Or(e.Since, e.At)}
	return f, max(0, ago) + e.At.Sub(f.Since)
}

// Stream is the stream's health.
type Stream struct {
	overview.Stream
	Replicated bool `json:"replicated"`

	Loss             string   `json:"loss,omitempty"`              // what shows that it lost messages
	DurablesAffected []string `json:"durables_affected,omitempty"` // durable consumers that may have had them
}

// How long everything that a start reads may take, and how often it is read while somebody watches: it takes
// several connections.
const (
	timeLimit = 15 * time.Second
	interval  = 10 * time.Second
)

// Read reads everything. The report always says what could be read; an error, what could not.
func Read(ctx context.Context, cfg config.Config, log *slog.Logger) (*Report, error) {
	w := newWatcher(cfg)
	var both sync.WaitGroup
	both.Go(func() {
		defer crash.Guard()
		w.Once(ctx)
	})
	s := readStart(ctx, cfg, log)
	both.Wait()
	return report(cfg, w.Reading(), s), s.failed
}

// Watch shows a report every two seconds until ctx ends or show fails.
func Watch(ctx context.Context, cfg config.Config, log *slog.Logger, show func(*Report) error) error {
	ctx, cancel := context.WithCancel(ctx)
	var readers sync.WaitGroup
	defer readers.Wait()
	defer cancel()
	w := newWatcher(cfg)
	readers.Go(func() {
		defer crash.Guard()
		w.Run(ctx)
	})
	starts := make(chan *start)
	readers.Go(func() {
		defer crash.Guard()
		for ctx.Err() == nil {
			select {
			case starts <- readStart(ctx, cfg, log):
			case <-ctx.Done():
			}
			select {
			case <-time.After(interval):
			case <-ctx.Done():
			}
		}
	})
	newest := <-starts // or what it could not read in its time
	tick := time.NewTicker(watch.Interval)
	defer tick.Stop()
	for ctx.Err() == nil {
		if err := show(report(cfg, w.Reading(), newest)); err != nil {
			return err
		}
		select {
		case newest = <-starts:
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return nil
}

func newWatcher(cfg config.Config) *watch.Watcher {
	// what fails is in the reading
	return watch.New(watch.Config{Config: cfg, Logger: slog.New(slog.DiscardHandler),
		Partitions: partition.Watched(cfg)})
}

// start is what a start of run would have read.
type start struct {
	readings checkpoint.Readings
	record   *checkpoint.Record // also where the rest could not be read
	ended    *checkpoint.End    // likewise
	gaps     []byte             // likewise
	config   checkpoint.Config
	loss     string // what shows that the stream lost messages
	setup    error  // what such a start would stop with
	failed   error  // not everything could be read
}

func readStart(ctx context.Context, cfg config.Config, log *slog.Logger) *start {
	ctx, cancel := context.WithTimeout(ctx, timeLimit)
	defer cancel()
	s := &start{}
	if s.failed = s.read(ctx, cfg, log); s.failed != nil {
		s.readStore(ctx, cfg, log)
	}
	return s
}

func (s *start) read(ctx context.Context, cfg config.Config, log *slog.Logger) error {
	c, err := conns.Open(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer c.Close()
	reader := c.Reader()
	if cfg.Cluster.Shared() { // also what another cluster makes
		reader.Record = wiring.SessionStore(cfg, c.NATS).Load
	}
	r, err := reader.Read(ctx)
	if err != nil {
		return err
	}
	if r.Slot.Exists || r.Record != nil {
		if r.Publication, s.setup = c.Session.Publication(ctx, c.Layout.Needed()); s.setup == nil {
			s.setup = c.NATS.CheckStream(ctx)
		}
	}
	s.readings, s.record, s.config = r, r.Record, wiring.Checkpoint(cfg, c.Layout)
	s.gaps, _ = c.Store.Gaps(ctx) // it is no part of what a start needs
	// while it is active somebody publishes, though the record may not have been written again yet
	if !r.Slot.Active {
		s.ended, _ = c.Store.LastEnd(ctx) // likewise
	}
	if s.setup == nil {
		var found checkpoint.Start
		found, s.setup = checkpoint.Resolve(s.config, r)
		if s.loss = found.Loss; s.setup == nil && !r.Slot.Active { // whoever holds the slot has read it
			var recent []outbox.Counter
			if recent, s.setup = found.Recent(ctx, c.NATS.Recent); s.setup == nil {
				s.setup = s.config.CheckMemory(found, len(recent))
			}
		}
	}
	return nil
}

// readStore reads what there is in NATS without PostgreSQL. An error would say no more than the one that led
// here.
func (s *start) readStore(ctx context.Context, cfg config.Config, log *slog.Logger) {
	conn, err := wiring.ConnectBroker(ctx, cfg, log)
	if err != nil {
		return
	}
	defer conn.Close()
	store := wiring.Store(cfg, conn)
	s.record, _, _ = wiring.HomeStore(cfg, conn).Load(ctx)
	s.ended, _ = store.LastEnd(ctx)
	s.gaps, _ = store.Gaps(ctx)
}

// openGaps returns the gaps that were stored and that the checkpoint knows.
func openGaps(stored []byte, holds []relay.Hold) (open []pipeline.Gap) {
	var gaps []pipeline.Gap
	if json.Unmarshal(stored, &gaps) != nil { // nothing was stored, or it is not of this version
		return nil
	}
	for _, g := range gaps {
		if slices.ContainsFunc(holds, func(h relay.Hold) bool {
			return string(outbox.AppendSequence(nil, h.Sequence)) == g.Sequence
		}) {
			open = append(open, g)
		}
	}
	return open
}

func report(cfg config.Config, read watch.Reading, s *start) *Report {
	r := &s.readings
	now := time.Now()
	rep := &Report{
		Health: "ok", Source: cfg.Source.String(), Shard: cfg.Shard.String(),
		Report: overview.Of(cfg, &read, now), LastEnd: s.ended,
	}
	if cfg.Source.Rows() {
		rep.Table = cfg.Table
	}
	if cfg.Cluster.Islands() {
		rep.pause = pipeline.HeldHomePause(cfg.Cluster.Count, cfg.Cluster.MaximumDelay)
	}
	if s.failed == nil {
		rep.Table = s.config.Table
	}
	rep.Stream.Stream = rep.Report.Stream
	rep.Stream.Replicated = r.Stream.Exists && r.Stream.Replicated
	if s.record != nil && len(s.record.Checkpoints) > 0 {
		newest := s.record.Checkpoints[len(s.record.Checkpoints)-1]
		rep.Checkpoint, rep.Recorded = &newest.Checkpoint, &newest.Since
		rep.Gaps = openGaps(s.gaps, newest.Holds)
		rep.Cluster.Owns(s.record.Owner, s.record.Epoch)
		rep.Cluster.Agrees(s.record)
		rep.Cluster.Knows(newest.Said, newest.Tally, s.record.Kept(cfg.Sink.DurableAfter, now))
		rep.LagBytes = outbox.Distance(newest.At(), max(newest.At(), read.Postgres.WALEnd))
	}
	problem := s.failed
	if problem == nil {
		problem = s.setup
	}
	rep.Stream.Loss = s.loss
	fault := outbox.FaultOf(problem)
	if rep.Stream.Loss != "" || fault != nil && fault.Code == "stream_shortened" {
		rep.Stream.DurablesAffected = r.Stream.Durables
	}
	rep.broker = r.Stream.Now
	held, _ := rep.held(now)
	active := rep.Slot.Active || r.Slot.Active // whoever looked last
	rep.OfHealth(problem, active, held, s.ended)
	switch {
	case fault != nil:
		rep.Health, rep.Problem = fault.Code, fault.Error()
	case s.failed != nil:
		rep.Health, rep.Problem = "not known", problem.Error()
	case problem != nil:
		rep.Health, rep.Problem = "waiting", problem.Error()
	case rep.Slot.WaitsAt != "" && held == nil:
		rep.Health, rep.Problem = rep.Slot.WaitsAt, rep.Verdict.Cause
	case active:
	case held != nil:
		rep.Health, rep.Problem = held.Code, held.Message
	default:
		rep.Health, rep.Problem = "not running", "no outflow holds the slot"
	}
	rep.Problem = cfg.Repeat.In(rep.Problem)
	return rep
}
