package drain

import (
	"context"
	"log/slog"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
)

// Waiting is what a slot holds that no place covers.
type Waiting struct {
	Events int
	First  relay.Commit // the first transaction of them; its zero value if there are none
}

// Beyond decodes the slot, which nobody may hold, without consuming it, and counts the events that a place does not cover: those
// beyond its due that are not taken. table and mapping are those under which they were written; 0 where there was no table.
func Beyond(ctx context.Context, cfg config.Config, table uint32, mapping relay.Mapping, place relay.Checkpoint, log *slog.Logger) (Waiting, error) {
	taken := map[outbox.Position]bool{}
	for _, p := range place.PublishedAhead {
		taken[p] = true
	}
	// Payloads are counted, not read.
	dec := decoder.New(decoder.Config{TableOID: table, Mapping: mapping, Slot: cfg.Slot, MaxPayload: 1})
	var w Waiting
	var res decoder.Result
	rc := wiring.Replication(cfg, log)
	rc.OwnOnly = mapping.OwnOnly
	err := replication.Peek(ctx, rc, 0, false, func(m replication.Message) error {
		if err := dec.Decode(m.Data, &res); err != nil {
			return err
		}
		c := res.Commit
		if res.Kind != decoder.Commit || c.Kind != relay.Events || c.LSN <= place.Due {
			return nil
		}
		for i := range c.Events {
			if taken[outbox.Position{LSN: c.LSN, Index: uint32(i)}] {
				continue
			}
			if w.Events == 0 {
				w.First = c
			}
			w.Events++
		}
		return nil
	})
	return w, err
}
