package repair

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/catalog"
)

// attempt is one whole repair over connections of its own.
func (r *repair) attempt(ctx context.Context, confirmed *finding) error {
	if !r.renewed {
		if err := r.renewIngress(ctx); err != nil {
			return err
		}
	}
	l, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.AwaitSlot(ctx); err != nil {
		return err
	}
	rd, err := l.Read(ctx)
	if err != nil {
		return err
	}
	if r.window != nil { // its acknowledgements may have been lost
		n, err := r.window.Landed(ctx, l, rd.Stream.NewestSeq)
		if err != nil {
			return err
		}
		r.landed, r.window = r.landed+n, nil
	}
	f, err := r.evaluate(ctx, l, rd)
	if err != nil {
		return err
	}
	switch {
	case f.code == "":
		r.rep.done(r.landed)
		return nil
	case f.code != confirmed.code || f.cause() != confirmed.cause():
		return fmt.Errorf("now %s is found, no more %s", f.cause(), confirmed.cause())
	}
	p, err := r.plan(ctx, l, f)
	if err != nil {
		return err
	}
	defer p.close()
	r.rep.planned(p)
	if err := r.checkLoss(p); err != nil {
		return err
	}
	if p.archived != nil {
		return p.archived
	}
	if p.erasures != nil && !r.o.DespiteErasure {
		return p.erasures
	}
	switch p.mode {
	case modeRecord:
		return r.writeRecord(ctx, l, f, p)
	case modeKeep:
		return r.keepSlot(ctx, l, f, p)
	default:
		return r.newSlot(ctx, l, f, p)
	}
}

// renewIngress gives the stream a new ingress, so that a suspended outflow that wakes up can't publish among
// what the repair publishes. Only connections that are opened after it know the new ingress.
func (r *repair) renewIngress(ctx context.Context) error {
	l, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.AwaitSlot(ctx); err != nil {
		return err
	}
	st, err := l.NATS.State(ctx)
	if err == nil && st.Exists {
		err = l.NATS.RenewIngress(ctx)
	}
	r.renewed = err == nil
	return err
}

// writeRecord writes the planned record, where nothing else is needed.
func (r *repair) writeRecord(ctx context.Context, l *backfill.Conns, f *finding, p *plan) error {
	if err := conns.EnsureBucket(ctx, r.cfg, l.Store); err != nil {
		return err
	}
	if _, err := conns.SaveRecord(ctx, l.Store, p.record, f.Revision); err != nil {
		return err
	}
	r.rep.done(r.landed)
	progress.Step(ctx, "checkpoint record: written")
	return nil
}

// begunFor is the code that the repair was begun for.
func (f *finding) begunFor() string {
	if f.code == checkpoint.CodeUnfinished {
		return f.Record.Repairing
	}
	return f.code
}

// begun reports whether a repair into this stream is under way. What its attempts have published lies behind
// the record's base, and need not be accepted: it may be lost, and comes again.
func (f *finding) begun() bool {
	rec := f.Record
	return rec != nil && rec.Repairing != "" && rec.Created.Equal(f.Stream.Created)
}

// inProgress is the record of a repair that is under way.
func (r *repair) inProgress(l *backfill.Conns, f *finding) *checkpoint.Record {
	rec := l.NewRecord(f.Readings)
	rec.Begun = &checkpoint.Begun{Durable: f.Durable()}
	if f.Record != nil {
		if was := f.Record.Begun; was != nil { // also where the stream was put back from a copy
			rec.Begun.Attempts = was.Attempts
		}
		rec.Base, rec.Checkpoints, rec.Holes = f.Record.Base, f.Record.Checkpoints, f.Record.Holes
		if before := f.published(); before != 0 { // until its rows are published, too
			rec.Publication.TableOID = before
		}
		if f.Record.SystemID == rec.SystemID { // of a server that was put back this says so, see WentBack
			rec.Publication.Seen = max(rec.Publication.Seen, f.Record.Publication.Seen)
		}
		if !f.Stream.Exists {
			rec.Created = f.Record.Created
		}
	}
	rec.Holes = f.Holes(rec.Holes)
	rec.Repairing = f.begunFor()
	return rec
}

// keepSlot repairs with the existing slot.
func (r *repair) keepSlot(ctx context.Context, l *backfill.Conns, f *finding, p *plan) error {
	if !f.Stream.Exists {
		return r.makeStream(ctx, l, f, r.inProgress(l, f))
	}
	s := p.scan
	s.anchor.Seq = f.Stream.LastSeq
	s.anchor.Timeline = f.Server.History.At(s.anchor.Due)
	rec := r.inProgress(l, f)
	if err := r.saveAnchor(ctx, l, f, rec, s.anchor); err != nil {
		return err
	}
	// An outflow that was started before the record said so may hold the slot and publish; its next record is
	// refused.
	if slot, err := l.Session.Slot(ctx); err != nil || slot.Active {
		return errors.Join(err, fmt.Errorf("slot %s is held by pid %d (%s)", r.cfg.Slot, slot.ActivePID,
			slot.Holder))
	}
	if err := r.forgetStates(ctx, f, p); err != nil {
		return err
	}
	return r.publishMissing(ctx, l, f, s, rec)
}

// saveAnchor writes the record from which a killed repair continues: the slot is the right one, and from the
// anchor on it brings everything that the stream lacks. What the broker has lost beyond the stream's end lies
// behind the anchor: a checkpoint there would be none to go on from.
func (r *repair) saveAnchor(ctx context.Context, l *backfill.Conns, f *finding, rec *checkpoint.Record,
	anchor relay.Checkpoint) error {
	if anchor.Seq = f.End(); f.begun() {
		anchor.Seq = min(anchor.Seq, f.Record.Base)
	}
	anchor.Tally = relay.Tally{} // what is repaired did not come through the WAL
	rec.Checkpoints = []checkpoint.StoredCheckpoint{{Checkpoint: anchor, Since: time.Now().UTC()}}
	rec.Base, rec.Holes = anchor.Seq, f.Holes(rec.Holes)
	return r.save(ctx, l, f, rec)
}

