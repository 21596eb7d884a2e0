package uninstall

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/operate/parts"
	"github.com/outflowhq/outflow/internal/operate/sqlapi"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// inverses say of each part what becomes of it.
var inverses = map[parts.Part]func(u *uninstall, ctx context.Context) (Step, error){
	parts.Function:    (*uninstall).function,
	parts.Slot:        (*uninstall).dropSlot,
	parts.Publication: (*uninstall).publication,
	parts.Stream:      (*uninstall).removeStream,
	parts.Record:      (*uninstall).removeRecord,
	parts.Bucket:      (*uninstall).bucket,
	parts.Counters:    (*uninstall).counters,
	parts.States:      (*uninstall).states,
	parts.Table:       (*uninstall).keepTable,
}

// order is that of the removal, which the comment of the package argues. What stays comes last.
var order = []parts.Part{parts.Function, parts.Slot, parts.Publication, parts.Stream, parts.Record,
	parts.Bucket, parts.Counters, parts.States, parts.Table}

func (u *uninstall) plan(ctx context.Context) error {
	for _, part := range order {
		if gone := u.gone(part); gone != "" {
			u.rep.Parts = append(u.rep.Parts, Step{Part: part, Action: None, Why: gone + " is gone"})
			continue
		}
		step, err := inverses[part](u, ctx)
		if err != nil {
			return err
		}
		step.Part = part
		u.rep.Parts = append(u.rep.Parts, step)
	}
	return nil
}

// gone names the side that had a part and is gone; "" if it is there.
func (u *uninstall) gone(part parts.Part) string {
	inNATS := part == parts.Stream || part == parts.Record || part == parts.Bucket
	switch {
	case u.o.Gone == GoneNATS && inNATS:
		return "NATS"
	case u.o.Gone == GonePostgres && !inNATS:
		return "PostgreSQL"
	}
	return ""
}

// sharing names the slots whose records say that they read the same table.
func (u *uninstall) sharing() (slots []string) {
	for _, o := range u.others {
		if u.here(o) && o.Record.Mapping.Table == u.table {
			slots = append(slots, o.Slot)
		}
	}
	return slots
}

// here reports whether a record is of a slot of this database, under whatever name, that was not uninstalled.
func (u *uninstall) here(o checkpoint.Other) bool {
	r := o.Record
	return r != nil && r.SystemID == u.server.SystemID && !r.LeftBehind() && u.databases.Has(o.Slot,
		r.Database, r.OfTable("", u.tableOID), r.OfTable(u.table, u.tableOID))
}

func (u *uninstall) function(ctx context.Context) (Step, error) {
	s := Step{Name: sqlapi.Name, Action: None}
	text := "pg_logical_emit_message"
	if u.table != "" {
		schema, name, err := catalog.SplitTable(u.table)
		if err != nil {
			return s, err
		}
		text = pgx.Identifier{schema, name}.Sanitize()
	}
	all, err := u.pg.Functions(ctx, sqlapi.Schema, sqlapi.Function, text)
	if err != nil || len(all) == 0 {
		return s, err
	}
	var ours []string
	for _, f := range all {
		if f.Has {
			ours = append(ours, f.Signature)
		}
	}
	s.Action = Keep
	switch slots := u.sharing(); {
	case len(ours) == 0:
		s.Why = "it writes to another table"
	case len(slots) > 0:
		s.Why = "slot " + strings.Join(slots, ", ") + " reads the same table"
	case !u.o.SQLAPI:
		s.Why = "services may call it; --sql-api removes it"
	default:
		s.Action = Remove
		for _, name := range sqlapi.ConsumerFunctions() {
			all, err := u.pg.Functions(ctx, sqlapi.Schema, name, "")
			if err != nil {
				return s, err
			}
			for _, f := range all {
				ours = append(ours, f.Signature)
			}
		}
		s.do = func(ctx context.Context) error { return u.pg.DropFunctions(ctx, sqlapi.Schema, ours) }
	}
	return s, nil
}

