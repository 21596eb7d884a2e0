package initialize

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/operate/slotread"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// remap changes the mapping, which is source and columns, in the record. Another mapping means another order,
// so nothing published with the old one may ever be made again: everything written before must be published,
// and only the newest checkpoint stays in the record. Another name of the same table changes no message: it
// waits for nothing. That clusters share the stream, or publish for one another, from now on is taken up in
// the same way: nothing that was recorded before may say what they could not know.
func (s *setup) remap(ctx context.Context, r checkpoint.Readings) error {
	old := r.Record.Mapping
	renamed := old
	if oid := r.Record.Publication.TableOID; oid != 0 && oid == s.publication.TableOID {
		renamed.Table = s.layout.Mapping.Table
	}
	if old.Source.Rows() && s.cfg.Source.Rows() && renamed.Table != s.layout.Mapping.Table {
		return &outbox.Fault{
			Class: outbox.Fatal, Code: "other_table",
			Message: fmt.Sprintf("slot %s publishes table %s, the configuration says %s", s.cfg.Slot,
				old.Table, s.layout.Mapping.Table),
			Hint: "Give the other table a slot, a publication and a stream of its own",
		}
	}
	if err := s.otherCluster(r.Record); err != nil {
		return err
	}
	if new := s.layout.Mapping; old.Away() || new.Away() {
		return &outbox.Fault{
			Class: outbox.Fatal, Code: "subscription",
			Message: fmt.Sprintf("slot %s reads subscription %q, the configuration says %q: that, and the "+
				"columns of a stream of another cluster's rows, can't be changed", s.cfg.Slot,
				old.Subscription, new.Subscription),
			Hint: "Give it a slot and a stream of its own",
		}
	}
	before, err := s.readEarlier(ctx, old)
	if err != nil {
		return err
	}
	cc := wiring.Checkpoint(s.cfg, s.layout)
	cc.Mapping, cc.Table = old, old.Table
	r.Publication = before.publication
	start, err := checkpoint.Resolve(cc, r)
	if err != nil {
		return err
	}
	if r.Slot.Active {
		return s.notYet("outflow is running (slot held by pid %d)", r.Slot.ActivePID)
	}
	if s.dry && s.report == nil {
		return nil // the real run does it as its last step, and it may take long
	}
	rec := *r.Record
	rec.Mapping = s.layout.Mapping
	s.share(&rec)
	if renamed == rec.Mapping && rec.Epoch == r.Record.Epoch {
		return s.saveMapping(ctx, r, &rec, fmt.Sprintf("changed: table %s was %s", rec.Mapping.Table,
			old.Table))
	}
	newest := r.Record.Checkpoints[len(r.Record.Checkpoints)-1]
	if newest.Seq != start.End { // the broker may have lost what is between that and the last sequence
		return s.notYet("the stream ends at sequence %d, the checkpoint record at %d", start.End, newest.Seq)
	}
	if n := len(newest.Holds); n > 0 {
		return s.notYet("gap mode holds back events of %d sequences, the oldest in the transaction at %v", n,
			newest.Holds[0].Oldest.LSN)
	}
	joins := rec.Mapping.Cluster != old.Cluster
	if n := len(newest.PublishedAhead); n > 0 && (joins || s.unshared(r.Record)) {
		return s.notYet("%d events are published ahead of the newest checkpoint", n)
	}
	u, err := slotread.CountUnpublished(ctx, s.cfg, before.table, old, newest.Checkpoint, s.log)
	if err != nil {
		return err
	}
	if u.Events > 0 {
		return s.notYet("%s %s not published, the first in the transaction at %v, of %v",
			units.Of(u.Events, "event"), units.Agree(u.Events, "is", "are"), u.First.LSN,
			relay.CommitTime(u.First.Time))
	}
	// it was read before the server's LSN, so it is only known up to here
	if rec.Publication.PublicationIdentity != s.publication {
		rec.Publication = checkpoint.PublicationSeen{PublicationIdentity: s.publication,
			Seen: max(rec.Publication.Seen, newest.Due)}
	}
	if m := rec.Mapping; m.Doc != old.Doc || m.Actor != old.Actor || m.Counter != old.Counter ||
		m.Span != old.Span {
		newest.Remembered = 0 // the counters in the stream are of other sequences
	}
	newest.Tally = relay.Tally{} // it may be of other events
	rec.Checkpoints = []checkpoint.StoredCheckpoint{newest}
	if newest.Remembered == 0 { // else there may be some between the messages that are remembered
		rec.Holes = nil
	}
	return s.saveMapping(ctx, r, &rec, fmt.Sprintf("changed from %v", newest.Due))
}

// saveMapping saves the record, or says that it would be.
func (s *setup) saveMapping(ctx context.Context, r checkpoint.Readings, rec *checkpoint.Record,
	changed string) error {
	if s.dry {
		changed = "would be " + changed
	} else if _, err := conns.SaveRecord(ctx, s.store, rec, r.Revision); err != nil {
		return err
	}
	s.reportState(changed, "mapping", "") // which is in the record: nothing that is made
	return nil
}

// earlier belongs to the old mapping: the OID of its table and the identity of its publication.
type earlier struct {
	table       uint32
	publication relay.PublicationIdentity
}

// readEarlier reads what belongs to the old mapping. If both read rows, or neither, it is the same as for the
// new one, unless the new one also rests on the subscriptions of other clusters.
func (s *setup) readEarlier(ctx context.Context, old relay.Mapping) (e earlier, err error) {
	if old.Source.Rows() == s.cfg.Source.Rows() && old.Cluster == s.layout.Mapping.Cluster {
		return earlier{s.layout.Table.OID, s.publication}, nil
	}
	pc := wiring.Setup(s.cfg)
	pc.Config.Cluster, pc.Clusters, pc.Columns = 0, nil, s.layout.Needed()
	if pc.Table = ""; old.Source.Rows() {
		pc.Table = old.Table
	}
	pg, err := wiring.OpenSetup(ctx, s.cfg, pc)
	if err != nil {
		return e, err
	}
	defer pg.Close()
	if old.Source.Rows() {
		t, err := pg.Table(ctx)
		if err != nil {
			return e, err
		}
		e.table = t.OID
	}
	e.publication, err = pg.Publication(ctx)
	return e, err
}

func (s *setup) notYet(format string, args ...any) error {
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "not_published",
		Message: "the mapping of source and columns, and cluster.mode, cannot be changed yet: " +
			fmt.Sprintf(format, args...),
		Hint: "Stop the writers and outflow, run `outflow drain` with the old settings, then `outflow " +
			"init` again",
	}
}
