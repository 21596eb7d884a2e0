package consumer

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// Headers of messages that are read here, beside the packed one.
const (
	deadLetterHeader     = "Outflow-Dead-Letter"
	replayHeader         = "Outflow-Replay"
	replaySequenceHeader = "Outflow-Replay-Sequence"
)

// typeHeaders are the names under which a mapped header is taken for the event's type; the first one that is
// there counts.
var typeHeaders = [...]string{"Event-Type", "event_type"}

// Event is one message of the stream, as a handler gets it. The handler may keep it, and may write to Data.
type Event struct {
	// the document, from the subject; a value that was cut there stays cut, which tells it apart all the same
	Document string
	ID       string // the event's id in the outbox; cut likewise
	Key      string // its seq_key; cut likewise
	Subject  string // the public subject, also where the event is replayed
	Type     string // the mapped header Event-Type, else event_type, else empty

	// the payload's bytes; of a dead letter, the JSON that names its row. It must not be written to
	Data   []byte
	Header nats.Header // all headers of the message

	Position outbox.Position // where it was committed: unique, the same each time that the event comes
	Window   Window          // where it left the buffer of outflow
	// its sequence in the stream; of a replayed event, the one it had first, or 0 if it came from the table
	Sequence uint64
	Time     time.Time // when the stream took it

	Schema     string // the version that Data has, after all upcasters; empty without Config.Schema
	Replayed   bool   // it comes from outflow replay: it was in the stream before
	Attempt    int    // the attempt at this event, from 1; attempts before it was parked count
	DeadLetter string // the reason, if this is a dead letter: the row could not be published

	head   outbox.Header
	hash   uint32 // of the document: says its partition
	source string // live or replay
	// the sequence in the source's stream, which for a replayed event is another than Sequence
	seq  uint64
	size int             // what it counts against Config.MaxBytes
	raw  *stream.Message // as it was read
}

// Window is the place of an event in the window that it was published in.
type Window struct {
	N, Of int // the event is the n-th of so many, from 0
	// up to where the window took what was committed, and what had been read when it closed
	Due, Thru outbox.LSN
}

// ForeignError says that a message is none that outflow published, or that it is not on a subject of the
// template.
type ForeignError struct {
	Sequence uint64 // its sequence in the stream
	Subject  string
	Message  string // what is wrong with it
	Hint     string // what to do
}

// Error implements error.
func (e *ForeignError) Error() string {
	return fmt.Sprintf("message %d on subject %q: %s. %s", e.Sequence, e.Subject, e.Message, e.Hint)
}

// decoder makes events of messages. It is safe for concurrent use.
type decoder struct {
	subject  *outbox.SubjectTemplate                    // where the document is, if document is nil
	document func(subject string, h nats.Header) string // Config.Document
	// what stands before the public subject of a replayed message
	prefix string
}

// newDecoder returns the decoder for the settings Subject and Document.
func newDecoder(cfg *Config) (*decoder, error) {
	d := &decoder{document: cfg.Document, prefix: replayPrefix(cfg.Stream, cfg.Name)}
	if d.document != nil {
		return d, nil
	}
	subject, err := outbox.ParseSubjectTemplate(cfg.Subject)
	wrong := ""
	switch {
	case err != nil:
		wrong = outbox.FaultOf(err).Message
	case !subject.HasToken(documentColumn):
		wrong = fmt.Sprintf("subject %q: {%s} is no token of it", cfg.Subject, documentColumn)
	}
	if wrong != "" {
		return nil, fmt.Errorf("Config.Subject: %s. Give the subject of outflow's configuration with {%s} "+
			"for the column that holds the "+
			"document, or Config.Document if the document is not in the subject", wrong, documentColumn)
	}
	d.subject = subject
	return d, nil
}

// documentColumn is the column of the template that holds the document.
const documentColumn = "doc_id"

