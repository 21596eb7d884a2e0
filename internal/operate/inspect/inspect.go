// Package inspect is `outflow inspect`: it decodes a slot without consuming it and prints commits, events and
// windows.
package inspect

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/slotread"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// Options say how much to show.
type Options struct {
	Limit   int  // changes, after which no further transaction is begun; 0: no limit
	Payload bool // show payloads
}

// recordTimeout is how long to wait for the checkpoint record. The slot can be shown without it.
const recordTimeout = 3 * time.Second

// inspector prints what one slot holds.
type inspector struct {
	out     *bufio.Writer
	payload bool
	source  relay.Source
	cp      relay.Checkpoint
	events  []relay.Event // of the present transaction
	commits int
	windows int
}

// Run reads the slot and prints what it holds.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, o Options, out io.Writer) (err error) {
	layout, err := wiring.ReadLayout(ctx, cfg)
	if err != nil {
		return err
	}
	cp, recent, cuts, source := start(ctx, cfg, layout, log)
	i := &inspector{out: bufio.NewWriter(out), payload: o.Payload, source: cfg.Source, cp: cp}
	fmt.Fprintf(i.out, "slot %s, from %v (%s), %v\n", cfg.Slot, cp.Due, source, cp.Settings)
	held, bytes, err := slotread.Order(ctx, cfg, layout, cp, recent, cuts, o.Limit, log, i.result,
		i.cut, i.window)
	if err != nil {
		return err
	}
	fmt.Fprintf(i.out, "%s with events, %s, %s (%d bytes) held: not due yet\n",
		units.Of(i.commits, "commit"), units.Of(i.windows, "window"), units.Of(held, "event"), bytes)
	return i.out.Flush()
}

// start returns the checkpoint that ordering starts from, what gap mode remembers there and the cuts behind
// it, and says where it was found. The layout follows the record.
func start(ctx context.Context, cfg config.Config, layout *wiring.Layout, log *slog.Logger) (
	cp relay.Checkpoint, recent []outbox.Counter, cuts []checkpoint.StoredCut, source string) {
	cp = relay.Checkpoint{Settings: cfg.Reorder.Settings()}
	whole := ctx
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	sc, err := wiring.Sink(cfg, layout, log)
	if err != nil {
		return cp, nil, nil, "no checkpoint record: " + err.Error()
	}
	conn, err := wiring.Connect(ctx, cfg, sc)
	if err != nil {
		return cp, nil, nil, "no checkpoint record: " + err.Error()
	}
	defer conn.Close()
	rec, _, err := wiring.HomeStore(cfg, conn).Load(ctx) // it only reads
	switch {
	case err != nil:
		return cp, nil, nil, "no checkpoint record: " + err.Error()
	case rec == nil || len(rec.Checkpoints) == 0:
		return cp, nil, nil, "no checkpoint record"
	}
	layout.Follow(cfg, rec)
	newest := rec.Checkpoints[len(rec.Checkpoints)-1]
	source = fmt.Sprintf("the newest recorded checkpoint, sequence %d", newest.Seq)
	recent, err = checkpoint.Start{Checkpoint: newest.Checkpoint, Holes: rec.Holes, Accepted: rec.Base}.
		Recent(whole, conn.Recent)
	if err != nil {
		source += ", with nothing remembered: " + err.Error()
	}
	cuts = slices.DeleteFunc(rec.Cuts, func(c checkpoint.StoredCut) bool { return c.Seq <= newest.Seq })
	return newest.Checkpoint, recent, cuts, source
}

func (i *inspector) result(r *decoder.Result) error {
	if r.Malformed != nil {
		fmt.Fprintf(i.out, "malformed: %v\n", r.Malformed)
	}
	if r.Ignored != decoder.NothingIgnored {
		fmt.Fprintf(i.out, "ignored: %v (source is %v)\n", r.Ignored, i.source)
	}
	switch r.Kind {
	case decoder.Event:
		i.events = append(i.events, r.Event)
	case decoder.Commit:
		i.commit(&r.Commit)
	}
	return nil
}

func (i *inspector) commit(c *relay.Commit) {
	at := relay.CommitTime(c.Time).Format("2006-01-02 15:04:05.000000")
	switch c.Kind {
	case relay.Events:
		i.commits++
		before := ""
		switch {
		case c.LSN <= i.cp.Start():
			before = "  (at or below the start: no input)"
		case c.LSN <= i.cp.Due:
			before = "  (at or below the checkpoint: published, but for what gap mode holds back)"
		}
		fmt.Fprintf(i.out, "commit %v  %s  %s%s\n", c.LSN, at, units.Of(c.Events, "event"), before)
		for n := range i.events {
			i.event("  ", &i.events[n])
		}
	case relay.Heartbeat:
		fmt.Fprintf(i.out, "tick   %v  %s\n", c.LSN, at)
	case relay.SettingsChange:
		fmt.Fprintf(i.out, "change %v  %s  %v\n", c.LSN, at, c.Settings)
	}
	i.events = i.events[:0]
}

func (i *inspector) cut(c checkpoint.StoredCut) error {
	fmt.Fprintf(i.out, "cut    %v  sequence %d\n", c.LSN, c.Seq)
	return nil
}

func (i *inspector) window(w *reorder.Window) error {
	i.windows++
	fmt.Fprintf(i.out, "window due=%v thru=%v of=%d pull=%d sort=%v\n", w.Due, w.Thru, w.Of, w.Pull, w.Sort)
	var e relay.Event
	for {
		more, err := w.Next(&e)
		if err != nil || !more {
			return err
		}
		i.event("  "+e.Pos.String()+" ", &e)
	}
}

func (i *inspector) event(prefix string, e *relay.Event) {
	fmt.Fprintf(i.out, "%si=%d doc=%q actor=%q key=%q id=%q %d bytes", prefix, e.Pos.Index, e.Doc, e.Actor,
		e.Key, e.ID, e.PayloadSize)
	if e.Null&relay.IsMessage != 0 {
		fmt.Fprint(i.out, " (message)")
	}
	if e.Bad != "" {
		fmt.Fprintf(i.out, " bad: %s", e.Bad)
	}
	if i.payload {
		fmt.Fprintf(i.out, " %s", e.Payload)
	}
	fmt.Fprintln(i.out)
}
