package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
)

// JetStream keeps the offsets in a key-value bucket, outflow-consumers-<stream>, for handlers whose effect is
// not in PostgreSQL. One instance has all partitions, the others stand by. What was handled shortly before a
// crash is handled again, in the same order: at least once. An event that fails for good goes to
// [Config.OnPoison], as there is no table to park it in.
func JetStream() Offsets { return bucketOffsets{} }

type bucketOffsets struct{}

// Bucket is the name of the bucket in which [JetStream] keeps the offsets, one key for each consumer.
func Bucket(stream string) string { return "outflow-consumers-" + stream }

func (bucketOffsets) open(ctx context.Context, js jetstream.JetStream, cfg *Config) (store, error) {
	if js == nil {
		return nil, errors.New("consumer: JetStream marks without a JetStream context")
	}
	kv, err := js.KeyValue(ctx, Bucket(cfg.Stream))
	if errors.Is(err, jetstream.ErrBucketNotFound) && !cfg.NoCreate {
		var stream jetstream.Stream
		if stream, err = js.Stream(ctx, cfg.Stream); err == nil {
			kv, err = js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
				Bucket: Bucket(cfg.Stream), History: 64, Replicas: stream.CachedInfo().Config.Replicas,
				Description: "how far Outflow's consumers are",
			})
		}
	}
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", Bucket(cfg.Stream), err)
	}
	return newDocumentStore(bucketCell{kv, cfg.Name}, cfg), nil
}

// cell is one value that is replaced by compare-and-set.
type cell interface {
	load(ctx context.Context) (value []byte, revision uint64, err error) // nil, 0: no value yet
	save(ctx context.Context, value []byte, revision uint64) (uint64, error)
}

type bucketCell struct {
	kv  jetstream.KeyValue
	key string
}

func (b bucketCell) load(ctx context.Context) ([]byte, uint64, error) {
	e, err := b.kv.Get(ctx, b.key)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	return e.Value(), e.Revision(), nil
}

func (b bucketCell) save(ctx context.Context, value []byte, revision uint64) (uint64, error) {
	var r uint64
	var err error
	if revision == 0 {
		r, err = b.kv.Create(ctx, b.key, value)
	} else {
		r, err = b.kv.Update(ctx, b.key, value, revision)
	}
	if errors.Is(err, jetstream.ErrKeyExists) {
		err = errMoved
	}
	return r, err
}

// Memory keeps the offsets in this process, for tests: at least once. Consumers that share it and have the
// same name are instances of one.
func Memory() Offsets { return &memoryOffsets{cells: map[string]*memoryCell{}} }

type memoryOffsets struct {
	mu    sync.Mutex
	cells map[string]*memoryCell
}

func (m *memoryOffsets) open(_ context.Context, _ jetstream.JetStream, cfg *Config) (store, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cells[cfg.Name] == nil {
		m.cells[cfg.Name] = &memoryCell{}
	}
	return newDocumentStore(m.cells[cfg.Name], cfg), nil
}

type memoryCell struct {
	mu       sync.Mutex
	value    []byte
	revision uint64
}

func (c *memoryCell) load(context.Context) ([]byte, uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.value, c.revision, nil
}

func (c *memoryCell) save(_ context.Context, value []byte, revision uint64) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if revision != c.revision {
		return 0, errMoved
	}
	c.value, c.revision = value, c.revision+1
	return c.revision, nil
}

const documentVersion = 2

// document is the JSON of one consumer.
type document struct {
	Version    int                  `json:"v"`
	Stream     string               `json:"stream"`
	Created    map[string]time.Time `json:"created"`
	Filters    []string             `json:"filters"`
	Layout     layout               `json:"layout"`
	Wanted     *layout              `json:"wanted,omitempty"`
	Barrier    uint64               `json:"barrier,omitempty"`
	ReplayedTo uint64               `json:"replayed_to,omitempty"`
	Offsets    map[string]offsets   `json:"marks"`           // by source and partition
	Owner      string               `json:"owner,omitempty"` // empty: nobody has the lease
	Lease      time.Duration        `json:"lease,omitempty"` // of the owner
	Anew       bool                 `json:"anew,omitempty"`  // nobody has had the lease since the consumer began
}

