// Package initialize is `outflow init`: it makes what is missing, in an order that lets the next run finish
// after a crash at any point, and refuses what it can't finish without losing events.
//
// Table and publication come first, because PostgreSQL decodes WAL with the catalog as it was when that WAL
// was written. Stream and bucket come before the slot, because a slot retains WAL. Directly before the slot
// comes a record that says that the slot is about to be made: only such a record lets a later run adopt a
// slot that exists. The record with the first checkpoint comes last.
package initialize

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/operate/parts"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/sink"
)

// setup is one run of init.
type setup struct {
	cfg    config.Config
	log    *slog.Logger
	report func(format string, args ...any) // called with a line for each object; nil: not at all
	// called with what the operator should know before anything is made
	note     func(format string, args ...any)
	snapshot Snapshot // makes the slot; nil: init does
	accept   []string // further roles whose table may be used

	dry    bool  // nothing is made; it is only found out what would be, and what does not fit
	misfit error // the first thing that does not fit

	layout      *wiring.Layout
	pg          *catalog.Setup
	session     *replication.Session // for what only a replication connection tells
	conn        *sink.Conn
	store       *checkpoint.Store
	publication relay.PublicationIdentity
	rows        bool // the table existed and may have rows
}

func silent(string, ...any) {}

// Run makes what is missing, after a dry run has found that all of it can be made. report is called with a
// line for each step. A table that one of the roles acceptOwners owns may be used even if every role may
// create objects in its schema.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, report func(format string, args ...any),
	acceptOwners []string) error {
	return run(ctx, setup{cfg: cfg, log: log, report: report, accept: acceptOwners})
}

// Snapshot returns an error if a snapshot must not be taken where there is what was read.
type Snapshot = func(checkpoint.Config, *wiring.Layout, checkpoint.Readings) error

// Prepare makes what has to exist before a snapshot makes the slot: table, publication, stream and bucket.
func Prepare(ctx context.Context, cfg config.Config, log *slog.Logger,
	report func(format string, args ...any), acceptOwners []string, fits Snapshot) error {
	return run(ctx, setup{cfg: cfg, log: log, report: report, snapshot: fits, accept: acceptOwners})
}

// DryRun makes nothing. It reports what Run would make, what exists, and what does not fit; its error is the
// one that Run would return.
func DryRun(ctx context.Context, cfg config.Config, log *slog.Logger,
	report func(format string, args ...any), acceptOwners []string) error {
	s := setup{cfg: cfg, log: log, report: report, note: report, accept: acceptOwners, dry: true}
	return s.steps(ctx)
}

func run(ctx context.Context, s setup) error {
	dry := s
	dry.dry, dry.report, dry.note = true, nil, s.report
	if err := dry.steps(ctx); err != nil {
		return err
	}
	s.note = silent
	return s.steps(ctx)
}

func (s *setup) steps(ctx context.Context) error {
	defer s.close()
	name := "table " + s.cfg.Table
	for _, step := range []struct {
		do      func(context.Context) error
		waiting string // for what, if it takes a while; "": it says so itself
	}{
		{s.open, ""}, {s.table, "PostgreSQL, or a lock on " + name}, {s.connect, ""},
		{s.makePublication, "PostgreSQL, or a lock on " + name},
		{s.makeStream, "NATS: stream " + s.cfg.Stream}, {s.makeSlot, "slot " + s.cfg.Slot},
	} {
		done := func() {}
		if step.waiting != "" {
			done = progress.Wait(ctx, "waiting for "+step.waiting)
		}
		err := step.do(ctx)
		done()
		if err != nil {
			return err
		}
	}
	return s.misfit
}

func (s *setup) close() {
	if s.pg != nil {
		s.pg.Close()
	}
	if s.session != nil {
		s.session.Close()
	}
	if s.conn != nil {
		s.conn.Close()
	}
}

// fits notes and reports an error that makes something not fit. In a dry run, which goes on, it returns nil
// for it.
func (s *setup) fits(err error, part parts.Part, name string) error {
	if err == nil || !s.dry || outbox.FaultOf(err) == nil {
		return err
	}
	if s.misfit == nil {
		s.misfit = err
	}
	s.reportState("does not fit: "+outbox.FaultOf(err).Message, part, name)
	return nil
}

