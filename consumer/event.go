package consumer

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// Headers that are read here, besides the packed one.
const (
	deadLetterHeader     = "Outflow-Dead-Letter"
	replayHeader         = "Outflow-Replay"
	replaySequenceHeader = "Outflow-Replay-Sequence"
)

// typeHeaders are the mapped headers that may hold the event's type; the first one present counts.
var typeHeaders = [...]string{"Event-Type", "event_type"}

// Event is one message of the stream as a handler gets it: a copy at each call, which the handler may change
// and keep, but for Header.
type Event struct {
	Document string // from the subject; a value too long for a subject is shortened, and still unique
	ID       string // the event's id in the outbox; shortened likewise
	Key      string // its seq_key; shortened likewise
	Subject  string // the public subject, also of a replayed event
	Type     string // the mapped header Event-Type, else event_type, else empty

	Data   []byte      // the payload, the handler's own copy; for a dead letter, JSON that names the row
	Header nats.Header // all headers of the message. Must not be written to

	Position outbox.Position // where it was committed: unique, and the same at each delivery
	// Home is cluster.id of the cluster that committed it, where clusters publish for one another. Another
	// stream may have the same event again, with the same Home, Position and ID. 0: none is named.
	Home     int
	Sequence uint64    // in the stream; if replayed, the original one, or 0 if it came from the table
	Time     time.Time // when the stream stored it

	Schema     string // version of Data after all upcasters; empty without Config.Schema
	Replayed   bool   // it comes from outflow replay: it was in the stream before
	Attempt    int    // from 1; includes attempts before the event was parked
	DeadLetter string // the reason, if this is a dead letter (see [Config.DeadLetters])

	head   outbox.Header
	hash   uint32          // of the document, which decides its partition
	source string          // live or replay
	seq    uint64          // in the source's stream: for a replayed event not the same as Sequence
	size   int             // what it counts against Config.MaxBytes
	raw    *stream.Message // as it was read

	parkedBefore bool    // replayed, and in the table of parked events already
	sqlTx        *sql.Tx // with PostgresSQL
}

// ForeignError says that Outflow did not publish a message, or that the template does not produce its
// subject.
type ForeignError struct {
	Sequence uint64 // its sequence in the stream
	Subject  string
	Message  string // what is wrong
	Hint     string // what can be done
}

// Error implements error.
func (e *ForeignError) Error() string {
	return fmt.Sprintf("message %d on subject %q: %s. %s", e.Sequence, e.Subject, e.Message, e.Hint)
}

// decoder turns messages into events. It is safe for concurrent use.
type decoder struct {
	subject  *outbox.SubjectTemplate                    // where the document is, if document is nil
	document func(subject string, h nats.Header) string // Config.Document
	prefix   string                                     // of a replayed message's public subject
	divided  *outbox.SubjectTemplate                    // divides documents; nil: as they are found
}

// dividedBy returns a decoder for offsets of a keying.
func (d *decoder) dividedBy(cfg *Config, keying string) *decoder {
	if keying == cfg.Keying {
		return d
	}
	other := *d
	other.divided = templateOf(keying)
	return &other
}

// newDecoder returns the decoder for the settings Subject and Document.
func newDecoder(cfg *Config) (*decoder, error) {
	d := &decoder{document: cfg.Document, prefix: replayPrefix(cfg.Stream, cfg.Name)}
	if d.document != nil {
		return d, nil
	}
	subject, err := outbox.ParseSubjectTemplate(cfg.Subject)
	wrong := ""
	if err != nil {
		wrong = outbox.FaultOf(err).Message
	} else if _, ok := subject.Encoded(documentColumn, ""); !ok {
		wrong = fmt.Sprintf("subject %q does not hold {%s}", cfg.Subject, documentColumn)
	}
	if wrong != "" {
		return nil, fmt.Errorf("Config.Subject: %s. Give the subject of outflow's configuration with {%s} "+
			"for the column that holds the "+
			"document, or Config.Document if the document is not in the subject", wrong, documentColumn)
	}
	if cfg.DeadLetters == nil { // which may have any subject
		if err := matchesTemplate(cfg.Filters, subject, cfg.Stream); err != nil {
			return nil, err
		}
	}
	d.subject = subject
	return d, nil
}

