package sink

import (
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Message is an event as it is published, without what belongs to a single publish: the ingress and the
// protocol's headers.
type Message struct {
	Subject    string
	Header     map[string]string // mapped headers, and Outflow
	Data       []byte
	DeadLetter Reason // why it is a dead letter; "" if it isn't one
}

// Encoder encodes events for other destinations than the stream, such as a replay. One goroutine uses it.
type Encoder struct {
	enc *encoder
	m   message
}

// NewEncoder makes an encoder with the settings of a connection.
func NewEncoder(cfg Config) (*Encoder, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	enc, err := newEncoder(cfg.withDefaults())
	if err != nil {
		return nil, err
	}
	// What is too large stays as it is in the stream. Of a row that is read in the table nobody knows whose
	// it is.
	enc.msgID, enc.fenced, enc.home = false, false, 0
	enc.order = nil
	enc.setOrder()
	return &Encoder{enc: enc}, nil
}

// Mapped returns what reads a mapped header's value from an event, as the message has it; "" where it has
// none. nil: no header has this name, whatever its case.
func (x *Encoder) Mapped(name string) func(*relay.Event) string {
	i := slices.IndexFunc(x.enc.mapped, func(h header) bool { return strings.EqualFold(h.name, name) })
	if i < 0 {
		return nil
	}
	field := x.enc.mapped[i].field
	return func(e *relay.Event) string {
		v, _ := field.value(e)
		return trim(v)
	}
}

// Subject returns the subject of an event's message, and why that is a dead letter; "" if it isn't one.
func (x *Encoder) Subject(e *relay.Event, h *outbox.Header) (subject string, dead Reason) {
	if dead = x.enc.encode(&x.m, e, h, 0); dead != "" {
		return x.enc.deadTo, dead
	}
	return string(x.m.subject), ""
}

// Message makes the message of an event. A row that can't be published is a dead letter, or a fault of class
// Poison, as in a run.
func (x *Encoder) Message(e *relay.Event, h *outbox.Header) (Message, error) {
	m := &x.m
	reason := x.enc.encode(m, e, h, 0)
	if reason != "" {
		if x.enc.deadTo == "" {
			return Message{}, x.enc.fault(e, reason)
		}
		x.enc.deadLetter(m, e, h, 0, reason)
	}
	out := Message{Subject: string(m.subject), Header: map[string]string{}, Data: m.data, DeadLetter: reason}
	for line := range strings.SplitSeq(strings.TrimPrefix(string(m.header), headerStart), "\r\n") {
		name, value, ok := strings.Cut(line, ": ")
		if ok && name != headerExpected {
			out.Header[name] = value
		}
	}
	return out, nil
}
