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
)

// errOwned ends the session of a follower whose cluster makes the stream now.
var errOwned = fmt.Errorf("this cluster makes the stream now: %w", errAnew)

// follower is the session of a cluster that stands by while another one makes the stream. It reads the WAL of
// its own server, publishes nothing, and needs no windows: whoever goes on takes the stream's checkpoints
// from the home's record. What it keeps is where in the WAL that it reads the home's inputs lie, in a record
// of its own, and of that WAL what somebody may still have to read. The home needs no record, only the WAL.
type follower struct {
	p       *Pipeline
	conns   *Conns // its Store is that of the follower's own record; nil at home
	home    Store  // of the home's record
	cluster int
	server  relay.ServerState

	decoder   *decoder.Decoder
	result    decoder.Result
	away      *away // nil: this is the home
	tally     *homeTally
	tracker   *checkpoint.Tracker
	keeper    *checkpointer
	questions *worker
	ticks     *heartbeatWriter

	settings relay.Settings // in force
	newest   outbox.LSN     // the newest input, or the due of the checkpoint that was gone on from
	end      outbox.LSN     // up to where the WAL was read, between transactions
	events   time.Time      // when the newest input with events came in; zero: none did

	said      outbox.LSN // what the home's record says is confirmed
	owner     int        // who makes the stream, as it says
	epoch     uint64
	confirmed outbox.LSN // to PostgreSQL
	heard     time.Time  // JetStream was alive then
	asked     time.Time  // the home's record was last asked for
	revision  uint64     // of the home's record
	alive     time.Time  // it was found to be another one than before
	progress  progress   // of the stream's owner
	moved     time.Time  // it had changed, or there was nothing to do
	begun     time.Time
}

// follow stands by until this cluster makes the stream, or something fails.
func (p *Pipeline) follow(ctx context.Context, conns *Conns) error {
	p.stage = stageStandby
	f := &follower{p: p, conns: conns, home: conns.Store, cluster: conns.Checkpoint.Cluster}
	conns.Store = nil
	if e, ok := f.home.(*Elsewhere); ok {
		f.home, conns.Store = e.Home, e.Own
	}
	first, start, err := f.findStart(ctx)
	if err != nil {
		return err
	}
	if first.Slot.Active {
		return p.standBy(ctx, conns, first.Slot)
	}
	startCtx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	from := start.Checkpoint.Start()
	if err := conns.Source.Start(startCtx, from, conns.Binary && !p.text); err != nil {
		return fmt.Errorf("start replication at %v: %w", from, err)
	}
	// as for whoever publishes: what was read before may have been the work of the slot's last holder
	held, again, err := f.findStart(ctx)
	if err != nil {
		return err
	}
	if !start.Same(again) {
		return fmt.Errorf("the place moved from %v to %v while the slot was taken over",
			start.Checkpoint.Start(), again.Checkpoint.Start())
	}
	f.begin(held, again)
	defer f.close()
	if err = f.loop(ctx); errors.Is(err, decoder.ErrNeedText) {
		p.text = true
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return f.stop()
	}
	return err
}

// findStart reads what an ordinary start does, but nothing of the stream's messages: they are the owner's.
func (f *follower) findStart(ctx context.Context) (checkpoint.Readings, checkpoint.Start, error) {
	c := f.conns
	reader := checkpoint.Reader{
		Slot: limited("slot", c.Source.Slot), Record: f.load,
		Stream: func(ctx context.Context) (relay.StreamState, error) {
			st, err := limited("stream", c.JetStream.State)(ctx)
			return relay.StreamState{Exists: st.Exists, Created: st.Created, Replicated: st.Replicated,
				Now: st.Now}, err
		},
		Server: limited("server", c.Source.Server), Publication: publication(c.Source),
	}
	r, err := reader.Read(ctx)
	if err != nil {
		return r, checkpoint.Start{}, err
	}
	f.p.recheckAfter = r.RecheckAfter()
	start, err := checkpoint.Resolve(c.Checkpoint, r)
	if err == nil {
		f.p.unconfirmed = unconfirmed{} // this reading does not agree
	}
	return r, start, err
}

