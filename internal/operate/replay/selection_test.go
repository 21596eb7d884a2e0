package replay

import (
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

func TestSubjectFiltersOverlapAndCover(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		a, b             string
		overlap, covered bool
		both             string
	}{
		{"a.b", "a.b", true, true, "a.b"}, {"a.b", "a.c", false, false, ""},
		{"a.*", "a.b", true, true, "a.b"}, {"a.b", "a.*", true, false, "a.b"},
		{"a.>", "a", false, false, ""}, {"a.>", "a.b.c", true, true, "a.b.c"},
		{"a.*.c", "a.b.>", true, false, "a.b.c"}, {">", "a.*", true, true, "a.*"},
		{"*.b", "a.*", true, false, "a.b"}, {"a.*", "a.*.c", false, false, ""},
		{"a.>", "*.*", true, false, "a.*"}, {"a.>", "a.>", true, true, "a.>"},
	} {
		if got := overlap(test.a, test.b); got != test.overlap || overlap(test.b, test.a) != got {
			t.Errorf("%s and %s overlap: %v", test.a, test.b, got)
		}
		if got := covers(test.a, test.b); got != test.covered {
			t.Errorf("%s covers %s: %v", test.a, test.b, got)
		}
		if both, ok := intersect(test.a, test.b); ok != test.overlap || both != test.both {
			t.Errorf("%s and %s: %s", test.a, test.b, both)
		}
	}
}

func TestResumePointsSurviveTheirText(t *testing.T) {
	t.Parallel()
	for _, p := range []resumePoint{
		{n: 1, hash: "ab", from: FromStream, seq: 17, end: 20},
		{n: 9, hash: "ab", from: FromTable, row: rowKey{"a b=c\r\n%", "", "ü+&\x00"}},
	} {
		text := p.String()
		if back, err := parseResumePoint(text); err != nil || back != p || strings.ContainsAny(text, "\r\n") {
			t.Errorf("%q becomes %+v, %v", text, back, err)
		}
	}
	for _, text := range []string{"", "v=2 n=1 of=a from=stream", "v=1 n=x of=a from=stream",
		"v=1 n=1 of=a from=memory", "v=1 n=0 of=a from=table"} {
		if p, err := parseResumePoint(text); err == nil {
			t.Errorf("%q is %+v", text, p)
		}
	}
}

func TestALineHoldsTheDataUnchanged(t *testing.T) {
	t.Parallel()
	for data, want := range map[string]string{
		`{"a":  1.10, "<&>":9007199254740993}`: `"data":{"a":  1.10, "<&>":9007199254740993}}`,
		"{\"a\":\n  1.10}":                     `"data":{"a":1.10}}`,
		"":                                     `"data_base64":""}`,
		"\x00\xff":                             `"data_base64":"AP8="}`,
		"\"\xff\"":                             `"data_base64":"Iv8i"}`,
		"no JSON":                              `"data_base64":"bm8gSlNPTg=="}`,
	} {
		m := Message{Subject: "s", Header: nats.Header{"A": {"<b>"}}, Data: []byte(data)}
		b, err := m.appendLine([]byte("kept\n"))
		got, _ := strings.CutPrefix(string(b), "kept\n")
		if err != nil || got != `{"subject":"s","headers":{"A":["<b>"]},"id":"","key":"",`+want+"\n" {
			t.Errorf("%q: %q, %v", data, b, err)
		}
	}
}

