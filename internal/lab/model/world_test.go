package model

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

const timeline = 1

var (
	epoch    = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	mapping  = relay.Mapping{Table: "public.outbox", Doc: "doc_id", Actor: "actor_id", Key: "seq_key", Payload: "payload"}
	identity = relay.PublicationIdentity{OID: 16401, Xmin: 730, RelOID: 16402, RelXmin: 730}
)

// world is what outlives a session: PostgreSQL, the stream, the record, and the network between. Its time goes in steps of a second.
type world struct {
	wal     []*input
	rnd     *rand.Rand
	cfg     checkpoint.Config
	durable int
	now     int
	make    func(relay.Checkpoint) orderer

	messages []*message // by sequence; nil: lost
	synced   []int      // when each is on disk
	removed  int        // retention has removed all up to this sequence
	records  []revision
	revision uint64

	confirmed outbox.LSN
	earlier   []outbox.LSN // what was confirmed before
	wires     [][]sent     // what dead sessions sent, still on its way
	saves     []*save      // likewise

	killIn               int // steps until the process dies, 0: by chance alone
	lost, refused, holes int
}

type revision struct {
	number uint64
	doc    []byte
	rec    *checkpoint.Record // what doc says, once it was read
	at     int                // when it was stored
	synced int                // when it is on disk
}

type sent struct {
	m    *message
	last uint64 // the expected last sequence
	acks *[]ack // nil: no reply subject
}

type ack struct {
	seq uint64
	ok  bool
}

// save is a record on its way.
type save struct {
	doc      []byte
	last     uint64
	firm     bool // synced at once: one loss at a time
	landed   bool
	conflict bool
	revision uint64
}

func newWorld(wal []*input, first relay.Settings, durable int, rnd *rand.Rand, make func(relay.Checkpoint) orderer) *world {
	w := &world{wal: wal, rnd: rnd, durable: durable, make: make}
	w.cfg = checkpoint.Config{
		Slot: "outflow", Stream: "OUTBOX", Publication: "outflow", Table: mapping.Table, Mapping: mapping,
		DurableAfter: time.Duration(durable) * time.Second,
	}
	rec := &checkpoint.Record{
		Slot: w.cfg.Slot, Database: "app", SystemID: "7361530121234511111", Mapping: mapping, Stream: w.cfg.Stream, Created: epoch,
		Publication: checkpoint.PublicationSeen{PublicationIdentity: identity},
		Checkpoints: []checkpoint.StoredCheckpoint{{Checkpoint: relay.Checkpoint{Settings: first, Timeline: timeline}, Since: epoch}},
	}
	doc, err := rec.Encode()
	if err != nil {
		panic(err)
	}
	w.revision = 1
	w.records = []revision{{number: 1, doc: doc}}
	return w
}

func (w *world) clock() time.Time { return epoch.Add(time.Duration(w.now) * time.Second) }

// newest is the sequence of the newest message that can be read, 0 if none can.
func (w *world) newest() int {
	for q := len(w.messages); q > w.removed; q-- {
		if w.messages[q-1] != nil {
			return q
		}
	}
	return 0
}

func (w *world) readings() (checkpoint.Readings, uint64, error) {
	last := &w.records[len(w.records)-1]
	if last.rec == nil {
		var err error
		if last.rec, err = checkpoint.Decode(last.doc); err != nil {
			return checkpoint.Readings{}, 0, err
		}
	}
	c := *last.rec
	rec := &c
	rec.Checkpoints = slices.Clone(c.Checkpoints)
	rec.StoredAt(epoch.Add(time.Duration(last.at) * time.Second))
	r := checkpoint.Readings{
		Slot:   relay.SlotState{Exists: true, Plugin: "pgoutput", Database: "app", Confirmed: w.confirmed},
		Record: rec,
		Stream: relay.StreamState{Exists: true, Created: epoch, LastSeq: uint64(len(w.messages)), NewestSeq: uint64(w.newest())},
		Server: relay.ServerState{
			SystemID: rec.SystemID, Database: "app", History: relay.History{Timeline: timeline}, WALEnd: w.wal[len(w.wal)-1].lsn,
		},
		Publication: identity,
		Now:         w.clock(),
	}
	if n := w.newest(); n > 0 {
		h := w.messages[n-1].header
		r.Stream.Newest = &h
	}
	return r, last.number, nil
}