// load reads the home's record, and returns the follower's own; at home what there is of places in it.
func (f *follower) load(ctx context.Context) (*checkpoint.Record, uint64, error) {
	rec, revision, err := load(ctx, f.home)
	if err == nil {
		err = f.heed(rec, revision)
	}
	if err != nil {
		return nil, 0, err
	}
	if f.conns.Store != nil {
		return f.conns.load(ctx)
	}
	return rec.WithoutStream(), revision, nil
}

// heed takes note of what the home's record says, and that it was written.
func (f *follower) heed(rec *checkpoint.Record, revision uint64) error {
	switch {
	case rec == nil || rec.Epoch == 0:
		return errors.New("the checkpoint record of the home says no owner any more")
	case rec.Owner == f.cluster:
		return errOwned
	}
	f.p.health.heard(rec)
	f.said, f.owner, f.epoch = rec.Confirmed, rec.Owner, rec.Epoch
	if f.revision != revision || f.alive.IsZero() {
		f.revision, f.alive = revision, time.Now()
	}
	return nil
}

func (f *follower) begin(r checkpoint.Readings, start checkpoint.Start) {
	p, now, newest := f.p, time.Now(), start.Checkpoints[len(start.Checkpoints)-1].Checkpoint
	f.server, f.begun, f.heard, f.asked = r.Server, now, r.Asked, r.Asked
	f.moved, p.lags = now, 0
	p.input.begin(newest.Due, now)
	f.settings, f.newest, f.end = newest.Settings, newest.Due, newest.Start()
	f.confirmed = start.Confirmed
	f.decoder, f.questions = decoder.New(f.conns.Decoder), newWorker()
	f.tracker = checkpoint.NewTracker(f.conns.Checkpoint, start, now)
	f.keeper = &checkpointer{conns: f.conns, log: p.log, record: r.Record, revision: r.Revision}
	f.ticks = &heartbeatWriter{worker: newWorker(), writer: f.conns.Writer, log: p.log, notices: &p.notices,
		metrics: p.metrics}
	if f.conns.Store != nil {
		f.away = newAway(newest)
		f.tally = newTally(f.conns.Checkpoint, p.log, newest)
	}
	p.health.set(StateStandby, nil)
	p.log.Log(context.Background(), p.stateLevel(), "standby: another cluster makes the stream", "owner",
		f.owner, "epoch", f.epoch, "checkpoint", newest.Due, "from", newest.Start())
}

func (f *follower) close() {
	f.questions.close()
	f.ticks.worker.close()
}

// stop sends the last confirmation. What was not recorded is read again.
func (f *follower) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), f.p.cfg.StopTimeout)
	defer cancel()
	go discard(f.conns.Source.Batches())
	if err := f.conns.Source.Stop(ctx); err != nil {
		return fmt.Errorf("end replication: %w", err)
	}
	return nil
}

func (f *follower) loop(ctx context.Context) error {
	timer := time.NewTicker(idleInterval)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case b, ok := <-f.conns.Source.Batches():
			if !ok {
				return replicationEnded(f.conns.Source)
			}
			if err := f.read(b, time.Now()); err != nil {
				return err
			}
		case result := <-f.questions.done:
			if err := f.questions.take(result); err != nil {
				return err
			}
		case result := <-f.ticks.worker.done:
			if err := f.ticks.worker.take(result); err != nil {
				return err
			}
		case <-f.conns.JetStream.Lost():
			return connectionLost(f.conns.JetStream)
		case <-timer.C:
			f.housekeep(time.Now())
		}
	}
}

// housekeep moves the watermarks, as far as nothing is under way.
func (f *follower) housekeep(now time.Time) {
	if now.Sub(f.begun) >= HoldPause {
		f.p.recovered()
	}
	f.confirm()
	f.tick(now)
	if f.questions.busy {
		return
	}
	if f.away != nil {
		f.mark()
		if in, ok := f.tracker.SaveIn(now); ok && in == 0 {
			f.save(now)
			return
		}
	}
	if now.Sub(f.asked) >= f.p.lookInterval() {
		f.look(now)
	}
}

