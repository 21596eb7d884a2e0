package sink

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

func TestAMessageHasTheseBytes(t *testing.T) {
	t.Parallel()
	enc := testEncoder(t, Config{MsgID: true, Headers: []MappedHeader{{"traceparent", "trace"},
		{"Event-Type", "type"}}})
	g := event(0, "doc 1", []byte(`[[0,0,"a"]]`))
	g.e.Extra = []string{" edit\r\nX: y ", "00-ab-cd-01"}
	var m message
	if r := enc.encode(&m, &g.e, &g.h, 41); r != "" {
		t.Fatal(r)
	}
	got := string(appendFrame(nil, &m, []byte("_INBOX.outflow.x.42")))
	header := "NATS/1.0\r\n" +
		"Event-Type: edit  X: y\r\n" +
		"Nats-Expected-Last-Sequence: 41\r\n" +
		"Nats-Msg-Id: 0/16B3748-0\r\n" +
		"Outflow: v=1 lsn=0/16B3748 i=0 n=0 of=1 due=0/16B3748 thru=0/16B3748 pull=0 tl=1 sort=s id=id " +
		"key=k\r\n" +
		"traceparent: 00-ab-cd-01\r\n" +
		"\r\n"
	want := "HPUB _outflow.3f9a.outbox.doc=201 _INBOX.outflow.x.42 222 233\r\n" + header + `[[0,0,"a"]]` +
		"\r\n"
	if got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	g.e.SetExtraNull(0)
	if enc.encode(&m, &g.e, &g.h, 41); strings.Contains(string(m.header), "Event-Type") {
		t.Errorf("a NULL column makes a header: %q", m.header)
	}
}

func TestASubjectIsMadeOfTheDocument(t *testing.T) {
	t.Parallel()
	for doc, want := range map[string]string{
		"6f9619ff-8b86-d011-b42d-00cf4fc964ff": "outbox.6f9619ff-8b86-d011-b42d-00cf4fc964ff",
		"":                                     "outbox.=",
		" ":                                    "outbox.=20",
		"=":                                    "outbox.=3D",
		"a.b":                                  "outbox.a=2Eb",
		"a.*":                                  "outbox.a=2E=2A",
		">":                                    "outbox.=3E",
		"a\r\nPUB x 0":                         "outbox.a=0D=0APUB=20x=200",
		"größe/1":                              "outbox.gr=C3=B6=C3=9Fe=2F1",
		strings.Repeat("d", 200):               "outbox." + strings.Repeat("d", 200),
		strings.Repeat("d", 5000): "outbox." + strings.Repeat("d", 128) +
			"=~f4998dc1ed415e72178f4608029b974f",
	} {
		enc := testEncoder(t, Config{})
		g := event(0, doc, []byte("{}"))
		var m message
		if r := enc.encode(&m, &g.e, &g.h, 0); r != "" {
			t.Errorf("%q: %s", doc, r)
		}
		got := strings.TrimPrefix(string(m.subject), "_outflow.3f9a.")
		if got != want {
			t.Errorf("document %q has subject %q, want %q", doc, got, want)
		}
	}
}

// roles and the columns type and trace.
func testResolve(name string) (Field, bool) {
	switch name {
	case "type":
		return 0, true
	case "trace":
		return 1, true
	}
	return RoleField(name)
}

func testEncoder(t testing.TB, cfg Config) *encoder {
	t.Helper()
	if cfg.Table = "public.outbox"; cfg.Stream == "" {
		cfg.Stream = "OUTBOX"
	}
	cfg.Resolve, cfg.Keyed = testResolve, true
	enc, err := newEncoder(cfg.withDefaults())
	must.Succeed(t, err)
	enc.ingress = "_outflow.3f9a."
	return enc
}

