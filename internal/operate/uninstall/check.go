package uninstall

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/slotread"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// refuse notes a reason not to remove anything, unless its code is accepted.
func (u *uninstall) refuse(code, hint, format string, args ...any) {
	r := Refusal{Code: code, Message: fmt.Sprintf(format, args...), Hint: hint}
	if slices.Contains(acceptable, code) {
		r.Hint += fmt.Sprintf(". To pass over it: --accept %s", code)
	}
	if slices.Contains(u.o.Accept, code) {
		u.rep.Accepted = append(u.rep.Accepted, r)
		return
	}
	u.rep.Refused = append(u.rep.Refused, r)
}

// foreign says why a slot of that name can't be Outflow's.
func (u *uninstall) foreign() *outbox.Fault {
	return checkpoint.Config{Slot: u.cfg.Slot, Stream: u.cfg.Stream}.ForeignSlot(u.slot, u.server.Database)
}

func (u *uninstall) ours() bool { return u.slot.Exists && u.foreign() == nil }

// check looks for what nobody has read, and for what is not ours to remove.
func (u *uninstall) check(ctx context.Context) error {
	u.checkRecord()
	if u.cfg.Cluster.Elsewhere() {
		return u.checkElsewhere(ctx)
	}
	if err := u.checkStandbys(ctx); err != nil {
		return err
	}
	if u.ours() {
		if err := u.checkSlot(ctx); err != nil {
			return err
		}
	}
	if u.o.Stream && u.stream.Exists {
		return u.checkStream(ctx)
	}
	return nil
}

// checkElsewhere looks at what a cluster has that stands by for another one's stream. Nothing is published
// from its slot that the home does not have, unless the stream is made from it now.
func (u *uninstall) checkElsewhere(ctx context.Context) error {
	if u.slot.Active {
		u.refuse("slot_held", "Stop it first", "slot %s is held by %s, server process %d", u.cfg.Slot,
			u.slot.Holder, u.slot.ActivePID)
	}
	if u.o.Stream {
		u.refuse("cluster_owner", "Leave out --with-stream", "stream %s is the home's", u.cfg.Stream)
	}
	if u.o.Gone == GoneNATS {
		return nil
	}
	home, _, err := wiring.HomeStore(u.cfg, u.conn).Load(ctx)
	if err != nil && outbox.FaultOf(err) == nil {
		return err
	}
	if home != nil && home.Owner == u.cfg.Cluster.ID {
		u.refuse("cluster_owner", "Start the home's `outflow run`, which takes the stream back, or another "+
			"cluster's, and run the command again", "this cluster makes stream %s, in epoch %d: what it has "+
			"of the home's rows may be in no message yet", u.cfg.Stream, home.Epoch)
	}
	return nil
}

// checkStandbys looks for clusters that stand by for this stream: their slots would keep WAL for ever.
func (u *uninstall) checkStandbys(ctx context.Context) error {
	if !u.cfg.Cluster.Shared() || u.o.Gone == GoneNATS {
		return nil
	}
	clusters, err := u.store.Standbys(ctx)
	for _, n := range clusters {
		u.refuse(codeStandby, "Stop that cluster's outflow, and run `outflow uninstall` there first",
			"cluster %d stands by for stream %s", n, u.cfg.Stream)
	}
	return err
}

func (u *uninstall) checkRecord() {
	rec := u.record
	switch {
	case u.corrupt != nil:
		u.refuse(codeUnknown, "Look at it, or put it back (`outflow explain "+u.corrupt.Code+"`)",
			"whose slot %s is nobody can tell: %s", u.cfg.Slot, u.corrupt.Message)
	case rec == nil && u.ours() && u.o.Gone == GoneNATS:
		u.refuse(codeUnknown, "Look in pg_replication_slots who else may use it",
			"the checkpoint record is gone with NATS: nothing shows that slot %s is Outflow's", u.cfg.Slot)
	case rec == nil && u.ours():
		u.refuse(codeUnknown,
			"Correct slot, stream and nats.url if this is another outflow's, or a subscription's",
			"there is no checkpoint record of slot %s for stream %s: nothing shows that the slot is "+
				"Outflow's", u.cfg.Slot, u.cfg.Stream)
	case rec == nil:
	case rec.SystemID != u.server.SystemID || rec.Database != u.server.Database &&
		!u.databases.Renamed(rec.Database, rec.OfTable("", u.tableOID)):
		u.refuse(codeServer, "Correct postgres.url",
			"the checkpoint record is of database %s of server %s, this is database %s of server %s",
			rec.Database, rec.SystemID, u.server.Database, u.server.SystemID)
	case rec.Repairing != "":
		u.refuse(codeUnfinished, "Let it finish first: run it again",
			"%s has not finished: rows of the table may be in no message", unfinished(rec.Repairing))
	}
}

