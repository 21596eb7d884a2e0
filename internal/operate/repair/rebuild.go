package repair

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// firstLook is how far before its end the stream is read first, then four times as far, until the checkpoint
// is found.
const firstLook = 4096

// rebuild makes the record from the headers of the stream. The LSN confirmed to PostgreSQL is a checkpoint's
// due; its sequence is that of the last message whose due is not beyond it. The WAL behind it must then make
// exactly the messages that follow.
func (r *repair) rebuild(ctx context.Context, l *backfill.Conns, f *finding) (*plan, error) {
	cp := relay.Checkpoint{Due: f.Slot.Confirmed, Settings: l.Settings(),
		Timeline: f.Server.History.At(f.Slot.Confirmed)}
	if cp.Settings.ByGap() {
		return nil, r.inGapMode(f)
	}
	var holes []checkpoint.Range
	why, err := r.locate(ctx, l, f, &cp)
	if err == nil && cp.Settings.ByGap() {
		return nil, r.inGapMode(f)
	}
	if err == nil && why == "" {
		holes, why, err = r.compareWithWAL(ctx, l, f, cp)
	}
	if err != nil {
		return nil, err
	}
	if why != "" {
		return nil, &outbox.Fault{
			Class: outbox.Gap, Code: f.code, From: f.fault.From, To: f.fault.To,
			Message: fmt.Sprintf("the checkpoint record of slot %s can't be rebuilt from the stream: %s",
				r.cfg.Slot, why),
			Hint: "If other ordering settings were in force (horizon, sort, limits), give them to this " +
				"command: OUTFLOW_REORDER_HORIZON, OUTFLOW_REORDER_SORT, OUTFLOW_REORDER_MAX_EVENTS, " +
				"OUTFLOW_REORDER_MAX_BYTES. Otherwise let it make the slot anew and publish what the " +
				"stream lacks from the table: `outflow repair --new-slot`",
		}
	}
	rec := l.NewRecord(f.Readings)
	rec.Holes = holes
	rec.Checkpoints = []checkpoint.StoredCheckpoint{{Checkpoint: cp, Since: time.Now().UTC()}}
	rd := f.Readings
	rd.Record = rec
	if _, err := checkpoint.Resolve(l.CC, rd.Readings); err != nil {
		return nil, err
	}
	return &plan{mode: modeRecord, record: rec, why: fmt.Sprintf("the headers of the stream and the WAL "+
		"behind %v agree: the record can be made from them, with the checkpoint %v = sequence %d",
		cp.Due, cp.Due, cp.Seq)}, nil
}

// inGapMode is the fault of a record of gap mode: the headers of the stream don't say which events a
// checkpoint holds back.
func (r *repair) inGapMode(f *finding) *outbox.Fault {
	return &outbox.Fault{
		Class: outbox.Gap, Code: f.code, From: f.fault.From, To: f.fault.To,
		Message: fmt.Sprintf(
			"the checkpoint record of slot %s can't be rebuilt from the stream: in gap mode "+
				"no header says which events were held back", r.cfg.Slot),
		Hint: fmt.Sprintf("Let it make the slot anew and publish what the stream lacks from the table: "+
			"`outflow repair --accept %s --new-slot`", f.code),
	}
}

// rebuilt is the plan to write a rebuilt record, unless the table has rows that neither the stream nor the
// slot has, or other messages would count as erased. Messages beyond the checkpoint show that the stream
// still ends where it did. If there are none, it may be an older copy, and the WAL behind its end is already
// confirmed.
func (r *repair) rebuilt(ctx context.Context, l *backfill.Conns, f *finding) (*plan, error) {
	p, err := r.rebuild(ctx, l, f)
	if err != nil || p.record.Checkpoints[0].Seq < f.Stream.NewestSeq {
		return p, err
	}
	unproven := func(why *outbox.Fault) (*plan, error) {
		p.notes = append(p.notes, fmt.Sprintf("nothing shows that stream %s has everything up to the "+
			"confirmed LSN %v, and the table was not compared: %s",
			r.cfg.Stream, f.Slot.Confirmed, why.Message))
		return p, nil
	}
	if err := r.checkTable(l, f); err != nil {
		return unproven(outbox.FaultOf(err))
	}
	keep := &plan{mode: modeKeep, why: "the table has rows that neither the stream nor the slot has: the " +
		"stream was put back from an older copy, or they were never published"}
	err = r.compare(ctx, l, f, keep)
	why, renew := isUntrusted(err)
	fault := outbox.FaultOf(err)
	switch {
	case fault != nil && fault.Code == codeRemoved:
		keep.close()
		return unproven(fault)
	case renew:
		keep.close()
		return &plan{mode: modeNewSlot, why: "the slot can't be kept: " + why}, nil
	case err != nil || keep.scan.counts[missing] > 0:
		return keep, err
	case r.erasedBehind(f, keep.scan):
		keep.why = "the stream has lost its end, and messages that were erased there"
		return keep, nil
	}
	keep.close()
	return p, nil
}

