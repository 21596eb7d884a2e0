package repair

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
)

// finding is what is wrong.
type finding struct {
	backfill.Readings
	code  string        // as outflow run says it; "": nothing
	inner string        // under repair_unfinished: what is wrong beside that; "": nothing more
	fault *outbox.Fault // nil if nothing is wrong
}

// cause is the code that decides how the repair is done.
func (f *finding) cause() string {
	if f.code == checkpoint.CodeUnfinished {
		return f.inner
	}
	return f.code
}

// accepts reports whether code names the finding. An unfinished repair may also be named by what it was begun
// for.
func (f *finding) accepts(code string) bool {
	return code == f.code || f.code == checkpoint.CodeUnfinished &&
		(code == f.inner || code == f.Record.Repairing)
}

// diagnose reads everything until two readings agree, which are some time apart and over new connections.
func (r *repair) diagnose(ctx context.Context) (*finding, error) {
	var last *finding
	for n := 1; ; n++ {
		f, err := r.readOnce(ctx)
		switch {
		case err != nil && (ctx.Err() != nil || n == attempts || !retryable(err)):
			return nil, err
		case err != nil:
			progress.Step(ctx, "could not read everything, reading again: %v", err)
			last = nil
		case f.code == "", f.code == codeMissing, f.code == checkpoint.CodeSnapshotUnfinished,
			f.code == checkpoint.CodeRestoreUnfinished,
			f.code == checkpoint.CodeUnfinished && (f.inner == "" || len(f.Record.Checkpoints) == 0),
			last != nil && last.code == f.code && last.inner == f.inner:
			return f, nil
		case n == attempts:
			return nil, fmt.Errorf("no two readings agree: the last ones found %s and %s", last.cause(),
				f.cause())
		default:
			last = f
			progress.Step(ctx, "found %s: reading again in %v, as only what two readings find counts",
				f.cause(), f.RecheckAfter())
		}
		pause := time.Second
		if last != nil {
			pause = last.RecheckAfter()
		}
		task := progress.Until(ctx, "waiting", time.Now().Add(pause), "until everything is read again")
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
		task.End()
	}
}

