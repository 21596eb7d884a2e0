package repair

import (
	"context"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/slotread"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// wouldPublish makes the messages that a session from a checkpoint would make of what the slot holds now. It
// consumes nothing. input is called with the LSN of each input before that is taken in, message with the
// header of each message, cut with each of the cuts before what it closes; their errors end it. recent is
// what gap mode remembers at the checkpoint.
func (r *repair) wouldPublish(ctx context.Context, l *backfill.Conns, from relay.Checkpoint,
	recent []outbox.Counter, cuts []checkpoint.StoredCut, history relay.History,
	input func(outbox.LSN) error, cut func(checkpoint.StoredCut) error, message func(*outbox.Header) error,
) error {
	_, _, err := slotread.Order(ctx, r.cfg, l.Layout, from, recent, cuts, 0, r.log,
		func(res *decoder.Result) error {
			if c := res.Commit; res.Kind == decoder.Commit && c.Kind != relay.NoInput && c.LSN > from.Due {
				return input(c.LSN)
			}
			return nil
		}, cut, func(w *reorder.Window) error {
			var e relay.Event
			for n := 0; ; n++ {
				more, err := w.Next(&e)
				if err != nil || !more {
					return err
				}
				h := outbox.Header{
					Pos: e.Pos, N: n, Of: w.Of, Due: w.Due, Thru: w.Thru, Pull: w.Pull,
					Timeline: history.At(e.Pos.LSN), Sort: w.Sort, ID: e.ID, Key: e.Key,
					Counter: e.Counter,
				}
				if err := message(&h); err != nil {
					return err
				}
			}
		})
	return err
}
