package decoder

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/outflowhq/outflow/internal/relay"
)

// maxHeaders is how many members headers may have: each is compared with those before it.
const maxHeaders = 256

// The members of a message event's content.
const (
	memberDoc = iota
	memberActor
	memberCounter
	memberID
	memberKey
	memberHeaders
	memberPayload
	members
)

var memberNames = [members]string{"doc_id", "actor_id", "counter", "id", "seq_key", "headers", "payload"}

// content is what is known of a message event while it is read. Values are where they lie in the message.
type content struct {
	json  scanner
	bad   string // what is wrong with a member, while the JSON is right; the first stands
	seen  [members]bool
	value [members]span // of strings between their quotes; unset if absent, null or bad
	extra []span        // of headers, by the index of Event.Extra
	names [][]byte      // of headers, to find one that comes twice
}

// event makes an event of the content of a logical message. What is wrong with it marks the event, as a column does that can't be
// decoded: nothing else is held up by it.
func (d *Decoder) event(b []byte, r *Result) error {
	if d.tx.events == math.MaxUint32 {
		return errTooManyEvents
	}
	e := &r.Event
	e.Null, e.Pos.Index = relay.IsMessage, d.tx.events
	d.tx.events++
	r.Kind = Event

	c := &d.content
	d.readContent(b)
	if c.json.bad != "" {
		e.Bad = "content " + c.json.bad
		clear(c.value[:]) // what was read before may have been meant otherwise
		clear(c.extra)
	} else if c.bad != "" {
		e.Bad = "content: " + c.bad
	}
	e.Doc = d.member(memberDoc, e, relay.NullDoc)
	e.Actor = d.member(memberActor, e, relay.NullActor)
	e.ID = d.member(memberID, e, relay.NullID)
	e.Key = d.member(memberKey, e, relay.NullKey)
	if counter := c.value[memberCounter]; !c.value[memberKey].set && c.value[memberActor].set && counter.set && e.Bad == "" {
		e.Key = d.arena.key(e.Actor, string(b[counter.start:counter.end]))
		e.Null &^= relay.NullKey
	}
	// What the mapping has no place for decides nothing, as of a row: else messages would be ordered among each other, and rows not.
	if !d.cfg.Mapping.Keyed() {
		e.Key, e.Null = "", e.Null&^relay.NullKey
	}
	if d.cfg.Mapping.Actor == "" {
		e.Actor, e.Null = "", e.Null&^relay.NullActor
	}
	switch p := c.value[memberPayload]; {
	case !p.set:
		e.Null |= relay.NullPayload
	default:
		e.PayloadSize = p.end - p.start
		if e.Bad == "" && (d.cfg.MaxPayload == 0 || e.PayloadSize <= d.cfg.MaxPayload) {
			e.Payload = d.arena.copy(b[p.start:p.end])
		}
	}
	large := slices.ContainsFunc(c.extra, func(s span) bool { return s.end-s.start >= ownBlock })
	e.Extra = d.arena.strings(len(c.extra), large)
	for i, s := range c.extra {
		if d.cfg.Extra[i] == d.cfg.Mapping.Counter {
			s = c.value[memberCounter]
		}
		if s.set {
			e.Extra[i] = d.unquoted(s)
		} else {
			e.SetExtraNull(i)
		}
	}
	c.json.b = nil
	clear(c.names)
	return nil
}

// member gives the value of a member that is a string.
func (d *Decoder) member(i int, e *relay.Event, null relay.Nulls) string {
	s := d.content.value[i]
	if !s.set {
		e.Null |= null
		return ""
	}
	return d.unquoted(s)
}

// unquoted copies the value of a string into the arena.
func (d *Decoder) unquoted(s span) string {
	raw := d.content.json.b[s.start:s.end]
	if !s.escaped {
		return asString(d.arena.copy(raw))
	}
	return asString(appendUnquoted(d.arena.take(len(raw)), raw))
}