func unfinished(repairing string) string {
	if repairing == "snapshot" {
		return "outflow init --snapshot"
	}
	return "outflow repair --accept " + repairing
}

func (u *uninstall) checkSlot(ctx context.Context) error {
	if u.slot.Active {
		u.refuse("slot_held", "Stop it first; `outflow drain` says when it is safe to",
			"slot %s is held by %s, server process %d", u.cfg.Slot, u.slot.Holder, u.slot.ActivePID)
		return nil
	}
	connected, err := u.pg.Connected(ctx)
	if err != nil {
		return fmt.Errorf("list the connections: %w", err)
	}
	if len(connected) > 0 {
		u.rep.Notes = append(u.rep.Notes, fmt.Sprintf("connected for slot %s: %s. Stop them first: when "+
			"the slot is gone, an outflow run that stands by ends with exit code 4, and outflow maintain "+
			"goes on and can do nothing", u.cfg.Slot,
			strings.Join(connected, ", ")))
	}
	return u.checkPublished(ctx)
}

const drainFirst = "Stop the writers, run `outflow drain`, then run the command again"

// checkPublished looks for events that only the slot has.
func (u *uninstall) checkPublished(ctx context.Context) error {
	refuse := func(format string, args ...any) error {
		u.refuse(codeUnpublished, drainFirst, format, args...)
		return nil
	}
	if u.slot.Invalidation != "" || u.slot.WALStatus == "lost" {
		u.refuse(codeUnpublished, "`outflow repair` finds the rows that are in no message",
			"slot %s is lost (%s): what it held and was not published can't be told", u.cfg.Slot,
			u.slot.Invalidation)
		return nil
	}
	from, mapping := relay.Checkpoint{Due: u.slot.Confirmed}, u.mapping(ctx)
	if rec := u.record; rec != nil && len(rec.Checkpoints) > 0 {
		newest := u.newest()
		if n := len(newest.Holds); n > 0 {
			return refuse("gap mode holds back events of %d sequences, the oldest in the transaction at %v",
				n, newest.Holds[0].Oldest.LSN)
		}
		// a process that was killed may have published more than the record says
		if end := u.end(); u.stream.Exists && end > newest.Seq && newest.Due >= u.slot.Confirmed {
			return refuse("the stream's newest message is at sequence %d, the checkpoint record's at %d: "+
				"outflow was killed, and which events are published is known after the next start", end,
				newest.Seq)
		}
		if newest.Due >= u.slot.Confirmed {
			from = newest
		}
		// what is not confirmed may still be lost with the end of the broker's files, and the WAL is what
		// brings it back
		if n := u.unconfirmed(); n > 0 && !u.o.Stream {
			return refuse("%s %s been in stream %s for less than sink.durable_after (%v): not confirmed",
				units.Of(n, "message"), units.Agree(n, "has", "have"), u.cfg.Stream,
				u.cfg.Sink.DurableAfter)
		}
	}
	if mapping == nil {
		return refuse("table and record are gone: which events slot %s holds can't be told", u.cfg.Slot)
	}
	table := uint32(0)
	if u.record != nil {
		table = u.record.Publication.TableOID
	}
	if mapping.Source.Rows() && table == 0 {
		t, err := u.pg.Table(ctx)
		if f := outbox.FaultOf(err); f != nil && f.Code == "table_missing" {
			return refuse("table %s is gone: which of its rows slot %s holds can't be told", mapping.Table,
				u.cfg.Slot)
		}
		if err != nil {
			return err
		}
		table = t.OID
	}
	busy := false
	if u.o.Yes && table != 0 {
		var err error
		if busy, err = u.lockTable(ctx, table); err != nil {
			return err
		}
	}
	// before the WAL is read, so that what commits meanwhile is found there
	if open, err := u.pg.Writers(ctx, table); err != nil {
		return fmt.Errorf("look for open transactions: %w", err)
	} else if len(open) > 0 {
		u.refuse(codeUnpublished, "Let them end (`COMMIT PREPARED` or `ROLLBACK PREPARED` those that are "+
			"prepared), run `outflow drain`, then run the command again",
			"what %s writes to table %s may not be committed yet, and would be in no message",
			strings.Join(open, ", "), mapping.Table)
		return nil
	} else if busy {
		u.refuse(codeUnpublished, "Stop what works on the table, or try it again",
			"table %s could not be locked against writing for %v", mapping.Table, lockWait)
		return nil
	}
	u.o.Progress("reading the %d bytes of WAL that slot %s holds", u.server.WALEnd-u.slot.Restart, u.cfg.Slot)
	found, err := slotread.CountUnpublished(ctx, u.cfg, table, *mapping, from, u.log)
	switch f := outbox.FaultOf(err); {
	case f != nil && f.Code == relay.CodeSlotInUse:
		u.refuse("slot_held", "Stop it first", "slot %s was taken by somebody else meanwhile", u.cfg.Slot)
		return nil
	case f != nil && f.Class != outbox.Transient:
		return refuse("what slot %s holds can't be read: %s", u.cfg.Slot, f.Message)
	case err != nil:
		return err
	case found.Events > 0:
		return refuse("%s in slot %s %s not published, the first in the transaction at %v, of %v",
			units.Of(found.Events, "event"), u.cfg.Slot, units.Agree(found.Events, "is", "are"),
			found.First.LSN, relay.CommitTime(found.First.Time))
	}
	return nil
}

