package consumeradmin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/jsapi"
)

// bucket has the offsets of consumers without a database.
type bucket struct {
	js jetstream.JetStream
	kv jetstream.KeyValue

	// leader, if it is set, is asked for documents. Otherwise any replica may answer, out of date: that is
	// enough for whoever writes the document back by its revision.
	leader *jsapi.Client
}

// openBucket finds it; nil if there is none.
func openBucket(ctx context.Context, js jetstream.JetStream, stream string) (*bucket, error) {
	kv, err := js.KeyValue(ctx, consumer.Bucket(stream))
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", consumer.Bucket(stream), err)
	}
	return &bucket{js: js, kv: kv}, nil
}

// names lists the consumers that have a document.
func (b *bucket) names(ctx context.Context) (all []string, err error) {
	if b == nil {
		return nil, nil
	}
	subjects := "$KV." + b.kv.Bucket() + "."
	var info *jetstream.StreamInfo
	stream, err := b.js.Stream(ctx, "KV_"+b.kv.Bucket())
	if err == nil {
		info, err = stream.Info(ctx, jetstream.WithSubjectFilter(subjects+">"))
	}
	if err != nil {
		return nil, fmt.Errorf("list the keys of bucket %s: %w", b.kv.Bucket(), err)
	}
	for subject := range info.State.Subjects {
		name := strings.TrimPrefix(subject, subjects)
		if doc, err := b.load(ctx, name); err != nil {
			return nil, err
		} else if doc != nil { // else it was deleted
			all = append(all, name)
		}
	}
	return all, nil
}

// documentVersion is that of the documents that package consumer writes.
const documentVersion = 2

// layout is the layout of a document.
type layout struct {
	Keying     string `json:"keying"`
	Partitions int    `json:"partitions"`
}

// document is a consumer's document in the bucket. Fields that this version does not know are preserved.
type document struct {
	revision uint64
	fields   map[string]json.RawMessage
	lease    time.Duration
	state
}

// get reads a key; nil: there is none.
func (b *bucket) get(ctx context.Context, name string) (value []byte, revision uint64, err error) {
	if b.leader == nil {
		e, err := b.kv.Get(ctx, name)
		switch {
		case errors.Is(err, jetstream.ErrKeyNotFound):
			return nil, 0, nil
		case err != nil:
			return nil, 0, err
		}
		return e.Value(), e.Revision(), nil
	}
	m, err := b.leader.Message(ctx, "KV_"+b.kv.Bucket(),
		jsapi.MessageRequest{Last: "$KV." + b.kv.Bucket() + "." + name})
	if m == nil || err != nil || len(m.Data) == 0 { // where it was deleted, there is a marker without data
		return nil, 0, err
	}
	return m.Data, m.Seq, nil
}

func (b *bucket) load(ctx context.Context, name string) (*document, error) {
	if b == nil {
		return nil, nil
	}
	value, revision, err := b.get(ctx, name)
	if value == nil && err == nil {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("key %s of bucket %s: %w", name, b.kv.Bucket(), err)
	}
	var known struct {
		Version int      `json:"v"`
		Stream  string   `json:"stream"`
		Filters []string `json:"filters"`
		Layout  layout   `json:"layout"`
		Wanted  *layout  `json:"wanted"`
		Barrier uint64   `json:"barrier"`

		Created map[string]time.Time `json:"created"` // of the streams, by source

		ReplayedTo uint64                    `json:"replayed_to"`
		Marks      map[string]map[int]offset `json:"marks"` // by source and partition
		Owner      string                    `json:"owner"`
		Lease      time.Duration             `json:"lease"`
	}
	d := &document{revision: revision}
	err = errors.Join(json.Unmarshal(value, &known), json.Unmarshal(value, &d.fields))
	if err == nil && known.Version != documentVersion {
		err = fmt.Errorf("version %d", known.Version)
	}
	if err != nil {
		return nil, fmt.Errorf("key %s of bucket %s: %w", name, b.kv.Bucket(), err)
	}
	d.lease = known.Lease
	d.state = state{stream: known.Stream, created: known.Created[live], filters: known.Filters,
		partitions: known.Layout.Partitions, keying: known.Layout.Keying, replayedTo: known.ReplayedTo,
		owner: known.Owner}
	for p := range len(known.Marks[live]) {
		m, ok := known.Marks[live][p]
		if !ok {
			return nil, fmt.Errorf("key %s of bucket %s: partition %d is missing", name, b.kv.Bucket(), p)
		}
		d.offsets = append(d.offsets, m)
	}
	if known.Wanted != nil {
		d.change = d.changeTo(known.Wanted.Partitions, known.Wanted.Keying, known.Barrier)
	}
	return d, nil
}

// save writes what lower has changed, unless somebody else has written to the document.
func (b *bucket) save(ctx context.Context, name string, d *document) error {
	var offsets map[string]json.RawMessage
	err := json.Unmarshal(d.fields["marks"], &offsets)
	set := func(fields map[string]json.RawMessage, key string, v any) {
		text, e := json.Marshal(v)
		fields[key] = text
		err = errors.Join(err, e)
	}
	if offsets == nil {
		offsets = map[string]json.RawMessage{}
	}
	byPartition := map[int]offset{}
	for p, m := range d.offsets {
		byPartition[p] = m
	}
	set(offsets, live, byPartition)
	set(d.fields, "marks", offsets)
	set(d.fields, "replayed_to", d.replayedTo)
	delete(d.fields, "owner")
	delete(d.fields, "lease")
	delete(d.fields, "anew") // whoever claims it next has to read what lies behind its offsets
	value, e := json.Marshal(d.fields)
	if err = errors.Join(err, e); err != nil {
		return err
	}
	if _, err := b.kv.Update(ctx, name, value, d.revision); err != nil {
		return fmt.Errorf("key %s of bucket %s: %w", name, b.kv.Bucket(), err)
	}
	return nil
}

// lower moves every offset beyond another one back to it, and records up to where events are replayed. One
// that stays keeps what is known of its message: if the broker has lost that, events that come again are
// recognized by it.
func (s *state) lower(to offset) {
	s.replayedTo = max(s.replayedTo, s.furthest())
	for i := range s.offsets {
		if s.offsets[i].Seq > to.Seq {
			s.offsets[i] = to
		}
	}
}
