package repair

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
)

// The times between two readings that must agree, as in a start.
const (
	secondReading           = 5 * time.Second
	secondReadingReplicated = 15 * time.Second
)

// finding is what is wrong.
type finding struct {
	backfill.Readings
	code  string        // as outflow run says it; "": nothing
	inner string        // under repair_unfinished: what is wrong beside that; "": nothing more
	fault *outbox.Fault // nil if nothing is wrong
}

// cause is what decides how it is repaired.
func (f *finding) cause() string {
	if f.code == checkpoint.CodeUnfinished {
		return f.inner
	}
	return f.code
}

// accepts reports whether code names the finding. A repair that was begun may be named by what it was begun for.
func (f *finding) accepts(code string) bool {
	return code == f.code || f.code == checkpoint.CodeUnfinished && (code == f.inner || code == f.Record.Repairing)
}

// diagnose reads everything until two readings, some time apart and on new connections, agree.
func (r *repair) diagnose(ctx context.Context) (*finding, error) {
	var last *finding
	for n := 1; ; n++ {
		f, err := r.reading(ctx)
		switch {
		case err != nil && (n == attempts || !again(err)):
			return nil, err
		case err != nil:
			r.say("could not read everything, reading again: %v", err)
			last = nil
		case f.code == "", f.code == codeMissing, f.code == checkpoint.CodeSnapshotUnfinished, f.code == checkpoint.CodeUnfinished && (f.inner == "" || len(f.Record.Checkpoints) == 0),
			last != nil && last.code == f.code && last.inner == f.inner:
			return f, nil
		case n == attempts:
			return nil, fmt.Errorf("no two readings agree: the last ones found %s and %s", last.cause(), f.cause())
		default:
			last = f
			r.say("found %s: reading again in %v, as only what two readings find counts", f.cause(), wait(f))
		}
		pause := time.Second
		if last != nil {
			pause = wait(last)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
	}
}

func wait(f *finding) time.Duration {
	if f.Stream.Replicated {
		return secondReadingReplicated
	}
	return secondReading
}

// reading is one reading, on connections of its own.
func (r *repair) reading(ctx context.Context) (*finding, error) {
	l, err := backfill.Open(ctx, r.cfg, r.log)
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
	return r.judge(ctx, l, rd)
}

// judge says what is wrong, as a start would, and beside that what only a session would notice.
func (r *repair) judge(ctx context.Context, l *backfill.Links, rd backfill.Readings) (*finding, error) {
	f := &finding{Readings: rd}
	if rd.Corrupt != nil {
		f.code, f.fault = rd.Corrupt.Code, rd.Corrupt
		return f, nil
	}
	start, err := checkpoint.Resolve(l.CC, rd.Readings)
	if err = f.take(err); err != nil {
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
		if err := inner.take(err); err != nil {
			return nil, err
		}
		f.inner = inner.code
	case f.code == "":
		if err := f.take(r.prove(ctx, l, rd, start)); err != nil {
			return nil, err
		}
		if f.code == "" {
			if err := f.take(r.strangers(ctx, l, rd)); err != nil {
				return nil, err
			}
		}
		if f.code == "" && (r.o.Check || r.o.Accept == codeMissing) {
			if err := f.take(r.check(ctx, l, f)); err != nil {
				return nil, err
			}
		}
	}
	return f, nil
}

// codeMissing is the code of the fault of rows that are not published although nothing shows why: only who looks for it finds it.
const codeMissing = "rows_missing"

// check compares the table with the stream and with what the slot will bring.
func (r *repair) check(ctx context.Context, l *backfill.Links, f *finding) error {
	if err := r.allowed(l, f); err != nil {
		return err
	}
	p := &plan{mode: modeKeep}
	err := r.surveyed(ctx, l, f, p)
	defer p.close()
	if why, ok := isUntrusted(err); ok {
		return fmt.Errorf("table and stream can't be compared: %s", why)
	}
	if err != nil {
		return err
	}
	r.rep.compared(p.survey)
	n := p.survey.counts[missing]
	if n == 0 {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Gap, Code: codeMissing,
		Message: fmt.Sprintf("%d rows of table %s are in no message of stream %s, and slot %s will not bring them",
			n, l.Layout.Mapping.Table, r.cfg.Stream, r.cfg.Slot),
	}
}

// take notes a gap, and gives back every other error.
func (f *finding) take(err error) error {
	fault := outbox.FaultOf(err)
	if fault == nil || fault.Class != outbox.Gap {
		return err
	}
	f.code, f.fault = fault.Code, fault
	return nil
}

// errProved ends a reading of the slot.
var errProved = errors.New("proved")

// prove makes the messages that the stream has beyond the place, as a session would, and compares the last one.
func (r *repair) prove(ctx context.Context, l *backfill.Links, rd backfill.Readings, start checkpoint.Start) error {
	proof := checkpoint.NewTailCheck(l.CC, start)
	if proof.Verified() {
		return nil
	}
	above, upTo := proof.Compares()
	stored, err := l.Conn.Stored(ctx, above, upTo)
	if err != nil {
		return err
	}
	if err := proof.Stored(stored); err != nil {
		return err
	}
	err = r.rehearse(ctx, l, start.Checkpoint, rd.Server.History, proof.Input, func(h *outbox.Header) error {
		if _, err := proof.Skip(h); err != nil {
			return err
		}
		if proof.Verified() {
			return errProved
		}
		return nil
	})
	if errors.Is(err, errProved) {
		return nil
	}
	if err == nil {
		err = proof.Input(rd.Server.WALEnd) // a silent WAL shows a divergence as well
	}
	return err
}

// strangers looks for a message that is not ours among those that no repair has accepted. A run that sees one being stored stops; the next
// one can't tell by the end of the stream that an event is missing before it.
func (r *repair) strangers(ctx context.Context, l *backfill.Links, rd backfill.Readings) error {
	var seq uint64
	var n int
	r.say("no gap at the end of the stream; looking through its messages")
	err := l.Messages(ctx, rd.Record.Base+1, rd.Stream.NewestSeq, func(m backfill.Message) error {
		if _, err := outbox.ParseHeader(m.Header); err != nil {
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
		Message: fmt.Sprintf("%d messages of stream %s have no %s header, the last one at sequence %d", n, r.cfg.Stream, outbox.HeaderName, seq),
	}
}
