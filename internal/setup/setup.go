// Package setup is `outflow init`: it makes what is missing, in an order in which a crash at any point leaves something that the next
// run can finish, and refuses what it cannot finish without losing events.
//
// Table and publication come first, because PostgreSQL decodes with the catalog of the time. Stream and bucket come before the slot,
// because a slot keeps WAL. A record that says that the slot is about to be made comes directly before the slot: only such a record
// lets a later run adopt a slot that it finds. The record with the first place comes last.
package setup

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/config"
	"github.com/outflowhq/outflow/internal/wiring"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/sink"
)

// setup is one run of init.
type setup struct {
	cfg      config.Config
	log      *slog.Logger
	report   func(format string, args ...any)
	snapshot bool     // the slot is made by a snapshot
	accept   []string // further roles whose table may be used

	layout      *wiring.Layout
	pg          *replication.Setup
	session     *replication.Session // for what only a replication connection says
	conn        *sink.Conn
	store       *checkpoint.Store
	publication outbox.PublicationIdentity
}

// Run makes what is missing. report is called with a line for each step. A table of one of the roles acceptOwners may be used, whoever
// may create in its schema.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, report func(format string, args ...any), acceptOwners []string) error {
	s := &setup{cfg: cfg, log: log, report: report, accept: acceptOwners}
	return s.steps(ctx, s.table, s.connect, s.makePublication, s.makeStream, s.makeSlot)
}

// Prepare makes what a slot needs: table, publication, stream and bucket. It is the first part of a set-up that begins with a snapshot.
func Prepare(ctx context.Context, cfg config.Config, log *slog.Logger, report func(format string, args ...any), acceptOwners []string) error {
	s := &setup{cfg: cfg, log: log, report: report, snapshot: true, accept: acceptOwners}
	return s.steps(ctx, s.table, s.connect, s.makePublication, s.makeStream)
}

