package pipeline

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

const (
	tableOID   = 16385
	controlOID = 16399
	originName = "pg_16500"
	oidText    = 25
	oidBigint  = 20
	oidNumeric = 1700 // has no binary reader
)

var (
	mapping = relay.Mapping{Table: "public.outbox", Doc: "doc_id", Actor: "actor_id", Counter: "counter",
		Span: "span", Key: "seq_key", Payload: "payload"}
	columns = [...]string{"doc_id", "actor_id", "seq_key", "counter", "span", "payload"}
)

// row is an insert into the outbox. The key says the counter, "a:000041", and how many it takes where that is
// more than one: "a:000041+3".
type row struct{ doc, actor, key, payload string }

// counter returns the columns that the key says; nil is NULL.
func (r row) counter() (counter, span *int64) {
	_, number, ok := strings.Cut(r.key, ":")
	if !ok {
		return nil, nil
	}
	number, spans, _ := strings.Cut(number, "+")
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil {
		return nil, nil
	}
	if s, err := strconv.ParseInt(spans, 10, 64); err == nil {
		span = &s
	}
	return &n, span
}

// logical is a logical message.
type logical struct {
	prefix, content string
	outside         bool // not transactional
}

// transaction is a committed transaction in the WAL.
type transaction struct {
	start, end outbox.LSN // of the commit record
	time       int64      // commit timestamp, microseconds since 2000
	rows       []row
	logical    []logical
	control    bool       // they are rows of the control table
	home       outbox.LSN // replicated from there: its end LSN there
	origin     string     // the name of what it came by; "": originName
}

// messages are what pgoutput sends of the transaction; relation says that the table was not described in this
// session yet.
func (x *transaction) messages(relation bool, payload uint32, bin bool) []relay.WALMessage {
	be := binary.BigEndian
	var out []relay.WALMessage
	add := func(lsn outbox.LSN, b []byte) { out = append(out, relay.WALMessage{WALEnd: lsn, Data: b}) }
	message := func(m logical) {
		b := []byte{'M', 1}
		if m.outside {
			b[1] = 0
		}
		b = cstring(be.AppendUint64(b, uint64(x.start)), m.prefix)
		add(x.start, append(be.AppendUint32(b, uint32(len(m.content))), m.content...))
	}
	for _, m := range x.logical {
		if m.outside {
			message(m) // sent when it was written
		}
	}
	b := be.AppendUint64([]byte{'B'}, uint64(x.start))
	b = be.AppendUint64(b, uint64(x.time))
	add(x.start, be.AppendUint32(b, 731))
	if x.home != 0 {
		add(x.start, cstring(be.AppendUint64([]byte{'O'}, uint64(x.home)), cmp.Or(x.origin, originName)))
	}
	if relation && len(x.rows) > 0 {
		b := be.AppendUint32([]byte{'R'}, tableOID)
		b = append(cstring(cstring(b, "public"), "outbox"), 'd')
		b = be.AppendUint16(b, uint16(len(columns)))
		for _, name := range columns {
			typ := uint32(oidText)
			switch name {
			case "counter", "span":
				typ = oidBigint
			case "payload":
				typ = payload
			}
			b = be.AppendUint32(cstring(append(b, 0), name), typ)
			b = be.AppendUint32(b, 0xFFFFFFFF)
		}
		add(0, b)
	}
	for _, r := range x.rows {
		b := append(be.AppendUint32([]byte{'I'}, tableOID), 'N')
		b = be.AppendUint16(b, uint16(len(columns)))
		kind := byte('t')
		if bin {
			kind = 'b'
		}
		value := func(v string) { b = append(be.AppendUint32(append(b, kind), uint32(len(v))), v...) }
		number := func(n *int64) {
			switch {
			case n == nil:
				b = append(b, 'n')
			case bin:
				value(string(be.AppendUint64(nil, uint64(*n))))
			default:
				value(strconv.FormatInt(*n, 10))
			}
		}
		counter, span := r.counter()
		value(r.doc)
		value(r.actor)
		value(r.key)
		number(counter)
		number(span)
		value(r.payload)
		add(x.start, b)
	}
	for _, m := range x.logical {
		switch {
		case m.outside:
		case x.control:
			controlRow(m, func(b []byte) { add(x.start, b) })
		default:
			message(m)
		}
	}
	b = be.AppendUint64([]byte{'C', 0}, uint64(x.start))
	b = be.AppendUint64(b, uint64(x.end))
	add(x.end, be.AppendUint64(b, uint64(x.time)))
	return out
}

// controlRow describes the control table and inserts a row that says what a logical message would.
func controlRow(m logical, add func([]byte)) {
	be := binary.BigEndian
	b := append(cstring(cstring(be.AppendUint32([]byte{'R'}, controlOID), "public"), "outflow_control"), 'd')
	b = be.AppendUint16(b, uint16(len(relay.ControlColumns)))
	for _, name := range relay.ControlColumns {
		b = be.AppendUint32(be.AppendUint32(cstring(append(b, 0), name), oidText), 0xFFFFFFFF)
	}
	add(b)
	b = append(be.AppendUint32([]byte{'I'}, controlOID), 'N')
	b = be.AppendUint16(b, uint16(len(relay.ControlColumns)))
	for _, value := range []string{mapping.Table, m.prefix, m.content} {
		b = append(be.AppendUint32(append(b, 't'), uint32(len(value))), value...)
	}
	add(b)
}

func cstring(b []byte, s string) []byte { return append(append(b, s...), 0) }

var decoderConfig = decoder.Config{TableOID: tableOID, Mapping: mapping, Slot: "outflow"}

// line is a message of the stream as the tests compare it.
type line struct {
	doc, payload string
	header       outbox.Header
}

func lineOf(e *relay.Event, h *outbox.Header) line { return line{e.Doc, string(e.Payload), *h} }

func (l line) String() string { return fmt.Sprintf("%s %s|%s", l.doc, &l.header, l.payload) }
