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
	slots, err := s.slots(ctx)
	if err != nil {
		return err
	}
	for _, slot := range slots {
		if slot == s.cfg.Slot {
			continue
		}
		other := NewStore(s.api, StoreConfig{Stream: s.cfg.Stream, Slot: slot})
		rec, _, err := other.Load(ctx)
		if err != nil && outbox.FaultOf(err) == nil { // one that can't be decoded is somebody's all the same
			return err
		}
		if rec != nil || err != nil {
			return &outbox.Fault{
				Class: outbox.Fatal, Code: "other_slot",
				Message: fmt.Sprintf("the outflow of slot %s publishes to stream %s as well", slot,
					s.cfg.Stream), Hint: hintOtherSlot(s.cfg, slot),
			}
		}
	}
	return nil
}

// slots lists the keys that the bucket has ever held.
func (s *Store) slots(ctx context.Context) ([]string, error) {
	prefix := strings.TrimSuffix(s.subject, s.cfg.Slot)
	var info struct {
		jsapi.Answer
		State struct {
			Subjects map[string]uint64 `json:"subjects"`
		} `json:"state"`
	}
	err := s.api.Ask(ctx, "STREAM.INFO."+s.stream, map[string]string{"subjects_filter": prefix + ">"}, &info)
	switch {
	case jsapi.Refused(err, jetstream.JSErrCodeStreamNotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("list the records of checkpoint bucket %s: %w", Bucket(s.cfg.Stream), err)
	}
	var slots []string
	for _, subject := range slices.Sorted(maps.Keys(info.State.Subjects)) {
		slots = append(slots, strings.TrimPrefix(subject, prefix))
	}
	return slots, nil
}
