package decoder

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/outflowhq/outflow/internal/jsontext"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// messages is the configuration of a slot without a table; both has the table beside it, with other column
// names.
var (
	messages = Config{Slot: "outflow", ID: "id", Extra: []string{"event_type", "counter", "tenant"},
		Mapping: relay.Mapping{
			Source: relay.FromMessage, Doc: "doc_id", Actor: "actor_id", Counter: "counter", Key: "seq_key",
			Payload: "payload",
		}}
	both = func() Config {
		c := config
		c.Mapping.Source = relay.FromBoth
		c.Extra = []string{"event_type", "counter", "tenant"}
		return c
	}()
)

// decodeContent decodes a transaction that holds one message event.
func decodeContent(t testing.TB, cfg Config, text string) (relay.Event, error) {
	t.Helper()
	d, r := New(cfg), Result{}
	must.Succeed(t, d.Decode(begin(100), &r))
	msg := logical(1, outbox.EventPrefix, text)
	if err := d.Decode(msg, &r); err != nil {
		return relay.Event{}, err
	}
	for i := range msg {
		msg[i] = 0xEE // the buffer is used again
	}
	if r.Kind != Event || r.Ignored != 0 || r.Event.Null&relay.IsMessage == 0 {
		return relay.Event{}, fmt.Errorf("%+v", r)
	}
	e := r.Event
	if err := d.Decode(commit(100, 108, 1), &r); err != nil || r.Commit.Kind != relay.Events ||
		r.Commit.Events != 1 {
		return relay.Event{}, fmt.Errorf("commit %+v: %w", r.Commit, err)
	}
	return e, nil
}

