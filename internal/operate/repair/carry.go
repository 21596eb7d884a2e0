package repair

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/sink"
)

// attempt is one whole repair, on connections of its own.
func (r *repair) attempt(ctx context.Context, confirmed *finding) error {
	l, err := backfill.Open(ctx, r.cfg, r.log)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.AwaitSlot(ctx); err != nil {
		return err
	}
	if !r.renewed {
		return r.renewIngress(ctx, l)
	}
	rd, err := l.Read(ctx)
	if err != nil {
		return err
	}
	f, err := r.judge(ctx, l, rd)
	if err != nil {
		return err
	}
	switch {
	case f.code == "":
		r.rep.done(0)
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
	if err := r.consent(p); err != nil {
		return err
	}
	switch p.mode {
	case modeRecord:
		return r.writeRecord(ctx, l, f, p)
	case modeKeep:
		return r.keep(ctx, l, f, p)
	default:
		return r.renew(ctx, l, f, p)
	}
}

// renewIngress shuts the door that an outflow which sleeps knows: what it sends when it wakes up must get in nowhere among what the
// repair publishes.
func (r *repair) renewIngress(ctx context.Context, l *backfill.Links) error {
	st, err := l.Conn.State(ctx)
	if err == nil && st.Exists {
		err = l.Conn.RenewIngress(ctx)
	}
	r.renewed = err == nil
	if err == nil {
		err = errRenewed
	}
	return err
}

// errRenewed asks for connections that know the new ingress.
var errRenewed = errors.New("the stream has a new ingress")

// writeRecord repairs what only the record lacked.
func (r *repair) writeRecord(ctx context.Context, l *backfill.Links, f *finding, p *plan) error {
	if err := r.bucket(ctx, l); err != nil {
		return err
	}
	if _, err := l.Store.Save(ctx, p.record, f.Revision); err != nil {
		return fmt.Errorf("write the checkpoint record: %w", err)
	}
	r.rep.done(0)
	r.say("checkpoint record: written")
	return nil
}

// original is the code that the repair was begun for.
func (f *finding) original() string {
	if f.code == checkpoint.CodeUnfinished {
		return f.Record.Repairing
	}
	return f.code
}

// under is the record of a repair that is under way.
func (r *repair) under(l *backfill.Links, f *finding) *checkpoint.Record {
	rec := l.Fresh(f.Readings)
	if f.Record != nil {
		rec.Base, rec.Checkpoints, rec.Holes = f.Record.Base, f.Record.Checkpoints, f.Record.Holes
		if before := f.published(); before != 0 { // until its rows are published, too
			rec.Publication.TableOID = before
		}
		if !f.Stream.Exists {
			rec.Created = f.Record.Created
		}
	}
	rec.Holes = f.Holes(rec.Holes)
	rec.Repairing = f.original()
	return rec
}

// keep repairs with the slot that is there.
func (r *repair) keep(ctx context.Context, l *backfill.Links, f *finding, p *plan) error {
	if !f.Stream.Exists {
		return r.makeStream(ctx, l, f, r.under(l, f))
	}
	s := p.survey
	s.anchor.Seq = f.Stream.LastSeq
	s.anchor.Timeline = f.Server.History.At(s.anchor.Due)
	rec := r.under(l, f)
	if err := r.anchorAt(ctx, l, f, rec, s.anchor); err != nil {
		return err
	}
	// One that was started before the record said so may hold the slot, and publish: its next record is refused.
	if slot, err := l.PG.Slot(ctx); err != nil || slot.Active {
		return errors.Join(err, fmt.Errorf("slot %s is held by pid %d (%s)", r.cfg.Slot, slot.ActivePID, slot.Holder))
	}
	return r.fill(ctx, l, f, s, rec)
}

// anchorAt writes the record with which a repair that dies goes on: the slot is the right one, and from the anchor on it brings all that
// the stream lacks.
func (r *repair) anchorAt(ctx context.Context, l *backfill.Links, f *finding, rec *checkpoint.Record, anchor relay.Checkpoint) (err error) {
	rec.Checkpoints = []checkpoint.StoredCheckpoint{{Checkpoint: anchor, Since: time.Now().UTC()}}
	rec.Base = anchor.Seq
	return r.save(ctx, l, f, rec)
}

func (r *repair) save(ctx context.Context, l *backfill.Links, f *finding, rec *checkpoint.Record) (err error) {
	if err := r.bucket(ctx, l); err != nil {
		return err
	}
	if f.Revision, err = l.Store.Save(ctx, rec, f.Revision); err != nil {
		return fmt.Errorf("write the checkpoint record: %w", err)
	}
	return nil
}

// bucket makes the record's bucket, if there is none.
func (r *repair) bucket(ctx context.Context, l *backfill.Links) error {
	storage := jetstream.FileStorage
	if r.cfg.Init.Storage == "memory" {
		storage = jetstream.MemoryStorage
	}
	return l.Store.EnsureBucket(ctx, r.cfg.Init.Replicas, storage)
}

// errAnew begins the repair again: what it needed is there now.
type errAnew struct{ what string }

func (e *errAnew) Error() string { return e.what }

// makeStream makes the stream as init would. Where there is a record it says first that a repair is under way, with the places that
// it had: an empty record would say that the slot is still to be made.
func (r *repair) makeStream(ctx context.Context, l *backfill.Links, f *finding, rec *checkpoint.Record) error {
	if f.Record != nil {
		if err := r.save(ctx, l, f, rec); err != nil {
			return err
		}
	}
	in := r.cfg.Init
	if err := l.Conn.EnsureStream(ctx, sink.StreamOptions{Replicas: in.Replicas, Storage: in.Storage, MaxAge: in.MaxAge, MaxBytes: in.MaxBytes}); err != nil {
		return err
	}
	return &errAnew{fmt.Sprintf("stream %s was made", r.cfg.Stream)}
}

// renew repairs with a new slot.
func (r *repair) renew(ctx context.Context, l *backfill.Links, f *finding, p *plan) error {
	rec := r.under(l, f)
	// Whatever the stream has is accepted: its positions may be those of another WAL.
	rec.Checkpoints, rec.Base = nil, max(rec.Base, f.Stream.LastSeq)
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
		r.say("dropping slot %s", r.cfg.Slot)
	}
	failover, err := l.PG.DropSlot(ctx)
	if err != nil {
		return err
	}
	r.say("making slot %s: the server waits for the transactions that write now", r.cfg.Slot)
	slot, err := replication.CreateSlot(ctx, l.PGC, failover)
	if err != nil {
		return err
	}
	defer slot.Close()
	r.say("slot %s: made, at %v", r.cfg.Slot, slot.At)
	snap, err := r.snapshot(ctx, l, f, p, slot.Snapshot)
	if err != nil {
		return err
	}
	p.close()
	if p.survey, err = r.newSurvey(l, f, snap); err != nil {
		return err
	}
	s := p.survey
	rd, err := l.Read(ctx)
	if err != nil {
		return err
	}
	s.anchor = relay.Checkpoint{
		Due: slot.At, Seq: rd.Stream.LastSeq, Settings: l.Settings(), Timeline: rd.Server.History.At(slot.At),
	}
	if err := r.anchorAt(ctx, l, f, rec, s.anchor); err != nil {
		return err
	}
	rd.Record = rec
	if err := s.run(ctx, rd, false); err != nil {
		return err
	}
	r.rep.planned(p)
	return r.fill(ctx, l, f, s, rec)
}

