package sink

import (
	"fmt"
	"sort"
	"strconv"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The headers that are ours or the server's.
const (
	headerExpected = "Nats-Expected-Last-Sequence"
	headerMsgID    = "Nats-Msg-Id"

	// The last sequence of a subject, and which subject that is.
	headerFence        = "Nats-Expected-Last-Subject-Sequence"
	headerFenceSubject = "Nats-Expected-Last-Subject-Sequence-Subject"

	headerBatchCommit = "Nats-Batch-Commit"
	headerBatchID     = "Nats-Batch-Id"
	headerBatchSeq    = "Nats-Batch-Sequence"

	HeaderDeadLetter = "Outflow-Dead-Letter" // on a dead letter: its Reason

	headerStart = "NATS/1.0\r\n"
)

// message is a message as it goes out. Its buffers are used again; data is the event's payload, which nobody
// writes to.
type message struct {
	subject []byte // with the ingress
	header  []byte // the whole block, from NATS/1.0 to the empty line
	data    []byte
	seq     uint64 // predicted

	// Where the expected sequence and the fence stand in header. In a batch, lines come before them or, from
	// its second message on, in their place.
	expected, expectedEnd int
	lines                 []byte // of a batch; empty: none
	rest                  int    // where header goes on behind them
}

// size is what the message counts in flight, in bytes: about what it takes on the wire.
func (m *message) size() int { return len(m.subject) + len(m.header) + len(m.data) }

// encoder turns events into messages. A message's bytes are a function of the event, its header, the sequence
// before it and the settings. One goroutine uses it.
type encoder struct {
	table       string
	template    *outbox.SubjectTemplate
	columns     []Field // where the values of the template's columns are
	mapped      []header
	order       []int // which header comes where: an index of mapped, or a slot below
	limit       int   // sink.max_payload
	keyed       bool
	msgID       bool
	home        int    // cluster.id of the one whose events these are, which messages name; 0: none
	deadTo      string // the dead letters' subject; "" if a row that can't be published stops
	ingress     string // prefix of every subject, with its last dot
	mappedBytes int    // bytes that the mapped headers of the last message take, or would take
	overhead    int    // bytes that a message counts for the protocol's headers
	fenced      bool   // a message names the newest cut
	fence       uint64 // its sequence; 0: the stream has none

	// The broker lost the messages from lostFrom to lostTo, which the message behind lostTo says; 0: none.
	// It counts as one of the protocol's headers: what is too large does not depend on a loss.
	lostFrom, lostTo uint64
}

// The slots of encoder.order that are not mapped headers.
const (
	slotExpected = -1 - iota
	slotMsgID
	slotOutflow
	slotLost
	slotOrigin
)

func newEncoder(c Config) (*encoder, error) {
	t, err := outbox.ParseSubjectTemplate(c.Subject)
	if err != nil {
		return nil, err
	}
	enc := &encoder{table: c.Table, template: t, limit: c.MaxPayload, keyed: c.Keyed,
		msgID: c.MsgID || c.Home > 0, home: c.Home, overhead: overhead, fenced: c.Fence}
	if c.Fence {
		enc.overhead += fenceBytes
	}
	if c.Home > 0 {
		enc.overhead += homeBytes
	}
	for _, column := range t.Columns() {
		f, ok := c.Resolve(column)
		if !ok {
			return nil, usage("subject_column", fmt.Sprintf("subject %q: the table has no column %q", t,
				column),
				"Name a column of the table, or one of the roles doc_id, actor_id, seq_key, id.")
		}
		enc.columns = append(enc.columns, f)
	}
	if enc.mapped, err = bindHeaders(c.Headers, c.Resolve); err != nil {
		return nil, err
	}
	if c.DeadLetter {
		if err := checkDeadLetterSubject(c.DeadLetterSubject, t); err != nil {
			return nil, err
		}
		enc.deadTo = c.DeadLetterSubject
	}
	enc.setOrder()
	return enc, nil
}

// setOrder sorts the headers by name, so that the order of the settings means nothing.
func (enc *encoder) setOrder() {
	names := map[int]string{slotExpected: headerExpected, slotOutflow: outbox.HeaderName,
		slotLost: outbox.HeaderLost}
	if enc.msgID {
		names[slotMsgID] = headerMsgID
	}
	if enc.home > 0 {
		names[slotOrigin] = outbox.HeaderOrigin
	}
	for i, h := range enc.mapped {
		names[i] = h.name
	}
	for slot := range names {
		enc.order = append(enc.order, slot)
	}
	sort.Slice(enc.order, func(i, j int) bool { return names[enc.order[i]] < names[enc.order[j]] })
}

// encode makes the message that is expected directly behind sequence last. It returns why it can't be
// published, if it can't: what m holds is of no use then.
func (enc *encoder) encode(m *message, e *relay.Event, h *outbox.Header, last uint64) Reason {
	if r := enc.checkValues(e); r != "" {
		return r
	}
	m.seq = last + 1
	m.data = e.Payload
	m.subject = enc.appendSubject(append(m.subject[:0], enc.ingress...), e)
	if len(m.subject)-len(enc.ingress) > outbox.MaxSubject {
		return SubjectTooLong
	}
	b := append(m.header[:0], headerStart...)
	own, mapped := 0, 0
	for _, slot := range enc.order {
		switch slot {
		case slotExpected:
			b = enc.expect(m, b, last)
		case slotMsgID:
			b = enc.appendMsgID(b, e)
		case slotOrigin:
			b = enc.appendOrigin(b)
		case slotOutflow:
			start := len(b)
			b = appendOutflow(b, h)
			own = len(b) - start
		case slotLost:
			b = enc.appendLost(b, last)
		default:
			v, null := enc.mapped[slot].field.value(e)
			if null {
				continue
			}
			v = trim(v)
			name := enc.mapped[slot].name
			if mapped += len(name) + len(v) + 4; mapped <= maxHeaders {
				b = appendMapped(b, name, v)
			}
		}
	}
	m.header = append(b, "\r\n"...)
	enc.mappedBytes = mapped
	if mapped > maxHeaders {
		return HeadersTooLarge
	}
	if e.PayloadSize+own+mapped+enc.overhead > enc.limit || e.PayloadSize != len(e.Payload) {
		return TooLarge
	}
	return ""
}

// appendSubject appends the event's public subject. It may be longer than a subject is allowed to be.
func (enc *encoder) appendSubject(b []byte, e *relay.Event) []byte {
	var room [8]string // rarely exceeded, so that a message costs no allocation
	values := room[:0]
	for _, f := range enc.columns {
		v, _ := f.value(e)
		values = append(values, v)
	}
	return enc.template.Append(b, values)
}

func (enc *encoder) checkValues(e *relay.Event) Reason {
	switch {
	case e.Bad != "":
		return Undecodable
	case e.Null&relay.NullDoc != 0:
		return NullDoc
	case e.Null&relay.NullKey != 0 && enc.keyed:
		return NullKey
	case e.Null&relay.NullPayload != 0:
		return NullPayload
	}
	return ""
}

// expect appends the expected sequence to the header's lines, and the fence behind it.
func (enc *encoder) expect(m *message, b []byte, last uint64) []byte {
	m.expected, m.rest, m.lines = len(b), len(b), m.lines[:0]
	b = append(b, headerExpected+": "...)
	b = strconv.AppendUint(b, last, 10)
	b = append(b, "\r\n"...)
	if enc.fenced {
		b = append(b, headerFence+": "...)
		b = strconv.AppendUint(b, enc.fence, 10)
		b = append(b, "\r\n"+headerFenceSubject+": "+outbox.CutSubject+"\r\n"...)
	}
	m.expectedEnd = len(b)
	return b
}

// appendMsgID appends the event's position, or what is the same whoever publishes it.
func (enc *encoder) appendMsgID(b []byte, e *relay.Event) []byte {
	b = append(b, headerMsgID+": "...)
	if enc.home > 0 {
		b = outbox.AppendOriginID(b, enc.home, e.Pos, e.ID)
	} else {
		b = e.Pos.Append(b)
	}
	return append(b, "\r\n"...)
}

func (enc *encoder) appendOrigin(b []byte) []byte {
	b = append(b, outbox.HeaderOrigin+": "...)
	b = strconv.AppendInt(b, int64(enc.home), 10)
	return append(b, "\r\n"...)
}

func appendOutflow(b []byte, h *outbox.Header) []byte {
	b = append(b, outbox.HeaderName+": "...)
	b = h.Append(b)
	return append(b, "\r\n"...)
}

// appendLost appends what the broker lost before the message behind sequence last.
func (enc *encoder) appendLost(b []byte, last uint64) []byte {
	if enc.lostFrom == 0 || last != enc.lostTo {
		return b
	}
	b = append(b, outbox.HeaderLost+": "...)
	b = strconv.AppendUint(b, enc.lostFrom, 10)
	return append(b, "\r\n"...)
}

// appendMapped appends a header line. CR and LF in the value become spaces.
func appendMapped(b []byte, name, v string) []byte {
	b = append(b, name...)
	b = append(b, ": "...)
	start := len(b)
	b = append(b, v...)
	for i := start; i < len(b); i++ {
		if b[i] == '\r' || b[i] == '\n' {
			b[i] = ' '
		}
	}
	return append(b, "\r\n"...)
}

// trim takes white space off both ends: whoever reads a header drops it anyway.
func trim(v string) string { return strings.Trim(v, " \t\r\n") }
