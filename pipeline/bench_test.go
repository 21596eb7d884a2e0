package pipeline

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// BenchmarkPipeline is the cost of one event on its way from the bytes of the replication stream to a
// publisher that only counts: what decoder, buffer, proof, tracker and loop take together. The stages' own
// benchmarks say which of them it is.
func BenchmarkPipeline(b *testing.B) {
	const horizon = 20 * time.Millisecond
	gap := relay.Settings{Sort: outbox.ByGap, Gap: relay.Gap{Bound: 10 * time.Second,
		Cold: 100 * time.Millisecond, Memory: 16_384, First: 1}}
	window := func(horizon time.Duration) relay.Settings { return relay.Settings{Horizon: horizon} }
	for _, c := range []struct {
		name string
		set  relay.Settings
		flow
	}{
		{"tx=1", window(0), flow{docs: 1000, rows: 1, payload: 200}},
		{"tx=100", window(0), flow{docs: 1000, rows: 100, payload: 200}},
		{"tx=100,binary", window(0), flow{docs: 1000, rows: 100, payload: 200, binary: true}},
		{"tx=100,payload=1KB", window(0), flow{docs: 1000, rows: 100, payload: 1 << 10}},
		{"tx=100,payload=10KB", window(0), flow{docs: 1000, rows: 100, payload: 10 << 10}},
		{"tx=100,docs=1", window(0), flow{docs: 1, rows: 100, payload: 200}},
		{"tx=100,docs=100000", window(0), flow{docs: 100_000, rows: 100, payload: 200}},
		{"tx=1,horizon=20ms", window(horizon), flow{docs: 1000, rows: 1, payload: 200}},
		{"tx=100,horizon=20ms", window(horizon), flow{docs: 1000, rows: 100, payload: 200}},
		{"tx=1,gap", gap, flow{docs: 1000, rows: 1, payload: 200}},
		{"tx=100,gap", gap, flow{docs: 1000, rows: 100, payload: 200}},
		{"tx=100,gap,docs=100000", gap, flow{docs: 100_000, rows: 100, payload: 200}},
		{"tx=1,trace", window(0), flow{rows: 1}},
		{"tx=100,trace", window(0), flow{rows: 100}},
	} {
		b.Run(c.name, func(b *testing.B) {
			set := c.set
			set.MaxEvents, set.MaxBytes = relay.DefaultMaxEvents, relay.DefaultMaxBytes
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			s := newSource(b, c.flow)
			pub := &counter{want: uint64(b.N), enough: cancel, notify: make(chan struct{}, 1)}
			p := New(Config{
				Settings: set, StopTimeout: time.Minute, Registerer: nowhere{}, Scratch: memory{},
				Open: func(context.Context) (*Conns, error) {
					return &Conns{
						Source: s, JetStream: pub, Store: shelf(set), Decoder: decoderConfig,
						Binary: c.binary, Checkpoint: checkpoint.Config{Slot: "outflow", Stream: "OUTBOX",
							Publication: "outflow", Table: mapping.Table, Mapping: mapping},
					}, nil
				},
			})
			b.ReportAllocs()
			b.ResetTimer()
			if err := p.Run(ctx); err != nil {
				b.Fatal(err)
			}
			if pub.last < pub.want || pub.late > 0 {
				b.Fatalf("%d of %d events came out, %d late", pub.last, pub.want, pub.late)
			}
		})
	}
}

// flow is a WAL to measure with.
type flow struct {
	docs    int // 0: the edits of a recorded session
	rows    int // in a transaction
	payload int // bytes
	binary  bool
}

// lap is the beginning of each actor's name, which insert replaces: rows come again and again, each time of
// other actors, so that their counters are always the next ones.
const lap = "lap00000"

// insert is the message of a row.
type insert struct {
	data []byte
	lap  int // where lap is in it
}

