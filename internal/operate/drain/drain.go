// Package drain is `outflow drain`: it publishes everything that is committed, waits until all of it is
// confirmed to PostgreSQL, and says when it is safe to stop or upgrade the server.
//
// It works in rounds. A round notes where the WAL ends and waits until the slot's confirmed LSN has reached
// that; the confirmed LSN only moves behind what is published, recorded and durable. If nothing was written
// to the outbox meanwhile, and no transaction that may have written to it is open or prepared, everything is
// drained. If another outflow holds the slot, a later checkpoint with the same sequence shows that; otherwise
// the slot itself does, decoded without consuming it. If something was written, the next round begins.
package drain

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/operate/slotread"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
)

const (
	pollInterval = 250 * time.Millisecond
	readTimeout  = 10 * time.Second // opening connections included
	lookTries    = 12               // attempts to read the slot after our own session has ended
)

// Report says how far a drain has come. The JSON names are stable.
type Report struct {
	Drained   bool       `json:"drained"`
	Goal      outbox.LSN `json:"goal"`      // where the WAL ended when this round began
	Published outbox.LSN `json:"published"` // the newest recorded checkpoint
	// the slot's: with Drained, everything committed up to here is published and confirmed
	Confirmed outbox.LSN `json:"confirmed"`
	Sequence  uint64     `json:"sequence"` // of the stream's newest message
	Rounds    int        `json:"rounds"`
	Meanwhile uint64     `json:"events_meanwhile"` // written to the outbox during the round before this one
	// pid of the walsender of the outflow that holds the slot; absent: drain itself
	Holder int `json:"holder,omitempty"`
	// how many sequences have events that gap mode holds back, because a counter before them is missing
	Holding int `json:"sequences_held,omitempty"`
	// transactions, prepared ones among them, that may have written to the table and are not committed yet
	Open    []string `json:"open_transactions,omitempty"`
	Problem string   `json:"problem,omitempty"`
}

// drainer is one drain. Its fields belong to the goroutine that called Run.
type drainer struct {
	cfg config.Config
	log *slog.Logger

	conns  *conns.Conns   // nil: not open
	pg     *catalog.Setup // looks for open transactions; nil: not open
	own    *streamer      // nil: another outflow holds the slot
	report Report
	nobody bool       // no transaction was open when the goal had been reached
	looked bool       // and everything was read once more since
	quiet  outbox.LSN // where the WAL ended after that, 0: not yet
	shower shower
}

// Run drains until nothing is left or ctx ends, and then returns what was reached last with ctx's error.
// Faults that need a person are returned as they are.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger) (Report, error) {
	d := &drainer{cfg: cfg, log: log, shower: shower{durable: cfg.Sink.DurableAfter}}
	defer d.close()
	for {
		done, err := d.step(ctx)
		if err != nil || done {
			d.report.Drained = done && err == nil
			return d.report, err
		}
		select {
		case <-ctx.Done():
			return d.report, ctx.Err()
		case err := <-d.own.done():
			d.own.stopped()
			d.own = nil
			if err != nil {
				return d.report, err
			}
		case <-time.After(pollInterval):
		}
	}
}

func (d *drainer) close() {
	d.shower.task.End()
	d.own.stop()
	d.disconnect()
}

func (d *drainer) disconnect() {
	d.conns.Close()
	if d.pg != nil {
		d.pg.Close()
	}
	d.conns, d.pg = nil, nil
}

// step reads everything once and reports whether everything is drained.
func (d *drainer) step(ctx context.Context) (done bool, err error) {
	r, err := d.read(ctx)
	defer func() {
		if err == nil && !done {
			d.shower.show(ctx, d.report, r, max(d.report.Published, d.own.published()))
		}
	}()
	if err != nil {
		return d.unknown(ctx, err)
	}
	d.report.Problem = ""
	if d.own == nil && !r.Slot.Active {
		d.own = stream(ctx, d.cfg, d.log)
	}
	d.report.Holder = 0
	if d.own == nil || d.own.standby() {
		d.report.Holder = r.Slot.ActivePID
	}
	d.report.Confirmed, d.report.Sequence = r.Slot.Confirmed, r.Stream.LastSeq
	if d.report.Goal == 0 {
		d.beginRound(r, 0)
	}
	confirmed, newest, ok := checkpoints(r)
	if !ok {
		return false, nil // no checkpoint covers the confirmed LSN: the streamer finds out what that means
	}
	d.report.Published, d.report.Holding = newest.Due, len(newest.Holds)
	if r.Slot.Confirmed >= d.report.Goal && !d.nobody {
		if err = d.look(ctx, r); err != nil {
			return d.unknown(ctx, err)
		}
	}
	return d.finished(ctx, r, confirmed, newest)
}

