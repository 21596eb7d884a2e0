package repair

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// mode is a way to repair.
type mode string

// The modes.
const (
	modeRecord  mode = "record"   // only the record is written: slot and stream agree with it
	modeKeep    mode = "keep"     // the slot is kept; what it will not bring comes from the table
	modeNewSlot mode = "new-slot" // the slot is made anew; what the stream lacks comes from the table
)

// plan is what a repair would do, and the scan that it follows from.
type plan struct {
	mode   mode
	why    string             // of the mode, in words
	record *checkpoint.Record // modeRecord: what is written
	notes  []string           // what the operator should know beside it
	scan   *scan              // nil for modeRecord
	loss   string             // what is lost that no table has; "" if nothing

	erasures *outbox.Fault // why it may publish what is erased; nil if not
	archived *outbox.Fault // why the archive comes first; nil if not
}

func (p *plan) close() {
	if p.scan != nil && p.scan.snap != nil {
		p.scan.snap.Close()
	}
}

// refuse is the fault of what no repair can do.
func refuse(code, message, hint string) *outbox.Fault {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: message, Hint: hint}
}

// plan finds out how to repair, and what is missing. It changes nothing.
func (r *repair) plan(ctx context.Context, l *backfill.Conns, f *finding) (*plan, error) {
	p, err := r.findPlan(ctx, l, f)
	if err != nil {
		return nil, err
	}
	if err := r.checkRights(ctx, f, p); err != nil {
		p.close()
		return nil, err
	}
	if p.scan != nil && p.scan.snap != nil {
		err := p.scan.checkAttempts()
		if err == nil {
			err = r.makeWindow(l, p.scan, 0).CheckFits(ctx)
		}
		if err != nil {
			p.close()
			return nil, err
		}
	}
	p.loss = r.lossOf(p)
	if p.erasures, err = r.erasures(ctx, f, p); err == nil {
		p.archived, err = r.archived(ctx, f, p)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (r *repair) findPlan(ctx context.Context, l *backfill.Conns, f *finding) (*plan, error) {
	p, err := r.chooseMode(ctx, l, f)
	if err != nil || p.mode == modeRecord || p.scan != nil {
		return p, err
	}
	if err := r.checkTable(l, f); err != nil {
		if fault := outbox.FaultOf(err); fault == nil || fault.Code != codeNoTable {
			return nil, err
		}
	}
	if p.mode == modeKeep {
		err := r.compare(ctx, l, f, p)
		if why, ok := isUntrusted(err); ok {
			p.mode, p.why = modeNewSlot, "the slot can't be kept: "+why
		} else {
			return p, err
		}
	}
	return p, r.compare(ctx, l, f, p)
}

// codeNoTable is the code of [wiring.NeedTable].
const codeNoTable = "no_table"

// checkTable refuses what can't be repaired from the table.
func (r *repair) checkTable(l *backfill.Conns, f *finding) error {
	table := l.Layout.Mapping.Table
	if f.Server.InRecovery {
		return refuse("in_recovery", "the server is a standby, on which no slot can be repaired",
			"Point postgres.url at the primary")
	}
	if err := wiring.NeedTable(r.cfg, "what is missing"); err != nil {
		return err
	}
	if l.Layout.ID == "" {
		return refuse("repair_ids", fmt.Sprintf("table %s has no id column (columns.id): nobody can tell "+
			"which of its rows are published", table),
			"Start anew, as docs/operations.md says, or set columns.id to a column that tells events apart "+
				"and was set when they were published")
	}
	return nil
}

// checkOrigin refuses a table in which other servers' rows are: they are in no message of this stream, and
// would be missing.
func (r *repair) checkOrigin(ctx context.Context, l *backfill.Conns, snap *tablesnapshot.Snapshot) error {
	if !l.Layout.Mapping.OwnOnly || r.o.Where != "" {
		return nil
	}
	return backfill.CheckOrigin(ctx, snap, "Give --where a condition that only rows hold to that were "+
		"written here, for example of a column with the cluster's number")
}

// chooseMode chooses the mode for the fault.
func (r *repair) chooseMode(ctx context.Context, l *backfill.Conns, f *finding) (*plan, error) {
	slot, cause := f.Slot, f.cause()
	switch {
	case l.CC.ForeignSlot(slot, f.Server.Database) != nil:
		foreign := l.CC.ForeignSlot(slot, f.Server.Database)
		if f.fault.Code == foreign.Code {
			foreign.Hint = f.fault.Hint // the one for a slot that we have a record of
		}
		return nil, foreign
	case f.Publication.Hidden != nil: // more rows would be missing at once
		return nil, f.Publication.Hidden
	case f.Record != nil && f.Record.Database != f.Server.Database && cause == "system_changed":
		return nil, refuse("database", fmt.Sprintf("the record is of database %s, the connection is to %s",
			f.Record.Database, f.Server.Database), "Point postgres.url at the database that holds the outbox")
	}
	renew := func(why string, notes ...string) (*plan, error) {
		return &plan{mode: modeNewSlot, why: why, notes: notes}, nil
	}
	usable := slot.Exists && slot.Invalidation == "" && slot.WALStatus != "lost" && slot.Confirmed != 0
	switch cause {
	case "slot_missing":
		return renew("there is no slot")
	case "slot_invalidated":
		return renew("the slot has lost its WAL")
	case "system_changed":
		return renew("the server is another cluster than the one that the stream was made from: after "+
			"pg_upgrade, a dump or a copy",
			fmt.Sprintf("make sure that this server is the one that is meant: its system identifier %s "+
				"takes the place of the recorded one", f.Server.SystemID))
	case "server_behind", "timeline_lost", "timeline_unknown", "divergence":
		return renew("the stream was not made from this WAL alone",
			"the stream may hold events that this database does not have: their consumers should be told")
	case "stream_not_empty":
		return renew("init did not finish")
	}
	if r.o.NewSlot {
		return renew("--new-slot")
	}
	if cause != "" && f.code == checkpoint.CodeUnfinished && len(f.Record.Checkpoints) == 0 {
		return renew("the repair that was begun makes the slot anew")
	}
	if !usable {
		return renew("the slot can't be used")
	}
	switch cause {
	case "record_missing", "record_corrupt":
		if f.Stream.LastSeq > 0 {
			return r.rebuilt(ctx, l, f)
		}
	case "stream_recreated":
		if f.Record.Repairing != "" {
			break // what that repair had yet to publish is in no record
		}
		if rec, ok := r.adoptStream(ctx, l, f); ok {
			return &plan{mode: modeRecord, record: rec, why: "the stream holds what the record says, up to " +
				"a checkpoint that outflow can go on from: it was put back from a copy"}, nil
		}
	case "memory_lost":
		rec, err := r.forget(ctx, l, f)
		switch {
		case err != nil:
			return nil, err
		case rec == nil:
			return renew("the stream has messages beyond the record's newest checkpoint, and without what " +
				"was removed they can't be made again to compare them")
		}
		return &plan{mode: modeRecord, record: rec, why: fmt.Sprintf("gap mode goes on with %d messages "+
			"that the stream still has: what it knew only of others is forgotten, and nothing else is lost",
			rec.Checkpoints[0].Remembered)}, nil
	case checkpoint.CodePublication:
		if f.Publication.OID != f.Record.Publication.OID {
			return renew("the publication was made anew: the WAL from before can't be decoded with it, or " +
				"leaves out rows")
		}
	}
	if rec := f.Record; rec != nil && rec.Base > f.Stream.LastSeq && cause != "stream_missing" &&
		cause != "stream_recreated" {
		return renew("the stream lost messages that an earlier repair had accepted")
	}
	return &plan{mode: modeKeep, why: "the slot is usable, and brings what follows"}, nil
}

// adoptStream reports whether the record is right for the present stream too, which has another creation
// time.
func (r *repair) adoptStream(ctx context.Context, l *backfill.Conns, f *finding) (*checkpoint.Record, bool) {
	rec := *f.Record
	rec.Created = f.Stream.Created
	rd := f.Readings
	rd.Record = &rec
	start, err := checkpoint.Resolve(l.CC, rd.Readings)
	if err == nil {
		err = r.verifyTail(ctx, l, rd, start)
	}
	return &rec, err == nil
}

// forget returns the record with its newest checkpoint alone, which remembers what the stream still has. It
// is nil if the messages beyond that can't be made again so.
func (r *repair) forget(ctx context.Context, l *backfill.Conns, f *finding) (*checkpoint.Record, error) {
	start, err := checkpoint.Resolve(l.CC, f.Readings.Readings)
	if err != nil {
		return nil, err
	}
	newest := start.Checkpoints[len(start.Checkpoints)-1]
	// as accepted messages they are looked for everywhere below, not only where they have to be
	start.Checkpoint, start.Accepted = newest.Checkpoint, newest.Seq
	recent, err := start.Recent(ctx, l.NATS.Recent)
	if err != nil {
		return nil, err
	}
	newest.Remembered = len(recent)
	rec := *f.Record
	rec.Base, rec.Checkpoints = max(rec.Base, newest.Seq), []checkpoint.StoredCheckpoint{newest}
	rd := f.Readings
	rd.Record = &rec
	start, err = checkpoint.Resolve(l.CC, rd.Readings)
	if err == nil {
		err = r.verifyTail(ctx, l, rd, start)
	}
	if fault := outbox.FaultOf(err); fault != nil && fault.Class == outbox.Gap {
		return nil, nil
	}
	return &rec, err
}

// snapshot takes a snapshot of the table, and of the table that was published before, if that was another
// one. It is nil if there is no table.
func (r *repair) snapshot(ctx context.Context, l *backfill.Conns, f *finding, p *plan,
	exported string) (*tablesnapshot.Snapshot, error) {
	snap, err := openSnapshot(ctx, l, exported)
	if err != nil || snap == nil || f.Record == nil {
		return snap, err
	}
	before, now := f.published(), snap.Table().OID
	if before == 0 || before == now {
		return snap, nil
	}
	name, err := snap.IncludeFormer(ctx, before)
	if err != nil {
		snap.Close()
		return nil, err
	}
	note := fmt.Sprintf("the table that was published before, with OID %d, is not there any more: rows of "+
		"it that are in no message are lost", before)
	if !l.Layout.Mapping.Keyed() {
		note += fmt.Sprintf(". If the ids of %s began anew with it, its rows may count as published "+
			"wherever a message has their id", l.Layout.Mapping.Table)
	}
	if name != "" {
		if err := r.checkReused(ctx, l, snap, name); err != nil {
			snap.Close()
			return nil, err
		}
		note = fmt.Sprintf("the table that was published before, with OID %d, is called %s now: its rows "+
			"count as well. What is written to it from now on is not published", before, name)
	}
	p.notes = []string{note}
	return snap, nil
}

// published is the OID of the table that was published, according to the record. It is 0 if the record
// doesn't say, or is of another cluster, where the OID means something else.
func (f *finding) published() uint32 {
	if f.Record == nil || f.Record.SystemID != f.Server.SystemID {
		return 0
	}
	return f.Record.Publication.TableOID
}

// checkReused refuses two tables if one uses ids of the other for different events: such rows would count as
// published.
func (r *repair) checkReused(ctx context.Context, l *backfill.Conns, snap *tablesnapshot.Snapshot,
	former string) error {
	m := l.Layout.Mapping
	n, err := snap.CountReused(ctx, tablesnapshot.Query{ID: l.Layout.ID, Where: r.o.Where,
		Columns: []string{m.Doc, m.Actor, m.Counter, m.Key, m.Payload}})
	if err != nil || n == 0 {
		return err
	}
	return idsReused(l, n, former)
}

// idsReused is the fault of n rows whose ids belong to other events.
func idsReused(l *backfill.Conns, n int, of string) *outbox.Fault {
	id := l.Layout.ID
	return refuse("repair_ids", fmt.Sprintf("%s of table %s %s the %s of another event of %s: by "+
		"that id nobody can tell what is published", units.Of(n, "row"), l.Layout.Mapping.Table,
		units.Agree(n, "has", "have"), id, of),
		fmt.Sprintf("Give them an %s that no event had (of an identity column: ALTER TABLE ... ALTER "+
			"COLUMN ... RESTART WITH a higher one, then UPDATE ... SET ... = DEFAULT), "+
			"or leave them out with --where, such as rows that were changed after they had been published, "+
			"and decide about them by hand", id))
}

// compare compares table and stream in the plan's mode.
func (r *repair) compare(ctx context.Context, l *backfill.Conns, f *finding, p *plan) error {
	snap, err := r.snapshot(ctx, l, f, p, "")
	if err != nil {
		return err
	}
	p.close()
	if snap != nil {
		if err := r.checkOrigin(ctx, l, snap); err != nil {
			snap.Close()
			return err
		}
	}
	if p.scan, err = r.newScan(l, f, snap); err != nil {
		return err
	}
	s := p.scan
	if p.mode == modeKeep {
		switch f.cause() {
		case "stream_missing", "stream_recreated", "record_missing", "record_corrupt":
			s.setAnchor(f.Readings, false, l.Settings())
		default:
			s.setAnchor(f.Readings, true, l.Settings())
		}
		if snap != nil { // a visible row must not be missing only because its WAL can't be read yet
			if err := snap.AwaitFlush(ctx); err != nil {
				return err
			}
		}
	}
	return s.run(ctx, f.Readings, p.mode == modeKeep)
}

// run compares.
func (s *scan) run(ctx context.Context, rd backfill.Readings, keep bool) error {
	if s.snap != nil {
		progress.Step(ctx, "reading the ids of table %s", s.l.Layout.Mapping.Table)
		if err := s.readCandidates(ctx); err != nil {
			return err
		}
		if err := s.readAttempts(ctx); err != nil {
			return err
		}
	}
	progress.Step(ctx, "%s; reading the headers of stream %s", units.Of(len(s.outcomes), "row"),
		s.r.cfg.Stream)
	if err := s.readStream(ctx, rd, keep); err != nil {
		return err
	}
	if n := s.counts[otherEvent]; n > 0 {
		return idsReused(s.l, n, "stream "+s.r.cfg.Stream)
	}
	if keep {
		if end := rd.Server.WALEnd; s.anchor.Due > end {
			// What commits from now on, up to there, would be neither in the snapshot nor read from the slot.
			return &untrusted{fmt.Sprintf("stream or record go up to %v, the WAL ends at %v", s.anchor.Due,
				end)}
		}
		progress.Step(ctx, "reading what slot %s will bring", s.r.cfg.Slot)
		if err := s.readSlot(ctx); err != nil {
			return err
		}
	}
	if err := s.findReplaced(ctx, rd, keep); err != nil {
		return err
	}
	if s.r.o.Where != "" || s.onlyNew && s.went == 0 || s.counts[missing] == 0 {
		return s.findEdges(ctx)
	}
	// those that the archive has are not gone
	if n, known := rd.Removed(s.again)+s.went, s.archived+s.replaced; n > known {
		return s.r.removedFault(n - known)
	}
	if s.withoutID > 0 {
		return refuse("repair_ids", fmt.Sprintf("stream %s has %s without an event id: their rows, if "+
			"the table still has them, look like missing ones",
			s.r.cfg.Stream, units.Of(s.withoutID, "message")), "Give a condition that only rows hold to "+
			"that may be missing, for example --where \"created_at > '...'\"")
	}
	return s.findEdges(ctx)
}