// reportMade reports that a part was made or would be made, or that it exists.
func (s *setup) reportMade(created bool, part parts.Part, name string) {
	state := "there"
	switch {
	case created && s.dry:
		state = "would be made"
	case created:
		state = "made"
	}
	s.reportState(state, part, name)
}

func (s *setup) reportState(state string, part parts.Part, name string) {
	if s.report != nil {
		s.report("%s: %s", part.Of(name), state)
	}
}

// open connects to PostgreSQL and makes sure that the server can be used at all.
func (s *setup) open(ctx context.Context) (err error) {
	pc := wiring.Setup(s.cfg)
	pc.AcceptOwners = s.accept
	if s.pg, err = wiring.OpenSetup(ctx, s.cfg, pc); err != nil {
		return err
	}
	if err := s.pg.CheckServer(ctx); err != nil {
		return err
	}
	if s.session, err = wiring.Inspect(ctx, s.cfg, s.log); err != nil {
		return err
	}
	if s.dry {
		return s.pg.DryRun(ctx)
	}
	return nil
}

// table makes the table, if one is needed and missing, and applies the configuration to it.
func (s *setup) table(ctx context.Context) error {
	created, control := false, false
	layout, err := func() (_ *wiring.Layout, err error) {
		if s.cfg.Source.Rows() {
			if created, err = s.pg.EnsureTable(ctx); err != nil {
				return nil, err
			}
			if control, err = s.pg.EnsureControl(ctx); err != nil {
				return nil, err
			}
		}
		l, err := wiring.Apply(ctx, s.cfg, s.pg)
		if err == nil {
			err = l.CheckKey()
		}
		return l, err
	}()
	if err != nil {
		return s.fits(err, parts.Table, s.cfg.Table)
	}
	s.layout = layout
	s.pg.SetColumns(layout.Needed())
	if s.cfg.Source.Rows() {
		s.reportMade(created, parts.Table, s.cfg.Table)
		if s.cfg.Cluster.Control != "" {
			s.reportMade(control, parts.Table, s.cfg.Cluster.Control)
		}
		s.rows = !created
		return s.notes(ctx)
	}
	return nil
}

// connect connects to NATS.
func (s *setup) connect(ctx context.Context) error {
	sc, err := wiring.Broker(s.cfg, s.log)
	if s.layout != nil {
		sc, err = wiring.Sink(s.cfg, s.layout, s.log)
	}
	if err != nil {
		return err
	}
	if s.conn, err = wiring.Connect(ctx, s.cfg, sc); err != nil {
		return err
	}
	s.store = wiring.Store(s.cfg, s.conn)
	return nil
}

func (s *setup) makePublication(ctx context.Context) error {
	if s.layout == nil {
		return nil
	}
	created, id, err := s.pg.EnsurePublication(ctx)
	if err != nil {
		return s.fits(err, parts.Publication, s.cfg.Publication)
	}
	s.publication = id
	s.reportMade(created, parts.Publication, s.cfg.Publication)
	return nil
}

func (s *setup) makeStream(ctx context.Context) error {
	if s.cfg.Cluster.Elsewhere() {
		return s.homeStream(ctx)
	}
	before, err := s.conn.State(ctx)
	if err != nil {
		return err
	}
	if !before.Exists && s.misfit == nil {
		// A slot or a record without a stream is a gap, and a new, empty stream would hide it.
		r, err := s.read(ctx)
		if err != nil {
			return err
		}
		// a snapshot starts over with all rows
		begun := r.Record != nil && r.Record.Repairing == checkpoint.ForSnapshot && s.snapshot != nil
		if (r.Slot.Exists || r.Record != nil && !r.Record.Creating) && !begun {
			return s.fits(s.resolve(r), parts.Slot, s.cfg.Slot)
		}
	}
	if err := s.stream(ctx); err != nil {
		return s.fits(err, parts.Stream, s.cfg.Stream)
	}
	s.reportMade(!before.Exists, parts.Stream, s.cfg.Stream)
	return s.fits(s.bucket(ctx), parts.Bucket, checkpoint.Bucket(s.cfg.Stream))
}

func (s *setup) stream(ctx context.Context) (err error) {
	if s.dry || s.cfg.Cluster.Elsewhere() {
		err = s.conn.CheckStream(ctx)
	} else {
		err = conns.EnsureStream(ctx, s.cfg, s.conn)
	}
	if err != nil {
		return err
	}
	if err := s.conn.CheckMaxAge(s.cfg.Sink.DurableAfter); err != nil || s.layout == nil {
		return err
	}
	return wiring.CheckLimits(ctx, s.conn, s.checkpoint(), s.cfg.Reorder.Settings())
}

