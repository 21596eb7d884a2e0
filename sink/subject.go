package sink

import (
	"strconv"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Filter returns a subject with wildcards that matches every subject which the template makes of an event whose columns have the known
// values. It may match more: a wildcard stands for whole tokens, and a :subject column whose value is not known ends the filter.
func (t *Template) Filter(known func(column string) (value string, ok bool)) string {
	var b []byte
	for i := range t.parts {
		p := &t.parts[i]
		if i > 0 {
			b = append(b, '.')
		}
		if p.column == "" {
			b = append(b, p.prefix...)
			continue
		}
		v, ok := known(p.column)
		switch {
		case !ok && p.subject:
			return string(append(b, '>'))
		case !ok:
			b = append(b, '*')
			continue
		}
		b = append(b, p.prefix...)
		switch {
		case p.partitions > 0:
			b = strconv.AppendUint(b, uint64(partition(v, p.partitions)), 10)
		case p.subject:
			b = appendSubject(b, v)
		default:
			b = outbox.AppendToken(b, v)
		}
		b = append(b, p.suffix...)
	}
	return string(b)
}

// Parse takes a subject of the template apart and calls f with the encoded value of each column that it holds; of a :subject column
// that is several tokens. A partition holds no value. It reports whether the subject is one of the template's.
func (t *Template) Parse(subject string, f func(column, encoded string)) bool {
	if !t.Produces(subject) {
		return false
	}
	tokens := strings.Split(subject, ".")
	spare := len(tokens) - len(t.parts)
	for i := range t.parts {
		p := &t.parts[i]
		n := 1
		if p.subject {
			n += spare
		}
		text := strings.Join(tokens[:n], ".")
		tokens = tokens[n:]
		if p.column != "" && p.partitions == 0 {
			f(p.column, text[len(p.prefix):len(text)-len(p.suffix)])
		}
	}
	return true
}

// Encoded is a column's value as it stands in the template's subjects; ok is false if they don't hold it.
func (t *Template) Encoded(column, value string) (encoded string, ok bool) {
	for i := range t.parts {
		switch p := &t.parts[i]; {
		case p.column != column || p.partitions > 0:
		case p.subject:
			return string(appendSubject(nil, value)), true
		default:
			return string(outbox.AppendToken(nil, value)), true
		}
	}
	return "", false
}

// Message is an event as it is published, but for what belongs to one publish: the ingress and the headers of the protocol.
type Message struct {
	Subject    string
	Header     map[string]string // mapped headers, and Outflow
	Data       []byte
	DeadLetter Reason // why it is a dead letter; "": it is none
}

// Encoder makes messages of events for somebody else than the stream. One goroutine uses it.
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
	enc.msgID = false
	enc.order = nil
	enc.setOrder()
	return &Encoder{enc: enc}, nil
}

// Message makes the message of an event. A row that can't be published is a dead letter, or a fault of class Poison, as in a run.
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
