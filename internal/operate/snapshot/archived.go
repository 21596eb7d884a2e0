package snapshot

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/operate/backfill"
)

// checkArchived refuses a snapshot into a new stream where an earlier one of that name was archived: the
// table may have only what is left of its rows, and the snapshot would pass for all of them.
func (s *snapshot) checkArchived(ctx context.Context) error {
	has, err := backfill.Archived(ctx, s.cfg, archive.Open)
	if has == "" {
		return err
	}
	conn, err := wiring.ConnectBroker(ctx, s.cfg, s.log)
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := conn.API().JetStream()
	if err != nil {
		return err
	}
	live, err := js.Stream(ctx, s.cfg.Stream)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
	case err != nil:
		return fmt.Errorf("stream %s: %w", s.cfg.Stream, err)
	case live.CachedInfo().State.LastSeq > 0:
		return nil // what it has decides
	}
	return refuse("snapshot_archived", "Make the stream again with `outflow archive restore`, and let "+
		"`outflow repair` publish the rows that it lacks. If the archived messages are not to count, say "+
		"--archive.url \"\" with this command, or give the new stream another name",
		"%s: rows that are there alone would be missing from a snapshot of the table", has)
}