func (s *setup) steps(ctx context.Context, steps ...func(context.Context) error) error {
	defer s.close()
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
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

// table makes the table if there is to be one and is none, and applies the configuration to it.
func (s *setup) table(ctx context.Context) error {
	pc := SQLConfig(s.cfg, s.log)
	pc.AcceptOwners = s.accept
	pg, err := replication.OpenSetup(ctx, pc)
	if err != nil {
		return fmt.Errorf("postgres.url: %w", err)
	}
	defer pg.Close()
	if err := pg.CheckServer(ctx); err != nil {
		return err
	}
	if s.cfg.Source.Rows() {
		created, err := pg.EnsureTable(ctx)
		if err != nil {
			return err
		}
		s.say(created, "table %s", s.cfg.Table)
	}
	s.layout, err = wiring.Apply(ctx, s.cfg, pg)
	return err
}

// SQLConfig is the configuration for making objects in PostgreSQL, with the columns that a new table gets.
func SQLConfig(cfg config.Config, log *slog.Logger) replication.SetupConfig {
	c := cfg.Columns
	return replication.SetupConfig{
		Config: wiring.Replication(cfg, log), ID: c.ID.Name,
		Mapping: outbox.Mapping{Doc: c.Doc.Name, Actor: c.Actor.Name, Counter: c.Counter.Name, Key: c.Key.Name, Payload: c.Payload.Name},
	}
}

// connect opens what the later steps need.
func (s *setup) connect(ctx context.Context) error {
	sc, err := wiring.Sink(s.cfg, s.layout, s.log)
	if err != nil {
		return err
	}
	if s.conn, err = wiring.Connect(ctx, s.cfg, sc); err != nil {
		return err
	}
	s.store = wiring.Store(s.cfg, s.conn)
	pc := SQLConfig(s.cfg, s.log)
	pc.Columns = s.layout.Needed()
	if s.pg, err = replication.OpenSetup(ctx, pc); err != nil {
		return fmt.Errorf("postgres.url: %w", err)
	}
	if s.session, err = replication.Open(ctx, pc.Config); err != nil {
		return fmt.Errorf("postgres.url: %w", err)
	}
	return nil
}

func (s *setup) makePublication(ctx context.Context) error {
	created, id, err := s.pg.EnsurePublication(ctx)
	if err != nil {
		return err
	}
	s.publication = id
	s.say(created, "publication %s", s.cfg.Publication)
	return nil
}

func (s *setup) makeStream(ctx context.Context) error {
	before, err := s.conn.State(ctx)
	if err != nil {
		return err
	}
	if !before.Exists {
		// A slot or a record without a stream is a gap: a new, empty stream would hide it.
		r, err := s.read(ctx)
		if err != nil {
			return err
		}
		begun := r.Record != nil && r.Record.Repairing == checkpoint.ForSnapshot && s.snapshot // it takes all rows again
		if (r.Slot.Exists || r.Record != nil && !r.Record.Creating) && !begun {
			return s.resolve(r.Readings)
		}
	}
	in := s.cfg.Init
	if err := s.conn.EnsureStream(ctx, sink.StreamOptions{Replicas: in.Replicas, Storage: in.Storage, MaxAge: in.MaxAge, MaxBytes: in.MaxBytes}); err != nil {
		return err
	}
	if err := s.conn.CheckMaxAge(s.cfg.Sink.DurableAfter); err != nil {
		return err
	}
	s.say(!before.Exists, "stream %s", s.cfg.Stream)
	storage := jetstream.FileStorage
	if in.Storage == "memory" {
		storage = jetstream.MemoryStorage
	}
	if err := s.store.EnsureBucket(ctx, in.Replicas, storage); err != nil {
		return err
	}
	s.report("bucket %s: ready", checkpoint.Bucket(s.cfg.Stream))
	return s.store.CheckAlone(ctx)
}

// makeSlot makes the slot between two writings of the record, or finds that everything is there.
func (s *setup) makeSlot(ctx context.Context) error {
	r, err := s.read(ctx)
	if err != nil {
		return err
	}
	switch {
	case r.Record != nil && !r.Record.Creating:
		return s.existing(ctx, r)
	case r.Record == nil && r.Slot.Exists, r.Stream.LastSeq > 0 && (r.Record == nil || !r.Record.LostFirstPlace(r.Slot, r.Stream)):
		return s.resolve(r.Readings) // a gap: it says which
	case r.Slot.Exists && (r.Slot.Active || r.Slot.Confirmed == 0):
		// The server process of an init that was killed goes on with it. Where the slot begins is not known before it is whole.
		return &outbox.Fault{
			Class: outbox.Fatal, Code: "slot_unfinished",
			What: fmt.Sprintf("slot %s is still being made, by the server process with pid %d", s.cfg.Slot, r.Slot.ActivePID),
			Cure: "It waits until the transactions that write now have ended. Wait for that, or end it with pg_terminate_backend(pid), then run `outflow init` again",
		}
	}
	if r.Record == nil {
		rec := &checkpoint.Record{
			Version: 1, Slot: s.cfg.Slot, Database: r.Server.Database, SystemID: r.Server.SystemID,
			Publication: checkpoint.PublicationSeen{PublicationIdentity: s.publication, Seen: r.Server.WALEnd},
			Mapping:     s.layout.Mapping, Stream: s.cfg.Stream, Created: r.Stream.Created, Creating: true,
		}
		if r.revision, err = s.store.Save(ctx, rec, r.revision); err != nil {
			return fmt.Errorf("write the checkpoint record: %w", err)
		}
		r.Record = rec
	}
	start := r.Slot.Confirmed
	if !r.Slot.Exists {
		if start, err = s.pg.CreateSlot(ctx); err != nil {
			return err
		}
	}
	s.say(!r.Slot.Exists, "slot %s at %v", s.cfg.Slot, start)
	first := *r.Record
	first.Creating = false
	first.Mapping = s.layout.Mapping
	first.Publication = checkpoint.PublicationSeen{PublicationIdentity: s.publication, Seen: r.Server.WALEnd}
	first.Created = r.Stream.Created
	settings := s.cfg.Reorder.Settings()
	if !s.layout.Mapping.Keyed() {
		settings = settings.Unkeyed()
	}
	first.Places = []checkpoint.StoredPlace{{
		Place: outbox.Place{Due: start, Settings: settings, Timeline: r.Server.History.At(start)},
		Since: time.Now().UTC(),
	}}
	if _, err := s.store.Save(ctx, &first, r.revision); err != nil {
		return fmt.Errorf("write the checkpoint record: %w", err)
	}
	s.report("checkpoint record: made, first place %v", start)
	return nil
}

// existing looks at a set-up that is complete.
func (s *setup) existing(ctx context.Context, r readings) error {
	if r.Record.Mapping != s.layout.Mapping && r.Record.Mapping.Shard == s.layout.Mapping.Shard {
		return s.remap(ctx, r)
	}
	if err := s.resolve(r.Readings); err != nil {
		return err
	}
	s.report("slot %s: there, confirmed up to %v", s.cfg.Slot, r.Slot.Confirmed)
	return nil
}

// readings are what a start would read, and the record's revision.
type readings struct {
	checkpoint.Readings
	revision uint64
}

func (s *setup) read(ctx context.Context) (r readings, err error) {
	if r.Slot, err = s.pg.Slot(ctx); err != nil {
		return r, err
	}
	if r.Record, r.revision, err = s.store.Load(ctx); err != nil {
		return r, err
	}
	if r.Stream, err = s.conn.State(ctx); err != nil {
		return r, err
	}
	if r.Server, err = s.session.Server(ctx); err != nil {
		return r, err
	}
	r.Publication, r.Now = s.publication, time.Now()
	return r, nil
}

func (s *setup) resolve(r checkpoint.Readings) error {
	_, err := checkpoint.Resolve(wiring.Checkpoint(s.cfg, s.layout), r)
	return err
}

func (s *setup) say(created bool, format string, args ...any) {
	state := "there"
	if created {
		state = "made"
	}
	s.report("%s: %s", fmt.Sprintf(format, args...), state)
}
