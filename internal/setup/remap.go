package setup

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/drain"
	"github.com/outflowhq/outflow/internal/wiring"
	"github.com/outflowhq/outflow/outbox"
)

// remap changes the column mapping in the record. Another mapping orders otherwise, so nothing that was published under the old one
// may ever be made again: everything written before must be published, and the newest place alone stays in the record.
func (s *setup) remap(ctx context.Context, r readings) error {
	old := r.Record.Mapping
	if old.Table != s.layout.Mapping.Table {
		return &outbox.Fault{
			Class: outbox.Fatal, Code: "other_table",
			What: fmt.Sprintf("slot %s publishes table %s, the configuration says %s", s.cfg.Slot, old.Table, s.layout.Mapping.Table),
			Cure: "Give the other table a slot, a publication and a stream of its own",
		}
	}
	cc := wiring.Checkpoint(s.cfg, s.layout)
	cc.Mapping = old
	if _, err := checkpoint.Resolve(cc, r.Readings); err != nil {
		return err
	}
	if r.Slot.Active {
		return s.notYet("outflow is running (slot held by pid %d)", r.Slot.ActivePID)
	}
	newest := r.Record.Places[len(r.Record.Places)-1]
	if newest.Seq != r.Stream.LastSeq {
		return s.notYet("the stream's last sequence is %d, the checkpoint record's %d", r.Stream.LastSeq, newest.Seq)
	}
	if err := s.nothingBeyond(ctx, newest.Place, old); err != nil {
		return err
	}
	rec := *r.Record
	rec.Mapping = s.layout.Mapping
	rec.Places = []checkpoint.StoredPlace{newest}
	rec.Holes = nil
	if _, err := s.store.Save(ctx, &rec, r.revision); err != nil {
		return fmt.Errorf("write the checkpoint record: %w", err)
	}
	s.report("column mapping: changed from %v", newest.Due)
	return nil
}

// nothingBeyond makes sure that the slot holds no event beyond a place.
func (s *setup) nothingBeyond(ctx context.Context, place outbox.Place, old outbox.Mapping) error {
	w, err := drain.Beyond(ctx, s.cfg, s.layout, old, place, s.log)
	if err != nil || w.Events == 0 {
		return err
	}
	return s.notYet("%d events are not published, the first in the transaction at %v, of %v", w.Events, w.First.LSN, outbox.CommitTime(w.First.Time))
}

func (s *setup) notYet(format string, args ...any) error {
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "not_published",
		What: "the column mapping cannot be changed yet: " + fmt.Sprintf(format, args...),
		Cure: "Stop the writers and outflow, run `outflow drain` with the old mapping, then `outflow init` again",
	}
}
