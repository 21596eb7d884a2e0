package backfill

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Removed is how many messages retention or somebody removed from the stream. The holes in the record, a lost
// end, what was erased, and what its messages say was lost ([Message.Lost]) don't count.
func (r *Readings) Removed(lost outbox.Sequences) uint64 {
	st := r.Stream
	end := st.NewestSeq
	if end == 0 {
		end = st.LastSeq
	}
	gone := end - min(end, st.Messages)
	return gone - min(gone, r.Explained(lost).Within(1, end).Count())
}

// Explained are the sequences of which it is known why they have no message, with those that the messages say
// were lost.
func (r *Readings) Explained(lost outbox.Sequences) outbox.Sequences {
	known := r.Stream.Erased.With(lost...)
	if r.Record != nil {
		for _, h := range r.Record.Holes {
			known = known.With(outbox.SequenceRange(h))
		}
	}
	return known
}

// Holes returns the known holes, and with them the end of the stream that the broker lost while it kept its
// last sequence.
func (r *Readings) Holes(known []checkpoint.Range) []checkpoint.Range {
	st := r.Stream
	if st.NewestSeq == 0 || st.NewestSeq == st.LastSeq {
		return known
	}
	known = slices.DeleteFunc(slices.Clone(known), func(h checkpoint.Range) bool {
		return h.From > st.NewestSeq
	})
	return append(known, checkpoint.Range{From: st.NewestSeq + 1, To: st.LastSeq})
}

// WentBack reports whether the server may lack what was read from it, by what record, newest message and
// server say of WAL and timelines. A server that was put back has no slot, so that is what is found first;
// and of what is unfinished nothing else may be found. There must be a record.
func (r *Readings) WentBack() bool {
	rec, server := r.Record, r.Server
	if rec.SystemID != server.SystemID || server.WALEnd < rec.Publication.Seen {
		return true
	}
	gone := func(timeline uint32, at outbox.LSN) bool {
		end, left, known := server.History.Left(timeline)
		return !known || left && at > end
	}
	if n := r.Stream.Newest; n != nil && gone(n.Timeline, n.Pos.LSN) {
		return true
	}
	return slices.ContainsFunc(rec.Checkpoints, func(p checkpoint.StoredCheckpoint) bool {
		return gone(p.Timeline, p.Due)
	})
}

// End is where the stream ends for whoever publishes behind it: what the broker has lost beyond that comes
// again, and the next message says so. What was durable once may be in no table any more, and nobody says it
// of that.
func (r *Readings) End() uint64 {
	st := r.Stream
	if st.NewestSeq == 0 {
		return st.LastSeq
	}
	return max(st.NewestSeq, min(r.Durable(), st.LastSeq))
}

// Durable is up to which sequence the broker loses nothing any more, as far as the record says. A stream that
// was put back counts up to its newest message.
func (r *Readings) Durable() uint64 {
	rec := r.Record
	switch {
	case rec == nil, r.Stream.Exists && !rec.Created.Equal(r.Stream.Created):
		return r.Stream.NewestSeq
	case rec.Begun != nil: // what its attempts have published need not be
		return rec.Begun.Durable
	case len(rec.Checkpoints) == 0:
		return rec.Base
	}
	all := rec.Checkpoints
	durable := all[0].Seq
	for i, p := range all { // as a start finds them; the first may be kept for comparison alone
		if r.Slot.Exists && p.Start() <= r.Slot.Confirmed && (i == 0 || all[i-1].Start() < p.Start()) {
			durable = p.Seq
		}
	}
	return durable
}

// AwaitDurable waits until the end of the stream can no longer be lost, because the WAL that made it may be
// confirmed to PostgreSQL already: for after if rows were published, otherwise for what is left of it since
// the newest message was stored. stored is zero if there is no message.
func (r *Readings) AwaitDurable(
	ctx context.Context, after time.Duration, published uint64, stored time.Time,
) error {
	left := after
	switch {
	case published > 0:
	case stored.IsZero():
		return nil
	case !r.Stream.Now.IsZero():
		// Stream.Now is by the broker's clock, as stored is: ours may be ahead.
		left = min(after, after-r.Stream.Now.Sub(stored)-time.Since(r.Now))
	}
	if left <= 0 {
		return nil
	}
	progress.Step(ctx, "waiting %v (sink.durable_after) until nothing of it can be lost any more; stopped "+
		"meanwhile and run again, the command goes on", left.Round(time.Millisecond))
	defer progress.Until(ctx, "waiting (sink.durable_after)", time.Now().Add(left),
		"until it is durable").End()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(left):
		return nil
	}
}

// Finish clears Repairing in the record: everything up to the checkpoint's sequence is accepted, and outflow
// run goes on from that checkpoint, the only one. The stream must end there, with its newest message at
// newest, and nobody may hold the slot. The checkpoint is written with the sequence end, behind which the
// broker may have lost messages. It opens new connections, because publishing and sink.durable_after may have
// taken longer than a server keeps an idle connection.
func (l *Conns) Finish(ctx context.Context, rec *checkpoint.Record, revision uint64, cp relay.Checkpoint,
	newest, end uint64) error {
	table := l.Layout.Table.OID
	l, err := Open(ctx, l.cfg, l.log)
	if err != nil {
		return err
	}
	defer l.Close()
	rd, err := l.Read(ctx)
	if err != nil {
		return err
	}
	switch {
	case rd.Slot.Active:
		return slotHeld(l.cfg.Slot, rd.Slot)
	case !rd.Stream.Exists || !rd.Stream.Created.Equal(rec.Created) || rd.Stream.LastSeq != cp.Seq ||
		rd.Stream.NewestSeq != newest:
		return fmt.Errorf("the stream ends at sequence %d (newest message %d), not at %d", rd.Stream.LastSeq,
			rd.Stream.NewestSeq, cp.Seq)
	}
	cp.Seq = end
	done := *rec
	done.Repairing, done.Begun, done.Base, done.Holes = "", nil, cp.Seq, nil
	done.Publication.TableOID = table
	done.Checkpoints = []checkpoint.StoredCheckpoint{{Checkpoint: cp, Since: time.Now().UTC()}}
	rd.Record = &done
	if _, err := checkpoint.Resolve(l.CC, rd.Readings); err != nil {
		return err
	}
	_, err = conns.SaveRecord(ctx, l.Store, &done, revision)
	return err
}
