package producer

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/outflowhq/outflow/outbox"
)

// Message returns an Outbox without a table, for Outflow's `source: message` (or both): an event is a logical
// message in the WAL, which is published if and only if the caller's transaction commits, and of which
// nothing stays in the database. So there is nothing to clean up, and nothing to read again but the stream.
//
// The payload is a JSON text, and goes out byte for byte, but for white space around it. Columns are the
// event's headers, under the names of columns that Outflow's settings headers and subject have; NULL is none.
// An event without an ID gets a random UUID; the ids are returned as they are published. Of cfg, Columns and
// Publication are of no use here, and Table says only in which schema the table of counters is.
func Message(cfg Config) (*Outbox, error) {
	o, err := New(cfg)
	if err != nil {
		return nil, err
	}
	o.message = true
	return o, nil
}

// maxMessageHeaders is how many headers a content may have. It is an object: so its payload may be nested one
// less than [jsontext.MaxDepth], which holds for the whole of it.
const maxMessageHeaders = 256

// emit is the call that emits a content: as UTF-8, whatever the database's encoding is.
func emit(content string) string {
	return "pg_catalog.pg_logical_emit_message(true, '" + outbox.EventPrefix + "', pg_catalog.convert_to(" +
		content + ", 'UTF8'))::pg_catalog.text"
}

// The statements. The messages are made one by one in the order of the arrays.
var (
	emitSQL = "SELECT ''::pg_catalog.text, " + emit("t.c0") + "\nFROM " + source(1) + " ORDER BY t.n"
	// The counter stands between what comes before it in the content and what comes after it.
	emitNextSQL = "SELECT " + emit("r.head || r.counter || r.tail") +
		", r.counter::pg_catalog.text\nFROM r ORDER BY r.n"
)

// buildMessages checks the events and makes the statement that emits them.
func (o *Outbox) buildMessages(events []Event) (statement, error) {
	s := statement{ids: make([]string, len(events)), returnsCounter: o.cfg.NextCounter}
	counters := map[sequence]int{}
	heads, tails, docs, actors := &list{}, &list{}, &list{}, &list{}
	var head, tail []byte
	for i := range events {
		e := &events[i]
		bad := o.judgeMessage(e)
		if bad == nil && !o.cfg.NextCounter {
			at := sequence{e.Document, e.Actor, e.Counter}
			if j, twice := counters[at]; twice && e.Key == "" && (e.Actor != "" || e.Counter != 0) {
				bad = takenInCall(e, j)
			}
			counters[at] = i
		}
		if bad == nil {
			if s.ids[i] = e.ID; e.ID == "" {
				s.ids[i] = newID()
			}
			head, tail, bad = o.content(head[:0], tail[:0], e, s.ids[i])
		}
		if bad == nil && len(heads.b)+len(tails.b)+len(docs.b)+len(actors.b) > maxCall {
			bad = callTooLarge(e)
		}
		if bad != nil {
			bad.Index = i
			return statement{}, bad
		}
		if o.cfg.NextCounter {
			heads.addBytes(head)
			tails.addBytes(tail)
			docs.add(e.Document)
			actors.add(e.Actor)
		} else {
			heads.addBytes(append(strconv.AppendInt(head, e.Counter, 10), tail...))
		}
	}
	if !o.cfg.NextCounter {
		s.sql, s.args = emitSQL, []any{heads.param()}
		return s, nil
	}
	s.sql = "WITH e AS (SELECT t.n, t.c0 AS doc, t.c1 AS actor, t.c2 AS head, t.c3 AS tail FROM " +
		source(4) + "),\n" +
		takeSQL(o.counter, "e.doc", "e.actor") + emitNextSQL
	s.args = []any{docs.param(), actors.param(), heads.param(), tails.param()}
	return s, nil
}

