package repair

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
)

// mode is a way to repair.
type mode string

// The modes.
const (
	modeRecord mode = "record"   // only the record is written: slot and stream bear it out
	modeKeep   mode = "keep"     // the slot is kept, what it will not bring comes from the table
	modeRenew  mode = "new-slot" // the slot is made anew, what the stream lacks comes from the table
)

// plan is what a repair would do, with what it was found from.
type plan struct {
	mode   mode
	why    string             // of the mode, in words
	record *checkpoint.Record // modeRecord: what is written
	notes  []string           // what the operator should know beside it
	survey *survey            // nil for modeRecord
	loss   string             // what is lost that no table has; "" if nothing
}

func (p *plan) close() {
	if p.survey != nil && p.survey.snap != nil {
		p.survey.snap.Close()
	}
}

// refuse is the fault of something that no repair can do.
func refuse(code, what, cure string) *outbox.Fault {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: what, Hint: cure}
}

// plan finds out how the finding is to be repaired, and what is missing. It changes nothing.
func (r *repair) plan(ctx context.Context, l *backfill.Links, f *finding) (*plan, error) {
	p, err := r.detailed(ctx, l, f)
	if err == nil {
		p.loss = r.loses(p)
	}
	return p, err
}

func (r *repair) detailed(ctx context.Context, l *backfill.Links, f *finding) (*plan, error) {
	p, err := r.choose(ctx, l, f)
	if err != nil || p.mode == modeRecord || p.survey != nil {
		return p, err
	}
	if err := r.allowed(l, f); err != nil && outbox.FaultOf(err).Code != codeNoTable {
		return nil, err
	}
	if p.mode == modeKeep {
		err := r.surveyed(ctx, l, f, p)
		if why, ok := isUntrusted(err); ok {
			p.mode, p.why = modeRenew, "the slot can't be kept: "+why
		} else {
			return p, err
		}
	}
	return p, r.surveyed(ctx, l, f, p)
}

// codeNoTable is the code of the fault of what there has to be a table for.
const codeNoTable = "no_table"

// allowed refuses what the table can't repair.
func (r *repair) allowed(l *backfill.Links, f *finding) error {
	table := l.Layout.Mapping.Table
	if f.Server.InRecovery {
		return refuse("in_recovery", "the server is a standby, on which no slot can be repaired", "Point postgres.url at the primary")
	}
	if err := wiring.NeedTable(r.cfg, "what is missing"); err != nil {
		return err
	}
	if l.Layout.ID == "" {
		return refuse("repair_ids", fmt.Sprintf("table %s has no id column (columns.id): nobody can tell which of its rows are published", table),
			"Start anew, as docs/operations.md says, or set columns.id to a column that tells events apart and was set when they were published")
	}
	if n := f.Removed(); n > 0 && r.o.Where == "" {
		return refuse("repair_removed", fmt.Sprintf("%d messages of stream %s are not there any more (retention, or somebody removed them): their rows, if the table "+
			"still has them, look like missing ones", n, r.cfg.Stream),
			"Give a condition that only rows hold to that may be missing, for example --where \"created_at > '...'\"")
	}
	return nil
}

// choose says which mode the fault asks for.
func (r *repair) choose(ctx context.Context, l *backfill.Links, f *finding) (*plan, error) {
	slot, cause := f.Slot, f.cause()
	switch {
	case l.CC.ForeignSlot(slot, f.Server.Database) != nil:
		foreign := l.CC.ForeignSlot(slot, f.Server.Database)
		if f.fault.Code == foreign.Code {
			foreign.Hint = f.fault.Hint // as a start says it: there is a record of ours
		}
		return nil, foreign
	case f.Publication.Hidden != nil: // what is published from the table now would be missing again at once
		return nil, f.Publication.Hidden
	case f.Record != nil && f.Record.Database != f.Server.Database && cause == "system_changed":
		return nil, refuse("database", fmt.Sprintf("the record is of database %s, the connection is to %s", f.Record.Database, f.Server.Database),
			"Point postgres.url at the database that holds the outbox")
	}
	renew := func(why string, notes ...string) (*plan, error) {
		return &plan{mode: modeRenew, why: why, notes: notes}, nil
	}
	usable := slot.Exists && slot.Invalidation == "" && slot.WALStatus != "lost" && slot.Confirmed != 0
	switch cause {
	case "slot_missing":
		return renew("there is no slot")
	case "slot_invalidated":
		return renew("the slot has lost its WAL")
	case "system_changed":
		return renew("the server is another cluster than the one that the stream was made from: after pg_upgrade, a dump or a copy",
			fmt.Sprintf("make sure that this server is the one that is meant: its system identifier %s takes the place of the recorded one", f.Server.SystemID))
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
		if rec, ok := r.adopted(ctx, l, f); ok {
			return &plan{mode: modeRecord, record: rec, why: "the stream holds what the record says, up to a place that outflow can go on from: it was put back from a copy"}, nil
		}
	case checkpoint.CodePublication:
		if f.Publication.OID != f.Record.Publication.OID {
			return renew("the publication was made anew: the WAL from before can't be decoded with it, or leaves out rows")
		}
	}
	if rec := f.Record; rec != nil && rec.Base > f.Stream.LastSeq && cause != "stream_missing" && cause != "stream_recreated" {
		return renew("the stream lost messages that an earlier repair had accepted")
	}
	return &plan{mode: modeKeep, why: "the slot is usable, and brings what follows"}, nil
}

