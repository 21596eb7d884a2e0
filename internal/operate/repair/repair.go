// Package repair is `outflow repair`: it closes a gap that outflow run has stopped at.
//
// What is missing is found by event id, not by position: the rows of the outbox table that are in no message
// of the stream and that the slot will not bring either. So it doesn't matter how the gap came about. The
// missing rows are published as one window in the order (document, key), and the record gets a checkpoint
// behind them.
//
// # The steps, each of which may be followed by a kill -9
//
//  1. Everything is read as a start reads it, twice. The fault must be the one that the operator accepted.
//     Then the stream gets a new ingress, so that a suspended outflow that wakes up can't publish.
//  2. The record says `repairing`, by compare-and-set. From now on run and init stop (repair_unfinished).
//  3. The slot is kept if what it will bring is known to follow what the stream has. Then the anchor, which
//     is the checkpoint behind which the WAL brings everything, is at or above its confirmed LSN. Otherwise
//     the slot is made anew, and the anchor is where it begins. A record without checkpoints means that the
//     slot has yet to be made; one with the anchor, that it is the right one.
//  4. The record says which rows are missing, and behind which sequence they come. They are published, each
//     at its expected sequence. If a message is refused, somebody else has published, and everything is read
//     and compared again.
//  5. The stream is read back. After sink.durable_after the record is saved without `repairing`, with the
//     anchor as its only checkpoint and with base, up to which messages are not compared with any WAL.
//
// A repair that was killed is run again. It finds the rows that are in the stream by now, or that were and
// that the stream has replaced or discarded, and publishes the others.
//
// # Events that are not rows
//
// Events that were written as logical messages are only in the WAL and in the stream. If a repair needs the
// table (steps 3 and 4), those in the range are lost unless the slot still brings them. Repair says so, and
// only goes on if the operator accepts that in words. If there is no table it publishes nothing: it makes
// slot and record such that outflow can go on.
package repair

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
)

// Options say what to do.
type Options struct {
	Accept  string // the code of the fault that is to be repaired; "": look, and change nothing
	Where   string // a condition on the outbox table: rows for which it does not hold are not missed
	Check   bool   // compare table and stream even if nothing is wrong; changes nothing
	NewSlot bool   // make the slot anew even if it could be kept, or the record rebuilt

	// EarlierWhere are conditions of a repair that did not finish: no other SQL of the record is run.
	EarlierWhere []string

	// AcceptLoss is lossWords if the operator accepts that events which are in no table may be lost.
	AcceptLoss string

	DespiteErasure bool // publish rows although an erasure has not finished, or is not known any more

	// for tests; nil: nothing is
	sent func() // called after each row that was handed to the publisher
	past func() // called when the archive was read and the stream was not
}

// attempts is how often a repair is tried while connections are lost or somebody else publishes.
const attempts = 6

type repair struct {
	cfg config.Config
	log *slog.Logger
	o   Options
	rep *Report

	renewed bool // the stream has a new ingress, which no other process knows

	landed uint64           // how many events earlier attempts have published
	window *backfill.Window // of the attempt before, as long as nobody has looked what became of it
}

// Run diagnoses, and repairs what o.Accept names. If a gap is left, the error is its fault, and the report
// says what was found. The report is nil only if nothing could be found out.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, o Options) (*Report, error) {
	r := &repair{cfg: cfg, log: log, o: o, rep: &Report{Slot: cfg.Slot, Stream: cfg.Stream, Where: o.Where,
		EarlierWhere: o.EarlierWhere,
		newSlot:      o.NewSlot, despite: o.DespiteErasure}}
	f, err := r.diagnose(ctx)
	if err != nil {
		return nil, err
	}
	r.rep.found(f)
	if f.code == "" {
		return r.rep, nil
	}
	if err := wiring.NeedAll(cfg, "a repair"); err != nil {
		return nil, err
	}
	switch f.code { // they may still be running: nothing is touched
	case checkpoint.CodeSnapshotUnfinished:
		r.rep.Command = "outflow init --snapshot"
		return r.rep, f.fault
	case checkpoint.CodeRestoreUnfinished:
		r.rep.Command = "outflow archive restore"
		return r.rep, f.fault
	}
	if o.Accept == "" {
		return r.rep, r.planOnly(ctx, f)
	}
	if err := r.checkLossFirst(ctx, f); err != nil {
		return r.rep, err
	}
	return r.rep, r.execute(ctx, f)
}

// open connects to both sides. A stream that another cluster makes is read as well: a home that has lost its
// slot can't take it back, and nobody else can repair it.
func (r *repair) open(ctx context.Context) (*backfill.Conns, error) {
	l, err := backfill.Open(ctx, r.cfg, r.log)
	if err == nil {
		l.Store = wiring.HomeStore(r.cfg, l.NATS)
	}
	return l, err
}

// checkAccepted returns an error unless the fault that was found is the one that the operator accepts.
func (r *repair) checkAccepted(f *finding) error {
	if f.code == "" || f.accepts(r.o.Accept) {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Usage, Code: "accept", Message: fmt.Sprintf("--accept %s is not what is found: %s. %s",
			r.o.Accept, f.code, f.fault.Message),
		Hint: fmt.Sprintf("Look with `outflow repair`, then accept %s", f.code),
	}
}

// planOnly reports what a repair would do. It returns the fault that was found, as nothing is repaired.
func (r *repair) planOnly(ctx context.Context, f *finding) error {
	l, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer l.Close()
	p, err := r.plan(ctx, l, f)
	if err != nil {
		r.rep.Command = ""
		return err
	}
	defer p.close()
	r.rep.planned(p)
	fault := *f.fault
	fault.Hint = fmt.Sprintf("Nothing was changed. To repair it: `%s`", r.rep.Command)
	if p.archived != nil {
		fault.Hint = "Nothing was changed. " + p.archived.Hint
	}
	return &fault
}

// execute repairs, from the beginning as often as necessary. Each time two readings must agree about what is
// wrong.
func (r *repair) execute(ctx context.Context, found *finding) error {
	for attempt := 1; ; attempt++ {
		if err := r.checkAccepted(found); err != nil {
			return err
		}
		err := r.attempt(ctx, found)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || attempt == attempts || !retryable(err) {
			return err
		}
		progress.Step(ctx, "begins again: %v", err)
		r.renewed = false // what this attempt has sent may still be on its way
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Duration(attempt) * 200 * time.Millisecond):
		}
		if found, err = r.diagnose(ctx); err != nil {
			return err
		}
	}
}

// retryable reports whether a repair that failed with err begins again. One cause is that somebody else
// published meanwhile.
func retryable(err error) bool {
	f := outbox.FaultOf(err)
	return f == nil || f.Class == outbox.Transient || f.Class == outbox.Gap && f.Observed
}