// event makes the event of a message, which stays as it is. Its error is a *ForeignError.
func (d *decoder) event(m *stream.Message) (*Event, error) {
	e := &Event{
		Subject: m.Subject, Data: m.Data, Header: m.Header, Sequence: m.Sequence, Time: m.Time, Attempt: 1,
		source: live, seq: m.Sequence, size: len(m.Subject) + len(m.Data) + eventOverhead, raw: m,
	}
	foreign := func(hint, format string, args ...any) error {
		return &ForeignError{Sequence: m.Sequence, Subject: m.Subject, Message: fmt.Sprintf(format, args...),
			Hint: hint}
	}
	const notOurs = "Something else than outflow publishes here: take its right to do so, and keep these " +
		"messages from the consumer with Config.Filter"
	packed := m.Header[outbox.HeaderName]
	if len(packed) != 1 {
		return nil, foreign(notOurs, "it has %d headers %s, not one", len(packed), outbox.HeaderName)
	}
	var err error
	if e.head, err = outbox.ParseHeader(packed[0]); err != nil {
		return nil, foreign(notOurs+
			". If a newer outflow published it, this consumer needs the newer library", "%v", err)
	}
	e.Position, e.ID, e.Key = e.head.Pos, e.head.ID, e.head.Key
	e.Window = Window{N: e.head.N, Of: e.head.Of, Due: e.head.Due, Thru: e.head.Thru}
	if e.Window.N >= e.Window.Of {
		return nil, foreign(notOurs, "its header says n=%d of=%d", e.Window.N, e.Window.Of)
	}
	for _, name := range typeHeaders {
		if v := m.Header[name]; len(v) > 0 {
			e.Type = v[0]
			break
		}
	}
	if m.Replay {
		if err := e.replay(d.prefix); err != nil {
			return nil, foreign("Publish replays with outflow replay --to consumer:NAME", "%v", err)
		}
	}
	if v := m.Header[deadLetterHeader]; len(v) > 0 {
		e.DeadLetter, e.Document = v[0], deadLetterDocument(m.Data)
	} else if d.document != nil {
		e.Document = d.document(e.Subject, e.Header)
	} else {
		var ok bool
		if e.Document, ok = d.subject.Value(e.Subject, documentColumn); !ok {
			return nil, foreign("Give the consumer the subject of outflow's configuration "+
				"(Config.Subject), with {doc_id} where the document is, or Config.Document, or keep such "+
				"messages from it with Config.Filter", "the template %q makes no such subject", d.subject)
		}
	}
	e.hash = partitionHash(e.Document)
	return e, nil
}

// eventOverhead is what an event counts beside its bytes.
const eventOverhead = 512

// partitionHash is the hash of NATS's own partition() mapping, FNV-1a of 32 bits: an event's partition is it
// modulo their number.
func partitionHash(document string) uint32 {
	h := uint32(2166136261)
	for i := range len(document) {
		h = (h ^ uint32(document[i])) * 16777619
	}
	return h
}

// replay gives a replayed event the subject and the sequence that it had.
func (e *Event) replay(prefix string) error {
	if len(e.Header[replayHeader]) == 0 {
		return fmt.Errorf("it is among those to be replayed, and has no header %s", replayHeader)
	}
	e.Subject = strings.TrimPrefix(e.Subject, prefix)
	e.Replayed, e.source, e.Sequence = true, replay, 0
	if v := e.Header[replaySequenceHeader]; len(v) > 0 {
		seq, err := strconv.ParseUint(v[0], 10, 64)
		if err != nil {
			return fmt.Errorf("header %s: %q is not a sequence", replaySequenceHeader, v[0])
		}
		e.Sequence = seq
	}
	return nil
}

// deadLetterDocument is the document that a dead letter names; empty where the row had none that can be read.
func deadLetterDocument(data []byte) string {
	var row struct {
		Document string `json:"doc_id"`
	}
	if json.Unmarshal(data, &row) != nil {
		return ""
	}
	// Where a subject would have cut it, it is the same document only if it is cut here as well.
	document, _ := outbox.ParseToken(string(outbox.AppendToken(nil, row.Document)))
	return document
}
