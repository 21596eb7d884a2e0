package sink

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Reason says in one stable word why a row can't be published: the value of the Outflow-Dead-Letter header,
// and the code of the fault under on_poison stop. When several hold, it is the first in this order.
type Reason string

// The reasons.
const (
	// a column, or the content of a message, that could not be decoded
	Undecodable    Reason = "undecodable"
	NullDoc        Reason = "null_doc_id"      //
	NullKey        Reason = "null_seq_key"     // in a table that has a seq_key
	NullPayload    Reason = "null_payload"     //
	SubjectTooLong Reason = "subject_too_long" // over 1,000 bytes
	// mapped headers over 16 KiB, each counting its name, value and 4 bytes
	HeadersTooLarge Reason = "headers_too_large"
	// payload, Outflow header and mapped headers with their lines, and 128 bytes: over sink.max_payload
	TooLarge Reason = "too_large"
)

// Reasons lists all of them.
var Reasons = []Reason{Undecodable, NullDoc, NullKey, NullPayload, SubjectTooLong, HeadersTooLarge, TooLarge}

// DeadLetter is the body of the message that takes the place of a row that can't be published, as JSON. Long
// values are cut, and where sink.max_payload is very small, Detail, Subject, Doc and ID are left out in that
// order until it fits.
type DeadLetter struct {
	Reason       Reason          `json:"reason"`
	Detail       string          `json:"detail,omitempty"`
	Table        string          `json:"table,omitempty"` // empty for a logical message
	ID           string          `json:"id,omitempty"`    // event id; empty if there is none
	Doc          string          `json:"doc_id,omitempty"`
	Position     outbox.Position `json:"position"`
	Subject      string          `json:"subject,omitempty"` // the one it would have had
	PayloadBytes int             `json:"payload_bytes"`
}

// The cuts of a dead letter's values, in bytes.
const (
	cutValue  = 200
	cutDetail = 300
)

// deadLetter makes the message that takes the row's place. Its bytes are a function of the same things as
// encode's.
func (enc *encoder) deadLetter(m *message, e *relay.Event, h *outbox.Header, last uint64, r Reason) {
	var subject []byte
	if r != Undecodable {
		subject = enc.appendSubject(nil, e)
	}
	table := enc.table
	if e.Null&relay.IsMessage != 0 {
		table = ""
	}
	d := DeadLetter{
		Reason: r, Detail: cut(enc.detail(e, r), cutDetail), Table: cut(table, cutValue),
		ID: cut(e.ID, cutValue), Doc: cut(e.Doc, cutValue), Position: e.Pos,
		Subject: cut(string(subject), outbox.MaxSubject), PayloadBytes: e.PayloadSize,
	}
	m.seq = last + 1
	m.subject = append(append(m.subject[:0], enc.ingress...), enc.deadTo...)
	b := enc.expect(m, append(m.header[:0], headerStart...), last)
	if enc.msgID {
		b = enc.appendMsgID(b, e)
	}
	b = enc.appendLost(b, last)
	if enc.home > 0 {
		b = enc.appendOrigin(b)
	}
	own := len(b)
	b = appendOutflow(b, h)
	b = append(b, HeaderDeadLetter+": "...)
	b = append(b, r...)
	b = append(b, "\r\n"...)
	own = len(b) - own
	m.header = append(b, "\r\n"...)
	for _, field := range []*string{&d.Detail, &d.Subject, &d.Doc, &d.ID, &d.Table} {
		m.data = d.encode()
		if len(m.data)+own+enc.overhead <= enc.limit {
			return
		}
		*field = ""
	}
	m.data = d.encode()
}

func (d *DeadLetter) encode() []byte {
	b, err := json.Marshal(d)
	if err != nil {
		panic("sink: dead letter: " + err.Error()) // strings and numbers only
	}
	return b
}