// unknown closes the connections after an error, and returns it if it needs a person.
func (d *drainer) unknown(ctx context.Context, err error) (bool, error) {
	d.disconnect()
	if class := outbox.ClassOf(err); ctx.Err() == nil && class != outbox.Transient {
		return false, err
	}
	d.report.Problem = err.Error()
	return false, ctx.Err()
}

// look looks for transactions whose rows may still come: they are in no WAL that a slot decodes before they
// are committed, so nothing else shows them.
func (d *drainer) look(ctx context.Context, r *checkpoint.Readings) error {
	if !r.Record.Mapping.Source.Rows() {
		d.nobody = true
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if d.pg == nil {
		pg, err := wiring.OpenSetup(ctx, d.cfg, wiring.Setup(d.cfg))
		if err != nil {
			return err
		}
		d.pg = pg
	}
	open, err := d.pg.Writers(ctx, d.conns.Layout.Table.OID)
	if err == nil {
		d.report.Open, d.nobody = open, len(open) == 0
	}
	return err
}

// finished reports whether everything is drained; if events were written meanwhile it begins the next round.
func (d *drainer) finished(ctx context.Context, r *checkpoint.Readings, confirmed,
	newest relay.Checkpoint) (bool, error) {
	switch {
	case r.Slot.Confirmed < d.report.Goal:
		return false, nil
	case r.Stream.LastSeq > confirmed.Seq:
		d.beginRound(r, r.Stream.LastSeq-confirmed.Seq)
		return false, nil
	case !d.nobody:
		return false, nil
	case d.quiet == 0 && !d.looked:
		d.looked = true // the end of the WAL is read after that: what was committed meanwhile is before it
		return false, nil
	case d.quiet == 0:
		d.quiet = r.Server.WALEnd
	}
	if newest.Due < d.quiet || len(newest.PublishedAhead) > 0 || len(newest.Holds) > 0 ||
		len(confirmed.Holds) > 0 {
		return false, nil // the keepalives have yet to get there, or gap mode still waits for a counter
	}
	if d.report.Holder != 0 {
		return true, nil
	}
	d.own.stop()
	d.own = nil
	return d.slotIsEmpty(ctx, r, confirmed)
}

// slotIsEmpty decodes what the slot, which is free, holds beyond the confirmed checkpoint.
func (d *drainer) slotIsEmpty(ctx context.Context, r *checkpoint.Readings, confirmed relay.Checkpoint) (bool,
	error) {
	for try := 1; ; try++ {
		u, err := slotread.CountUnpublished(ctx, d.cfg, d.conns.Layout.Table.OID, r.Record.Mapping, confirmed,
			d.log)
		switch fault := outbox.FaultOf(err); {
		case err == nil && u.Events == 0:
			return true, nil
		case err == nil:
			d.beginRound(r, uint64(u.Events))
			return false, nil
		case fault == nil || fault.Code != relay.CodeSlotInUse:
			return false, err
		case try == lookTries: // another outflow, which stood by, has it now
			return false, nil
		}
		select { // the server process of our own session may not have ended yet
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(pollInterval):
		}
	}
}

// beginRound begins a round.
func (d *drainer) beginRound(r *checkpoint.Readings, meanwhile uint64) {
	d.report.Goal, d.report.Meanwhile = r.Server.WALEnd, meanwhile
	d.report.Open, d.nobody, d.looked, d.quiet = nil, false, false, 0
	d.report.Rounds++
}

// checkpoints returns the newest recorded checkpoint that the slot's confirmed LSN shows to be durable, and
// the newest of all. Of several that start at that LSN it is the oldest.
func checkpoints(r *checkpoint.Readings) (confirmed, newest relay.Checkpoint, ok bool) {
	if r.Record == nil {
		return confirmed, newest, false
	}
	for i, p := range r.Record.Checkpoints {
		if p.Start() <= r.Slot.Confirmed && (i == 0 || r.Record.Checkpoints[i-1].Start() < p.Start()) {
			confirmed, ok = p.Checkpoint, true
		}
		newest = p.Checkpoint
	}
	return confirmed, newest, ok
}

// read reads everything but the publication. The end of the WAL, which the others are compared with, is at
// worst later than they are: then drain waits for more than it has to.
func (d *drainer) read(ctx context.Context) (*checkpoint.Readings, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if d.conns == nil {
		c, err := conns.Open(ctx, d.cfg, d.log)
		if err != nil {
			return nil, err
		}
		d.conns = c
	}
	r, err := d.conns.Reader().Read(ctx)
	return &r, err
}

// String is the report in a line.
func (r Report) String() string {
	s := fmt.Sprintf("waiting for %v: published and recorded up to %v, confirmed up to %v; %s", r.Goal,
		r.Published, r.Confirmed, r.who())
	if r.Holding > 0 {
		s += "; " + r.held()
	}
	if len(r.Open) > 0 {
		s += "; " + r.open()
	}
	if r.Problem != "" {
		s += "; " + r.Problem
	}
	return s
}
