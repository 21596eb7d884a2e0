package oracle

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Origin says what is an event.
type Origin string

// The origins; none given is the table.
const (
	OfTable   Origin = "table"
	OfMessage Origin = "message" // logical messages with the prefix outflow.event
	OfBoth    Origin = "both"
)

func (o Origin) messages() bool { return o == OfMessage || o == OfBoth }

// eventPrefix is that of a logical message that is an event.
const eventPrefix = "outflow.event"

const (
	deepest     = 1000 // brackets within each other, at most
	mostHeaders = 256
)

// fromMessage makes an event of a logical message's content, as a row would be: its members are the columns
// of the roles, its headers further columns. One that is not as it should be is an event all the same:
// outflow leaves a dead letter in its place.
func (r *Reader) fromMessage(text string) *Event {
	m, err := parseContent(text, r.source.Columns.Span != "")
	if err != nil {
		return &Event{Message: true, Bad: err.Error(), NullDoc: true, NullPayload: true, NullKey: true}
	}
	c := r.source.Columns
	var row Row
	for _, role := range []struct{ member, column string }{
		{"doc_id", c.Doc}, {"actor_id", c.Actor}, {"counter", c.Counter}, {"id", c.ID}, {"seq_key", c.Key},
		{"span", c.Span},
	} {
		if v, there := m.text[role.member]; there && role.column != "" {
			row = append(row, Column{Name: role.column, Value: v})
		}
	}
	if payload, there := m.raw["payload"]; there {
		row = append(row, Column{Name: c.Payload, Value: string(payload)})
	}
	for name, v := range m.headers {
		if _, role := row.Get(name); !role {
			row = append(row, Column{Name: name, Value: v})
		}
	}
	e := r.event(row)
	e.Message, e.Bad = true, m.bad
	_, key := m.text["seq_key"]
	_, actor := m.text["actor_id"]
	_, counter := m.text["counter"]
	switch {
	case key:
	case m.bad != "":
		e.Key, e.NullKey = "", true
	default:
		e.NullKey = !actor || !counter
	}
	e.NullDoc = m.text["doc_id"] == ""
	_, there := m.raw["payload"]
	e.NullPayload = !there
	return e
}

// parsed is a content that is JSON. What is right of it counts also where something else is not.
type parsed struct {
	raw     map[string]json.RawMessage
	text    map[string]string // of the members that are text, and counter
	headers map[string]string // those that are not null
	bad     string
}

func (p *parsed) spoil(format string, args ...any) {
	if p.bad == "" {
		p.bad = fmt.Sprintf(format, args...)
	}
}

// parseContent reads a content; an error says that it is not a JSON object.
func parseContent(content string, span bool) (*parsed, error) {
	switch {
	case !utf8.ValidString(content):
		return nil, errors.New("not UTF-8")
	case !json.Valid([]byte(content)):
		return nil, errors.New("not JSON")
	case brackets(content) > deepest:
		return nil, errors.New("too deep")
	}
	p := &parsed{text: map[string]string{}, headers: map[string]string{}}
	var twice string
	var ok bool
	if p.raw, twice, ok = object(content); !ok {
		return nil, errors.New("not an object")
	}
	if twice != "" {
		p.spoil("%s twice", twice)
	}
	for name, raw := range p.raw {
		null := string(raw) == "null"
		switch name {
		case "payload":
		case "doc_id", "actor_id", "id", "seq_key":
			if v, ok := textOf(raw); ok && !(name == "doc_id" && v == "") {
				p.text[name] = v
			} else if !null || ok {
				p.spoil("%s is %.40s", name, raw)
			}
		case "counter":
			if n, err := strconv.ParseUint(string(raw), 10, 63); err == nil &&
				strconv.FormatUint(n, 10) == string(raw) {
				p.text[name] = string(raw)
			} else if !null {
				p.spoil("counter is %.40s", raw)
			}
		case "headers":
			all, twice, ok := object(string(raw))
			if !ok && !null || twice != "" || len(all) > mostHeaders {
				p.spoil("headers")
			}
			for name, raw := range all {
				if v, ok := textOf(raw); ok {
					p.headers[name] = v
				} else if string(raw) != "null" {
					p.spoil("header %s is %.40s", name, raw)
				}
			}
		case "span":
			n, err := strconv.ParseUint(string(raw), 10, 32)
			switch {
			case !span:
				p.spoil("unknown member span")
			case err == nil && n > 0 && strconv.FormatUint(n, 10) == string(raw):
				p.text[name] = string(raw)
			case !null:
				p.spoil("span is %.40s", raw)
			}
		default:
			p.spoil("unknown member %s", name)
		}
	}
	return p, nil
}

// object splits a JSON object into its members. Of one that comes twice the first counts.
func object(text string) (members map[string]json.RawMessage, twice string, ok bool) {
	d := json.NewDecoder(strings.NewReader(text))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, "", false
	}
	members = map[string]json.RawMessage{}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, "", false
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, "", false
		}
		if _, there := members[name.(string)]; there {
			twice = name.(string)
			continue
		}
		members[name.(string)] = raw
	}
	return members, twice, true
}

// textOf is the value of a JSON string that PostgreSQL could hold as text: no NUL, no half of a surrogate
// pair, of which encoding/json makes a replacement character.
func textOf(raw json.RawMessage) (v string, ok bool) {
	if raw[0] != '"' || json.Unmarshal(raw, &v) != nil || strings.ContainsRune(v, 0) {
		return "", false
	}
	const replacement = "\uFFFD"
	written := strings.Count(string(raw), replacement) + strings.Count(strings.ToLower(string(raw)), `\ufffd`)
	return v, strings.Count(v, replacement) == written
}

// brackets is how deep a JSON text's brackets lie within each other.
func brackets(text string) (most int) {
	d := json.NewDecoder(strings.NewReader(text))
	for depth := 0; ; {
		t, err := d.Token()
		if errors.Is(err, io.EOF) {
			return most
		}
		if err != nil {
			return deepest + 1
		}
		if delim, is := t.(json.Delim); is && slices.Contains([]json.Delim{'{', '['}, delim) {
			depth++
			most = max(most, depth)
		} else if is {
			depth--
		}
	}
}