// documentStore keeps a consumer's offsets in one document, which the session has in memory and writes
// periodically. A handler's effects are elsewhere, so they may be ahead of the document, never behind it.
type documentStore struct {
	cell cell
	cfg  *Config
	me   string

	watched      uint64    // the last revision that acquire saw of another owner's document
	watchedSince time.Time // when it first saw that

	mu         sync.Mutex
	doc        document
	revision   uint64
	superseded bool      // another instance has written the document
	dirty      bool      // an offset has moved since the last write
	written    time.Time // when the last write began
}

func newDocumentStore(c cell, cfg *Config) *documentStore {
	return &documentStore{cell: c, cfg: cfg, me: instanceName()}
}

func (s *documentStore) transactional() bool { return false }

// renewEvery is short, because what is not written is handled again after a crash. At this rate the bucket's
// 64 revisions reach back about a minute, further than what a server may not have synced to disk yet.
func (s *documentStore) renewEvery() time.Duration { return min(time.Second, s.cfg.Lease/3) }

func (s *documentStore) abandon() {}

// acquire asks for the lease, unless this instance can't work with the layout's keying. An owner counts as
// dead when its document has not changed for the time of the lease, by this instance's clock.
func (s *documentStore) acquire(ctx context.Context, _ avoids) (*state, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, revision, err := s.cell.load(ctx)
	if err != nil {
		return nil, err
	}
	d := document{Version: documentVersion, Stream: s.cfg.Stream, Filters: s.cfg.Filters}
	if value == nil && s.doc.Layout.Partitions > 0 { // or a replica answers that lags
		return nil, &possibleLoss{deleted(s.cfg), "no marks"}
	}
	if value != nil {
		if err := json.Unmarshal(value, &d); err != nil || d.Version != documentVersion {
			return nil, fault(ErrSetup, err,
				"Another version of this package has written it: run the same one everywhere, or delete the "+
					"key to begin anew",
				"key %s of bucket %s can't be read (version %d)", s.cfg.Name, Bucket(s.cfg.Stream), d.Version)
		}
	}
	if d.Owner != "" && d.Owner != s.me {
		if s.watched != revision {
			s.watched, s.watchedSince = revision, time.Now()
		}
		if time.Since(s.watchedSince) < max(d.Lease, s.cfg.Lease) {
			return nil, &heldError{why: fmt.Sprintf("instance %s is active", d.Owner)}
		}
	}
	all, writes, anew := &state{Offsets: d.Offsets}, d.Owner == s.me, d.Anew || d.Owner == s.me
	if d.Wanted != nil {
		if at := newest(d.Offsets[live].list()); at.Seq > d.Barrier {
			d.Barrier = at.Seq
		} else if switchable(all, d.Layout, d.Barrier) {
			for source, old := range d.Offsets {
				d.Offsets[source] = offsetsAt(newest(old.list()), d.Wanted.Partitions)
			}
			d.Layout, d.Wanted, d.Barrier, writes = *d.Wanted, nil, 0, true
		}
	}
	works := d.Layout.Partitions == 0 || s.cfg.worksWith(d.Layout.Keying)
	if works {
		d.Owner, d.Lease, d.Anew, writes = s.me, s.cfg.Lease, false, true
	} else if writes { // the lease is for those that can work with it
		d.Owner, d.Lease = "", 0
	}
	s.doc, s.revision, s.superseded = d, revision, false
	if writes {
		if err := s.writeLocked(ctx); err != nil {
			return nil, err
		}
	}
	st := &state{Filters: d.Filters, Layout: d.Layout, Anew: anew, Wanted: d.Wanted, Barrier: d.Barrier,
		ReplayedTo: d.ReplayedTo, Created: map[string]time.Time{}, Offsets: map[string]offsets{}}
	maps.Copy(st.Created, d.Created)
	if !works {
		return st, nil
	}
	for source, offsets := range d.Offsets {
		st.Offsets[source] = maps.Clone(offsets)
	}
	st.Furthest = newest(st.Offsets[replay].list()).Seq
	return st, nil
}

