package consumer

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

const packed = "v=1 lsn=0/16B3748 i=3 n=1 of=12 due=0/16B3748 thru=0/16B37F0 pull=0 tl=1 sort=s id=6f=20 " +
	"key=alice:0001"

func mustDecoder(t testing.TB, template string) *decoder {
	t.Helper()
	r, err := newDecoder(&Config{Name: "orders", Stream: "OUTBOX", Subject: template})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestAnEventHasTheFieldsOfItsMessage(t *testing.T) {
	t.Parallel()
	at := time.Now()
	m := stream.Message{
		Subject: "outbox.a=20b", Data: []byte("{}"), Sequence: 7, Time: at,
		Header: nats.Header{"Outflow": {packed}, "event_type": {"other"}, "Event-Type": {"created"}},
	}
	e, err := mustDecoder(t, "outbox.{doc_id}").event(&m)
	if err != nil {
		t.Fatal(err)
	}
	if e.Document != "a b" || e.ID != "6f " || e.Key != "alice:0001" || e.Subject != m.Subject ||
		e.Type != "created" ||
		e.Sequence != 7 || e.source != live ||
		e.Position != (outbox.Position{LSN: 0x16B3748, Index: 3}) ||
		!e.Time.Equal(at) || e.Replayed || e.Attempt != 1 || e.DeadLetter != "" || string(e.Data) != "{}" {
		t.Errorf("%+v", e)
	}
}

func TestAReplayedEventHasTheFieldsOfTheOriginal(t *testing.T) {
	t.Parallel()
	d := mustDecoder(t, "outbox.{doc_id}")
	header := nats.Header{"Outflow": {packed}, "Outflow-Replay": {"r1"}, "Outflow-Replay-Sequence": {"41"}}
	m := stream.Message{Subject: "_outflow_replay.OUTBOX.orders.outbox.a", Header: header, Sequence: 3,
		Replay: true}
	e, err := d.event(&m)
	if err != nil || !e.Replayed || e.Subject != "outbox.a" || e.Document != "a" || e.Sequence != 41 ||
		e.seq != 3 || e.source != replay {
		t.Errorf("%+v, %v", e, err)
	}
	for name, change := range map[string]func(*stream.Message){
		"has no header Outflow-Replay": func(m *stream.Message) {
			m.Header = nats.Header{"Outflow": {packed}}
		},
		"makes no such subject": func(m *stream.Message) {
			m.Subject = "_outflow_replay.OUTBOX.other.outbox.a"
		},
		"is not a sequence": func(m *stream.Message) {
			m.Header = nats.Header{"Outflow": {packed}, "Outflow-Replay": {"r"},
				"Outflow-Replay-Sequence": {"x"}}
		},
	} {
		other := m
		change(&other)
		if _, err := d.event(&other); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A dead letter belongs to the document that it names, wherever it is published.
func TestADeadLetterBelongsToTheDocumentItNames(t *testing.T) {
	t.Parallel()
	r := mustDecoder(t, "outbox.{doc_id}")
	long := strings.Repeat("x", 300)
	for data, document := range map[string]string{
		`{"reason":"too_large","doc_id":"a.b"}`: "a.b", `{"reason":"null_doc_id"}`: "", "no JSON": "",
		// as the subjects of its other events say it
		`{"doc_id":"` + long + `"}`: string(outbox.AppendToken(nil, long)),
	} {
		header := nats.Header{"Outflow": {packed}, "Outflow-Dead-Letter": {"too_large"}}
		e, err := r.event(&stream.Message{Subject: "OUTBOX.dead_letter", Header: header, Data: []byte(data)})
		if err != nil || e.Document != document || e.DeadLetter != "too_large" {
			t.Errorf("%s: %+v, %v", data, e, err)
		}
	}
}

// The document is where the template has it, or where Config.Document finds it.
func TestTheDocumentIsReadFromTheSubject(t *testing.T) {
	t.Parallel()
	long := string(outbox.AppendToken(nil, strings.Repeat("x", 300)))
	for _, c := range []struct{ template, subject, document string }{
		{"outbox.{doc_id}", "outbox.a=2E=20=FF", "a. \xff"},
		{"outbox.{doc_id}", "outbox." + long, long}, // it was cut and stays so
		{"outbox.{doc_id}.{topic:subject}", "outbox.a.b.c.d", "a"},
	} {
		e, err := mustDecoder(t, c.template).event(&stream.Message{Subject: c.subject,
			Header: nats.Header{"Outflow": {packed}}})
		if err != nil || e.Document != c.document {
			t.Errorf("%s by %s: %+v, %v; want %q", c.subject, c.template, e, err, c.document)
		}
	}
	for template, want := range map[string]string{"outbox.*": "token",
		"outbox.{topic}": "does not hold {doc_id}"} {
		_, err := newDecoder(&Config{Subject: template})
		if text := fmt.Sprint(err); !strings.Contains(text, want) ||
			!strings.Contains(text, "or Config.Document") {
			t.Errorf("%q: %v, want %q", template, err, want)
		}
	}
	r, err := newDecoder(&Config{Document: func(subject string, h nats.Header) string {
		return subject + h.Get("X")
	}})
	if err != nil {
		t.Fatal(err)
	}
	e, err := r.event(&stream.Message{Subject: "outbox.t",
		Header: nats.Header{"Outflow": {packed}, "X": {"1"}}})
	if err != nil || e.Document != "outbox.t1" {
		t.Errorf("%+v, %v", e, err)
	}
}

// A topic with dots is a document as well.
func TestADocumentMayTakeSeveralTokens(t *testing.T) {
	t.Parallel()
	d := mustDecoder(t, "shop.{doc_id:subject}.v-{kind}")
	for document, subject := range map[string]string{
		"orders.tea": "shop.orders.tea.v-x", "a": "shop.a.v-x", "a b.c": "shop.a=20b.c.v-x",
	} {
		e, err := d.event(&stream.Message{Subject: subject, Header: nats.Header{"Outflow": {packed}}})
		if err != nil || e.Document != document {
			t.Errorf("%s: %+v, %v", subject, e, err)
		}
	}
	for _, subject := range []string{"shop.v-x", "other.a.v-x", "shop.a", "shop.a=zz.v-x"} {
		e, err := d.event(&stream.Message{Subject: subject, Header: nats.Header{"Outflow": {packed}}})
		if err == nil {
			t.Errorf("%s is read as document %q", subject, e.Document)
		}
	}
}

func TestForeignMessagesAreRefused(t *testing.T) {
	t.Parallel()
	outside := strings.Replace(packed, "n=1 ", "n=12 ", 1)
	for name, m := range map[string]stream.Message{
		"0 headers":       {Subject: "outbox.a"},
		"2 headers":       {Subject: "outbox.a", Header: nats.Header{"Outflow": {packed, packed}}},
		"want v= next":    {Subject: "outbox.a", Header: nats.Header{"Outflow": {"x"}}},
		"unknown version": {Subject: "outbox.a", Header: nats.Header{"Outflow": {"v=2" + packed[3:]}}},
		"n=12 of=12":      {Subject: "outbox.a", Header: nats.Header{"Outflow": {outside}}},
		"Config.Subject":  {Subject: "orders.a", Header: nats.Header{"Outflow": {packed}}},
		"makes no such":   {Subject: "outbox.a.b", Header: nats.Header{"Outflow": {packed}}},
	} {
		m.Sequence = 4711
		_, err := mustDecoder(t, "outbox.{doc_id}").event(&m)
		var foreign *ForeignError
		if !errors.As(err, &foreign) || foreign.Sequence != 4711 || foreign.Subject != m.Subject ||
			foreign.Hint == "" ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The partition is that of NATS's own mapping, which the template's {partition(doc_id, N)} is, too.
func TestPartitionsAreThoseOfNATS(t *testing.T) {
	t.Parallel()
	for document, want := range map[string]uint32{"": 2166136261, "a": 0xe40c292c, "foobar": 0xbf9cf968} {
		if got := partitionHash(document); got != want {
			t.Errorf("%q: %d, want %d", document, got, want)
		}
	}
}

func FuzzEvent(f *testing.F) {
	f.Add("outbox.{doc_id}", "outbox.a=20b", packed, []byte(`{"doc_id":"x"}`), false)
	f.Add("outbox.{topic:subject}.v-{doc_id}", "outbox.a.b.v-c", packed, []byte(`{"doc_id":1}`), true)
	f.Add("{partition(doc_id,3)}.{doc_id}", "2.=", packed, []byte{0xff}, true)
	f.Fuzz(func(t *testing.T, template, subject, header string, data []byte, dead bool) {
		r, err := newDecoder(&Config{Subject: template})
		if err != nil {
			return
		}
		h := nats.Header{"Outflow": {header}}
		if dead {
			h["Outflow-Dead-Letter"] = []string{"r"}
		}
		e, err := r.event(&stream.Message{Subject: subject, Header: h, Data: data, Sequence: 1})
		if err != nil {
			if e != nil {
				t.Error("an event beside the error", err)
			}
			return
		}
		again, err := r.event(&stream.Message{Subject: subject, Header: h, Data: data, Sequence: 2})
		if err != nil || again.Document != e.Document || again.Position != e.Position {
			t.Errorf("%+v is another event the second time: %+v, %v", e, again, err)
		}
		if !dead && template == "outbox.{doc_id}" {
			if token := string(outbox.AppendToken(nil, e.Document)); "outbox."+token != subject && "outbox."+
				e.Document != subject {
				t.Errorf("%q is read as document %q", subject, e.Document)
			}
		}
	})
}
