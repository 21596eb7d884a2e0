package checkpoint

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
)

// maxMaintained is how large that may be which outflow maintain stores of itself, in bytes.
const maxMaintained = 64 << 10

// SaveMaintained stores what outflow maintain says of itself, for whoever has no other way to know. It never
// touches the record.
func (s *Store) SaveMaintained(ctx context.Context, doc []byte) error {
	if len(doc) > maxMaintained {
		return fmt.Errorf("write %s: %d bytes are more than %d", s.beside(maintainedKey(s.cfg.Slot)),
			len(doc), maxMaintained)
	}
	return s.saveBeside(ctx, s.beside(maintainedKey(s.cfg.Slot)), doc)
}

// Maintained returns what [Store.SaveMaintained] has stored last, and when, by the broker's clock; nil:
// nothing.
func (s *Store) Maintained(ctx context.Context) (doc []byte, stored time.Time, err error) {
	m, err := s.api.Message(ctx, s.stream, jsapi.MessageRequest{Last: s.beside(maintainedKey(s.cfg.Slot))})
	if jsapi.Refused(err, jetstream.JSErrCodeStreamNotFound) {
		err = nil
	}
	if m == nil || err != nil || len(m.Data) == 0 { // 0: it was removed
		return nil, time.Time{}, err
	}
	if len(m.Data) > maxMaintained {
		return nil, time.Time{}, fmt.Errorf("%s has %d bytes, more than %d",
			s.beside(maintainedKey(s.cfg.Slot)), len(m.Data), maxMaintained)
	}
	return m.Data, m.Time, nil
}

func maintainedKey(slot string) string { return "maintained." + slot }