func TestAMessageIsReadAsADocument(t *testing.T) {
	t.Parallel()
	const required = `"doc_id":"d","payload":1`
	nulls := relay.NullActor | relay.NullKey | relay.NullID
	deep := strings.Repeat("[", jsontext.MaxDepth-1) + strings.Repeat("]", jsontext.MaxDepth-1)
	for name, c := range map[string]struct {
		text string
		want relay.Event // without Extra where nothing is said about it: all NULL
	}{
		"everything": {
			`{"doc_id":"d","actor_id":"a","counter":42,"id":"i","seq_key":"k","headers":{"event_type":"moved","other":"x"},"payload":{"n":1.10}}`,
			relay.Event{Doc: "d", Actor: "a", ID: "i", Key: "k", Payload: []byte(`{"n":1.10}`),
				Extra: []string{"moved", "42", ""}, Counter: outbox.Counter{First: 42, Span: 1}},
		},
		"computed key": {
			`{"doc_id":"d","actor_id":"a","counter":42,"payload":[]}`,
			relay.Event{Doc: "d", Actor: "a", Key: "a:00000000000000000042", Null: relay.NullID,
				Payload: []byte("[]"), Extra: []string{"", "42", ""},
				Counter: outbox.Counter{First: 42, Span: 1}},
		},
		"greatest counter": {
			`{"doc_id":"d","actor_id":"","counter":9223372036854775807,"payload":[]}`,
			relay.Event{Doc: "d", Key: ":09223372036854775807", Null: relay.NullID, Payload: []byte("[]"),
				Extra:   []string{"", "9223372036854775807", ""},
				Counter: outbox.Counter{First: math.MaxInt64, Span: 1}},
		},
		"no key": {`{` + required + `}`, relay.Event{Doc: "d", Null: nulls, Payload: []byte("1")}},
		"no actor, no key": {`{` + required + `,"counter":0}`,
			relay.Event{Doc: "d", Null: nulls, Payload: []byte("1"), Extra: []string{"", "0", ""},
				Counter: outbox.Counter{Span: 1}}},
		"null is absent": {`{` + required +
			`,"id":null,"actor_id":null,"counter":null,"seq_key":null,"headers":null}`,
			relay.Event{Doc: "d", Null: nulls, Payload: []byte("1")}},
		"null header": {`{` + required + `,"headers":{"event_type":null,"tenant":""}}`,
			relay.Event{Doc: "d", Null: nulls, Payload: []byte("1"), Extra: []string{"", "", "."}}},
		"no doc_id": {`{"payload":1}`,
			relay.Event{Null: nulls | relay.NullDoc, Payload: []byte("1")}},
		"null doc_id": {`{"doc_id":null,"payload":1}`,
			relay.Event{Null: nulls | relay.NullDoc, Payload: []byte("1")}},
		"no payload": {`{"doc_id":"d"}`, relay.Event{Doc: "d", Null: nulls | relay.NullPayload}},
		"payload null": {`{"doc_id":"d","payload":null}`,
			relay.Event{Doc: "d", Null: nulls, Payload: []byte("null")}},
		"payload as it is": {" {\"doc_id\" : \"d\" ,\n\"payload\"\t: {\"b\" :1e400, " +
			"\"a\":\"\\u0000\\ud800\", \"a\":[ ]} } ", relay.Event{Doc: "d", Null: nulls,
			Payload: []byte("{\"b\" :1e400, \"a\":\"\\u0000\\ud800\", \"a\":[ ]}")}},
		"escapes": {`{"doc\u005fid":"\u00e9\ud83d\ude00\"\\\/\b\f\n\r\t","payload":"\q"}`,
			relay.Event{Bad: "content is not JSON"}},
		"escapes, good": {`{"doc\u005fid":"\u00e9\ud83d\ude00\"\\\/\b\f\n\r\t","payload":"\u0041"}`,
			relay.Event{Doc: "é😀\"\\/\b\f\n\r\t", Null: nulls, Payload: []byte(`"\u0041"`)}},
		"deep": {`{"doc_id":"d","payload":` + deep + `}`,
			relay.Event{Doc: "d", Null: nulls, Payload: []byte(deep)}},
		"too deep":       {`{"doc_id":"d","payload":[` + deep + `]}`, relay.Event{Bad: "too deep"}},
		"no JSON":        {`doc_id=d`, relay.Event{Bad: "at byte 0 of 8: no JSON object"}},
		"empty":          {``, relay.Event{Bad: "no JSON object"}},
		"array":          {`[` + `{` + required + `}]`, relay.Event{Bad: "no JSON object"}},
		"cut":            {`{` + required, relay.Event{Bad: "no comma and no brace"}},
		"more":           {`{` + required + `}{}`, relay.Event{Bad: "goes on after its end"}},
		"trailing comma": {`{` + required + `,}`, relay.Event{Bad: "no name of a member"}},
		"not UTF-8": {"{\"doc_id\":\"\xe9\",\"payload\":1}",
			relay.Event{Bad: "content is not UTF-8"}},
		"control character": {"{\"doc_id\":\"\n\",\"payload\":1}", relay.Event{Bad: "a control character"}},
		"empty doc_id":      {`{"doc_id":"","payload":1}`, relay.Event{Bad: "doc_id is empty"}},
		"number as doc_id":  {`{"doc_id":7,"payload":1}`, relay.Event{Bad: "doc_id is not a string"}},
		"NUL":               {`{"doc_id":"a\u0000","payload":1}`, relay.Event{Bad: `doc_id holds \u0000`}},
		"half a pair": {`{"doc_id":"d","actor_id":"\ud800","payload":1}`,
			relay.Event{Doc: "d", Bad: "actor_id holds"}},
		"unknown member": {`{` + required + `,"docid":"x","id":"i"}`,
			relay.Event{Doc: "d", ID: "i", Bad: `unknown member "docid"`}},
		"twice": {`{` + required + `,"doc_id":"e"}`, relay.Event{Doc: "d", Bad: "doc_id twice"}},
		"twice, escaped": {`{` + required + `,"\u0064oc_id":"e"}`,
			relay.Event{Doc: "d", Bad: "doc_id twice"}},
		"counter as text": {`{` + required + `,"counter":"1"}`,
			relay.Event{Doc: "d", Bad: "counter is not a whole number"}},
		"counter below 0": {`{` + required + `,"counter":-1}`,
			relay.Event{Doc: "d", Bad: "counter is not a whole number"}},
		"counter too large": {`{` + required + `,"counter":9223372036854775808}`,
			relay.Event{Doc: "d", Bad: "counter is not a whole number"}},
		"counter 1.0": {`{` + required + `,"counter":1.0}`,
			relay.Event{Doc: "d", Bad: "counter is not a whole number"}},
		"counter 1e3": {`{` + required + `,"counter":1e3}`,
			relay.Event{Doc: "d", Bad: "counter is not a whole number"}},
		"counter 01": {`{` + required + `,"counter":01}`, relay.Event{Bad: "content is not JSON"}},
		"span without a role for it": {`{` + required + `,"counter":1,"span":1}`,
			relay.Event{Doc: "d", Bad: `unknown member "span"`}},
		"headers a list": {`{` + required + `,"headers":[]}`,
			relay.Event{Doc: "d", Bad: "headers is not an object"}},
		"header a number": {`{` + required + `,"headers":{"schema_version":2}}`,
			relay.Event{Doc: "d", Bad: "header schema_version is not a string"}},
		"header twice": {`{` + required + `,"headers":{"tenant":"a","t\u0065nant":"b"}}`,
			relay.Event{Doc: "d", Bad: `headers has the member "tenant" twice`}},
		"many headers": {`{` + required + `,"headers":{` + manyHeaders(maxHeaders+1) + `}}`,
			relay.Event{Doc: "d", Bad: "more than 256"}},
		"header name NUL": {`{` + required + `,"headers":{"\u0000":"a"}}`,
			relay.Event{Doc: "d", Bad: "headers has a name"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, cfg := range []Config{messages, both} {
				e, err := decodeContent(t, cfg, c.text)
				must.Succeed(t, err)
				if c.want.Bad != "" {
					if !strings.Contains(e.Bad, c.want.Bad) || e.Payload != nil || e.Doc != c.want.Doc ||
						e.ID != c.want.ID {
						t.Errorf("%+v", e)
					}
					continue
				}
				want := c.want
				want.PayloadSize = len(want.Payload)
				want.Null |= relay.IsMessage
				if want.Extra = slices.Clone(want.Extra); want.Extra == nil {
					want.Extra = []string{"", "", ""}
				}
				for i, v := range want.Extra {
					if v == "" {
						want.SetExtraNull(i)
					} else if v == "." {
						want.Extra[i] = ""
					}
				}
				if !reflect.DeepEqual(e, want) {
					t.Errorf("got  %+v\nwant %+v", e, want)
				}
			}
		})
	}
}