func (s *setup) bucket(ctx context.Context) error {
	name := checkpoint.Bucket(s.cfg.Stream)
	if s.dry {
		there, err := s.store.CheckBucket(ctx)
		if err != nil {
			return err
		}
		s.reportMade(!there, parts.Bucket, name)
		return s.store.CheckAlone(ctx)
	}
	if err := conns.EnsureBucket(ctx, s.cfg, s.store); err != nil {
		return err
	}
	s.reportState("ready", parts.Bucket, name)
	return s.store.CheckAlone(ctx)
}

// makeSlot writes a record that says so, makes the slot, and writes the record with the first checkpoint. Or
// everything exists.
func (s *setup) makeSlot(ctx context.Context) error {
	if s.snapshot != nil && !s.dry || s.misfit != nil {
		return nil
	}
	r, err := s.read(ctx)
	if err != nil {
		return err
	}
	if s.snapshot != nil {
		return s.fits(s.snapshot(s.checkpoint(), s.layout, r), parts.Slot, s.cfg.Slot)
	}
	if r.Record != nil && !r.Record.Creating {
		return s.fits(s.existing(ctx, r), parts.Slot, s.cfg.Slot)
	}
	if err := s.checkFree(r); err != nil {
		return s.fits(err, parts.Slot, s.cfg.Slot)
	}
	if s.rows || !s.dry { // a slot keeps WAL: there is none before what goes with it can be written
		err := s.fits(conns.States(ctx, s.cfg, r.Server, (*partition.Manager).CheckForget), parts.Table,
			catalog.PartitionStates)
		if err == nil && s.misfit == nil {
			err = s.fits(conns.Erasures(ctx, s.cfg, r.Server, (*erasure.Ledger).CheckLower, s.end(r)),
				parts.Table, erasure.Table)
		}
		if err != nil || s.misfit != nil {
			return err
		}
	}
	if s.dry {
		s.reportMade(!r.Slot.Exists, parts.Slot, s.cfg.Slot)
		if r.Record != nil {
			s.reportState("would be finished", parts.Record, "")
		} else {
			s.reportMade(true, parts.Record, "")
		}
		if r.Slot.Exists {
			return nil
		}
		return s.noteOlderRows(ctx)
	}
	if r.Record == nil {
		rec := &checkpoint.Record{
			Version: 1, Slot: s.cfg.Slot, Database: r.Server.Database, SystemID: r.Server.SystemID,
			Publication: checkpoint.PublicationSeen{PublicationIdentity: s.publication,
				Seen: r.Server.WALEnd},
			Mapping: s.layout.Mapping, Stream: s.cfg.Stream, Created: r.Stream.Created, Creating: true,
		}
		if r.Revision, err = conns.SaveRecord(ctx, s.store, rec, r.Revision); err != nil {
			return err
		}
		r.Record = rec
	}
	start := r.Slot.Confirmed
	if !r.Slot.Exists {
		done := progress.Wait(ctx, "the server waits for the transactions that write now")
		start, err = s.pg.CreateSlot(ctx)
		done()
		if err != nil {
			return err
		}
	}
	s.reportMade(!r.Slot.Exists, parts.Slot, fmt.Sprintf("%s at %v", s.cfg.Slot, start))
	// before the record is complete: until then nothing is removed from the table
	if err := conns.States(ctx, s.cfg, r.Server, (*partition.Manager).Forget); err != nil {
		return err
	}
	first := *r.Record
	first.Creating, first.Base = false, r.Record.Uninstalled(r.Stream)
	if first.Base > 0 { // the slot that it was of may have been another server's
		first.SystemID, first.Database = r.Server.SystemID, r.Server.Database
	}
	first.Mapping = s.layout.Mapping
	first.Publication = checkpoint.PublicationSeen{PublicationIdentity: s.publication, Seen: r.Server.WALEnd}
	first.Created = r.Stream.Created
	settings := s.cfg.Reorder.Settings()
	if !s.layout.Mapping.Keyed() {
		settings = settings.Unkeyed()
	}
	due, read, err := s.firstPlace(ctx, start)
	if err != nil {
		return err
	}
	s.share(&first)
	// what follows comes behind the end of the stream, which may have gone back
	if err := conns.Erasures(ctx, s.cfg, r.Server, (*erasure.Ledger).Lower, s.end(r)); err != nil {
		return err
	}
	if err := s.conn.ForgetErased(ctx, r.Stream.ErasedBehind()); err != nil {
		return err
	}
	first.Checkpoints = []checkpoint.StoredCheckpoint{{
		Checkpoint: relay.Checkpoint{Due: due, Read: read, Seq: first.Base, Settings: settings,
			Timeline: r.Server.History.At(start)},
		Since: time.Now().UTC(),
	}}
	if _, err := conns.SaveRecord(ctx, s.store, &first, r.Revision); err != nil {
		return err
	}
	made := fmt.Sprintf("made, first checkpoint %v", start)
	if first.Base > 0 {
		made += fmt.Sprintf(", behind sequence %d of the stream, which outflow uninstall has left",
			first.Base)
	}
	s.reportState(made, parts.Record, "")
	return nil
}

