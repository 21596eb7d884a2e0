package repair

import (
	"context"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/app/tempfile"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
	"github.com/outflowhq/outflow/replication"
)

// rehearse makes the messages that a session from a place would make of what the slot holds now, and consumes nothing. input is called
// with the LSN of each input before it is read, message with the header of each message. An error of theirs ends it.
func (r *repair) rehearse(ctx context.Context, l *backfill.Links, place relay.Checkpoint, history relay.History,
	input func(outbox.LSN) error, message func(*outbox.Header) error,
) error {
	dec := decoder.New(wiring.Decoder(r.cfg, l.Layout))
	buf := reorder.New(reorder.Config{
		Settings: place.Settings, Start: place.Due, PublishedAhead: place.PublishedAhead, Unkeyed: !l.Layout.Mapping.Keyed(),
		Scratch: tempfile.Dir(r.cfg.Reorder.SpillDir), MaxSpill: r.cfg.Reorder.MaxSpill, Stop: ctx.Err,
	})
	defer buf.Discard()
	var res decoder.Result
	var e relay.Event
	return replication.Peek(ctx, l.PGC.Config, 0, false, func(m replication.Message) error {
		if err := dec.Decode(m.Data, &res); err != nil {
			return err
		}
		if res.Kind == decoder.Event {
			return buf.Append(&res.Event)
		}
		if res.Kind != decoder.Commit {
			return nil
		}
		if c := res.Commit; c.Kind != relay.NoInput && c.LSN > place.Due {
			if err := input(c.LSN); err != nil {
				return err
			}
		}
		if err := buf.Commit(res.Commit); err != nil {
			return err
		}
		w, err := buf.Close()
		if err != nil || w == nil {
			return err
		}
		for n := 0; ; n++ {
			more, err := w.Next(&e)
			if err != nil || !more {
				return err
			}
			h := outbox.Header{
				Pos: e.Pos, N: n, Of: w.Of, Due: w.Due, Thru: w.Thru, Pull: w.Pull,
				Timeline: history.At(e.Pos.LSN), Sort: w.Sort, ID: e.ID, Key: e.Key,
			}
			if err := message(&h); err != nil {
				return err
			}
		}
	})
}
