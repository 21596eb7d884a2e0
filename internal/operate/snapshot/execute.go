package snapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// maxRows is how many positions a window has.
const maxRows = math.MaxUint32 - outbox.RepairedIndex

// begin records that a snapshot is under way and that the slot has yet to be made.
func (s *snapshot) begin(ctx context.Context, l *backfill.Conns, rd *backfill.Readings) error {
	rec := l.NewRecord(*rd)
	rec.Repairing, rec.Base = checkpoint.ForSnapshot, rd.Stream.LastSeq
	// a stream that was made anew has none
	if rd.Record != nil && rd.Record.Created.Equal(rd.Stream.Created) {
		rec.Holes = rd.Record.Holes
	}
	rec.Holes = rd.Holes(rec.Holes)
	s.o.Hit("snapshot.begin")
	if err := s.save(ctx, l, rec, rd); err != nil {
		return err
	}
	s.ours = true
	s.o.Hit("snapshot.begun")
	return nil
}

func (s *snapshot) save(ctx context.Context, l *backfill.Conns, rec *checkpoint.Record,
	rd *backfill.Readings) error {
	revision, err := conns.SaveRecord(ctx, l.Store, rec, rd.Revision)
	switch {
	case errors.Is(err, checkpoint.ErrUnknown):
		s.ours = false // it may be there or not: whose the next one is can't be told
	case err == nil:
		s.revision, rd.Revision, rd.Record = revision, revision, rec
	}
	return err
}

// execute makes the slot, publishes the rows of its snapshot that the stream does not have, and finishes the
// record.
func (s *snapshot) execute(ctx context.Context, l *backfill.Conns, rd *backfill.Readings) error {
	reader, newest, err := s.reader(ctx, l, rd)
	if err != nil {
		return err
	}
	defer reader.Close()
	waited := progress.Wait(ctx, "waiting for a lock on table "+s.rep.Table)
	lock, err := tablesnapshot.LockTable(ctx, l.PGC.Config)
	waited()
	if err != nil {
		return err
	}
	defer lock.Close()
	if !reflect.DeepEqual(lock.Table(), l.Layout.Table) {
		return fmt.Errorf("table %s was altered meanwhile", s.rep.Table)
	}
	slot, err := s.makeSlot(ctx, l, rd)
	if err != nil {
		return err
	}
	defer slot.Close()
	snap, err := reader.Snapshot(ctx, slot.Snapshot)
	if err != nil {
		return err
	}
	defer snap.Close()
	slot.Close()
	s.o.Hit("snapshot.taken")
	cp, err := s.checkpointAt(ctx, l, rd, slot.At)
	if err != nil {
		return err
	}
	w, err := s.window(ctx, l, snap, cmp.Or(rd.Stream.NewestSeq, cp.Seq), cp)
	if err != nil {
		return err
	}
	begun := time.Now()
	published, err := w.Publish(ctx)
	s.rep.Published, s.rep.Seconds = published, time.Since(begun).Seconds()
	if err != nil {
		return s.hintRunAgain(err)
	}
	s.o.Hit("snapshot.published")
	snap.Close()
	lock.Close()
	if published > 0 {
		s.rep.First, s.rep.Last = cp.Seq+1, cp.Seq+published
		progress.Step(ctx, "%s: published in %.1f s, sequences %d to %d; reading them back",
			units.Of(published, "row"), s.rep.Seconds, s.rep.First, s.rep.Last)
	}
	last, end := rd.Stream.NewestSeq, cmp.Or(rd.Stream.NewestSeq, cp.Seq)
	if cp = w.After(); published > 0 {
		last, end = cp.Seq, cp.Seq
	}
	gone, err := w.ReadBack(ctx)
	if err != nil {
		return err
	}
	if s.rep.Discarded = gone; gone > 0 {
		progress.Step(ctx, "%d of them: replaced or discarded by the stream's limits", gone)
	}
	err = rd.AwaitDurable(ctx, s.cfg.Sink.DurableAfter, published, newest)
	if err != nil {
		return err
	}
	s.o.Hit("snapshot.durable")
	return s.finish(ctx, l, rd, cp, last, end)
}