// lockWait is how long the lock on the table is waited for.
const lockWait = 5 * time.Second

// lockTable keeps everybody from writing to the table until the slot is dropped. It is busy if others hold
// locks on it all the time. A role without the right to lock it may still uninstall.
func (u *uninstall) lockTable(ctx context.Context, table uint32) (busy bool, err error) {
	conn, err := postgres.Connect(ctx, u.cfg.Postgres.URL)
	if err != nil {
		return false, err
	}
	u.lock = conn
	var name string
	if err := conn.QueryRow(ctx, `SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c
		JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1`, table).Scan(&name); err != nil {
		if errors.Is(err, pgx.ErrNoRows) {
			return false, nil // it is gone
		}
		return false, fmt.Errorf("look for the table: %w", err)
	}
	_, err = conn.Exec(ctx, fmt.Sprintf("BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0; "+
		"SET LOCAL lock_timeout = %d; LOCK TABLE %s IN SHARE MODE", lockWait.Milliseconds(), name))
	switch postgres.SQLState(err) {
	case "":
		return false, err
	case postgres.StateLockNotAvailable:
		busy = true
	default:
		u.rep.Notes = append(u.rep.Notes, fmt.Sprintf("table %s could not be locked (%v): what is committed "+
			"until the slot is dropped stays a row of the table", name, err))
	}
	postgres.Close(conn)
	u.lock = nil
	return busy, nil
}

// end is the sequence of the stream's newest message. The broker may have lost those up to the last sequence:
// then the slot brings again what was in them.
func (u *uninstall) end() uint64 { return cmp.Or(u.stream.NewestSeq, u.stream.LastSeq) }

// newest is the newest checkpoint that the stream bears out, as a start takes it.
func (u *uninstall) newest() relay.Checkpoint {
	all := u.record.Checkpoints
	i := len(all) - 1
	for u.stream.Exists && i > 0 && all[i].Seq > u.end() && !u.durable(i) {
		i--
	}
	return all[i].Checkpoint
}

// durable reports whether the slot's confirmed LSN shows a checkpoint to be durable. Of several that start at
// that LSN it is the oldest.
func (u *uninstall) durable(i int) bool {
	all := u.record.Checkpoints
	return all[i].Start() <= u.slot.Confirmed && (i == 0 || all[i-1].Start() < all[i].Start())
}