// inserts are the messages of the flow's rows.
func (f flow) inserts(b *testing.B) (all []insert) {
	add := func(r row) {
		x := transaction{rows: []row{r}}
		data := x.messages(false, oidText, f.binary)[1].Data
		all = append(all, insert{data, bytes.Index(data, []byte(lap))})
	}
	if f.docs == 0 {
		ops, err := recording.Load(recording.FriendsForever)
		if err != nil {
			b.Fatal(err)
		}
		for _, op := range ops {
			actor := lap + op.Actor
			add(row{op.Doc, actor, fmt.Sprintf("%s:%020d", op.Actor, op.Counter), string(op.Payload)})
		}
		return all
	}
	payload := string(bytes.Repeat([]byte{'x'}, f.payload))
	for i := range min(1<<17, 64<<20/(f.payload+150)) {
		doc := i * 7919 % f.docs
		key := fmt.Sprintf("author-01:%020d", i/f.docs+1) // each document comes once in f.docs rows
		add(row{fmt.Sprintf("document-%06d", doc), lap + "author-01", key, payload})
	}
	return all
}

const firstLSN = outbox.LSN(0x1000000)

// source is a server that sends transactions without end, as fast as they are taken.
type source struct {
	flow
	rows    []insert
	next    int // row
	laps    int
	lsn     outbox.LSN
	now     int64
	batches chan *relay.Batch
	free    chan *parcel
	stop    chan struct{}
}

// parcel is a batch that is used again, with the memory for what is not the same each time.
type parcel struct {
	relay.Batch
	ends []byte
}

func newSource(b *testing.B, f flow) *source {
	s := &source{
		flow: f, rows: f.inserts(b), lsn: firstLSN, batches: make(chan *relay.Batch, 4),
		free: make(chan *parcel, 8), stop: make(chan struct{}),
	}
	for range cap(s.free) {
		p := new(parcel)
		p.Free = func() { s.free <- p }
		p.Free()
	}
	return s
}

func (s *source) run() {
	defer close(s.batches)
	relation := (&transaction{rows: []row{{}}}).messages(true, oidText, s.binary)[1]
	for {
		p := <-s.free
		p.Messages, p.ends = p.Messages[:0], p.ends[:0]
		for size := 0; size < 64<<10; { // what the replication connection brings at a time when there is more
			size += s.transaction(p, relation)
			relation.Data = nil
		}
		select {
		case s.batches <- &p.Batch:
		case <-s.stop:
			return
		}
	}
}

// transaction adds one to a parcel.
func (s *source) transaction(p *parcel, relation relay.WALMessage) (size int) {
	be := binary.BigEndian
	add := func(lsn outbox.LSN, b []byte) {
		p.Messages = append(p.Messages, relay.WALMessage{WALEnd: lsn, Data: b})
		size += len(b)
	}
	start, end := s.lsn+64, s.lsn+128
	s.lsn = end
	from := len(p.ends)
	p.ends = be.AppendUint32(be.AppendUint64(be.AppendUint64(append(p.ends, 'B'), uint64(start)),
		uint64(s.now)), 731)
	add(start, p.ends[from:])
	if relation.Data != nil {
		add(0, relation.Data)
	}
	for range s.flow.rows {
		from, row := len(p.ends), s.rows[s.next]
		p.ends = append(p.ends, row.data...)
		copy(p.ends[from+row.lap:], fmt.Appendf(nil, "lap%05d", s.laps))
		add(start, p.ends[from:])
		s.now += 10
		if s.next++; s.next == len(s.rows) { // the keys begin again: everything before leaves
			s.next, s.laps, s.now = 0, s.laps+1, s.now+1_000_000
		}
	}
	from = len(p.ends)
	p.ends = be.AppendUint64(be.AppendUint64(be.AppendUint64(append(p.ends, 'C', 0), uint64(start)),
		uint64(end)), uint64(s.now))
	add(end, p.ends[from:])
	return size
}

func (s *source) Server(context.Context) (relay.ServerState, error) {
	return relay.ServerState{
		SystemID: systemID, Database: "app", Version: 180000, History: relay.History{Timeline: timeline},
		WALEnd: firstLSN, WALSenderTimeout: time.Minute,
	}, nil
}

func (s *source) Slot(context.Context) (relay.SlotState, error) {
	return relay.SlotState{
		Exists: true, Plugin: "pgoutput", Database: "app", WALStatus: "reserved", SafeWALSize: -1,
		Confirmed: firstLSN, Restart: firstLSN,
	}, nil
}