// finish records that the snapshot is complete: outflow run goes on from the checkpoint, behind the stream's
// newest message.
func (s *snapshot) finish(ctx context.Context, l *backfill.Conns, rd *backfill.Readings,
	cp relay.Checkpoint, newest, end uint64) error {
	err := l.Finish(ctx, rd.Record, rd.Revision, cp, newest, end)
	if f := outbox.FaultOf(err); f != nil && f.Class == outbox.Gap { // the next attempt makes the slot anew
		err = fmt.Errorf("somebody else changed what was made: %s", f.Message)
	}
	if err != nil {
		return err
	}
	s.o.Hit("snapshot.finished")
	s.rep.Finished = true
	progress.Step(ctx, "checkpoint record: made, outflow run goes on from %v behind sequence %d", cp.Due,
		cp.Seq)
	return nil
}

// hintRunAgain adds to the fault of a row that can't be published what to do once it can.
func (s *snapshot) hintRunAgain(err error) error {
	f := outbox.FaultOf(err)
	if f == nil || f.Class != outbox.Poison {
		return err
	}
	named := *f
	named.Hint += ". Then run `outflow init --snapshot` again: it goes on behind what is published"
	return &named
}

// reader opens the connection that will take the snapshot, and loads the ids of the events that the stream
// has into it.
func (s *snapshot) reader(
	ctx context.Context, l *backfill.Conns, rd *backfill.Readings,
) (_ *tablesnapshot.Reader, newest time.Time, err error) {
	reader, err := tablesnapshot.OpenReader(ctx, l.PGC.Config)
	if err != nil {
		return nil, newest, err
	}
	s.rep.Already = rd.Stream.Messages
	if rd.Stream.NewestSeq == 0 {
		return reader, newest, nil
	}
	progress.Step(ctx, "stream %s has %s of a snapshot that did not finish: reading their ids",
		s.cfg.Stream, units.Of(rd.Stream.Messages, "message"))
	err = reader.LoadKnown(ctx, func(add func(...tablesnapshot.IDHash) error) error {
		return l.Messages(ctx, 1, rd.Stream.NewestSeq, func(m backfill.Message) error {
			newest = m.Stored
			h, err := outbox.ParseHeader(m.Header)
			if err != nil || !h.Pos.Repaired() {
				return refuse("stream_not_empty",
					fmt.Sprintf("Keep everybody else out of Outflow's NATS account (docs/nats.md), remove "+
						"the stream with `nats stream rm %s`, then run `outflow init --snapshot` again: it "+
						"starts over", s.cfg.Stream),
					"message %d of stream %s is not one of a snapshot", m.Seq, s.cfg.Stream)
			}
			return add(tablesnapshot.IDHash(outbox.HeaderIDSum(m.Header)))
		})
	})
	if err != nil {
		reader.Close()
		return nil, newest, err
	}
	s.o.Hit("snapshot.known")
	return reader, newest, nil
}

// makeSlot drops the slot, if there is one, and makes it anew.
func (s *snapshot) makeSlot(ctx context.Context, l *backfill.Conns, rd *backfill.Readings) (*catalog.NewSlot,
	error) {
	err := l.AwaitSlot(ctx)
	if f := outbox.FaultOf(err); f != nil && f.Code == "slot_held" {
		return nil, refuse("slot_unfinished",
			"It may be that of an init that was killed, which waits until the transactions that write "+
				"now have ended. Wait for that, or end it with pg_terminate_backend(pid), then run `outflow "+
				"init --snapshot` again", "%s", f.Message)
	}
	if err != nil {
		return nil, err
	}
	if err := s.checkStillOurs(ctx, l); err != nil {
		return nil, err
	}
	if _, err := l.DropSlot(ctx); err != nil {
		return nil, err
	}
	s.o.Hit("snapshot.slot")
	progress.Step(ctx, "making slot %s: the server waits for the transactions that write now", s.cfg.Slot)
	waited := progress.Wait(ctx, "the server waits for the transactions that write now")
	slot, err := catalog.CreateSlotWithSnapshot(ctx, l.PGC, true)
	waited()
	if f := outbox.FaultOf(err); f != nil && f.Code == "slot_blocked" {
		f.Hint = strings.Replace(f.Hint, "`outflow init`", "`outflow init --snapshot`", 1)
	}
	if err != nil {
		return nil, err
	}
	s.rep.At = slot.At
	s.o.Hit("snapshot.made")
	progress.Step(ctx, "slot %s at %v: made", s.cfg.Slot, slot.At)
	return slot, nil
}