// TestAReplayedEventNamesItsHome, and has no id by which a stream would drop it.
func TestAReplayedEventNamesItsHome(t *testing.T) {
	t.Parallel()
	got := eventHeaders(nats.Header{outbox.HeaderName: {"v=1"}, outbox.HeaderOrigin: {"3"},
		outbox.HeaderLost: {"1"}, nats.MsgIdHdr: {"3-0/10-0-9f86d081884c7d65"},
		"Nats-Stream-Source": {"A 1"}})
	want := nats.Header{outbox.HeaderName: {"v=1"}, outbox.HeaderOrigin: {"3"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestASummaryDoesNotHoldTheEventsMemory: what a summary keeps of an event does not hold the memory in which
// the event came.
func TestASummaryDoesNotHoldTheEventsMemory(t *testing.T) {
	t.Parallel()
	m := messageOf("subject", "key", nil)
	m.Doc, m.DocOK = "doc", true
	var s Summary
	s.add(m)
	s.close()
	kept := []string{s.First.Subject, s.First.Key, s.First.ID, s.Subjects[0].Subject, s.Subjects[0].Document,
		s.Subjects[0].Last.Key}
	for i, from := range []string{m.Subject, m.Outflow.Key, m.Outflow.ID, m.Subject, m.Doc, m.Outflow.Key} {
		if kept[i] != from || unsafe.StringData(kept[i]) == unsafe.StringData(from) {
			t.Errorf("%q is kept as it is", from)
		}
	}
}

// extractorOf is the extractor for a table with the columns of the default one and topic.
func extractorOf(t *testing.T, subject string, headers ...config.Header) *extractor {
	t.Helper()
	role := func(name string) config.Column { return config.Column{Name: name} }
	cfg := config.Config{Table: "public.outbox", Stream: "OUTBOX", Subject: subject, Headers: headers,
		Columns: config.Columns{
			ID: role("id"), Doc: role("doc_id"), Actor: role("actor_id"), Counter: role("counter"),
			Key: role("seq_key"), Payload: role("payload"),
		}}
	template, err := outbox.ParseSubjectTemplate(subject)
	if err != nil {
		t.Fatal(err)
	}
	r, err := config.ResolveMapping(cfg, []string{"id", "doc_id", "actor_id", "counter", "seq_key", "payload",
		"topic"}, template.Columns())
	if err != nil {
		t.Fatal(err)
	}
	cfg.Sink.OnPoison = config.PoisonDeadLetter
	l, err := newExtractor(cfg, r, true)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func messageOf(subject, key string, header nats.Header) *Message {
	h := outbox.Header{Key: key, ID: "7"}
	if header == nil {
		header = nats.Header{}
	}
	header[outbox.HeaderName] = []string{h.String()}
	parsed, _ := outbox.ParseHeader(h.String())
	return &Message{Seq: 1, Subject: subject, Header: header, Outflow: parsed}
}

// TestDocumentAndActorAreFoundInAMessage: where the document and the actor of a message are found, or are
// not.
func TestDocumentAndActorAreFoundInAMessage(t *testing.T) {
	t.Parallel()
	const counter = ":00000000000000000007"
	long := strings.Repeat("x", 250)
	for _, test := range []struct {
		name    string
		l       *extractor
		sel     Selection
		filters string
		yes, no *Message
	}{
		{"subject", extractorOf(t, "o.{topic}.{doc_id}"), Selection{Docs: []string{"a b", "c"}},
			"OUTBOX.dead_letter o.*.a=20b o.*.c",
			messageOf("o.x.a=20b", "k", nil), messageOf("o.a=20b.x", "k", nil)},
		{"cut", extractorOf(t, "o.{doc_id}"), Selection{Docs: []string{long}}, "OUTBOX.dead_letter o." +
			string(outbox.AppendToken(nil, long)),
			messageOf("o."+string(outbox.AppendToken(nil, long)), "k", nil),
			messageOf("o."+string(outbox.AppendToken(nil, long+"x")), "k", nil)},
		{"subject column", extractorOf(t, "o.{doc_id:subject}.e"), Selection{Docs: []string{"a.b"}},
			"OUTBOX.dead_letter o.a.b.e",
			messageOf("o.a.b.e", "k", nil), messageOf("o.a.c.e", "k", nil)},
		{"unknown subject column", extractorOf(t, "o.{topic:subject}.{doc_id}"),
			Selection{Docs: []string{"d"}}, "OUTBOX.dead_letter o.>",
			messageOf("o.t.u.d", "k", nil), messageOf("o.t.d.u", "k", nil)},
		{"header", extractorOf(t, "o.{partition(doc_id,4)}", config.Header{Name: "Doc", Column: "doc_id"}),
			Selection{Docs: []string{"a"}}, "",
			messageOf("o.1", "k", nats.Header{"Doc": {"a"}}),
			messageOf("o.1", "k", nats.Header{"Doc": {"b"}})},
		{"actor in the key", extractorOf(t, "o.{doc_id}"), Selection{Actors: []string{"a:b"}}, ">",
			messageOf("o.x", "a:b"+counter, nil), messageOf("o.x", "a"+counter, nil)},
		{"actor in the subject", extractorOf(t, "o.{actor_id}"), Selection{Actors: []string{""}},
			"OUTBOX.dead_letter o.=",
			messageOf("o.=", "k", nil), messageOf("o.x", "k", nil)},
		{"dead letter", extractorOf(t, "o.{doc_id}"), Selection{Docs: []string{"a"}},
			"OUTBOX.dead_letter o.a",
			&Message{Subject: "OUTBOX.dead_letter", Header: nats.Header{sink.HeaderDeadLetter: {"too_large"}},
				Data: []byte(`{"doc_id":"a"}`)},
			&Message{Subject: "OUTBOX.dead_letter", Header: nats.Header{sink.HeaderDeadLetter: {"too_large"}},
				Data: []byte(`{"doc_id":"b"}`)}},
		{"filters", extractorOf(t, "o.{doc_id}"), Selection{Docs: []string{"a", "b"}, Filter: "*.b"}, "o.b",
			messageOf("o.b", "k", nil), messageOf("o.a", "k", nil)},
		{"key range", extractorOf(t, "o.{doc_id}"), Selection{Key: Range[string]{From: new("b")}}, ">",
			messageOf("o.a", "b"+long, nil), messageOf("o.a", "a"+long, nil)},
		{"key that looks cut", extractorOf(t, "o.{doc_id}"), Selection{Key: Range[string]{From: new("b=~z")}},
			">", messageOf("o.a", "b=~z", nil), messageOf("o.a", "b=~y", nil)},
	} {
		m, err := newMatcher(test.l, &test.sel, nil)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		if got := strings.Join(m.filters, " "); test.filters != "" && got != test.filters {
			t.Errorf("%s: filters %s", test.name, got)
		}
		for msg, want := range map[*Message]bool{test.yes: true, test.no: false} {
			if is, err := m.selects(msg); err != nil || is != want {
				t.Errorf("%s: %s is selected: %v, %v", test.name, msg.Subject, is, err)
			}
		}
	}
	for _, test := range []struct {
		subject string
		sel     Selection
	}{{"o.{topic}", Selection{Docs: []string{"a"}}},
		{"o.{partition(doc_id,4)}", Selection{Docs: []string{"a"}}}} {
		if _, err := newMatcher(extractorOf(t, test.subject), &test.sel, nil); err == nil {
			t.Errorf("%s tells the document", test.subject)
		}
	}
	m, err := newMatcher(extractorOf(t, "o.{doc_id}"), &Selection{Key: Range[string]{From: new(long)}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if is, err := m.selects(messageOf("o.a", long+"y", nil)); err == nil {
		t.Errorf("a key that is cut was compared: %v", is)
	}
}