func (s *source) Publication(context.Context) (relay.PublicationIdentity, error) {
	return relay.PublicationIdentity{OID: 1, TableOID: tableOID}, nil
}

func (s *source) Start(context.Context, outbox.LSN, bool) error {
	go s.run()
	return nil
}

func (s *source) Batches() <-chan *relay.Batch { return s.batches }
func (s *source) Err() error                   { return nil }
func (s *source) Confirm(outbox.LSN)           {}

func (s *source) Stop(context.Context) error {
	close(s.stop)
	return nil
}

func (s *source) Close() {}

// counter is a broker that acknowledges at once what was flushed, and every 50th message.
type counter struct {
	last, want uint64
	late       uint64
	acked      atomic.Uint64 // the checkpointer asks too
	enough     func()
	notify     chan struct{}
}

var counterCreated = time.Date(2024, 5, 1, 0, 0, 0, 0, time.UTC)

func (c *counter) Check(context.Context) error { return nil }
func (c *counter) Watch(context.Context) error { return nil }
func (*counter) Recent(context.Context, uint64, uint64, int) ([]outbox.Counter, error) {
	return nil, nil
}

func (*counter) NewestCut(context.Context, uint64) (*relay.Stored, error) { return nil, nil }
func (*counter) StoreCut(context.Context, outbox.Cut, uint64, uint64) error {
	return errors.New("there are no cuts here")
}

func (c *counter) Stored(context.Context, uint64, uint64, bool) ([]relay.Stored, error) {
	return nil, nil
}
func (c *counter) Lost() <-chan struct{}                      { return nil }
func (c *counter) Err() error                                 { return nil }
func (c *counter) Close()                                     {}
func (c *counter) Publisher(uint64, uint64, uint64) Publisher { return counting{c} }
func (c *counter) Resume(uint64) (Publisher, error) {
	return nil, errors.New("nothing fails here")
}

func (c *counter) State(context.Context) (relay.StreamState, error) {
	n := c.acked.Load()
	return relay.StreamState{Exists: true, Created: counterCreated, LastSeq: n, Messages: n, NewestSeq: n},
		nil
}

func (c *counter) Tail(ctx context.Context) (relay.StreamState, error) { return c.State(ctx) }

// counting is its publisher.
type counting struct{ *counter }

func (c counting) Full() bool { return false }

func (c counting) Publish(_ *relay.Event, h *outbox.Header) error {
	if h.Counter.Late {
		c.late++
	}
	if c.last++; c.last%50 == 0 {
		c.acked.Store(c.last)
	}
	if c.last == c.want {
		c.enough()
	}
	return nil
}

func (c counting) Flush(time.Time) time.Duration {
	c.acked.Store(c.last)
	return 0
}

func (c counting) Check(time.Time) error           { return nil }
func (c counting) Notify() <-chan struct{}         { return c.notify }
func (c counting) Acked() uint64                   { return c.acked.Load() }
func (c counting) Sent() uint64                    { return c.last }
func (c counting) Header(uint64) *outbox.Header    { return nil }
func (c counting) InFlight() (messages, bytes int) { return int(c.last - c.acked.Load()), 0 }

// store takes records and keeps none.
type store struct{ record *checkpoint.Record }

func shelf(set relay.Settings) store {
	return store{&checkpoint.Record{
		Slot: "outflow", Database: "app", SystemID: systemID, Mapping: mapping, Stream: "OUTBOX",
		Created: counterCreated,
		Publication: checkpoint.PublicationSeen{PublicationIdentity: relay.PublicationIdentity{OID: 1,
			TableOID: tableOID}, Seen: firstLSN},
		Checkpoints: []checkpoint.StoredCheckpoint{{
			Checkpoint: relay.Checkpoint{Due: firstLSN, Settings: set, Timeline: timeline},
			Since:      counterCreated,
		}},
	}}
}

func (s store) Load(context.Context) (*checkpoint.Record, uint64, error) { return s.record, 1, nil }

func (s store) SaveGaps(context.Context, []byte) error { return nil }

func (s store) Save(_ context.Context, _ *checkpoint.Record, revision uint64) (uint64, error) {
	return revision + 1, nil
}