func TestRowsThatCantBePublished(t *testing.T) {
	t.Parallel()
	const limit = 4096
	for _, test := range []struct {
		name   string
		change func(*relay.Event)
		want   Reason
	}{
		{"as large as it may be", func(e *relay.Event) { size(e, limit-128-len(eventHeader)) }, ""},
		{"a byte larger", func(e *relay.Event) { size(e, limit-128-len(eventHeader)+1) }, TooLarge},
		{"the mapped header makes it too large", func(e *relay.Event) {
			size(e, limit-128-len(eventHeader)-10)
			e.Extra[0], e.Null = "edit", 0
		}, TooLarge},
		{"left out by the decoder", func(e *relay.Event) { e.Payload, e.PayloadSize = nil, 100 }, TooLarge},
		{"empty payload", func(e *relay.Event) { size(e, 0) }, ""},
		{"subject of 1000 bytes", func(e *relay.Event) {
			e.Extra[1] = strings.Repeat("abcdefghi.", 99) +
				"abcde"
		}, ""},
		{"subject of 1001 bytes", func(e *relay.Event) {
			e.Extra[1] = strings.Repeat("abcdefghi.", 99) +
				"abcdef"
		}, SubjectTooLong},
		{"subject of a million dots", func(e *relay.Event) { e.Extra[1] = strings.Repeat(".", 1e6) },
			SubjectTooLong},
		{"mapped header above 16 KiB", func(e *relay.Event) {
			e.Extra[0], e.Null = strings.Repeat("x", 16<<10), 0
		}, HeadersTooLarge},
		{"no document", func(e *relay.Event) { e.Doc, e.Null = "", e.Null|relay.NullDoc }, NullDoc},
		{"no key", func(e *relay.Event) { e.Key, e.Null = "", e.Null|relay.NullKey }, NullKey},
		{"no payload", func(e *relay.Event) { size(e, 0); e.Null |= relay.NullPayload }, NullPayload},
		{"no actor", func(e *relay.Event) { e.Null |= relay.NullActor }, ""},
		{"undecodable", func(e *relay.Event) { e.Bad, e.Null = "payload: no text", relay.NullDoc },
			Undecodable},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{Subject: "ob.{trace:subject}.{type}",
				Headers: []MappedHeader{{"Event-Type", "type"}}, MaxPayload: limit}
			g := event(0, "doc", []byte(`[[0,0,"a"]]`))
			g.e.Extra = []string{"", "t"}
			g.e.SetExtraNull(0)
			test.change(&g.e)
			enc := testEncoder(t, cfg)
			var m message
			if got := enc.encode(&m, &g.e, &g.h, 6); got != test.want {
				t.Fatalf("got %q, want %q", got, test.want)
			}
			if test.want == "" {
				if n := len(m.header) + len(m.data); n > limit {
					t.Errorf("%d bytes pass", n)
				}
				return
			}
			f := enc.fault(&g.e, test.want)
			for _, part := range []string{"public.outbox", `"id"`, "0/16B3748-0", "dead_letter",
				hints[test.want], nextHints[test.want]} {
				if !strings.Contains(f.Error(), part) {
					t.Errorf("%q does not name %s", f, part)
				}
			}
			late := nextHints[test.want] != "" // the WAL has the row as it was inserted
			if late != strings.HasPrefix(f.Hint, "For this one, set sink.on_poison") {
				t.Errorf("the hint begins with what does not help: %s", f.Hint)
			}
			if f.Class != outbox.Poison || f.Code != string(test.want) {
				t.Errorf("fault %v %s", f.Class, f.Code)
			}
		})
	}
}

const eventHeader = "Outflow: v=1 lsn=0/16B3748 i=0 n=0 of=1 due=0/16B3748 thru=0/16B3748 pull=0 tl=1 " +
	"sort=s id=id key=k\r\n"

func size(e *relay.Event, n int) {
	e.Payload, e.PayloadSize = make([]byte, n), n
}

func TestADeadLetterHasTheseBytes(t *testing.T) {
	t.Parallel()
	enc := testEncoder(t, Config{DeadLetter: true, MaxPayload: 2048})
	g := event(3, "doc 1", nil)
	g.e.PayloadSize = 5000
	var m message
	if r := enc.encode(&m, &g.e, &g.h, 41); r != TooLarge {
		t.Fatal(r)
	}
	enc.deadLetter(&m, &g.e, &g.h, 41, TooLarge)
	const header = "NATS/1.0\r\nNats-Expected-Last-Sequence: 41\r\n" +
		"Outflow: v=1 lsn=0/16B3808 i=0 n=0 of=1 due=0/16B3808 thru=0/16B3808 pull=0 tl=1 sort=s id=id " +
		"key=k\r\n" +
		"Outflow-Dead-Letter: too_large\r\n\r\n"
	const body = `{"reason":"too_large","detail":"with its headers, a payload of 5000 bytes is above sink.max_payload, 2048",` +
		`"table":"public.outbox","id":"id","doc_id":"doc 1","position":"0/16B3808-0","subject":"outbox.doc=201","payload_bytes":5000}`
	if string(m.subject) != "_outflow.3f9a.OUTBOX.dead_letter" || string(m.header) != header ||
		string(m.data) != body || m.seq != 42 {
		t.Errorf("got %d %s\n%q\n%s", m.seq, m.subject, m.header, m.data)
	}
}

