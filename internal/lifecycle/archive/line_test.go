package archive

import (
	"bytes"
	"math"
	"os"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// oddLines are the lines of messages with everything that is written in a way of its own, of each version.
func oddLines(t *testing.T) []byte {
	t.Helper()
	every := make([]byte, 0x80)
	for i := range every {
		every[i] = byte(i)
	}
	all := []*Message{
		message(1),
		{Seq: math.MaxUint64, Time: time.Unix(0, 0), Subject: "a.b"},
		{Seq: 2, Time: made, Subject: "<&>\"\\\u2028", Data: every,
			Header: nats.Header{"B": {"2", ""}, "A": {"\t<é>"}}},
		{Seq: 3, Time: made, Subject: "s", Data: []byte("é漢😀\u2028\u2029\u202a\ufffd"),
			Header: nats.Header{}},
		{Seq: 4, Time: made, Subject: "s", Data: []byte("\xff\x00"), Header: nats.Header{"A": {"\xff"}}},
	}
	b := &bytes.Buffer{}
	for v := 1; v <= version; v++ {
		for _, m := range all {
			_, err := appendLine(b, m, v)
			must.Succeed(t, err)
		}
	}
	return b.Bytes()
}

// TestLinesAreWrittenAsEver: testdata/lines.jsonl was written with encoding/json. A run that was killed is
// found again by the bytes that it has written.
func TestLinesAreWrittenAsEver(t *testing.T) {
	t.Parallel()
	want, err := os.ReadFile("testdata/lines.jsonl")
	must.Succeed(t, err)
	got := bytes.SplitAfter(oddLines(t), []byte("\n"))
	lines := bytes.SplitAfter(want, []byte("\n"))
	if len(got) != len(lines) {
		t.Fatalf("%d lines, not %d", len(got), len(lines))
	}
	for i, line := range lines {
		if !bytes.Equal(got[i], line) {
			t.Errorf("line %d\n got %s want %s", i+1, got[i], line)
		}
	}
}

// TestTheEventHeaderIsFoundInALine as it is by decoding the line, whatever looks like it.
func TestTheEventHeaderIsFoundInALine(t *testing.T) {
	t.Parallel()
	const name, trap = outbox.HeaderName, `{"Outflow":["a"],"Outflow":["b"]}`
	headers := []nats.Header{
		nil, {}, {name: {"one"}}, {name: {"one", "two"}}, {name: {""}}, {name: {`with " and \`}},
		{name: {"<&>\u2028é"}}, {"A": {trap}, name: {"one"}}, {"A": {trap}}, {`{"` + name: {"no"}},
		{`","` + name: {"no"}, "Z": {name}}, {"outflow": {"no"}, "OUTFLOW": {"no"}}, {name: {"\xff"}},
		{"A": {"\xff"}, name: {"one"}}, {name + "-Origin": {"no"}},
	}
	for i, h := range headers {
		m := &Message{Seq: 1, Time: made, Subject: trap, Header: h, Data: []byte(trap)}
		for v := 1; v <= version; v++ {
			b := &bytes.Buffer{}
			_, err := appendLine(b, m, v)
			must.Succeed(t, err)
			read, _, err := parseLine(b.Bytes())
			must.Succeed(t, err)
			if got, err := eventHeader(b.Bytes()); err != nil || got != read.Header.Get(name) {
				t.Errorf("%d: %q, %v, want %q in %s", i, got, err, read.Header.Get(name), b)
			}
		}
	}
	b := &bytes.Buffer{}
	must.Succeed(t, encodeLine(b, &erasedLine{Seq: 1, Erased: trap}))
	if got, err := eventHeader(b.Bytes()); got != "" || err != nil {
		t.Errorf("erased: %q, %v", got, err)
	}
	for _, text := range []string{"{", `{"seq":1,"headers":{"Outflow":[]}}`} {
		if got, err := eventHeader([]byte(text)); err == nil {
			t.Errorf("%s: %q", text, got)
		}
	}
}

// FuzzEventHeader: of whatever is written as a line, the event's header is what decoding the line gives.
func FuzzEventHeader(f *testing.F) {
	const name = outbox.HeaderName
	f.Add("s", "A", `{"`, `one id=1","`, "two", []byte(`{"Outflow":["no"]}`), byte(0))
	f.Add(`,"Outflow":["`, "Z", "\u2028\\", "\ufffd<>", "\xff", []byte(`\",\"Outflow\":[\"no"]`), byte(1))
	f.Add("s", name, "\\", `\\`, "\x00", []byte("\xff"), byte(2))
	f.Add("s", `{"Outflow":["no`, `"],"Outflow":["no`, "", "", []byte{}, byte(3))
	f.Add("s", `a,`, `\`, "é\x7f", `",`, []byte(nil), byte(4))
	f.Add("s", `x"`, "", "no", "no", []byte(nil), byte(1))
	f.Fuzz(func(t *testing.T, subject, other, more, value, second string, data []byte, which byte) {
		if !utf8.ValidString(subject) {
			return
		}
		m := &Message{Seq: 1, Time: made, Subject: subject, Data: data, Header: nats.Header{}}
		if which&1 == 0 {
			m.Header[name] = []string{value, second}
		}
		if which&2 == 0 {
			m.Header[other] = append(m.Header[other], more, value)
		}
		if which&4 == 0 {
			m.Header[name+more], m.Header[other+name] = []string{second}, []string{more, name}
		}
		for v := 1; v <= version; v++ {
			b := &bytes.Buffer{}
			_, err := appendLine(b, m, v)
			must.Succeed(t, err)
			read, _, err := parseLine(b.Bytes())
			if err != nil { // such a name no stream has: no segment would come into being
				continue
			}
			if got, err := eventHeader(b.Bytes()); err != nil || got != read.Header.Get(name) {
				t.Errorf("%q, %v, want %q in %s", got, err, read.Header.Get(name), b)
			}
		}
	})
}
