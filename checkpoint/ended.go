package checkpoint

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// End says why a process stopped publishing: the fault that it ended with, or that it holds.
type End struct {
	// by the process's clock; of a fault that is held: when the process last tried, and found it again
	At      time.Time `json:"at"`
	Since   time.Time `json:"since,omitzero"` // when the fault was first found, by the same clock
	Code    string    `json:"code"`
	Class   string    `json:"class"`
	Message string    `json:"message"` // with the cause and the range of LSNs, without the hint
	Hint    string    `json:"hint,omitempty"`
	Exit    int       `json:"exit"` // the exit code
	Held    bool      `json:"held"` // the process stayed: on_fault is hold
	Host    string    `json:"host,omitempty"`
	PID     int       `json:"pid"`
	Version string    `json:"version,omitempty"`
	Stored  time.Time `json:"-"` // when it was stored, by the broker's clock; only LastEnd says so
}

// NewEnd returns what there is to say of a fault; the process adds itself.
func NewEnd(f *outbox.Fault) End {
	message := *f
	message.Hint = ""
	return End{At: time.Now().UTC().Truncate(time.Millisecond), Code: f.Code, Class: f.Class.String(),
		Message: message.Error(), Hint: f.Hint}
}

// maxEndText is how much of a text is stored: some causes quote what somebody else wrote.
const maxEndText = 2000

// SaveEnd stores why this process stopped publishing, in place of what a process before it has stored. It
// never touches the record.
func (s *Store) SaveEnd(ctx context.Context, e End) error {
	for _, text := range []*string{&e.Message, &e.Hint} {
		if len(*text) > maxEndText {
			*text = strings.ToValidUTF8((*text)[:maxEndText], "") + "…"
		}
	}
	doc, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return s.saveBeside(ctx, s.endSubject(), doc)
}

// saveBeside stores what is no record under a subject of the bucket.
//
// It is stored as a deletion that carries data: earlier versions of Outflow take each value in the bucket for
// the record of a slot.
func (s *Store) saveBeside(ctx context.Context, subject string, doc []byte) error {
	m := nats.NewMsg(s.api.PublishSubject(subject))
	m.Data = doc
	m.Header.Set("KV-Operation", "DEL")
	m.Header.Set("Nats-Rollup", "sub") // names of documents are not kept for longer than they are of use
	m.Header.Set("Nats-Expected-Stream", s.stream)
	if err := s.api.Publish(ctx, m); err != nil {
		return fmt.Errorf("write %s: %w", subject, err)
	}
	return nil
}

// LastEnd returns why the last process that published stopped, nil if it did not stop at a fault, or if the
// record was written since: then another process, or a repair, has gone on from there.
func (s *Store) LastEnd(ctx context.Context) (*End, error) {
	end, err := s.api.Message(ctx, s.stream, jsapi.MessageRequest{Last: s.endSubject()})
	if end == nil || err != nil {
		if jsapi.Refused(err, jetstream.JSErrCodeStreamNotFound) {
			err = nil
		}
		return nil, err
	}
	if len(end.Data) == 0 {
		return nil, nil // it was removed
	}
	record, err := s.api.Message(ctx, s.stream, jsapi.MessageRequest{Last: s.subject})
	if err != nil || record != nil && record.Seq > end.Seq {
		return nil, err
	}
	e := new(End)
	if err := json.Unmarshal(end.Data, e); err != nil {
		return nil, fmt.Errorf("read %s: %w", s.endSubject(), err)
	}
	e.Stored = end.Time
	return e, nil
}

// endSubject has a token more than a slot's name can have.
func (s *Store) endSubject() string { return s.beside(endKey(s.key)) }

func (s *Store) beside(key string) string { return "$KV." + Bucket(s.cfg.Stream) + "." + key }

func endKey(slot string) string { return "ended." + slot }
