package backfill

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/sink"
)

const openTimeout = 30 * time.Second

// slotPatience is how long to wait for a slot that is held: the server may take that long to notice that an
// outflow is gone.
const slotPatience = 15 * time.Second

// Conns are the connections of one attempt.
type Conns struct {
	*conns.Conns
	PGC catalog.SetupConfig
	CC  checkpoint.Config

	cfg config.Config
	log *slog.Logger
}

// Open connects to both sides, and checks the stream and that the record is the only one of its bucket.
func Open(ctx context.Context, cfg config.Config, log *slog.Logger) (_ *Conns, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	l := &Conns{cfg: cfg, log: log}
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	if l.Conns, err = conns.Open(ctx, cfg, log); err != nil {
		return nil, err
	}
	l.CC, l.PGC = wiring.Checkpoint(cfg, l.Layout), wiring.Setup(cfg)
	l.PGC.Columns = l.Layout.Needed()
	defer wiring.WaitNATS(ctx, cfg)()
	if err := l.NATS.CheckStream(ctx); err != nil {
		return nil, err
	}
	return l, l.Store.CheckAlone(ctx)
}

// Settings are the configured ordering settings, for where nothing recorded says which were in force.
func (l *Conns) Settings() relay.Settings {
	set := l.cfg.Reorder.Settings()
	if !l.Layout.Mapping.Keyed() {
		set = set.Unkeyed()
	}
	return set
}

// NewRecord returns a record without checkpoints for what was read.
func (l *Conns) NewRecord(rd Readings) *checkpoint.Record {
	rec := &checkpoint.Record{
		Version: 1, Slot: l.cfg.Slot, Database: rd.Server.Database, SystemID: rd.Server.SystemID,
		Publication: checkpoint.PublicationSeen{PublicationIdentity: rd.Publication, Seen: rd.Server.WALEnd},
		Mapping:     l.Layout.Mapping, Stream: l.cfg.Stream, Created: rd.Stream.Created,
	}
	if l.cfg.Cluster.Shared() { // the next epoch: whoever had the one before begins anew
		rec.Owner, rec.Epoch = l.cfg.Cluster.ID, 1
		if rd.Record != nil {
			rec.Epoch = rd.Record.Epoch + 1
		}
	}
	return rec
}

// Readings are what a start would read.
type Readings struct {
	checkpoint.Readings
	Corrupt *outbox.Fault // the record exists and can't be read
	// Owned says that another cluster makes the stream; the record is as a start here would take it over.
	// nil: none does, or the store has refused it.
	Owned error

	Databases catalog.Databases // by which the records of this one are known
}

// Read reads what a start reads, and goes on if the record is corrupt.
func (l *Conns) Read(ctx context.Context) (r Readings, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	reader := l.Reader()
	load := reader.Record
	reader.Record = func(ctx context.Context) (*checkpoint.Record, uint64, error) {
		rec, revision, err := load(ctx)
		if f := outbox.FaultOf(err); f != nil && f.Class == outbox.Gap {
			r.Corrupt, err = f, nil
		}
		return rec, revision, err
	}
	if r.Readings, err = reader.Read(ctx); err != nil {
		return r, err
	}
	if r.Databases, err = l.Session.Databases(ctx); err != nil {
		return r, err
	}
	l.CC = wiring.Checkpoint(l.cfg, l.Layout)
	if r.Owned = checkpoint.OwnerFault(r.Record, l.CC.Cluster); r.Owned != nil {
		r.Record = r.Record.TakenBy(l.CC.Cluster)
	}
	if r.Slot.Exists || r.Record != nil || r.Corrupt != nil || r.Stream.Exists {
		r.Publication, err = l.Session.Publication(ctx, l.PGC.Columns)
	}
	return r, err
}

// DropSlot drops the slot, as [catalog.Setup.DropSlot] does.
func (l *Conns) DropSlot(ctx context.Context) (failover bool, err error) {
	pg, err := wiring.OpenSetup(ctx, l.cfg, l.PGC)
	if err != nil {
		return false, err
	}
	defer pg.Close()
	return pg.DropSlot(ctx)
}