// documentColumn is the document's name in the subject template.
const documentColumn = "doc_id"

// event decodes a message without changing it. Its error is a *ForeignError.
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
		"messages from the consumer with Config.Filters"
	packed := m.Header[outbox.HeaderName]
	if len(packed) != 1 {
		return nil, foreign(notOurs, "it has %d headers %s, not one", len(packed), outbox.HeaderName)
	}
	var err error
	if e.head, err = outbox.ParseHeader(packed[0]); err != nil {
		return nil, foreign(notOurs+
			". If a newer outflow published it, this consumer needs the newer library", "%v", err)
	}
	if e.Home, err = outbox.HomeOf(m.Header); err != nil {
		return nil, foreign(notOurs, "%v", err)
	}
	e.Position, e.ID, e.Key = e.head.Pos, e.head.ID, e.head.Key
	if e.head.N >= e.head.Of {
		return nil, foreign(notOurs, "its header says n=%d of=%d", e.head.N, e.head.Of)
	}
	for _, name := range typeHeaders {
		if v := m.Header[name]; len(v) > 0 {
			e.Type = v[0]
			break
		}
	}
	if m.Replay {
		if err := e.replay(d.prefix); err != nil {
			return nil, foreign("Publish replays with `outflow replay --to consumer:NAME`", "%v", err)
		}
	}
	if v := m.Header[deadLetterHeader]; len(v) > 0 {
		e.DeadLetter, e.Document = v[0], deadLetterDocument(m.Data)
	} else if d.document != nil {
		e.Document = d.document(e.Subject, e.Header)
	} else {
		var ok bool
		if e.Document, ok = d.documentOf(e.Subject); !ok {
			return nil, foreign("Give the consumer the subject of outflow's configuration "+
				"(Config.Subject), with {doc_id} where the document is, or Config.Document, or keep such "+
				"messages from it with Config.Filters", "the template %q makes no such subject", d.subject)
		}
	}
	by := e.Document
	if d.divided != nil && e.DeadLetter == "" {
		if v, ok := d.divided.Value(e.Subject, documentColumn); ok {
			by = v
		}
	}
	e.hash = partitionHash(by)
	return e, nil
}

// documentOf reads the document out of a subject; ok is false if the template made no such subject.
func (d *decoder) documentOf(subject string) (document string, ok bool) {
	if d.subject.HasToken(documentColumn) {
		return d.subject.Value(subject, documentColumn)
	}
	readable := true // {doc_id:subject}: several tokens
	ok = d.subject.Parse(subject, func(column, encoded string) {
		tokens := strings.Split(encoded, ".")
		for i, token := range tokens {
			var valid bool
			tokens[i], valid = outbox.ParseToken(token)
			readable = readable && valid
		}
		if column == documentColumn {
			document = strings.Join(tokens, ".")
		}
	})
	return document, ok && readable
}

// eventOverhead is what an event counts in addition to its bytes.
const eventOverhead = 512

// partitionHash is the hash of NATS's partition() mapping. An event's partition is the hash modulo the number
// of partitions.
func partitionHash(document string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(document)) // cannot fail
	return h.Sum32()
}

// replay gives a replayed event its original subject and sequence.
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

// deadLetterDocument is the document that a dead letter names; empty if its row had no readable one.
func deadLetterDocument(data []byte) string {
	var row struct {
		Document string `json:"doc_id"`
	}
	if json.Unmarshal(data, &row) != nil {
		return ""
	}
	// A subject would have shortened a long value, so it has to be shortened here to be the same document.
	document, _ := outbox.ParseToken(string(outbox.AppendToken(nil, row.Document)))
	return document
}