// fill publishes what is missing, waits until it is durable, and finishes the record.
func (r *repair) fill(ctx context.Context, l *backfill.Links, f *finding, s *survey, rec *checkpoint.Record) error {
	w := r.window(l, f.Server.History, s)
	published, err := w.Publish(ctx)
	if err != nil {
		return err
	}
	if s.snap != nil {
		s.snap.Close()
	}
	if err := w.ReadBack(ctx); err != nil {
		return err
	}
	if err := r.awaitDurable(ctx, f.Readings, s, published); err != nil {
		return err
	}
	newest := s.newest
	place := s.anchor
	if place.Seq += published; published > 0 {
		newest = place.Seq
	}
	if err := l.Finish(ctx, rec, f.Revision, place, newest); err != nil {
		return err
	}
	r.rep.done(published)
	r.say("checkpoint record: written, outflow goes on from %v at sequence %d", place.Due, place.Seq)
	return nil
}

// awaitDurable waits until what the stream ends with has been there for durable_after: the anchor may be confirmed to PostgreSQL
// already, so that nothing would bring it again.
func (r *repair) awaitDurable(ctx context.Context, rd backfill.Readings, s *survey, published uint64) error {
	left := r.cfg.Sink.DurableAfter
	if published == 0 {
		left = rd.Undurable(left, s.newestAt)
	}
	if left <= 0 {
		return nil
	}
	r.say("waiting %v (sink.durable_after) until nothing of it can be lost any more; a repair that is stopped now goes on when it is run again",
		left.Round(time.Millisecond))
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(left):
		return nil
	}
}