// unconfirmed counts the messages behind the newest checkpoint that is durable.
func (u *uninstall) unconfirmed() uint64 {
	for i, p := range slices.Backward(u.record.Checkpoints) {
		if u.durable(i) {
			return u.end() - min(p.Seq, u.end())
		}
	}
	return 0 // no checkpoint covers it: a gap, and outflow run says which
}

// mapping is that of the record, else that of the configuration; nil if neither is known.
func (u *uninstall) mapping(ctx context.Context) *relay.Mapping {
	if u.record != nil {
		return &u.record.Mapping
	}
	l, err := wiring.Apply(ctx, u.cfg, u.pg)
	if err != nil {
		return nil
	}
	return &l.Mapping
}

// maxNamed is how many consumers a refusal names.
const maxNamed = 10

// checkStream looks for consumers that have not read all of the stream that is to go.
func (u *uninstall) checkStream(ctx context.Context) error {
	for _, o := range u.others {
		if o.Stream == u.cfg.Stream {
			u.refuse("other_slot", "Uninstall that one first, or leave out --with-stream",
				"the outflow of slot %s publishes to stream %s as well", o.Slot, u.cfg.Stream)
		}
	}
	const readFirst = "Let them read it, or delete those that nobody needs with `nats consumer rm`"
	js, err := u.conn.API().JetStream()
	if err != nil {
		return err
	}
	stream, err := js.Stream(ctx, u.cfg.Stream)
	if err != nil {
		return fmt.Errorf("stream %s: %w", u.cfg.Stream, err)
	}
	var behind []string
	list := stream.ListConsumers(ctx)
	for c := range list.Info() {
		if n := c.NumPending + uint64(c.NumAckPending); n > 0 && c.Config.Durable != "" {
			behind = append(behind, fmt.Sprintf("%s (%s)", c.Name, units.Of(n, "message")))
		}
	}
	if err := list.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		u.refuse(codeUnread, readFirst, "the consumers of stream %s could not be listed (%v)", u.cfg.Stream,
			err)
	}
	if n := len(behind); n > 0 {
		slices.Sort(behind)
		u.refuse(codeUnread, readFirst, "%s %s not read all of stream %s: %s",
			units.Of(n, "consumer"), units.Agree(n, "has", "have"), u.cfg.Stream,
			strings.Join(behind[:min(n, maxNamed)], ", "))
	}
	if u.o.Gone == GonePostgres {
		return nil
	}
	return u.checkParked(ctx)
}

// checkParked looks for parked events in this database: they refer to the stream's sequences.
func (u *uninstall) checkParked(ctx context.Context) error {
	conn, err := postgres.Connect(ctx, u.cfg.Postgres.URL)
	if err != nil {
		return err
	}
	defer postgres.Close(conn)
	rows, err := conn.Query(ctx, `SELECT n.nspname, c.relname FROM pg_class c
		JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_class o ON o.relnamespace = n.oid
		WHERE c.relname = 'outflow_parked' AND o.relname = 'outflow_consumer' AND c.relkind = 'r'
		ORDER BY 1 LIMIT 16`)
	if err != nil {
		return fmt.Errorf("look for parked events: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (t [2]string, err error) {
		return t, row.Scan(&t[0], &t[1])
	})
	if err != nil {
		return fmt.Errorf("look for parked events: %w", err)
	}
	for _, t := range found {
		var events int
		parked, of := pgx.Identifier{t[0], t[1]}, pgx.Identifier{t[0], "outflow_consumer"}
		err := conn.QueryRow(ctx, fmt.Sprintf("SELECT count(*) FROM %s p JOIN %s c USING (name) "+
			"WHERE c.stream = $1", parked.Sanitize(), of.Sanitize()),
			u.cfg.Stream).Scan(&events)
		if err != nil {
			return fmt.Errorf("count the parked events of schema %s: %w", t[0], err)
		}
		if events > 0 {
			u.refuse(codeUnread, "Release them with `outflow parked retry` or `outflow parked skip`",
				"%s of stream %s %s parked in schema %s", units.Of(events, "event"),
				u.cfg.Stream, units.Agree(events, "is", "are"), t[0])
		}
	}
	return nil
}