// readOnce reads everything once, over connections of its own.
func (r *repair) readOnce(ctx context.Context) (*finding, error) {
	l, err := r.open(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	if err := l.AwaitSlot(ctx); err != nil {
		return nil, err
	}
	rd, err := l.Read(ctx)
	if err != nil {
		return nil, err
	}
	return r.evaluate(ctx, l, rd)
}

// evaluate finds what is wrong: what a start would find, and what only a running session would notice.
func (r *repair) evaluate(ctx context.Context, l *backfill.Conns, rd backfill.Readings) (*finding, error) {
	f := &finding{Readings: rd}
	if rd.Corrupt != nil {
		f.code, f.fault = rd.Corrupt.Code, rd.Corrupt
		return f, nil
	}
	start, err := checkpoint.Resolve(l.CC, rd.Readings)
	if err = f.noteGap(err); err != nil {
		return nil, err
	}
	switch {
	case f.code == checkpoint.CodeUnfinished && len(rd.Record.Checkpoints) == 0:
		f.inner = rd.Record.Repairing // the slot is still to be made, whatever is there
	case f.code == checkpoint.CodeUnfinished:
		inner := &finding{}
		rec := *rd.Record
		rec.Repairing = ""
		rd.Record = &rec
		_, err := checkpoint.Resolve(l.CC, rd.Readings)
		if err := inner.noteGap(err); err != nil {
			return nil, err
		}
		f.inner = inner.code
	case f.code == "":
		if err := f.noteGap(r.verifyTail(ctx, l, rd, start)); err != nil {
			return nil, err
		}
		if f.code == "" {
			if err := f.noteGap(r.findForeign(ctx, l, rd)); err != nil {
				return nil, err
			}
		}
		if f.code == "" && (r.o.Check || r.o.Accept == codeMissing) {
			if err := f.noteGap(r.checkRows(ctx, l, f)); err != nil {
				return nil, err
			}
		}
	}
	if f.code == "" && rd.Owned != nil { // a start here would take the stream over, and go on
		return nil, rd.Owned
	}
	return f, nil
}

// codeMissing is the code of the fault of unpublished rows that only --check finds: nothing else shows that
// they are missing.
const codeMissing = "rows_missing"

// checkRows compares the table with the stream and with what the slot will bring.
func (r *repair) checkRows(ctx context.Context, l *backfill.Conns, f *finding) error {
	if err := r.checkTable(l, f); err != nil {
		return err
	}
	p := &plan{mode: modeKeep}
	err := r.compare(ctx, l, f, p)
	defer p.close()
	if why, ok := isUntrusted(err); ok {
		return fmt.Errorf("table and stream can't be compared: %s", why)
	}
	if err != nil {
		return err
	}
	r.rep.compared(p.scan)
	n := p.scan.counts[missing]
	if n == 0 {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Gap, Code: codeMissing,
		Message: fmt.Sprintf("%s of table %s %s in no message of stream %s, and slot %s will not bring "+
			"%s", units.Of(n, "row"), l.Layout.Mapping.Table, units.Agree(n, "is", "are"), r.cfg.Stream,
			r.cfg.Slot, units.Agree(n, "it", "them")),
	}
}

// noteGap notes a gap, and returns every other error.
func (f *finding) noteGap(err error) error {
	fault := outbox.FaultOf(err)
	if fault == nil || fault.Class != outbox.Gap {
		return err
	}
	f.code, f.fault = fault.Code, fault
	return nil
}

// errVerified ends the reading of the slot.
var errVerified = errors.New("verified")

// verifyTail makes the messages beyond the checkpoint from the WAL, as a session would, and compares them
// with those in the stream. In gap mode the stream must have what is remembered.
func (r *repair) verifyTail(ctx context.Context, l *backfill.Conns, rd backfill.Readings,
	start checkpoint.Start) error {
	recent, err := start.Recent(ctx, l.NATS.Recent)
	if err != nil {
		return err
	}
	if err := l.CC.CheckMemory(start, len(recent)); err != nil {
		return err
	}
	if c := start.NewCut; c != nil { // a start would record it first
		start.Cuts = append(slices.Clone(start.Cuts), checkpoint.StoredCut{LSN: c.Cut.LSN, Seq: c.Seq})
	}
	proof := checkpoint.NewTailCheck(l.CC, start)
	if proof.Verified() {
		return nil
	}
	above, upTo := proof.Compares()
	stored, err := l.NATS.Stored(ctx, above, upTo, false)
	if err != nil {
		return err
	}
	if err := proof.Stored(stored); err != nil {
		return err
	}
	verified := func() error {
		if proof.Verified() {
			return errVerified
		}
		return nil
	}
	err = r.wouldPublish(ctx, l, start.Checkpoint, recent, start.Cuts, rd.Server.History, proof.Input,
		func(cut checkpoint.StoredCut) error {
			if err := proof.Cut(cut); err != nil {
				return err
			}
			return verified()
		},
		func(h *outbox.Header) error {
			if _, err := proof.Skip(h); err != nil {
				return err
			}
			return verified()
		})
	if errors.Is(err, errVerified) {
		return nil
	}
	if err == nil {
		err = proof.Input(rd.Server.WALEnd) // if no more WAL comes, a divergence shows too
	}
	return err
}

// findForeign looks for messages of somebody else among those that no repair has accepted. A session that
// sees one being stored stops; the next one can't tell from the end of the stream that an event is missing
// before it.
func (r *repair) findForeign(ctx context.Context, l *backfill.Conns, rd backfill.Readings) error {
	var seq uint64
	var n int
	progress.Step(ctx, "no gap at the end of the stream; looking through its messages")
	err := l.Messages(ctx, rd.Record.Base+1, rd.Stream.NewestSeq, func(m backfill.Message) error {
		if _, err := outbox.ParseHeader(m.Header); err != nil && m.Cut == nil {
			seq = m.Seq
			n++
		}
		return nil
	})
	if err != nil || n == 0 {
		return err
	}
	return &outbox.Fault{
		Class: outbox.Gap, Code: "foreign_message", To: rd.Server.WALEnd,
		Message: fmt.Sprintf("%s of stream %s %s no %s header, the last one at sequence %d",
			units.Of(n, "message"), r.cfg.Stream, units.Agree(n, "has", "have"), outbox.HeaderName, seq),
	}
}
