package decoder

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/outflowhq/outflow/internal/jsontext"
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
	memberSpan // the last: only where it is mapped
	members
)

var memberNames = [members]string{"doc_id", "actor_id", "counter", "id", "seq_key", "headers", "payload",
	"span"}

// content is what is known of a message event while it is read. Values are where they lie in the message.
type content struct {
	json  jsontext.Scanner
	text  string // what is wrong with the text as a whole
	bad   string // what is wrong with a member, while the text is right; the first stands
	seen  [members]bool
	value [members]jsontext.Span // of strings between their quotes; unset if absent, null or bad
	extra []jsontext.Span        // of headers, by the index of Event.Extra
	names [][]byte               // of headers, to find one that comes twice
}

// event makes an event of the content of a logical message. What is wrong with it marks the event, as a
// column does that can't be decoded: nothing else is held up by it.
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
	if c.text != "" {
		e.Bad = "content " + c.text
		clear(c.value[:]) // what was read before may have been meant otherwise
		clear(c.extra)
	} else if c.bad != "" {
		e.Bad = "content: " + c.bad
	}
	e.Doc = d.member(memberDoc, e, relay.NullDoc)
	e.Actor = d.member(memberActor, e, relay.NullActor)
	e.ID = d.member(memberID, e, relay.NullID)
	e.Key = d.member(memberKey, e, relay.NullKey)
	if counter := c.value[memberCounter]; !c.value[memberKey].Set && c.value[memberActor].Set &&
		counter.Set && e.Bad == "" {
		e.Key = d.arena.key(e.Actor, string(b[counter.Start:counter.End]))
		e.Null &^= relay.NullKey
	}
	// What the mapping has no place for decides nothing, as of a row: else messages would be ordered among
	// each other, and rows not.
	if !d.cfg.Mapping.Keyed() {
		e.Key, e.Null = "", e.Null&^relay.NullKey
	}
	if d.cfg.Mapping.Actor == "" {
		e.Actor, e.Null = "", e.Null&^relay.NullActor
	}
	if first := c.value[memberCounter]; first.Set && d.cfg.Mapping.Counter != "" {
		n, _ := parseInteger(b[first.Start:first.End])
		span := int64(1)
		if s := c.value[memberSpan]; s.Set {
			span, _ = parseInteger(b[s.Start:s.End])
		}
		e.Counter = counterOf(n, span)
	}
	switch p := c.value[memberPayload]; {
	case !p.Set:
		e.Null |= relay.NullPayload
	default:
		e.PayloadSize = p.End - p.Start
		if e.Bad == "" && (d.cfg.MaxPayload == 0 || e.PayloadSize <= d.cfg.MaxPayload) {
			e.Payload = d.arena.copy(b[p.Start:p.End])
		}
	}
	large := slices.ContainsFunc(c.extra, func(s jsontext.Span) bool { return s.End-s.Start >= ownBlock })
	e.Extra = d.arena.strings(len(c.extra), large)
	for i, s := range c.extra {
		switch d.cfg.Extra[i] {
		case d.cfg.Mapping.Counter:
			s = c.value[memberCounter]
		case d.cfg.Mapping.Span:
			s = c.value[memberSpan]
		}
		if s.Set {
			e.Extra[i] = d.unquoted(s)
		} else {
			e.SetExtraNull(i)
		}
	}
	c.json.Text = nil
	clear(c.names)
	return nil
}

// member gives the value of a member that is a string.
func (d *Decoder) member(i int, e *relay.Event, null relay.Nulls) string {
	s := d.content.value[i]
	if !s.Set {
		e.Null |= null
		return ""
	}
	return d.unquoted(s)
}

// unquoted copies the value of a string into the arena.
func (d *Decoder) unquoted(s jsontext.Span) string {
	raw := d.content.json.Text[s.Start:s.End]
	if !s.Escaped {
		return asString(d.arena.copy(raw))
	}
	return asString(jsontext.AppendUnquoted(d.arena.take(len(raw)), raw))
}

// readContent reads all of a content.
func (d *Decoder) readContent(b []byte) {
	c := &d.content
	c.json = jsontext.Scanner{Text: b}
	c.text, c.bad, c.names = "", "", c.names[:0]
	c.seen, c.value = [members]bool{}, [members]jsontext.Span{}
	c.extra = slices.Grow(c.extra[:0], len(d.cfg.Extra))[:len(d.cfg.Extra)]
	clear(c.extra)
	s := &c.json
	if !utf8.Valid(b) {
		c.text = "is not UTF-8"
		return
	}
	if s.Space(); s.Peek() == '{' {
		d.readMembers()
		s.End()
	} else {
		s.Fail("no JSON object")
	}
	if s.Problem != "" {
		c.text = fmt.Sprintf("is not JSON as it should be, at byte %d of %d: %s", s.At, len(b), s.Problem)
	}
	if doc := c.value[memberDoc]; doc.Set && doc.Start == doc.End {
		c.spoil("doc_id is empty")
	}
}