func (u *uninstall) dropSlot(context.Context) (Step, error) {
	s := Step{Name: u.cfg.Slot, Action: None}
	switch f := u.foreign(); {
	case f != nil:
		s.Action, s.Why = Keep, f.Message
	case u.slot.Exists:
		s.Action = Remove
		s.Why = fmt.Sprintf("confirmed up to %v, of WAL that ends at %v", u.slot.Confirmed, u.server.WALEnd)
		s.do = func(ctx context.Context) error {
			if u.lock != nil { // it must have been there all the time
				if _, err := u.lock.Exec(ctx, "SELECT"); err != nil {
					return fmt.Errorf("the lock on the table was lost: %w", err)
				}
			}
			_, err := u.pg.DropSlot(ctx)
			if u.lock != nil {
				postgres.Close(u.lock)
				u.lock = nil
			}
			return err
		}
	}
	return s, nil
}

func (u *uninstall) publication(ctx context.Context) (Step, error) {
	s := Step{Name: u.cfg.Publication, Action: None}
	use, err := u.pg.PublicationUse(ctx)
	if err != nil || !use.Exists {
		return s, err
	}
	s.Action = Keep
	switch users := u.publicationUsers(use); {
	case len(use.Readers) > 0:
		s.Why = strings.Join(use.Readers, ", ") + " reads it now"
	case len(users) > 0:
		s.Why = "slot " + strings.Join(users, ", ") + " reads it"
	case u.o.Publication:
		s.Action = Remove
	case use.Differs != "":
		s.Why = use.Differs + ", as outflow init makes none; --with-publication drops it"
	case len(u.unaccounted(use)) > 0:
		s.Why = "slot " + strings.Join(u.unaccounted(use), ", ") + " may read it; --with-publication drops it"
	default:
		s.Action = Remove
	}
	if s.Action == Remove {
		s.do = u.pg.DropPublication
		if !use.Owned { // else the slot would be gone before the server says so
			u.refuse("no_right", "Run it as the owner of the publication",
				"the role may not drop publication %s", u.cfg.Publication)
		}
	}
	return s, nil
}

// publicationUsers are the slots whose records name the publication.
func (u *uninstall) publicationUsers(use catalog.PublicationUse) (slots []string) {
	for _, o := range u.others {
		if u.here(o) && o.Record.Publication.OID == use.OID {
			slots = append(slots, o.Slot)
		}
	}
	return slots
}

// unaccounted are the other slots of which no record says what they read.
func (u *uninstall) unaccounted(use catalog.PublicationUse) []string {
	return slices.DeleteFunc(slices.Clone(use.Slots), func(slot string) bool {
		return slices.ContainsFunc(u.others, func(o checkpoint.Other) bool {
			return u.here(o) && o.Slot == slot && o.Record.Publication.OID != 0
		})
	})
}

func (u *uninstall) removeStream(context.Context) (Step, error) {
	s := Step{Name: u.cfg.Stream, Action: None}
	switch {
	case !u.stream.Exists:
	case u.cfg.Cluster.Elsewhere():
		s.Action, s.Why = Keep, "it is the home's"
	case u.o.Stream:
		s.Action, s.Why = Remove, "with "+units.Of(u.stream.Messages, "message")
		s.do = func(ctx context.Context) error { return u.deleteStream(ctx, u.cfg.Stream) }
	default:
		s.Action = Keep
		s.Why = "it has " + units.Of(u.stream.Messages, "message") + "; --with-stream removes it"
	}
	return s, nil
}

func (u *uninstall) deleteStream(ctx context.Context, name string) error {
	js, err := u.conn.API().JetStream()
	if err == nil {
		err = js.DeleteStream(ctx, name)
	}
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return fmt.Errorf("remove stream %s: %w", name, err)
	}
	return nil
}

// leaves reports whether a stream stays behind which init can go on.
func (u *uninstall) leaves() bool {
	return u.stream.LastSeq > 0 && !u.o.Stream && !u.cfg.Cluster.Elsewhere() && u.record != nil &&
		(u.record.Created.Equal(u.stream.Created))
}

