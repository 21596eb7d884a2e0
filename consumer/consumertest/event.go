package consumertest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

// Event is an event to consume. Only Document and Data are required.
type Event struct {
	Document string
	Data     []byte
	ID       string // default: its number in the stream
	Key      string // its seq_key
	Type     string // becomes the header Event-Type

	Header  nats.Header // further headers
	Subject string      // default: outbox. and the document
	Time    time.Time   // default: now
}

// ofOutflow reports whether Outflow or the server set a header, which is left out of events read from files.
func ofOutflow(name string) bool {
	return name == outbox.HeaderName || name == "Outflow-Replay" || name == "Outflow-Replay-Sequence" ||
		strings.HasPrefix(name, "Nats-")
}

// Lines reads events from JSON lines, each as printed by outflow replay --to stdout or, like this, an event
// as a producer writes it:
//
//	{"doc_id": "a", "actor_id": "alice", "counter": 7, "id": "…", "seq_key": "…",
//	 "headers": {"schema_version": "2"}, "payload": {}}
//
// Only doc_id and payload, or op instead of it, are required.
func Lines(r io.Reader) ([]Event, error) {
	var events []Event
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		text, err := in.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if len(bytes.TrimSpace(text)) > 0 {
			e, err := parseLine(text)
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
			events = append(events, e)
		}
		if err == io.EOF {
			return events, nil
		}
	}
}

// File reads events from a file of JSON lines, as [Lines] does.
func File(name string) ([]Event, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	events, err := Lines(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return events, nil
}

// line has the members of both kinds of lines.
type line struct {
	Document *string         `json:"doc_id"`
	Actor    string          `json:"actor_id"`
	Counter  *int64          `json:"counter"`
	Key      string          `json:"seq_key"`
	Payload  json.RawMessage `json:"payload"`
	Op       json.RawMessage `json:"op"`

	ID      string          `json:"id"`
	Headers json.RawMessage `json:"headers"`

	Subject    string          `json:"subject"`
	Replayed   *string         `json:"document"`
	ReplayKey  string          `json:"key"`
	Time       time.Time       `json:"time"`
	Data       json.RawMessage `json:"data"`
	DataBase64 []byte          `json:"data_base64"`
}

func parseLine(text []byte) (e Event, err error) {
	var l line
	if err := json.Unmarshal(text, &l); err != nil {
		return e, err
	}
	if l.Subject != "" {
		return l.message()
	}
	if l.Document == nil {
		return e, fmt.Errorf("neither doc_id nor subject: want a line of outflow replay --to stdout, or of " +
			"a producer")
	}
	e = Event{Document: *l.Document, ID: l.ID, Key: l.Key, Data: l.Payload, Header: nats.Header{}}
	if e.Data == nil {
		e.Data = l.Op
	}
	if e.Data == nil {
		return e, fmt.Errorf("document %q: no payload", e.Document)
	}
	if e.Key == "" && l.Counter != nil {
		e.Key = fmt.Sprintf("%s:%020d", l.Actor, *l.Counter)
	}
	var headers map[string]string
	if l.Headers != nil {
		if err := json.Unmarshal(l.Headers, &headers); err != nil {
			return e, fmt.Errorf("headers: %w", err)
		}
	}
	for name, value := range headers {
		e.Header[name] = []string{value}
	}
	return e, nil
}

// message is the event of a line of outflow replay.
func (l *line) message() (e Event, err error) {
	e = Event{ID: l.ID, Key: l.ReplayKey, Subject: l.Subject, Time: l.Time, Data: l.Data,
		Header: nats.Header{}}
	if l.Replayed != nil {
		e.Document = *l.Replayed
	}
	if e.Data == nil {
		e.Data = l.DataBase64
	}
	var headers map[string][]string
	if l.Headers != nil {
		if err := json.Unmarshal(l.Headers, &headers); err != nil {
			return e, fmt.Errorf("headers: %w", err)
		}
	}
	for name, values := range headers {
		if !ofOutflow(name) {
			e.Header[name] = values
		}
	}
	return e, nil
}