func offsetsAt(at offset, partitions int) offsets {
	all := offsets{}
	for p := range partitions {
		all[p] = at
	}
	return all
}

// writeLocked writes the document. After an error it may have been stored or not, so the session is over.
func (s *documentStore) writeLocked(ctx context.Context) error {
	if s.superseded {
		return errMoved
	}
	value, err := json.Marshal(&s.doc)
	if err != nil {
		return err
	}
	now := time.Now()
	revision, err := s.cell.save(ctx, value, s.revision)
	if err != nil {
		s.superseded = true
		return err
	}
	s.revision, s.dirty, s.written = revision, false, now
	return nil
}

func (s *documentStore) change(ctx context.Context, change func(d *document)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.doc)
	return s.writeLocked(ctx)
}

func (s *documentStore) begin(ctx context.Context, l layout, filters []string, at offset,
	created time.Time) error {
	return s.change(ctx, func(d *document) {
		d.Layout, d.Filters, d.Created, d.Anew = l, filters, map[string]time.Time{live: created}, true
		d.Offsets = map[string]offsets{live: offsetsAt(at, l.Partitions)}
	})
}

func (s *documentStore) beginReplay(ctx context.Context, created, _ time.Time) error {
	return s.change(ctx, func(d *document) {
		d.Created[replay], d.Offsets[replay] = created, offsetsAt(offset{}, d.Layout.Partitions)
	})
}

// endReplay need not ask: nobody else has written the document since this instance has looked.
func (s *documentStore) endReplay(ctx context.Context, _ func(context.Context) (bool, error)) error {
	return s.change(ctx, func(d *document) {
		delete(d.Created, replay)
		delete(d.Offsets, replay)
	})
}

func (s *documentStore) want(ctx context.Context, l layout, barrier uint64) error {
	return s.change(ctx, func(d *document) { d.Wanted, d.Barrier = &l, max(d.Barrier, barrier) })
}

func (s *documentStore) save(ctx context.Context, st *state) error {
	return s.change(ctx, func(d *document) {
		d.Filters, d.Created[live] = st.Filters, st.Created[live]
		d.Offsets[live] = maps.Clone(st.Offsets[live])
	})
}

// due is never so: one instance has all partitions.
func (s *documentStore) due(context.Context) (bool, error) { return false, nil }

func (s *documentStore) dueEvery() time.Duration { return time.Hour }

func (s *documentStore) renew(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.doc.Owner != s.me || !s.superseded && !s.dirty && time.Since(s.written) < s.cfg.Lease/3 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Lease)
	defer cancel()
	return s.writeLocked(ctx)
}

func (s *documentStore) release(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.doc.Owner != s.me {
		return nil
	}
	s.doc.Owner, s.doc.Lease = "", 0
	return s.writeLocked(ctx)
}

func (s *documentStore) read(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
	return do(ctx, nil)
}

func (s *documentStore) load(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
	return do(ctx, nil)
}

func (s *documentStore) move(ctx context.Context, source string, partition int, from, to offset,
	do func(ctx context.Context, tx pgx.Tx) error) error {
	s.mu.Lock()
	ours := !s.superseded && time.Since(s.written) < s.cfg.Lease // otherwise another instance may be active
	s.mu.Unlock()
	if !ours {
		return errMoved
	}
	if err := do(ctx, nil); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.doc.Offsets[source][partition], s.dirty = to, true
	return nil
}

// shorten is never needed: a move has one event.
func (s *documentStore) shorten(context.Context, pgx.Tx, string, int, offset, offset) error {
	return nil
}