// judgeMessage checks the roles of an event.
func (o *Outbox) judgeMessage(e *Event) *Invalid {
	if bad := o.judgeAlways(e); bad != nil {
		return bad
	}
	for _, f := range []struct{ field, text string }{{"Document", e.Document}, {"Actor", e.Actor},
		{"Key", e.Key}, {"ID", e.ID}} {
		if bad := (&column{}).check(f.text); bad != nil {
			return invalid(f.field, shown(f.text), bad.problem, bad.hint)
		}
	}
	if len(e.Columns) > maxMessageHeaders {
		return invalid("Columns", fmt.Sprintf("(%d)", len(e.Columns)),
			fmt.Sprintf("more than %d headers", maxMessageHeaders), "Give fewer")
	}
	const within = 1 // the content
	if problem := checkJSON(e.Payload, within); problem != "" {
		return invalid("Payload", shown(string(e.Payload)), "not JSON: "+problem,
			"Give a JSON text, such as json.Marshal returns")
	}
	id, key := 36, headerValue(e.Actor+":00000000000000000000")
	if e.ID != "" {
		id = headerValue(e.ID)
	}
	if e.Key != "" {
		key = headerValue(e.Key)
	}
	return o.judgeSize(e, len(e.Payload), id, key, lookupMessage)
}

// content makes what comes before the counter and what comes after it.
func (o *Outbox) content(head, tail []byte, e *Event, id string) (_, _ []byte, bad *Invalid) {
	head = appendJSON(append(head, `{"doc_id":`...), e.Document)
	head = appendJSON(append(head, `,"actor_id":`...), e.Actor)
	head = append(head, `,"counter":`...)
	tail = appendJSON(append(tail, `,"id":`...), id)
	if e.Key != "" {
		tail = appendJSON(append(tail, `,"seq_key":`...), e.Key)
	}
	before := `,"headers":{`
	for _, name := range slices.Sorted(maps.Keys(e.Columns)) {
		val, binary, err := plain(e.Columns[name])
		f := (&column{}).check(name)
		switch {
		case f != nil:
		case err != nil:
			f = &finding{err.Error(), "Give a string, or something that has a text"}
		case binary && !utf8.ValidString(val.text):
			f = &finding{"bytes that are no text", "Give a string: a header is one"}
		case val.null:
			continue
		default:
			f = (&column{}).check(val.text)
		}
		if f != nil {
			return nil, nil, invalid(fmt.Sprintf("Columns[%q]", name), shown(fmt.Sprint(e.Columns[name])),
				f.problem, f.hint)
		}
		tail = appendJSON(append(appendJSON(append(tail, before...), name), ':'), val.text)
		before = ","
	}
	if before == "," {
		tail = append(tail, '}')
	}
	tail = append(append(tail, `,"payload":`...), e.Payload...)
	return head, append(tail, '}'), nil
}

// lookupMessage is the value that a mapped header has.
func lookupMessage(column string, e *Event) (string, bool) {
	if v, ok := e.Columns[column]; ok {
		val, _, err := plain(v)
		return val.text, err == nil && !val.null
	}
	switch column {
	case "doc_id":
		return e.Document, true
	case "actor_id":
		return e.Actor, true
	case "counter":
		return strconv.FormatInt(e.Counter, 10), true
	case "seq_key":
		return e.Key, true
	case "id":
		return e.ID, true
	}
	return "", false
}

// newID is a random UUID, version 4.
func newID() string {
	var b [16]byte
	rand.Read(b[:]) //nolint:errcheck // it never fails
	b[6], b[8] = b[6]&0x0F|0x40, b[8]&0x3F|0x80
	s := hex.EncodeToString(b[:])
	return strings.Join([]string{s[:8], s[8:12], s[12:16], s[16:20], s[20:]}, "-")
}

// appendJSON appends a string of valid UTF-8 as JSON, with no more escapes than there must be.
func appendJSON(b []byte, s string) []byte {
	const digits = "0123456789abcdef"
	b = append(b, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < ' ':
			b = append(b, '\\', 'u', '0', '0', digits[c>>4], digits[c&0xF])
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}