// AwaitSlot waits until nobody holds the slot. An outflow that holds it has found no gap, or is about to
// stop.
func (l *Conns) AwaitSlot(ctx context.Context) error {
	defer progress.Wait(ctx, "waiting until nobody holds slot "+l.cfg.Slot)()
	for begun := time.Now(); ; {
		slot, err := l.Session.Slot(ctx)
		if err != nil || !slot.Active {
			return err
		}
		if time.Since(begun) > slotPatience {
			return slotHeld(l.cfg.Slot, slot)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// slotHeld is the fault of a slot that is in use.
func slotHeld(name string, slot relay.SlotState) error {
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "slot_held", Message: fmt.Sprintf("slot %s is held by pid %d (%s)", name,
			slot.ActivePID, slot.Holder),
	}
}

// Message is what is read of a message in the stream.
type Message struct {
	Seq        uint64
	Subject    string
	Header     string // the Outflow header; "" if it has none
	DeadLetter string // why it is a dead letter; "" if it is not one
	Stored     time.Time
	Cut        *outbox.Cut // nil: it is not a cut
	// Lost is what the broker had lost before it: the events of these sequences come again from it on.
	Lost outbox.Sequences
}

// MessageOf is the message at a sequence.
func MessageOf(seq uint64, subject string, h nats.Header, stored time.Time) Message {
	m := Message{Seq: seq, Subject: subject, Header: h.Get(outbox.HeaderName),
		DeadLetter: h.Get(sink.HeaderDeadLetter), Stored: stored, Cut: outbox.CutOf(subject, h)}
	from, err := strconv.ParseUint(h.Get(outbox.HeaderLost), 10, 64)
	if err == nil && 0 < from && from < seq {
		m.Lost = outbox.Sequences{{From: from, To: seq - 1}}
	}
	return m
}

// Removed is [Readings.Removed]. If it depends on them, it reads the messages that say what the broker had
// lost: the record has only the holes that a start needs.
func (l *Conns) Removed(ctx context.Context, rd *Readings) (uint64, error) {
	if rd.Removed(nil) == 0 {
		return 0, nil
	}
	var lost outbox.Sequences
	err := l.Messages(ctx, 1, rd.Stream.NewestSeq, func(m Message) error {
		if len(m.Lost) > 0 {
			lost = lost.With(m.Lost...)
		}
		return nil
	})
	return rd.Removed(lost), err
}

// Messages calls f with each message of the stream from sequence from to the one at to, which must exist, or
// until f returns an error.
func (l *Conns) Messages(ctx context.Context, from, to uint64, f func(Message) error) error {
	if to == 0 || from > to {
		return nil
	}
	js, err := l.NATS.API().JetStream()
	if err != nil {
		return err
	}
	from = max(from, 1)
	task := progress.Count(ctx, "reading stream "+l.cfg.Stream, "messages", int64(to-from+1))
	defer task.End()
	return jsapi.ReadStream(ctx, js, l.cfg.Stream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from, HeadersOnly: true,
	}, to, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		task.Set(int64(meta.Sequence.Stream - from + 1))
		return f(MessageOf(meta.Sequence.Stream, m.Subject(), m.Headers(), meta.Timestamp))
	})
}

// Others returns the records of the other slots of this database, under whatever name, and those that can't
// be read.
func (l *Conns) Others(ctx context.Context, rd Readings) ([]checkpoint.Other, error) {
	all, err := l.Store.Others(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the records of other slots: %w", err)
	}
	oid := l.Layout.Table.OID
	return slices.DeleteFunc(all, func(o checkpoint.Other) bool {
		r := o.Record
		return r != nil && (r.SystemID != rd.Server.SystemID ||
			!rd.Databases.Has(o.Slot, r.Database, r.OfTable("", oid), r.OfTable(l.PGC.Table, oid)))
	}), nil
}

// Readers are the slots of the others, as Others returns them, that read this table, or may: the record of a
// slot of this database names another one if the database was renamed since.
func (l *Conns) Readers(rd Readings, others []checkpoint.Other) partition.Readers {
	r := partition.Readers{May: map[string]string{}}
	for _, o := range others {
		switch {
		case o.Record == nil:
			r.May[o.Slot] = outbox.FaultOf(o.Err).Message +
				"; run the newest version of outflow, or repair or uninstall that Outflow"
		case !l.readsTable(o):
		case o.Record.Database != rd.Server.Database && rd.Databases.HasSlot(o.Slot):
			r.May[o.Slot] = fmt.Sprintf("its record is of database %q, as this one may have been called; "+
				"uninstall that Outflow if nobody needs it", o.Record.Database)
		default:
			r.Others = append(r.Others, o.Slot)
		}
	}
	return r
}

// readsTable reports whether, by the record of its slot, another Outflow reads this table. The record has the
// table's former name until init is run again, and that of an older build has no OID. A table that was
// dropped and made again has another OID, and the other's slot may bring its rows.
func (l *Conns) readsTable(o checkpoint.Other) bool {
	same := o.Record.Mapping.Table == l.PGC.Table ||
		o.Record.Publication.TableOID != 0 && o.Record.Publication.TableOID == l.Layout.Table.OID
	return same && !o.Record.LeftBehind()
}