// end is where the stream ends.
func (s *setup) end(r checkpoint.Readings) erasure.End {
	return erasure.End{Stream: s.cfg.Stream, Created: r.Stream.Created, Last: r.Stream.LastSeq}
}

// checkFree makes sure that the slot can be made or adopted.
func (s *setup) checkFree(r checkpoint.Readings) error {
	if f := s.checkpoint().ForeignSlot(r.Slot, r.Server.Database); f != nil {
		return f
	}
	switch {
	case r.Record == nil && r.Slot.Exists && s.cfg.Cluster.Elsewhere():
		return s.checkpoint().SlotTaken(r.Slot)
	case r.Record == nil && r.Slot.Exists, r.Stream.LastSeq > r.Record.Uninstalled(r.Stream) &&
		(r.Record == nil || !r.Record.LostFirstCheckpoint(r.Slot, r.Stream)):
		return s.resolve(r) // the error says which gap it is
	case r.Slot.Exists && (r.Slot.Active || r.Slot.Confirmed == 0):
		// The server process of an init that was killed is still making it. Where the slot begins is not
		// known before it has finished.
		return &outbox.Fault{
			Class: outbox.Fatal, Code: "slot_unfinished",
			Message: fmt.Sprintf("slot %s is still being made, by the server process with pid %d", s.cfg.Slot,
				r.Slot.ActivePID),
			Hint: "It waits until the transactions that write now have ended. Wait for that, or end it " +
				"with pg_terminate_backend(pid), then run `outflow init` again",
		}
	}
	return nil
}

// existing checks a set-up that is complete.
func (s *setup) existing(ctx context.Context, r checkpoint.Readings) error {
	if s.unshared(r.Record) && r.Record.Repairing == "" ||
		r.Record.Mapping != s.layout.Mapping && r.Record.Mapping.Shard == s.layout.Mapping.Shard {
		return s.remap(ctx, r)
	}
	if err := s.resolve(r); err != nil {
		return err
	}
	s.reportState(fmt.Sprintf("there, confirmed up to %v", r.Slot.Confirmed), parts.Slot, s.cfg.Slot)
	return nil
}

// read reads what a start would read. The publication was read before, or made.
func (s *setup) read(ctx context.Context) (checkpoint.Readings, error) {
	reader := checkpoint.Reader{
		Slot: s.pg.Slot,
		Record: func(ctx context.Context) (*checkpoint.Record, uint64, error) {
			rec, revision, err := s.store.Load(ctx)
			if err == nil {
				s.layout.Follow(s.cfg, rec)
			}
			return rec, revision, err
		},
		Stream: s.conn.State, Server: s.session.Server,
	}
	r, err := reader.Read(ctx)
	if s.cfg.Cluster.Elsewhere() {
		r.Stream = ofHome(r.Stream)
	}
	r.Publication = s.publication
	return r, err
}

func (s *setup) checkpoint() checkpoint.Config { return wiring.Checkpoint(s.cfg, s.layout) }

func (s *setup) resolve(r checkpoint.Readings) error {
	if r.Record == nil && r.Slot.Active && s.checkpoint().ForeignSlot(r.Slot, r.Server.Database) == nil {
		return s.checkpoint().SlotTaken(r.Slot)
	}
	_, err := checkpoint.Resolve(s.checkpoint(), r)
	return err
}