func (u *uninstall) removeRecord(context.Context) (Step, error) {
	s := Step{Name: u.cfg.Slot, Action: None}
	if u.cfg.Cluster.Elsewhere() {
		s.Name, s.Why = fmt.Sprintf("of cluster %d beside it", u.cfg.Cluster.ID), "the home's stays"
	}
	switch {
	case u.record == nil && u.corrupt == nil:
	case u.leaves():
		s.Action = Keep
		s.Why = fmt.Sprintf("it says that init goes on behind sequence %d of the stream", u.stream.LastSeq)
		if u.slot.Exists || u.record.Uninstalled(u.stream) != u.stream.LastSeq {
			s.do = u.retire
		}
	default:
		s.Action = Remove
		s.do = func(ctx context.Context) error { return u.store.Remove(ctx, u.revision) }
	}
	return s, nil
}

// retire closes the stream's ingress to an outflow that still knows it, and lets the record say where the
// stream ends.
func (u *uninstall) retire(ctx context.Context) error {
	if err := u.conn.RenewIngress(ctx); err != nil {
		return fmt.Errorf("give stream %s a new ingress: %w", u.cfg.Stream, err)
	}
	now, err := u.conn.State(ctx)
	if err != nil {
		return err
	}
	rec := checkpoint.Record{Slot: u.record.Slot, Database: u.record.Database, SystemID: u.record.SystemID,
		Publication: u.record.Publication, Mapping: u.record.Mapping, Stream: u.record.Stream,
		Created: u.record.Created, Creating: true, Base: now.LastSeq}
	_, err = u.store.Save(ctx, &rec, u.revision)
	return err
}

func (u *uninstall) bucket(ctx context.Context) (Step, error) {
	name := checkpoint.Bucket(u.cfg.Stream)
	s := Step{Name: name, Action: None}
	there, err := u.store.CheckBucket(ctx)
	if !there {
		return s, err
	}
	s.Action = Keep
	if u.cfg.Cluster.Elsewhere() {
		s.Why = "the home's record is in it"
		return s, nil
	}
	switch shared := slices.ContainsFunc(u.others, func(o checkpoint.Other) bool {
		return o.Stream == u.cfg.Stream
	}); {
	case shared:
		s.Why = "other slots have records in it"
	case u.stream.Exists && !u.o.Stream:
		s.Why = "the stream stays"
	case u.unlisted != nil:
		s.Why = fmt.Sprintf("whether other slots have records in it is not known: %v", u.unlisted)
	default:
		s.Action = Remove
		s.do = func(ctx context.Context) error { return u.deleteStream(ctx, "KV_"+name) }
	}
	return s, nil
}

func (u *uninstall) counters(ctx context.Context) (Step, error) {
	s := Step{Action: None}
	name, err := sqlapi.CounterTable(cmp.Or(u.table, u.cfg.Table))
	if err != nil {
		return s, err
	}
	s.Name = name
	there, err := u.pg.HasTable(ctx, name)
	if err == nil && there {
		s.Action, s.Why = Keep, "where the counters of package producer and outflow.enqueue are"
	}
	return s, err
}

func (u *uninstall) states(ctx context.Context) (Step, error) {
	s := Step{Action: None}
	table := cmp.Or(u.table, u.cfg.Table)
	schema, _, err := catalog.SplitTable(table)
	if err != nil {
		return s, err
	}
	s.Name = pgx.Identifier{schema, catalog.PartitionStates}.Sanitize()
	there, err := u.pg.HasTable(ctx, s.Name)
	if err != nil {
		return s, err
	}
	former, err := u.pg.StatesElsewhere(ctx, table)
	var names []string
	if there {
		names = append(names, s.Name)
	}
	why := "it says which detached partitions there are, and that their rows are published"
	for _, f := range former {
		names = append(names, f.Table)
		if f.Doubt != "" {
			why += fmt.Sprintf("; %s %s: it may be another outbox's", f.Table, f.Doubt)
		}
	}
	if err == nil && len(names) > 0 {
		s.Name, s.Action, s.Why = strings.Join(names, ", "), Keep, why
	}
	return s, err
}

func (u *uninstall) keepTable(context.Context) (Step, error) {
	if u.table == "" {
		return Step{Action: None}, nil
	}
	return Step{Name: u.table, Action: Keep, Why: "it is never dropped"}, nil
}