func (r *repair) save(ctx context.Context, l *backfill.Conns, f *finding, rec *checkpoint.Record) error {
	if err := conns.EnsureBucket(ctx, r.cfg, l.Store); err != nil {
		return err
	}
	revision, err := conns.SaveRecord(ctx, l.Store, rec, f.Revision)
	if err == nil {
		f.Revision = revision
	}
	return err
}

// makeStream makes the stream as init would. If there is a record, it first says that a repair is under way
// and keeps its checkpoints: without any it would say that the slot has yet to be made.
func (r *repair) makeStream(ctx context.Context, l *backfill.Conns, f *finding,
	rec *checkpoint.Record) error {
	if f.Record != nil {
		if err := r.save(ctx, l, f, rec); err != nil {
			return err
		}
	}
	if err := conns.EnsureStream(ctx, r.cfg, l.NATS); err != nil {
		return err
	}
	return fmt.Errorf("stream %s was made", r.cfg.Stream) // the repair begins again
}

// newSlot repairs with a new slot.
func (r *repair) newSlot(ctx context.Context, l *backfill.Conns, f *finding, p *plan) error {
	rec := r.inProgress(l, f)
	// Whatever the stream has is accepted: its positions may be of another WAL.
	if rec.Checkpoints = nil; !f.begun() {
		rec.Base = max(rec.Base, f.End())
	}
	if !f.Stream.Exists {
		return r.makeStream(ctx, l, f, rec)
	}
	if err := r.save(ctx, l, f, rec); err != nil {
		return err
	}
	if err := l.AwaitSlot(ctx); err != nil {
		return err
	}
	if f.Slot.Exists {
		progress.Step(ctx, "dropping slot %s", r.cfg.Slot)
	}
	// Another repair may have finished while this one slept: then the slot alone has what was written since.
	switch _, revision, err := l.Store.Load(ctx); {
	case err != nil:
		return err
	case revision != f.Revision:
		return fmt.Errorf("somebody else has changed the checkpoint record of slot %s", r.cfg.Slot)
	}
	failover, err := l.DropSlot(ctx)
	if err != nil {
		return err
	}
	progress.Step(ctx, "making slot %s: the server waits for the transactions that write now", r.cfg.Slot)
	waited := progress.Wait(ctx, "the server waits for the transactions that write now")
	slot, err := catalog.CreateSlotWithSnapshot(ctx, l.PGC, failover)
	waited()
	if err != nil {
		return err
	}
	defer slot.Close()
	progress.Step(ctx, "slot %s: made, at %v", r.cfg.Slot, slot.At)
	snap, err := r.snapshot(ctx, l, f, p, slot.Snapshot)
	if err != nil {
		return err
	}
	p.close()
	had := p.scan.counts[missing]
	if p.scan, err = r.newScan(l, f, snap); err != nil {
		return err
	}
	s := p.scan
	// before the record has the anchor: a repair that goes on from there does not know of the former slot
	if err := r.forgetStates(ctx, f, p); err != nil {
		return err
	}
	rd, err := l.Read(ctx)
	if err != nil {
		return err
	}
	s.anchor = relay.Checkpoint{
		Due: slot.At, Seq: rd.Stream.LastSeq, Settings: l.Settings(), Timeline: rd.Server.History.At(slot.At),
	}
	s.onlyNew = had == 0 && rd.Removed(nil) <= f.Removed(nil)
	f.Stream.NewestSeq, f.Stream.LastSeq = rd.Stream.NewestSeq, rd.Stream.LastSeq // its end may be lost since
	if err := r.saveAnchor(ctx, l, f, rec, s.anchor); err != nil {
		return err
	}
	rd.Record = rec
	if err := s.run(ctx, rd, false); err != nil {
		return err
	}
	r.rep.planned(p)
	return r.publishMissing(ctx, l, f, s, rec)
}

// publishMissing publishes what is missing, waits until it is durable, and finishes the record.
func (r *repair) publishMissing(ctx context.Context, l *backfill.Conns, f *finding, s *scan,
	rec *checkpoint.Record) error {
	if err := r.forgetErased(ctx, l, f, s); err != nil {
		return err
	}
	w := r.makeWindow(l, s, f.End())
	if w.Of > 0 {
		s.addAttempt(rec, f.Readings)
		if err := r.save(ctx, l, f, rec); err != nil {
			return err
		}
		progress.Step(ctx, "publishing %s", units.Of(w.Of, "event"))
	}
	r.window = w
	published, err := w.Publish(ctx)
	if err != nil {
		return err
	}
	if s.snap != nil {
		s.snap.Close()
	}
	gone, err := w.ReadBack(ctx)
	if err != nil {
		return err
	}
	r.rep.discarded(gone)
	err = f.AwaitDurable(ctx, r.cfg.Sink.DurableAfter, published, s.newestAt)
	if err != nil {
		return err
	}
	newest, end := s.newest, f.End()
	after := w.After()
	if published > 0 {
		newest, end = after.Seq, after.Seq
	}
	if err := l.Finish(ctx, rec, f.Revision, after, newest, end); err != nil {
		return err
	}
	r.rep.done(r.landed + published)
	progress.Step(ctx, "checkpoint record: written, outflow goes on from %v at sequence %d", after.Due,
		after.Seq)
	return nil
}
