package checkpoint

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
)

// maxBeside is how large that may be which is stored beside a record, in bytes.
const maxBeside = 64 << 10

// SaveMaintained stores what outflow maintain says of itself, for whoever has no other way to know. It never
// touches the record.
func (s *Store) SaveMaintained(ctx context.Context, doc []byte) error {
	return s.saveDoc(ctx, maintainedKey(s.key), doc)
}

// Maintained returns what [Store.SaveMaintained] has stored last, and when, by the broker's clock; nil:
// nothing.
func (s *Store) Maintained(ctx context.Context) (doc []byte, stored time.Time, err error) {
	return s.doc(ctx, maintainedKey(s.key))
}

// SaveGaps stores the names of the oldest gaps that are open, which the record only knows by a hash. It never
// touches the record.
func (s *Store) SaveGaps(ctx context.Context, doc []byte) error {
	return s.saveDoc(ctx, gapsKey(s.key), doc)
}

// Gaps returns what [Store.SaveGaps] has stored last; nil: nothing. Some of the gaps may be open no longer.
func (s *Store) Gaps(ctx context.Context) (doc []byte, err error) {
	doc, _, err = s.doc(ctx, gapsKey(s.key))
	return doc, err
}

func (s *Store) saveDoc(ctx context.Context, key string, doc []byte) error {
	if len(doc) > maxBeside {
		return fmt.Errorf("write %s: %d bytes are more than %d", s.beside(key), len(doc), maxBeside)
	}
	return s.saveBeside(ctx, s.beside(key), doc)
}

func (s *Store) doc(ctx context.Context, key string) (doc []byte, stored time.Time, err error) {
	m, err := s.api.Message(ctx, s.stream, jsapi.MessageRequest{Last: s.beside(key)})
	if jsapi.Refused(err, jetstream.JSErrCodeStreamNotFound) {
		err = nil
	}
	if m == nil || err != nil || len(m.Data) == 0 { // 0: it was removed
		return nil, time.Time{}, err
	}
	if len(m.Data) > maxBeside {
		return nil, time.Time{}, fmt.Errorf("%s has %d bytes, more than %d", s.beside(key), len(m.Data),
			maxBeside)
	}
	return m.Data, m.Time, nil
}

func maintainedKey(slot string) string { return "maintained." + slot }

func gapsKey(slot string) string { return "gaps." + slot }
