package backfill

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/sink"
)

const openTimeout = 30 * time.Second

// slotPatience is how long to wait for a slot that is held: the server may take that long to notice that an outflow is gone.
const slotPatience = 15 * time.Second

// Links are the connections of one attempt.
type Links struct {
	Layout  *wiring.Layout
	Conn    *sink.Conn
	Store   *checkpoint.Store
	Session *replication.Session // for what only a replication connection says
	PG      *replication.Setup
	PGC     replication.SetupConfig
	CC      checkpoint.Config

	cfg config.Config
	log *slog.Logger
	js  jetstream.JetStream
}

// Open connects to both sides, and checks the stream and that the record is the only one of its bucket.
func Open(ctx context.Context, cfg config.Config, log *slog.Logger) (_ *Links, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	l := &Links{cfg: cfg, log: log}
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	if l.Layout, err = wiring.ReadLayout(ctx, cfg, log); err != nil {
		return nil, err
	}
	sc, err := wiring.Sink(cfg, l.Layout, log)
	if err != nil {
		return nil, err
	}
	if l.Conn, err = wiring.Connect(ctx, cfg, sc); err != nil {
		return nil, err
	}
	if l.js, err = l.Conn.API().JetStream(); err != nil {
		return nil, err
	}
	l.Store = wiring.Store(cfg, l.Conn)
	l.CC = wiring.Checkpoint(cfg, l.Layout)
	l.PGC = wiring.Setup(cfg, log)
	l.PGC.Columns = l.Layout.Needed()
	if l.PG, err = replication.OpenSetup(ctx, l.PGC); err != nil {
		return nil, err
	}
	if l.Session, err = replication.Open(ctx, l.PGC.Config); err != nil {
		return nil, err
	}
	if err := l.Conn.CheckStream(ctx); err != nil {
		return nil, err
	}
	return l, l.Store.CheckAlone(ctx)
}

// Close closes them.
func (l *Links) Close() {
	if l.PG != nil {
		l.PG.Close()
	}
	if l.Session != nil {
		l.Session.Close()
	}
	if l.Conn != nil {
		l.Conn.Close()
	}
}

// Settings are the configured ordering settings, for where nothing recorded says which were in force.
func (l *Links) Settings() relay.Settings {
	set := l.cfg.Reorder.Settings()
	if !l.Layout.Mapping.Keyed() {
		set = set.Unkeyed()
	}
	return set
}

// NewRecord returns a record without checkpoints for what was read.
func (l *Links) NewRecord(rd Readings) *checkpoint.Record {
	return &checkpoint.Record{
		Version: 1, Slot: l.cfg.Slot, Database: rd.Server.Database, SystemID: rd.Server.SystemID,
		Publication: checkpoint.PublicationSeen{PublicationIdentity: rd.Publication, Seen: rd.Server.WALEnd},
		Mapping:     l.Layout.Mapping, Stream: l.cfg.Stream, Created: rd.Stream.Created,
	}
}

// Readings are what a start would read, with the record's revision.
type Readings struct {
	checkpoint.Readings
	Revision uint64
	Corrupt  *outbox.Fault // the record is there and can't be read
}

// Read reads slot, record, stream, server and publication, in this order.
func (l *Links) Read(ctx context.Context) (r Readings, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if r.Slot, err = l.PG.Slot(ctx); err != nil {
		return r, err
	}
	r.Record, r.Revision, err = l.Store.Load(ctx)
	if f := outbox.FaultOf(err); f != nil && f.Class == outbox.Gap {
		r.Corrupt, err = f, nil
	}
	if err != nil {
		return r, err
	}
	l.Layout.Follow(l.cfg, r.Record)
	l.CC, l.PGC.OwnOnly = wiring.Checkpoint(l.cfg, l.Layout), l.Layout.Mapping.OwnOnly
	if r.Stream, err = l.Conn.State(ctx); err != nil {
		return r, err
	}
	if r.Server, err = l.Session.Server(ctx); err != nil {
		return r, err
	}
	r.Now = time.Now()
	if r.Slot.Exists || r.Record != nil || r.Corrupt != nil || r.Stream.Exists {
		r.Publication, err = l.PG.Publication(ctx)
	}
	return r, err
}

// AwaitSlot waits until nobody holds the slot. An outflow that holds it has found no gap, or is about to stop.
func (l *Links) AwaitSlot(ctx context.Context) error {
	for begun := time.Now(); ; {
		slot, err := l.PG.Slot(ctx)
		if err != nil || !slot.Active {
			return err
		}
		if time.Since(begun) > slotPatience {
			return SlotHeld(l.cfg.Slot, slot)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// SlotHeld is the fault of a slot that is in use.
func SlotHeld(name string, slot relay.SlotState) error {
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "slot_held", Message: fmt.Sprintf("slot %s is held by pid %d (%s)", name, slot.ActivePID, slot.Holder),
		Hint: "Stop outflow first. While it runs there is no gap: it stops when it finds one",
	}
}

// Message is what is read of a message in the stream.
type Message struct {
	Seq        uint64
	Subject    string
	Header     string // the Outflow header; "" if it has none
	DeadLetter string // why it is a dead letter; "" if it is not one
	Stored     time.Time
}

// stalled is how long the stream may bring nothing although there is more.
const stalled = 20 * time.Second

// Messages calls f with each message of the stream from sequence from to the one at to, which must be there. An error of f ends it.
func (l *Links) Messages(ctx context.Context, from, to uint64, f func(Message) error) error {
	if to == 0 || from > to {
		return nil
	}
	stream := l.cfg.Stream
	consumer, err := l.js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: max(from, 1), HeadersOnly: true,
	})
	if err != nil {
		return fmt.Errorf("read stream %s: %w", stream, err)
	}
	it, err := consumer.Messages(jetstream.PullMaxMessages(4096))
	if err != nil {
		return fmt.Errorf("read stream %s: %w", stream, err)
	}
	defer it.Stop()
	for {
		next, cancel := context.WithTimeout(ctx, stalled)
		m, err := it.Next(jetstream.NextContext(next))
		cancel()
		if err != nil {
			return fmt.Errorf("read stream %s: %w", stream, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return fmt.Errorf("read stream %s: %w", stream, err)
		}
		if err := f(Message{meta.Sequence.Stream, m.Subject(), m.Headers().Get(outbox.HeaderName), m.Headers().Get(sink.HeaderDeadLetter), meta.Timestamp}); err != nil {
			return err
		}
		if meta.Sequence.Stream >= to {
			return nil
		}
	}
}