func manyHeaders(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"h%d":""`, i)
	}
	return b.String()[1:]
}

// Rows and messages of one transaction share the index, in the order in which they come.
func TestRowsAndMessagesShareTheIndex(t *testing.T) {
	t.Parallel()
	const text = `{"doc_id":"d","actor_id":"a","counter":1,"payload":"of a message"}`
	event, tick := logical(1, outbox.EventPrefix, text), logical(1, relay.HeartbeatPrefix, "")
	cfg := both
	cfg.Extra = nil
	for name, c := range map[string]struct {
		source  relay.Source
		want    string // which events: r row, m message
		ignored []Ignored
	}{
		"both": {relay.FromBoth, "mrmmr", []Ignored{IgnoredOutside}},
		"table": {relay.FromTable, "rr", []Ignored{IgnoredMessage, IgnoredMessage, IgnoredOutside,
			IgnoredMessage}},
		"message": {relay.FromMessage, "mmm", []Ignored{IgnoredRow, IgnoredOutside, IgnoredRow}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := cfg
			cfg.Mapping.Source, cfg.Unread = c.source, "public.outbox"
			d, r, got := New(cfg), Result{}, ""
			var ignored []Ignored
			for _, msg := range [][]byte{
				begin(100), tick, event, relation(tableOID, columns...), row("1", "{}"), event,
				logical(0, outbox.EventPrefix, text), event, logical(1, "outflow.events", text),
				row("2", "{}"), commit(100, 108, 1),
			} {
				must.Succeed(t, d.Decode(msg, &r))
				if r.Ignored != NothingIgnored {
					ignored = append(ignored, r.Ignored)
				}
				switch r.Kind {
				case Event:
					if r.Event.Pos.Index != uint32(len(got)) {
						t.Errorf("event %d has index %d", len(got), r.Event.Pos.Index)
					}
					got += map[bool]string{true: "m", false: "r"}[r.Event.Null&relay.IsMessage != 0]
				case Commit:
					if r.Commit.Kind != relay.Events || r.Commit.Events != len(c.want) {
						t.Errorf("%+v", r.Commit)
					}
				}
			}
			if got != c.want || !reflect.DeepEqual(ignored, c.ignored) {
				t.Errorf("events %s, ignored %v; want %s, %v", got, ignored, c.want, c.ignored)
			}
		})
	}
}

// What the mapping has no role for is of no message either: without a key events keep the order of the
// commits, and without actors a document is one sequence, of rows and messages together.
func TestAMessageHasNoMoreThanTheMappingWants(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mapping    relay.Mapping
		text       string
		actor, key string
	}{
		"no key": {relay.Mapping{Doc: "topic", Payload: "body"},
			`"actor_id":"a","counter":2,"seq_key":"k"`, "", ""},
		"no key to make": {relay.Mapping{Doc: "topic", Actor: "who", Payload: "body"},
			`"actor_id":"a","counter":2`, "a", ""},
		"no actor": {relay.Mapping{Doc: "topic", Key: "k", Payload: "body"},
			`"actor_id":"a","counter":2`, "", "a:00000000000000000002"},
		"no actor, its key": {relay.Mapping{Doc: "topic", Key: "k", Payload: "body"},
			`"actor_id":"a","seq_key":"x"`, "", "x"},
	} {
		cfg := both
		cfg.Mapping, cfg.Extra = c.mapping, nil
		cfg.Mapping.Source, cfg.Mapping.Table = relay.FromBoth, "public.outbox"
		e, err := decodeContent(t, cfg, `{"doc_id":"d","id":"i","payload":1,`+c.text+`}`)
		if err != nil || e.Bad != "" || e.Null != relay.IsMessage || e.Actor != c.actor || e.Key != c.key {
			t.Errorf("%s: actor %q, key %q, %+v, %v", name, e.Actor, e.Key, e, err)
		}
	}
}

// A payload above the limit is not copied, and a large content takes no more memory than what is kept of it.
func TestALargeMessageIsNotCopied(t *testing.T) {
	t.Parallel()
	cfg := messages
	cfg.MaxPayload = 1000
	text := `{"doc_id":"d","payload":"` + strings.Repeat("x", 1<<20) + `"}`
	e, err := decodeContent(t, cfg, text)
	if err != nil || e.Payload != nil || e.PayloadSize != 1<<20+2 || e.Bad != "" {
		t.Errorf("%v %+v", err, e)
	}
}

// A message event takes its values from the arena, as a row does, and beside that nothing.
func TestAMessageAllocatesNothingOfItsOwn(t *testing.T) {
	d, r := New(messages), Result{}
	must.Succeed(t, d.Decode(begin(100), &r))
	msg := logical(1, outbox.EventPrefix,
		`{"doc_id":"d","actor_id":"a","counter":42,"id":"i","headers":{"event_type":"moved","tenant":"x","other":"y"},"payload":{"n":1.10}}`)
	const events = 100
	if n := testing.AllocsPerRun(10, func() {
		for range events {
			if err := d.Decode(msg, &r); err != nil || r.Kind != Event {
				t.Fatal(err)
			}
		}
	}); n > events/4 {
		t.Errorf("%v allocations for %d events", n, events)
	}
}

// errNotContent is what the oracle says of a content that is no event.
var errNotContent = errors.New("no event")

// oracle reads a content with encoding/json, as simply as can be.
func oracle(text []byte) (want map[string]json.RawMessage, headers map[string]*string, err error) {
	if !utf8.Valid(text) || !json.Valid(text) || depthOf(text) > jsontext.MaxDepth {
		return nil, nil, errNotContent
	}
	members := func(raw []byte) (m map[string]json.RawMessage, err error) {
		d := json.NewDecoder(bytes.NewReader(raw))
		if t, err := d.Token(); err != nil || t != json.Delim('{') {
			return nil, errNotContent
		}
		m = map[string]json.RawMessage{}
		for d.More() {
			name, err := d.Token()
			if err != nil {
				return nil, err
			}
			if _, twice := m[name.(string)]; twice {
				return nil, errNotContent
			}
			var v json.RawMessage
			if err := d.Decode(&v); err != nil {
				return nil, err
			}
			m[name.(string)] = v
		}
		return m, nil
	}
	if want, err = members(text); err != nil {
		return nil, nil, err
	}
	for name, v := range want {
		switch name {
		case "payload":
			continue
		case "headers":
			if string(v) == "null" {
				continue
			}
			all, err := members(v)
			if err != nil || len(all) > maxHeaders {
				return nil, nil, errNotContent
			}
			headers = map[string]*string{}
			for name, v := range all {
				var s *string
				if json.Unmarshal(v, &s) != nil || s != nil && broken(v, *s) || broken([]byte(name), name) {
					return nil, nil, errNotContent
				}
				headers[name] = s
			}
		case "counter":
			if n, err := strconv.ParseInt(string(v), 10, 64); string(v) != "null" &&
				(err != nil || n < 0 || v[0] == '-') {
				return nil, nil, errNotContent
			}
		case "doc_id", "actor_id", "id", "seq_key":
			var s *string
			if json.Unmarshal(v, &s) != nil || s != nil && (broken(v, *s) || name == "doc_id" && *s == "") {
				return nil, nil, errNotContent
			}
		default:
			return nil, nil, errNotContent
		}
	}
	return want, headers, nil
}

// broken reports whether a string has what text can't hold; encoding/json makes U+FFFD of half a pair.
func broken(raw []byte, s string) bool {
	return strings.ContainsRune(s, 0) || strings.Count(s, "\uFFFD") != bytes.Count(raw, []byte("\uFFFD"))+
		strings.Count(strings.ToLower(string(raw)), `\ufffd`)
}

func depthOf(text []byte) (deepest int) {
	d, depth := json.NewDecoder(bytes.NewReader(text)), 0
	for {
		switch t, err := d.Token(); {
		case errors.Is(err, io.EOF):
			return deepest
		case err != nil:
			return math.MaxInt
		case t == json.Delim('{'), t == json.Delim('['):
			depth++
			deepest = max(deepest, depth)
		case t == json.Delim('}'), t == json.Delim(']'):
			depth--
		}
	}
}

// FuzzContent holds the reading of a message event against encoding/json: what is one of them an event is one
// of the other, with the same values. Beside that: no panic, and no more memory than in proportion to the
// bytes.
func FuzzContent(f *testing.F) {
	for _, text := range []string{
		`{"doc_id":"d","actor_id":"a","counter":42,"id":"i","seq_key":"k","headers":{"event_type":"moved"},"payload":{"n":1.10}}`,
		`{"doc_id":"\u00e9\ud83d\ude00","payload":[1,-0.5e+7,true,false,null,"x\\"]}`,
		`{"doc_id":"d","payload":{},"payload":{}}`,
		`{"doc_id":"","counter":-1}`, `{"headers":{"a":"\ud800","a":null}}`, `[[[]]]`,
		`{"doc_id":"d","payload":"` + "\xff" + `"}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if bytes.Contains(text, []byte(`\\u`)) || bytes.Contains(text, []byte("\uFFFD")) ||
			bytes.Contains(bytes.ToLower(text), []byte(`\ufffd`)) {
			t.Skip("the oracle counts replacement characters")
		}
		before := allocated()
		e, err := decodeContent(t, messages, string(text))
		must.Succeed(t, err)
		if got := allocated() - before; got > 2<<20+400*uint64(len(text)) {
			t.Errorf("%d bytes allocated for %d", got, len(text))
		}
		want, headers, err := oracle(text)
		if (err == nil) != (e.Bad == "") {
			t.Fatalf("%q: %q here, %v by encoding/json", text, e.Bad, err)
		}
		if err != nil {
			return
		}
		text1 := func(name string) (s string, null bool) {
			var p *string
			if raw, ok := want[name]; ok {
				_ = json.Unmarshal(raw, &p) // it was read before
			}
			if p == nil {
				return "", true
			}
			return *p, false
		}
		for name, v := range map[string]struct {
			got  string
			null relay.Nulls
		}{"doc_id": {e.Doc, relay.NullDoc}, "actor_id": {e.Actor, relay.NullActor},
			"id": {e.ID, relay.NullID}} {
			if s, null := text1(name); s != v.got || null != (e.Null&v.null != 0) {
				t.Errorf("%q: %s %q (NULL: %v), want %q (%v)", text, name, v.got, e.Null&v.null != 0, s, null)
			}
		}
		key, null := text1("seq_key")
		if actor, none := text1("actor_id"); null && !none && want["counter"] != nil &&
			string(want["counter"]) != "null" {
			n, _ := strconv.ParseInt(string(want["counter"]), 10, 64)
			key, null = fmt.Sprintf("%s:%020d", actor, n), false
		}
		if e.Key != key || null != (e.Null&relay.NullKey != 0) {
			t.Errorf("%q: key %q, want %q", text, e.Key, key)
		}
		if raw, there := want["payload"]; string(e.Payload) != string(raw) ||
			there != (e.Null&relay.NullPayload == 0) {
			t.Errorf("%q: payload %q, want %q", text, e.Payload, raw)
		}
		for i, name := range messages.Extra {
			want := headers[name]
			if name == "counter" {
				continue
			}
			if e.ExtraNull(i) != (want == nil) || want != nil && *want != e.Extra[i] {
				t.Errorf("%q: header %s is %q", text, name, e.Extra[i])
			}
		}
	})
}