// locate finds the checkpoint's sequence and the events published ahead of it. why says why they can't be
// found.
func (r *repair) locate(ctx context.Context, l *backfill.Conns, f *finding,
	cp *relay.Checkpoint) (why string, err error) {
	end := f.Stream.NewestSeq
	if end == 0 {
		return "no message can be read", nil
	}
	for look := uint64(firstLook); ; look *= 4 {
		from := uint64(1)
		if end > look {
			from = end - look
		}
		why, enough, err := r.locateFrom(ctx, l, f, from, end, cp)
		if err != nil || enough || from == 1 || why != "" {
			return why, err
		}
	}
}

// locateFrom reads from a sequence on. enough says that the first message and its whole window lie before the
// checkpoint: then so does everything before it.
func (r *repair) locateFrom(ctx context.Context, l *backfill.Conns, f *finding, from, end uint64,
	cp *relay.Checkpoint) (why string, enough bool, err error) {
	var first, before uint64
	var taken, maybe []outbox.Position
	err = l.Messages(ctx, from, end, func(m backfill.Message) error {
		switch {
		case m.Cut == nil:
		case m.Cut.LSN <= cp.Due:
			before = m.Seq
			return nil
		default:
			why = fmt.Sprintf("message %d is a cut at %v, and what follows it can't be made from the WAL "+
				"alone", m.Seq, m.Cut.LSN)
			return nil
		}
		h, err := outbox.ParseHeader(m.Header)
		if err != nil {
			why = fmt.Sprintf("message %d has no %s header", m.Seq, outbox.HeaderName)
			return nil
		}
		if first == 0 {
			first = m.Seq
			enough = h.Thru <= cp.Due && !h.Pos.Repaired()
		}
		if !h.Pos.Repaired() || !cp.Settings.ByGap() { // repairs and snapshots don't sort by gaps
			cp.Settings.Sort = h.Sort
		}
		if h.Pos.LSN > cp.Due {
			maybe = append(maybe, h.Pos)
		}
		if h.Due <= cp.Due {
			before = m.Seq
			taken = append(taken, maybe...)
			maybe = maybe[:0]
		} else if len(maybe) > relay.MaxPublishedAhead {
			maybe = maybe[:0] // a checkpoint has no more: these belong to what follows
		}
		return nil
	})
	if err != nil {
		return "", false, err
	}
	if before == 0 && first > 1 && from == 1 {
		return fmt.Sprintf("its messages up to %d, and with them those up to the confirmed LSN %v, are not "+
			"there any more", first-1, cp.Due), false, nil
	}
	if len(taken) > relay.MaxPublishedAhead {
		return fmt.Sprintf("%d events beyond %v stand before message %d", len(taken), cp.Due, before),
			false, nil
	}
	for f.Stream.Erased.Has(before + 1) { // only what is confirmed is erased
		before++
	}
	slices.SortFunc(taken, outbox.Position.Compare)
	cp.Seq, cp.PublishedAhead = before, taken
	return why, enough, nil
}

// errCompared ends the reading of the slot when everything is compared.
var errCompared = errors.New("compared")

// compareWithWAL makes the messages behind the checkpoint from the WAL and compares them with those in the
// stream. why says how they differ. holes are sequences that the broker had lost, and whose events follow.
func (r *repair) compareWithWAL(ctx context.Context, l *backfill.Conns, f *finding,
	cp relay.Checkpoint) (holes []checkpoint.Range, why string, err error) {
	end := f.Stream.NewestSeq
	if cp.Seq >= end {
		return nil, "", nil
	}
	// The stream is read by a goroutine of its own: both sides are long and come in order.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type read struct {
		seq  uint64
		h    outbox.Header
		lost outbox.Sequences
	}
	messages, ended := make(chan read, 256), make(chan error, 1)
	go func() {
		defer crash.Guard()
		defer close(messages)
		ended <- l.Messages(ctx, cp.Seq+1, end, func(m backfill.Message) error {
			h, err := outbox.ParseHeader(m.Header)
			if err != nil {
				return err
			}
			select {
			case messages <- read{m.Seq, h, m.Lost}:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	seq := cp.Seq
	var next read
	err = r.wouldPublish(ctx, l, cp, nil, nil, f.Server.History, func(outbox.LSN) error { return nil }, nil,
		func(h *outbox.Header) error {
			seq++
			if next.seq < seq {
				var ok bool
				if next, ok = <-messages; !ok {
					return errCompared
				}
			}
			if next.lost.Has(seq) {
				holes = append(holes, checkpoint.Range{From: seq, To: next.seq - 1})
				seq = next.seq
			}
			if next.seq == seq && !next.h.Same(h) {
				why = fmt.Sprintf("its message %d is %v, the WAL behind %v makes %v", seq, &next.h, cp.Due,
					h)
				return errCompared
			}
			if seq == end {
				return errCompared
			}
			return nil
		})
	cancel()
	readErr := <-ended
	switch {
	case errors.Is(err, errCompared) && (seq == end || why != ""):
		return holes, why, nil
	case errors.Is(err, errCompared):
		return nil, "", fmt.Errorf("compare stream and WAL: %w", readErr)
	case err != nil:
		return nil, "", err
	}
	return nil, fmt.Sprintf("the WAL behind %v makes %d messages, the stream has %d", cp.Due, seq-cp.Seq,
		end-cp.Seq), nil
}