// stored are the messages above a sequence and up to another that can be read. All are compared: the rules make each of them again.
func (w *world) stored(above, upTo uint64) (all []relay.Stored) {
	for q := max(int(above), w.removed) + 1; q <= int(upTo); q++ {
		if m := w.messages[q-1]; m != nil {
			all = append(all, relay.Stored{Seq: uint64(q), Header: &m.header})
		}
	}
	return all
}

// arrive lets one message reach the server, which stores it only at the sequence that its sender predicted.
func (w *world) arrive(s sent) {
	ok := s.last == uint64(len(w.messages))
	if ok {
		w.messages = append(w.messages, s.m)
		w.synced = append(w.synced, w.now+w.durable)
	} else {
		w.refused++
	}
	if s.acks != nil {
		*s.acks = append(*s.acks, ack{s.last + 1, ok})
	}
}

// land lets a record reach the store, which compares and sets.
func (w *world) land(s *save) {
	s.landed = true
	if s.conflict = s.last != w.records[len(w.records)-1].number; s.conflict {
		return
	}
	w.revision++
	s.revision = w.revision
	synced := w.now + w.durable
	if s.firm {
		synced = w.now
	}
	w.records = append(w.records, revision{number: w.revision, doc: s.doc, at: w.now, synced: synced})
}

// powerLoss makes the broker forget what it stored less than durable_after ago, from any point on; stream and record separately.
func (w *world) powerLoss() {
	firm := 0
	for _, t := range w.synced {
		if t <= w.now {
			firm++
		}
	}
	cut := firm + w.rnd.IntN(len(w.messages)-firm+1)
	w.lost += len(w.messages) - cut
	readable := false
	for q := w.removed; q < cut; q++ {
		readable = readable || w.messages[q] != nil
	}
	if readable && w.rnd.Float64() < 0.3 { // the index survived: the sequence does not go back
		if cut < len(w.messages) {
			w.holes++
		}
		for q := cut; q < len(w.messages); q++ {
			w.messages[q] = nil
		}
		w.wires = nil // what was on its way to a server that died is gone
	} else {
		w.messages, w.synced = w.messages[:cut], w.synced[:cut]
	}
	w.removed = min(w.removed, cut)
	w.saves = nil
	oldest := 0
	for i, r := range w.records {
		if r.synced <= w.now {
			oldest = i
		}
	}
	w.records = w.records[:oldest+w.rnd.IntN(len(w.records)-oldest)+1]
	for i := range w.synced { // what has survived is on disk
		w.synced[i] = w.now
	}
	for i := range w.records {
		w.records[i].synced = min(w.records[i].synced, w.now)
	}
}

// retention removes from the front what is on disk, sometimes all there is.
func (w *world) retention() {
	firm := 0
	for _, t := range w.synced {
		if t <= w.now {
			firm++
		}
	}
	if w.newest() == len(w.messages) {
		w.removed = max(w.removed, w.rnd.IntN(firm+1))
	}
}

// between is what happens while no session lives.
func (w *world) between() {
	if w.rnd.Float64() < 0.2 {
		w.retention()
	}
	if w.rnd.Float64() < 0.2 {
		w.powerLoss()
	}
	if w.rnd.Float64() < 0.2 { // a long time: what was lost is not younger than durable_after any more
		w.now += w.rnd.IntN(2*w.durable + 2)
	}
	if w.rnd.Float64() < 0.1 && len(w.earlier) > 0 { // PostgreSQL crashed, and its slot is where it was at the last checkpoint
		w.confirmed = pick(w.rnd, w.earlier...)
	}
}