// readMembers reads the members of the object that a content is.
func (d *Decoder) readMembers() {
	c := &d.content
	s := &c.json
	known := memberNames[:]
	if d.cfg.Mapping.Span == "" {
		known = known[:memberSpan]
	}
	s.Object(func(name jsontext.Span) {
		text := c.bytes(name)
		switch i := slices.IndexFunc(known, func(n string) bool { return n == string(text) }); {
		case i < 0:
			c.spoil("has the unknown member %s", c.quote(name))
			s.Value()
		case c.seen[i]:
			c.spoil("has the member %s twice", memberNames[i])
			s.Value()
		default:
			c.seen[i] = true
			d.readMember(i)
		}
	})
}

// readMember reads the value of a member.
func (d *Decoder) readMember(i int) {
	c := &d.content
	s := &c.json
	s.Space()
	start, first := s.Off, s.Peek()
	if i == memberHeaders && first == '{' {
		d.readHeaders()
		return
	}
	s.Value()
	whole := jsontext.Span{Start: start, End: s.Off, Set: true}
	switch {
	case s.Problem != "":
	case i == memberPayload:
		c.value[i] = whole
	case first == 'n': // null is as absent as in a column
	case i == memberHeaders:
		c.spoil("headers is not an object")
	case i == memberCounter:
		d.readNumber(i, whole, 0, math.MaxInt64)
	case i == memberSpan:
		d.readNumber(i, whole, 1, math.MaxUint32)
	default:
		c.value[i] = c.string("", memberNames[i], first, whole)
	}
}

// readNumber takes the value of a member that is a whole number, written in digits.
func (d *Decoder) readNumber(i int, whole jsontext.Span, least, most int64) {
	c := &d.content
	raw := c.json.Text[whole.Start:whole.End]
	if n, ok := parseInteger(raw); !ok || raw[0] == '-' || n < least || n > most {
		c.spoil("%s is not a whole number from %d to %d, written in digits", memberNames[i], least, most)
		return
	}
	c.value[i] = whole
}

// readHeaders reads the member headers, an object.
func (d *Decoder) readHeaders() {
	c := &d.content
	s := &c.json
	s.Object(func(name jsontext.Span) {
		text := c.bytes(name)
		switch {
		case len(c.names) == maxHeaders:
			c.spoil("headers has more than %d members", maxHeaders)
			s.Value()
			return
		case name.Escaped && !jsontext.IsText(s.Text[name.Start:name.End]):
			c.spoil(`headers has a name with \u0000 or half of a surrogate pair`)
			s.Value()
			return
		case slices.ContainsFunc(c.names, func(n []byte) bool { return string(n) == string(text) }):
			c.spoil("headers has the member %s twice", c.quote(name))
			s.Value()
			return
		}
		c.names = append(c.names, text)
		s.Space()
		start, first := s.Off, s.Peek()
		s.Value()
		if s.Problem != "" || first == 'n' {
			return
		}
		v := c.string("header ", asString(text), first, jsontext.Span{Start: start, End: s.Off, Set: true})
		if i, used := d.extraAt[string(text)]; used {
			c.extra[i] = v
		}
	})
}

// string is what lies between the quotes of a value, unset if it is no string that PostgreSQL could hold as
// text. Its name is in two parts, and in the message's memory.
func (c *content) string(kind, name string, first byte, whole jsontext.Span) jsontext.Span {
	if first != '"' {
		c.spoil("%s is not a string", kind+name[:min(len(name), 40)])
		return jsontext.Span{}
	}
	whole.Start++
	whole.End--
	raw := c.json.Text[whole.Start:whole.End]
	whole.Escaped = slices.Contains(raw, '\\')
	if whole.Escaped && !jsontext.IsText(raw) {
		c.spoil(`%s holds \u0000 or half of a surrogate pair`, kind+name[:min(len(name), 40)])
		return jsontext.Span{}
	}
	return whole
}

// bytes is the name of a member.
func (c *content) bytes(name jsontext.Span) []byte {
	raw := c.json.Text[name.Start:name.End]
	if name.Escaped {
		return jsontext.AppendUnquoted(make([]byte, 0, len(raw)), raw)
	}
	return raw
}

// quote is a name as it can stand in an error.
func (c *content) quote(name jsontext.Span) string {
	b := c.bytes(name)
	return strconv.Quote(string(b[:min(len(b), 40)]))
}

func (c *content) spoil(format string, args ...any) {
	if c.bad == "" {
		c.bad = fmt.Sprintf(format, args...)
	}
}