// readContent reads all of a content.
func (d *Decoder) readContent(b []byte) {
	c := &d.content
	c.json = scanner{b: b}
	c.bad, c.seen, c.value, c.names = "", [members]bool{}, [members]span{}, c.names[:0]
	c.extra = slices.Grow(c.extra[:0], len(d.cfg.Extra))[:len(d.cfg.Extra)]
	clear(c.extra)
	s := &c.json
	if !utf8.Valid(b) {
		s.bad = "is not UTF-8"
		return
	}
	if s.space(); s.peek() != '{' {
		s.fail("no JSON object")
		return
	}
	s.object(func(name span) {
		text := c.bytes(name)
		switch i := slices.IndexFunc(memberNames[:], func(n string) bool { return n == string(text) }); {
		case i < 0:
			c.spoil("has the unknown member %s", c.quote(name))
			s.value()
		case c.seen[i]:
			c.spoil("has the member %s twice", memberNames[i])
			s.value()
		default:
			c.seen[i] = true
			d.readMember(i)
		}
	})
	if s.space(); s.bad == "" && s.off < len(s.b) {
		s.fail("goes on after its end")
	}
	if doc := c.value[memberDoc]; doc.set && doc.start == doc.end {
		c.spoil("doc_id is empty")
	}
}

// readMember reads the value of a member.
func (d *Decoder) readMember(i int) {
	c := &d.content
	s := &c.json
	s.space()
	start, first := s.off, s.peek()
	if i == memberHeaders && first == '{' {
		d.readHeaders()
		return
	}
	s.value()
	whole := span{start: start, end: s.off, set: true}
	switch {
	case s.bad != "":
	case i == memberPayload:
		c.value[i] = whole
	case first == 'n': // null is as absent as in a column
	case i == memberHeaders:
		c.spoil("headers is not an object")
	case i == memberCounter:
		if !counter(s.b[whole.start:whole.end]) {
			c.spoil("counter is not a whole number from 0 to %d, written in digits", math.MaxInt64)
			return
		}
		c.value[i] = whole
	default:
		c.value[i] = c.string("", memberNames[i], first, whole)
	}
}

// readHeaders reads the member headers, an object.
func (d *Decoder) readHeaders() {
	c := &d.content
	s := &c.json
	s.object(func(name span) {
		text := c.bytes(name)
		switch {
		case len(c.names) == maxHeaders:
			c.spoil("headers has more than %d members", maxHeaders)
			s.value()
			return
		case name.escaped && !readable(s.b[name.start:name.end]):
			c.spoil(`headers has a name with \u0000 or half of a surrogate pair`)
			s.value()
			return
		case slices.ContainsFunc(c.names, func(n []byte) bool { return string(n) == string(text) }):
			c.spoil("headers has the member %s twice", c.quote(name))
			s.value()
			return
		}
		c.names = append(c.names, text)
		s.space()
		start, first := s.off, s.peek()
		s.value()
		if s.bad != "" || first == 'n' {
			return
		}
		v := c.string("header ", asString(text), first, span{start: start, end: s.off, set: true})
		if i, used := d.extraAt[string(text)]; used {
			c.extra[i] = v
		}
	})
}

// string is what lies between the quotes of a value, unset if it is no string that PostgreSQL could hold as text. Its name is in two parts,
// and in the message's memory.
func (c *content) string(kind, name string, first byte, whole span) span {
	if first != '"' {
		c.spoil("%s is not a string", kind+name[:min(len(name), 40)])
		return span{}
	}
	whole.start++
	whole.end--
	raw := c.json.b[whole.start:whole.end]
	whole.escaped = slices.Contains(raw, '\\')
	if whole.escaped && !readable(raw) {
		c.spoil(`%s holds \u0000 or half of a surrogate pair`, kind+name[:min(len(name), 40)])
		return span{}
	}
	return whole
}

// bytes is the name of a member.
func (c *content) bytes(name span) []byte {
	raw := c.json.b[name.start:name.end]
	if name.escaped {
		return appendUnquoted(make([]byte, 0, len(raw)), raw)
	}
	return raw
}

// quote is a name as it can stand in an error.
func (c *content) quote(name span) string {
	b := c.bytes(name)
	return strconv.Quote(string(b[:min(len(b), 40)]))
}

func (c *content) spoil(format string, args ...any) {
	if c.bad == "" {
		c.bad = fmt.Sprintf(format, args...)
	}
}

// counter reports whether a JSON value is a whole number from 0 to 2^63-1, written as one.
func counter(b []byte) bool {
	for _, c := range b {
		if c < '0' || c > '9' {
			return false
		}
	}
	_, err := strconv.ParseInt(string(b[:min(len(b), 20)]), 10, 64)
	return err == nil && len(b) < 20
}
