package checkpoint

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// CheckAlone refuses a stream to which another slot's outflow publishes: a fatal fault with code other_slot.
// The two could not tell each other's messages from their own, and events would be lost where they meet.
func (s *Store) CheckAlone(ctx context.Context) error {
	others, err := s.others(ctx)
	if err != nil || len(others) == 0 {
		return err
	}
	slot := others[0].Slot
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "other_slot",
		Message: fmt.Sprintf("the outflow of slot %s publishes to stream %s as well", slot, s.cfg.Stream),
		Hint:    hintOtherSlot(s.cfg, slot),
	}
}

// Other is the record of another slot. One that can't be read is somebody's all the same.
type Other struct {
	Stream string
	Slot   string
	Record *Record // nil: it can't be read
	Err    error   // why it can't
}

// others reads the records of other slots in the same bucket.
func (s *Store) others(ctx context.Context) (all []Other, err error) {
	slots, err := s.slots(ctx)
	if err != nil {
		return nil, err
	}
	for _, slot := range slots {
		if slot == s.cfg.Slot {
			continue
		}
		other := NewStore(s.api, StoreConfig{Stream: s.cfg.Stream, Slot: slot, Cluster: s.cfg.Cluster})
		rec, _, err := other.Load(ctx)
		if err != nil && outbox.FaultOf(err) == nil {
			return nil, err
		}
		if rec != nil || err != nil {
			all = append(all, Other{Stream: s.cfg.Stream, Slot: slot, Record: rec, Err: err})
		}
	}
	return all, nil
}

// maxBuckets is in how many buckets of an account records are looked for.
const maxBuckets = 1000

// Others reads the records of all other slots that publish to streams of the same account, those of the same
// stream first. What can't be read may be of a bucket that only has a like name. It needs the right to list
// streams.
func (s *Store) Others(ctx context.Context) ([]Other, error) {
	all, err := s.others(ctx)
	if err != nil {
		return nil, err
	}
	names, err := s.api.Streams(ctx, "$KV.*.>")
	if err != nil {
		return nil, fmt.Errorf("list the key-value buckets: %w", err)
	}
	var streams []string
	for _, name := range names {
		stream, ours := strings.CutPrefix(name, "KV_"+Bucket(""))
		if ours && stream != s.cfg.Stream {
			streams = append(streams, stream)
		}
	}
	if len(streams) > maxBuckets {
		return nil, fmt.Errorf("%d key-value buckets are named as those of Outflow, at most %d are read",
			len(streams), maxBuckets)
	}
	for _, stream := range streams {
		more, err := NewStore(s.api, StoreConfig{Stream: stream, Cluster: s.cfg.Cluster}).others(ctx)
		if err != nil {
			return nil, err
		}
		all = append(all, more...)
	}
	return all, nil
}

// slots lists the slots of which the bucket has ever held a record. Keys of more than one token are of what
// lies beside one.
func (s *Store) slots(ctx context.Context) ([]string, error) {
	keys, err := s.keys(ctx)
	return slices.DeleteFunc(keys, func(key string) bool { return strings.Contains(key, ".") }), err
}

// keys lists all keys that the bucket has ever held.
func (s *Store) keys(ctx context.Context) (keys []string, err error) {
	prefix := s.beside("")
	var info struct {
		jsapi.Answer
		State struct {
			Subjects map[string]uint64 `json:"subjects"`
		} `json:"state"`
	}
	err = s.api.Ask(ctx, "STREAM.INFO."+s.stream, map[string]string{"subjects_filter": prefix + ">"}, &info)
	switch {
	case jsapi.Refused(err, jetstream.JSErrCodeStreamNotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("list the records of checkpoint bucket %s: %w", Bucket(s.cfg.Stream), err)
	}
	for _, subject := range slices.Sorted(maps.Keys(info.State.Subjects)) {
		keys = append(keys, strings.TrimPrefix(subject, prefix))
	}
	return keys, nil
}