// fault is the error that ends the run under on_poison stop.
func (enc *encoder) fault(e *relay.Event, r Reason) *outbox.Fault {
	id := "without an id"
	if e.ID != "" {
		id = fmt.Sprintf("id %q", cut(e.ID, cutValue))
	}
	what, place := fmt.Sprintf("table %s: the row", enc.table), "row"
	cure, next := hints[r], nextHints[r]
	if e.Null&relay.IsMessage != 0 {
		what, place = "the logical message ("+outbox.EventPrefix+")", "message"
		if c, ok := messageHints[r]; ok {
			cure, next = "", c
		}
	}
	dead := "set sink.on_poison to dead_letter: the " + place + "'s place then holds a message about it, " +
		"and everything else goes on."
	hint := cure + " Or " + dead
	if next != "" {
		hint = "For this one, " + dead + " For those to come, " + next
	}
	return &outbox.Fault{
		Class: outbox.Poison, Code: string(r),
		Message: fmt.Sprintf("%s %s at position %v can't be published: %s", what, id, e.Pos,
			enc.detail(e, r)),
		Hint: hint,
	}
}

// nextHints are those that come too late for this row: the WAL holds what was inserted.
var nextHints = map[Reason]string{
	NullDoc:     "make the column NOT NULL.",
	NullKey:     "make the column NOT NULL.",
	NullPayload: "make the column NOT NULL.",
}

// messageHints are the same for messages, where they differ from those for rows.
var messageHints = map[Reason]string{
	Undecodable: "correct what writes it; docs/format.md says what the content is.",
	NullDoc:     "give the content a doc_id.",
	NullKey:     "give the content a seq_key, or an actor_id and a counter.",
	NullPayload: "give the content a payload.",
}

var hints = map[Reason]string{
	Undecodable: "Keep the columns of the mapping in the table, published, and of types that Outflow can " +
		"read. (A generated column is in the WAL only " +
		"from PostgreSQL 18 on, with publish_generated_columns = stored.)",
	SubjectTooLong:  "Make the values that the subject is made of shorter, or use fewer of them.",
	HeadersTooLarge: "Map fewer or shorter columns to headers.",
	TooLarge: "Raise sink.max_payload, and max_payload of the server and max_msg_size of the stream " +
		"where they are lower.",
}

// detail describes what is wrong with the row.
func (enc *encoder) detail(e *relay.Event, r Reason) string {
	switch r {
	case Undecodable:
		return e.Bad
	case NullDoc:
		return "doc_id is NULL"
	case NullKey:
		return "seq_key is NULL"
	case NullPayload:
		return "payload is NULL"
	case SubjectTooLong:
		return fmt.Sprintf("its subject takes more than %d bytes", outbox.MaxSubject)
	case HeadersTooLarge:
		return fmt.Sprintf("its mapped headers take %d bytes, more than %d", enc.mappedBytes, maxHeaders)
	}
	return fmt.Sprintf("with its headers, a payload of %d bytes is above sink.max_payload, %d", e.PayloadSize,
		enc.limit)
}

// cut shortens s to at most n bytes of valid UTF-8.
func cut(s string, n int) string {
	if len(s) > n {
		for n > 0 && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// checkDeadLetterSubject refuses a subject that can't be published, or that an event could have.
func checkDeadLetterSubject(subject string, t *outbox.SubjectTemplate) error {
	d, err := outbox.ParseSubjectTemplate(subject)
	switch {
	case err != nil:
		return usage("dead_letter_subject", fmt.Sprintf("sink.dead_letter_subject: %v",
			outbox.FaultOf(err).Message), "Write literal tokens with dots between them.")
	case len(d.Columns()) > 0 || len(subject) > outbox.MaxSubject:
		return usage("dead_letter_subject", fmt.Sprintf("sink.dead_letter_subject %q: has a column, or is "+
			"too long", subject), "Write literal tokens with dots between them.")
	case t.Produces(subject):
		return usage("dead_letter_subject",
			fmt.Sprintf("sink.dead_letter_subject %q: the subject template %q could produce it", subject, t),
			"Choose another subject for dead letters.")
	}
	return nil
}
