// Package slotread reads what a slot holds without consuming it. Nobody else may hold the slot meanwhile.
package slotread

import (
	"context"
	"log/slog"
	"math"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/tempfile"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
	"github.com/outflowhq/outflow/replication"
)

// Decode calls f with what each message of the slot is decoded to, until f returns an error. The result is
// valid until f returns.
func Decode(
	ctx context.Context, cfg config.Config, l *wiring.Layout, log *slog.Logger, f func(*decoder.Result) error,
) error {
	return decode(ctx, cfg, wiring.Decoder(cfg, l), 0, log, func(r *decoder.Result, _ outbox.LSN) error {
		return f(r)
	})
}

func decode(
	ctx context.Context, cfg config.Config, dc decoder.Config, limit int, log *slog.Logger,
	f func(r *decoder.Result, complete outbox.LSN) error,
) error {
	dec := decoder.New(dc)
	var res decoder.Result
	rc := wiring.Replication(cfg, log)
	rc.OwnOnly = dc.Mapping.OwnOnly
	task := progress.Count(ctx, "reading what slot "+cfg.Slot+" holds", "messages", 0)
	defer task.End()
	return replication.Peek(ctx, rc, limit, func(m replication.Message) error {
		task.Add(1)
		if err := dec.Decode(m.Data, &res); err != nil {
			return err
		}
		return f(&res, dec.Complete())
	})
}

// Order puts what the slot holds in order, as a session that starts from a checkpoint would; recent is what
// gap mode remembers there. It calls result with each decoded message before it is taken in, and window with
// each window as it closes. The cuts behind the checkpoint are carried out as a session does it, and cut is
// called with each before its window. It returns what is held at the end: how many events and bytes are not
// due yet.
func Order(
	ctx context.Context, cfg config.Config, l *wiring.Layout, from relay.Checkpoint,
	recent []outbox.Counter, cuts []checkpoint.StoredCut, limit int, log *slog.Logger,
	result func(*decoder.Result) error, cut func(checkpoint.StoredCut) error,
	window func(*reorder.Window) error,
) (events int, bytes int64, err error) {
	buf := reorder.New(reorder.Config{
		Settings: from.Settings, Start: from.Published(), Due: from.Due, PublishedAhead: from.PublishedAhead,
		Holds: from.Holds, Remembered: from.Remembered, Recent: recent,
		Unkeyed: !l.Mapping.Keyed(),
		Scratch: tempfile.Dir(cfg.Reorder.SpillDir), MaxSpill: cfg.Reorder.MaxSpill, Stop: ctx.Err,
	})
	defer buf.Discard()
	carryOut := func(complete outbox.LSN) error { // all inputs up to there were read, and none beyond
		for ; len(cuts) > 0 && cuts[0].LSN <= complete; cuts = cuts[1:] {
			if err := cut(cuts[0]); err != nil {
				return err
			}
			w, err := buf.Cut(cuts[0].LSN)
			if err == nil && w != nil {
				err = window(w)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	take := func(r *decoder.Result) error {
		if err := result(r); err != nil {
			return err
		}
		switch r.Kind {
		case decoder.Event:
			return buf.Append(&r.Event)
		case decoder.Commit:
			if err := buf.Commit(r.Commit); err != nil {
				return err
			}
			w, err := buf.Close()
			if err != nil || w == nil {
				return err
			}
			return window(w)
		}
		return nil
	}
	err = decode(ctx, cfg, wiring.Decoder(cfg, l), limit, log, func(r *decoder.Result,
		complete outbox.LSN) error {
		if err := take(r); err != nil {
			return err
		}
		return carryOut(complete)
	})
	if err == nil && limit == 0 { // the WAL was read to its end
		err = carryOut(math.MaxUint64)
	}
	events, bytes = buf.Held()
	return events, bytes, err
}

// Unpublished are events in a slot that a checkpoint does not cover.
type Unpublished struct {
	Events int
	First  relay.Commit // the first transaction that has some; its zero value if there are none
}

// CountUnpublished counts the events beyond a checkpoint, except those that it says were published ahead. It
// must hold nothing back. table and mapping are those under which they were written; table is 0 where there
// was none.
func CountUnpublished(
	ctx context.Context, cfg config.Config, table uint32, mapping relay.Mapping, from relay.Checkpoint,
	log *slog.Logger,
) (u Unpublished, err error) {
	ahead := map[outbox.Position]bool{}
	for _, p := range from.PublishedAhead {
		ahead[p] = true
	}
	// Payloads are not needed: MaxPayload is as small as it can be.
	dc := decoder.Config{TableOID: table, Mapping: mapping, Slot: cfg.Slot, MaxPayload: 1}
	err = decode(ctx, cfg, dc, 0, log, func(r *decoder.Result, _ outbox.LSN) error {
		c := r.Commit
		if r.Kind != decoder.Commit || c.Kind != relay.Events || c.LSN <= from.Due {
			return nil
		}
		for i := range c.Events {
			if ahead[outbox.Position{LSN: c.LSN, Index: uint32(i)}] {
				continue
			}
			if u.Events == 0 {
				u.First = c
			}
			u.Events++
		}
		return nil
	})
	return u, err
}
