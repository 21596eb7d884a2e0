package snapshot

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
)

// allowed refuses a configuration without a table to take a snapshot of.
func allowed(cfg config.Config) error {
	if err := wiring.NeedHome(cfg, "a snapshot"); err != nil {
		return err
	}
	if err := wiring.NeedAll(cfg, "a snapshot"); err != nil {
		return err
	}
	return wiring.NeedTable(cfg, "a snapshot")
}

func refuse(code, hint, format string, args ...any) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: fmt.Sprintf(format, args...), Hint: hint}
}

// takenOver is the fault of a snapshot that another process has taken over.
func (s *snapshot) takenOver() error {
	return refuse("snapshot_taken_over",
		"Let that one finish; if there is none any more, run `outflow init --snapshot` again",
		"another outflow init --snapshot has begun for slot %s", s.cfg.Slot)
}

// check refuses what a snapshot must not touch, and what is left of a killed one that can't be continued.
// Nothing has been changed by then, except that missing objects were made by Prepare.
func (s *snapshot) check(ctx context.Context, l *backfill.Conns, rd *backfill.Readings) error {
	if rd.Corrupt != nil {
		return rd.Corrupt
	}
	if s.ours && rd.Revision != s.revision {
		return s.takenOver()
	}
	if !rd.Stream.Exists {
		return refuse("stream_missing", "Run `outflow init --snapshot` again: it makes it, and starts over",
			"stream %s was removed meanwhile", s.cfg.Stream)
	}
	if err := s.fits(l.CC, l.Layout, rd.Readings); err != nil {
		return err
	}
	if rd.Record != nil && rd.Record.Repairing == checkpoint.ForSnapshot {
		return s.checkUnfinished(ctx, l, rd)
	}
	return nil
}

// fits refuses a table without ids, a slot that is somebody else's, a finished installation, and a stream
// that has messages of something else than a snapshot.
func (s *snapshot) fits(cc checkpoint.Config, layout *wiring.Layout, rd checkpoint.Readings) error {
	if layout.ID == "" {
		return refuse("snapshot_ids", "Set columns.id to a column that tells events apart",
			"table %s has no id column (columns.id): a snapshot that is cut could not go on, because "+
				"nobody could tell which rows are published", layout.Mapping.Table)
	}
	if f := cc.ForeignSlot(rd.Slot, rd.Server.Database); f != nil {
		return f
	}
	switch rec := rd.Record; {
	case rec == nil || rec.Creating:
		return s.checkFresh(cc, rd)
	case rec.Repairing == checkpoint.ForSnapshot:
		return nil
	case rec.Repairing != "":
		_, err := checkpoint.Resolve(cc, rd)
		return err
	default:
		return refuse("snapshot_installed",
			"To publish older rows as well, take the snapshot into another stream: settings slot, "+
				"publication and stream with names that are not in use. Or let `outflow repair` publish "+
				"them behind what the stream has: docs/snapshot.md says how",
			"slot %s is set up already, the checkpoint record goes up to %v: a snapshot comes first or not "+
				"at all", s.cfg.Slot, rec.Checkpoints[len(rec.Checkpoints)-1].Due)
	}
}

// checkFresh checks a set-up without a record, or one that an init without --snapshot left before it recorded
// its slot.
func (s *snapshot) checkFresh(cc checkpoint.Config, rd checkpoint.Readings) error {
	switch {
	case rd.Stream.LastSeq > 0 && rd.Record == nil && !rd.Slot.Exists:
		return refuse("stream_not_empty",
			fmt.Sprintf("Set stream to a name that is not in use. Or, if its messages are of no use, remove "+
				"it with `nats stream rm %s`", s.cfg.Stream),
			"stream %s has had messages, its last sequence "+
				"is %d: a snapshot comes first", s.cfg.Stream, rd.Stream.LastSeq)
	case rd.Slot.Exists && rd.Record == nil, rd.Stream.LastSeq > 0:
		_, err := checkpoint.Resolve(cc, rd) // a gap: it says which
		return err
	}
	return nil
}

// checkUnfinished checks what an unfinished snapshot has left.
func (s *snapshot) checkUnfinished(ctx context.Context, l *backfill.Conns, rd *backfill.Readings) error {
	rec := rd.Record
	remove := fmt.Sprintf("remove the stream with `nats stream rm %s`, then run `outflow init --snapshot` "+
		"again", s.cfg.Stream)
	anew := "Or start over: " + remove
	switch {
	case rec.SystemID != rd.Server.SystemID || rec.Database != rd.Server.Database &&
		!rd.Databases.Renamed(rec.Database, rec.OfTable("", l.Layout.Table.OID)):
		return refuse("snapshot_server", "Correct postgres.url. "+anew,
			"the snapshot that did not finish is of database %s of the server %s, this is database %s of %s",
			rec.Database, rec.SystemID, rd.Server.Database, rd.Server.SystemID)
	case rd.Stream.LastSeq == 0:
		return nil // nothing was published, or the stream was removed to start over
	case rd.WentBack():
		return refuse("snapshot_server", "Start over: "+remove,
			"the server was restored from an older copy, or left the timeline that the unfinished snapshot "+
				"is of: its rows may have ids that stream %s has for others", s.cfg.Stream)
	case rec.Mapping != l.Layout.Mapping:
		return refuse("mapping_changed", "Set table and columns to what they were. "+anew,
			"the snapshot that did not finish read table and columns otherwise")
	}
	n, err := l.Removed(ctx, rd)
	if err == nil && n > 0 {
		err = refuse("snapshot_removed",
			fmt.Sprintf("Remove the stream with `nats stream rm %s`, then run `outflow init --snapshot` "+
				"again: it starts over", s.cfg.Stream),
			"%d messages of stream %s are not there any more (retention, or somebody removed them): their "+
				"rows would be published again", n, s.cfg.Stream)
	}
	return err
}