// checkStillOurs reads the record once more before the slot is dropped. If this process was suspended since
// it wrote the record, another snapshot may have finished meanwhile, and then the slot is the only place that
// has what was written since.
func (s *snapshot) checkStillOurs(ctx context.Context, l *backfill.Conns) error {
	_, revision, err := l.Store.Load(ctx)
	if err == nil && revision != s.revision {
		err = s.takenOver()
	}
	return err
}

// checkpointAt is the checkpoint at the beginning of the slot, behind what the stream has.
func (s *snapshot) checkpointAt(ctx context.Context, l *backfill.Conns, rd *backfill.Readings,
	at outbox.LSN) (relay.Checkpoint, error) {
	now, err := l.Read(ctx)
	if err != nil {
		return relay.Checkpoint{}, err
	}
	was, is := rd.Stream, now.Stream
	if is.LastSeq != was.LastSeq || is.NewestSeq != was.NewestSeq || !is.Created.Equal(was.Created) {
		return relay.Checkpoint{},
			fmt.Errorf("stream %s has changed since its messages were read: sequence %d, and %d now",
				s.cfg.Stream, was.LastSeq, is.LastSeq)
	}
	return relay.Checkpoint{Due: at, Seq: is.LastSeq, Settings: l.Settings(),
		Timeline: now.Server.History.At(at)}, nil
}

// window prepares the window to publish: the rows of the snapshot that the stream does not have.
func (s *snapshot) window(
	ctx context.Context, l *backfill.Conns, snap *tablesnapshot.Snapshot, end uint64,
	cp relay.Checkpoint,
) (*backfill.Window, error) {
	id := l.Layout.ID
	defer progress.Wait(ctx, "PostgreSQL looks through table "+s.rep.Table)()
	none, double, err := snap.CheckIDs(ctx, id)
	if err != nil {
		return nil, err
	}
	if none > 0 || double > 0 {
		return nil, refuse("snapshot_ids",
			"Give each row an id of its own, or set columns.id to another column, then run `outflow init "+
				"--snapshot` again",
			"table %s: %s %s no %s, %d %s that of another row: a snapshot that is cut could not "+
				"tell which rows are published", s.rep.Table, units.Of(none, "row"),
			units.Agree(none, "has", "have"), id, double, units.Agree(double, "has", "have"))
	}
	if l.Layout.Mapping.OwnOnly {
		if err := backfill.CheckOrigin(ctx, snap, "Publish what was written here without a snapshot, by "+
			"`outflow init`, or take it before other servers' rows come"); err != nil {
			return nil, err
		}
	}
	q := tablesnapshot.Query{Mapping: l.Layout.Mapping, ID: id, SkipKnown: true, Sorted: true}
	progress.Step(ctx, "counting the rows of table %s", s.rep.Table)
	of, err := snap.Count(ctx, q)
	if err != nil {
		return nil, err
	}
	requests, err := erasure.Read(ctx, snap.Querier(), snap.Table())
	if err != nil {
		return nil, err
	}
	back, err := erasure.FindBack(ctx, snap, q, requests)
	if err != nil {
		return nil, err
	}
	of -= len(back)
	if s.rep.Erased = len(back); len(back) > 0 {
		progress.Step(ctx, "%v", back)
	}
	if of > maxRows {
		return nil, refuse("snapshot_rows", "Delete rows that nobody needs",
			"table %s has %d rows, a snapshot can have %d", s.rep.Table, of, uint32(maxRows))
	}
	s.rep.Rows, s.rep.Order = of, order(l.Layout.Mapping)
	w := &backfill.Window{
		Conns: l, Snapshot: snap, Query: q, Of: of,
		Checkpoint: cp, End: end, Index: outbox.RepairedIndex,
		Wanted: func(e *relay.Event) bool { return !back.Has(e.ID) },
		Sent:   func() { s.o.Hit("snapshot.row") },
	}
	if err := w.CheckFits(ctx); err != nil {
		return nil, err
	}
	progress.Step(ctx, "publishing %s in the order (%s): the server sorts them first", units.Of(of, "row"),
		s.rep.Order)
	return w, nil
}

// order names the columns that the rows are sorted by.
func order(m relay.Mapping) string {
	if m.Keyed() {
		return "doc_id, seq_key, id"
	}
	return "doc_id, id" // the order of their commits is no longer known
}