// A restart reads from the stream what gap mode remembers: from dead letters as from all others.
func TestGapModesCounterStandsInEventsAndDeadLetters(t *testing.T) {
	t.Parallel()
	enc := testEncoder(t, Config{DeadLetter: true, MaxPayload: minMaxPayload})
	g := event(3, "doc 1", []byte("{}"))
	g.h.Sort, g.h.Counter = outbox.ByGap, outbox.Counter{Sequence: 255, First: 41, Span: 3, Late: true}
	const want = " sort=g id=id key=k q=00000000000000ff c=41 span=3 late=1\r\n"
	for _, tooLarge := range []bool{false, true} {
		if tooLarge {
			size(&g.e, minMaxPayload)
		}
		var m message
		if r := enc.encode(&m, &g.e, &g.h, 41); (r == TooLarge) != tooLarge {
			t.Fatal(r)
		}
		if tooLarge {
			enc.deadLetter(&m, &g.e, &g.h, 41, TooLarge)
		}
		h := stream.HeaderOf(m.header)
		if !strings.Contains(string(m.header), want) || h == nil || h.Counter != g.h.Counter {
			t.Errorf("the header is %q, read as %+v", m.header, h)
		}
	}
}

func TestADeadLetterFitsIntoAnyLimit(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("\x01", 5000)
	for limit := minMaxPayload; limit < 8<<10; limit += 37 {
		home := limit % 2 * outbox.MaxCluster
		enc := testEncoder(t, Config{DeadLetter: true, MaxPayload: limit, MsgID: true, Home: home})
		g := event(0, long, nil)
		g.e.ID, g.e.Bad, g.h.ID, g.h.Key = long, long, long, long
		const most = 1<<64 - 1
		g.h.Pos = outbox.Position{LSN: most, Index: 1<<32 - 1}
		g.h.N, g.h.Of, g.h.Pull, g.h.Due, g.h.Thru, g.h.Timeline = 1<<62, 1<<62, 1<<62, most, most, 1<<32-1
		g.h.Sort = outbox.ByGap
		g.h.Counter = outbox.Counter{Sequence: most, First: -1 << 63, Span: 1<<32 - 1, Late: true}
		g.e.Pos = g.h.Pos
		var m message
		enc.deadLetter(&m, &g.e, &g.h, most-1, Undecodable)
		if n := len(m.header) + len(m.data); n > limit {
			t.Fatalf("%d bytes, above %d: %s", n, limit, m.data)
		}
		if len(m.data) == 0 || m.data[len(m.data)-1] != '}' {
			t.Fatalf("no JSON: %s", m.data)
		}
	}
}

func TestSettingsThatAreRefused(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		change func(*Config)
		code   string
	}{
		{"header of the server", func(c *Config) { c.Headers = []MappedHeader{{"nAts-Rollup", "id"}} },
			"header_name"},
		{"header of ours", func(c *Config) { c.Headers = []MappedHeader{{"outflowX", "id"}} }, "header_name"},
		{"no header name", func(c *Config) { c.Headers = []MappedHeader{{"A B", "id"}} }, "header_name"},
		{"the same header twice", func(c *Config) {
			c.Headers = []MappedHeader{{"A", "id"}, {"a", "doc_id"}}
		}, "header_name"},
		{"column that is not there", func(c *Config) { c.Headers = []MappedHeader{{"A", "type"}} },
			"header_column"},
		{"subject column that is not there", func(c *Config) { c.Subject = "a.{type}" }, "subject_column"},
		{"stream with a dot", func(c *Config) { c.Stream = "a.b" }, "stream"},
		{"tiny limit", func(c *Config) { c.MaxPayload = 10 }, "max_payload"},
		{"dead letters among events", func(c *Config) { c.DeadLetter, c.Stream = true, "outbox" },
			"dead_letter_subject"},
		{"dead letters on a wildcard", func(c *Config) { c.DeadLetter, c.DeadLetterSubject = true, "a.>" },
			"dead_letter_subject"},
		{"dead letters by column", func(c *Config) { c.DeadLetter, c.DeadLetterSubject = true, "a.{id}" },
			"dead_letter_subject"},
		{"dead letters on the ingress", func(c *Config) {
			c.DeadLetter, c.DeadLetterSubject = true,
				"_outflow.a"
		}, "dead_letter_subject"},
		{"password with a space", func(c *Config) { c.URL = "nats://me:hush7pw word@host:x" }, "nats_url"},
		{"second server", func(c *Config) { c.URL = "nats://a,http://b" }, "nats_url"},
	} {
		cfg := config("")
		test.change(&cfg)
		f := wantFault(t, cfg.Validate(), outbox.Usage, test.code)
		if strings.Contains(f.Error(), "hush7pw") || f.Hint == "" {
			t.Errorf("%s: %v", test.name, f)
		}
	}
	cfg := config("")
	cfg.Stream = "outbox" // dead letters would be among events, but there are none
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
}
