package repair

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/setup"
	"github.com/outflowhq/outflow/internal/wiring"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/sink"
)

const openTimeout = 30 * time.Second

// links are the connections of one attempt.
type links struct {
	layout  *wiring.Layout
	conn    *sink.Conn
	store   *checkpoint.Store
	js      jetstream.JetStream
	session *replication.Session // for what only a replication connection says
	pg      *replication.Setup
	pgc     replication.SetupConfig
	cc      checkpoint.Config
}

func (r *repair) open(ctx context.Context) (_ *links, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	l := &links{}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.layout, err = wiring.ReadLayout(ctx, r.cfg, r.log); err != nil {
		return nil, err
	}
	sc, err := wiring.Sink(r.cfg, l.layout, r.log)
	if err != nil {
		return nil, err
	}
	if l.conn, err = wiring.Connect(ctx, r.cfg, sc); err != nil {
		return nil, err
	}
	if l.js, err = l.conn.JetStream(); err != nil {
		return nil, err
	}
	l.store = wiring.Store(r.cfg, l.conn)
	l.cc = wiring.Checkpoint(r.cfg, l.layout)
	l.pgc = setup.SQLConfig(r.cfg, r.log)
	l.pgc.Columns = l.layout.Columns()
	if l.pg, err = replication.OpenSetup(ctx, l.pgc); err != nil {
		return nil, fmt.Errorf("postgres.url: %w", err)
	}
	if l.session, err = replication.Open(ctx, l.pgc.Config); err != nil {
		return nil, fmt.Errorf("postgres.url: %w", err)
	}
	if err := l.conn.CheckStream(ctx); err != nil {
		return nil, err
	}
	return l, l.store.CheckAlone(ctx)
}

func (l *links) close() {
	if l.pg != nil {
		l.pg.Close()
	}
	if l.session != nil {
		l.session.Close()
	}
	if l.conn != nil {
		l.conn.Close()
	}
}

// snapshot takes a snapshot of the table; nil if there is none.
func (l *links) snapshot(ctx context.Context, exported string) (*replication.Snapshot, error) {
	if !l.layout.Mapping.Source.Rows() {
		return nil, nil
	}
	return replication.OpenSnapshot(ctx, l.pgc.Config, exported)
}

// readings are what a start would read, with the record's revision.
type readings struct {
	checkpoint.Readings
	revision uint64
	corrupt  *outbox.Fault // the record is there and can't be read
}

// read reads slot, record, stream, server and publication, in this order.
func (l *links) read(ctx context.Context) (r readings, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if r.Slot, err = l.pg.Slot(ctx); err != nil {
		return r, err
	}
	r.Record, r.revision, err = l.store.Load(ctx)
	if f := outbox.FaultOf(err); f != nil && f.Class == outbox.Gap {
		r.corrupt, err = f, nil
	}
	if err != nil {
		return r, err
	}
	if r.Stream, err = l.conn.State(ctx); err != nil {
		return r, err
	}
	if r.Server, err = l.session.Server(ctx); err != nil {
		return r, err
	}
	r.Now = time.Now()
	if r.Slot.Exists || r.Record != nil || r.corrupt != nil || r.Stream.Exists {
		r.Publication, err = l.pg.Publication(ctx)
	}
	return r, err
}

// message is what is read of a message of the stream.
type message struct {
	seq    uint64
	header string // the Outflow header; "" if it has none
	stored time.Time
}

// stalled is how long the stream may bring nothing although there is more.
const stalled = 20 * time.Second

// messages calls f with each message of the stream from sequence from to the one at to, which must be there. An error of f ends it.
func (l *links) messages(ctx context.Context, stream string, from, to uint64, f func(message) error) error {
	if to == 0 || from > to {
		return nil
	}
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
		if err := f(message{meta.Sequence.Stream, m.Headers().Get(outbox.HeaderName), meta.Timestamp}); err != nil {
			return err
		}
		if meta.Sequence.Stream >= to {
			return nil
		}
	}
}