// look starts to read the home's record.
func (f *follower) look(now time.Time) {
	f.asked = now
	f.questions.start(func(ctx context.Context) func() error {
		ctx, cancel := untilLost(ctx, f.conns.JetStream)
		defer cancel()
		asked := time.Now()
		rec, revision, err := load(ctx, f.home)
		var st relay.StreamState
		if err == nil {
			st, err = limited("stream", f.conns.JetStream.Tail)(ctx)
		}
		changing := outbox.FaultOf(err) != nil && outbox.FaultOf(err).Code == relay.CodeStreamMoved
		return func() error {
			if err != nil && !changing {
				return err
			}
			f.heard = asked
			if err := f.heed(rec, revision); err != nil {
				return err
			}
			f.compare(rec, st.LastSeq, changing)
			return f.suspect()
		}
	})
}

// save starts to store the follower's own record.
func (f *follower) save(now time.Time) {
	update := f.tracker.BeginSave(now)
	f.questions.start(func(ctx context.Context) func() error {
		asked, err := f.keeper.store(ctx, &update)
		return func() error {
			if err != nil {
				return fmt.Errorf("checkpoint record: %w", err)
			}
			f.heard = asked
			f.tracker.Saved(time.Now())
			return nil
		}
	})
}

// mark notes where the newest input lies.
func (f *follower) mark() {
	cp := relay.Checkpoint{Due: f.newest, Read: f.away.start(f.newest), Settings: f.settings,
		Home: f.away.home, Tally: f.tally.at(f.newest), Said: f.tally.said}
	cp.Timeline = f.server.History.At(cp.Read)
	f.tracker.Keepalive(cp)
}

// confirm frees the WAL that nobody has to read any more: up to what the home's record says is confirmed, or
// the home itself. Whoever makes the stream next begins at no lower place, at home or elsewhere.
func (f *follower) confirm() {
	lsn := min(f.said, f.end)
	if f.away != nil {
		f.tracker.Limit(max(f.said, f.away.home.LSN, 1)) // 1: nothing is said, which is no limit of 0
		lsn = f.tracker.Confirmable(f.heard)
	}
	if lsn <= f.confirmed {
		return
	}
	f.confirmed = lsn
	f.conns.Source.Confirm(lsn)
	f.tracker.Confirmed(lsn)
}

// read takes what replication brings.
func (f *follower) read(b *relay.Batch, now time.Time) error {
	defer b.Release()
	for i := range b.Messages {
		m := &b.Messages[i]
		if m.Keepalive {
			if !f.decoder.InTransaction() {
				f.passed(m.WALEnd)
			}
			continue
		}
		if err := f.decoder.Decode(m.Data, &f.result); err != nil {
			return err
		}
		if f.result.Malformed != nil {
			f.p.metrics.malformed.Inc()
			f.p.notices.malformed.say(f.p.log, slog.LevelWarn, noEffect, "err", f.result.Malformed)
		}
		if f.result.Kind != decoder.Commit {
			continue
		}
		if err := f.commit(&f.result.Commit, now); err != nil {
			return err
		}
	}
	return nil
}

func (f *follower) passed(at outbox.LSN) {
	f.end = max(f.end, at)
	if f.away != nil {
		f.away.passed(at)
	}
}

func (f *follower) commit(c *relay.Commit, now time.Time) error {
	if f.away != nil {
		f.away.commit(c)
		f.tally.commit(c)
		if w := &f.result.Watermark; w.LSN != 0 {
			if err := f.tally.heed(f.away, w, c.Time); err != nil {
				return err
			}
		}
	}
	f.end = max(f.end, c.LSN, c.Read)
	if c.Kind == relay.NoInput {
		return nil
	}
	f.newest = max(f.newest, c.LSN)
	f.p.input.read(c.LSN, now)
	switch c.Kind {
	case relay.Events:
		f.events = now
	case relay.SettingsChange:
		f.settings = c.Settings
	}
	return nil
}

// tick writes a heartbeat at home when events have waited as long as they may: whoever makes the stream has
// no other input that closes their window. It closes all that came before it, so one is enough.
func (f *follower) tick(now time.Time) {
	wait, h := f.window(), f.ticks
	if f.away != nil || !f.p.cfg.Heartbeats || f.events.IsZero() || wait == 0 {
		return
	}
	due := f.events.Add(wait + granularity)
	if h.last.Before(due) || h.notBefore.After(h.last) { // the latter: it failed
		h.offerHeartbeat(now, due)
	}
}

// window is how long an event may wait for what closes it.
func (f *follower) window() time.Duration {
	if f.settings.ByGap() {
		return f.settings.Gap.Bound
	}
	return f.settings.Horizon
}