// adopted looks whether the record holds for the stream that is there now, which has another creation time.
func (r *repair) adopted(ctx context.Context, l *backfill.Links, f *finding) (*checkpoint.Record, bool) {
	rec := *f.Record
	rec.Created, rec.Repairing = f.Stream.Created, ""
	rd := f.Readings
	rd.Record = &rec
	start, err := checkpoint.Resolve(l.CC, rd.Readings)
	if err == nil {
		err = r.prove(ctx, l, rd, start)
	}
	return &rec, err == nil
}

// snapshot takes a snapshot of the table for a plan, with the one that was published before it, if that is another. It is nil where there is no
// table.
func (r *repair) snapshot(ctx context.Context, l *backfill.Links, f *finding, p *plan, exported string) (*replication.Snapshot, error) {
	snap, err := openSnapshot(ctx, l, exported)
	if err != nil || snap == nil || f.Record == nil {
		return snap, err
	}
	before, now := f.published(), snap.Table().OID
	if before == 0 || before == now {
		return snap, nil
	}
	name, err := snap.With(ctx, before)
	if err != nil {
		snap.Close()
		return nil, err
	}
	note := fmt.Sprintf("the table that was published before, with OID %d, is not there any more: rows of it that are in no message are lost", before)
	if !l.Layout.Mapping.Keyed() {
		note += fmt.Sprintf(". If the ids of %s began anew with it, its rows may count as published wherever a message has their id", l.Layout.Mapping.Table)
	}
	if name != "" {
		if err := r.reused(ctx, l, snap, name); err != nil {
			snap.Close()
			return nil, err
		}
		note = fmt.Sprintf("the table that was published before, with OID %d, is called %s now: its rows count as well. What is written to it from now on is not published",
			before, name)
	}
	p.notes = []string{note}
	return snap, nil
}

// published is the OID of the table that the record says was published; 0 if it says nothing, or is of another cluster: what has that OID here
// is something else.
func (f *finding) published() uint32 {
	if f.Record == nil || f.Record.SystemID != f.Server.SystemID {
		return 0
	}
	return f.Record.Publication.TableOID
}

// reused refuses two tables of which one has ids of the other for other events: their rows would count as published.
func (r *repair) reused(ctx context.Context, l *backfill.Links, snap *replication.Snapshot, former string) error {
	m := l.Layout.Mapping
	n, err := snap.Reused(ctx, replication.RowQuery{ID: l.Layout.ID, Where: r.o.Where, Columns: []string{m.Doc, m.Actor, m.Counter, m.Key, m.Payload}})
	if err != nil || n == 0 {
		return err
	}
	return idsReused(l, n, former)
}

// idsReused is the fault of n rows that have ids of events of somewhere else.
func idsReused(l *backfill.Links, n int, of string) *outbox.Fault {
	id := l.Layout.ID
	return refuse("repair_ids", fmt.Sprintf("%d rows of table %s have the %s of another event of %s: by their id nobody can tell whether they are published",
		n, l.Layout.Mapping.Table, id, of),
		fmt.Sprintf("Give them an %s that no event had (of an identity column: ALTER TABLE ... ALTER COLUMN ... RESTART WITH a higher one, then UPDATE ... SET ... = DEFAULT), "+
			"or leave them out with --where, such as rows that were changed after they had been published, and decide about them by hand", id))
}

// surveyed compares table and stream in the plan's mode.
func (r *repair) surveyed(ctx context.Context, l *backfill.Links, f *finding, p *plan) error {
	snap, err := r.snapshot(ctx, l, f, p, "")
	if err != nil {
		return err
	}
	p.close()
	if p.survey, err = r.newSurvey(l, f, snap); err != nil {
		return err
	}
	s := p.survey
	if p.mode == modeKeep {
		switch f.cause() {
		case "stream_missing", "stream_recreated", "record_missing", "record_corrupt":
			s.anchored(f.Readings, false, l.Settings())
		default:
			s.anchored(f.Readings, true, l.Settings())
		}
		if snap != nil { // without rows none can be missed for being in WAL that can't be read yet
			if err := snap.AwaitFlush(ctx); err != nil {
				return err
			}
		}
	}
	return s.run(ctx, f.Readings, p.mode == modeKeep)
}

// run makes the whole comparison.
func (s *survey) run(ctx context.Context, rd backfill.Readings, keep bool) error {
	if s.snap != nil {
		s.r.say("reading the ids of table %s", s.l.Layout.Mapping.Table)
		if err := s.candidates(ctx); err != nil {
			return err
		}
	}
	s.r.say("%d rows; reading the headers of stream %s", len(s.fates), s.r.cfg.Stream)
	if err := s.stream(ctx, rd, keep); err != nil {
		return err
	}
	if n := s.counts[another]; n > 0 {
		return idsReused(s.l, n, "stream "+s.r.cfg.Stream)
	}
	if s.nameless > 0 && s.r.o.Where == "" && s.counts[missing] > 0 {
		return refuse("repair_ids", fmt.Sprintf("%d messages of stream %s have no event id: their rows, if the table still has them, look like missing ones",
			s.nameless, s.r.cfg.Stream), "Give a condition that only rows hold to that may be missing, for example --where \"created_at > '...'\"")
	}
	if keep {
		if end := rd.Server.WALEnd; s.anchor.Due > end {
			// What commits up to there from now on is neither in the snapshot nor would it be read.
			return &untrusted{fmt.Sprintf("stream or record go up to %v, the WAL ends at %v", s.anchor.Due, end)}
		}
		s.r.say("reading what slot %s will bring", s.r.cfg.Slot)
		if err := s.slot(ctx); err != nil {
			return err
		}
	}
	return s.edges(ctx)
}
