package sink

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/sink/stream"
)

// FuzzAck feeds any answer to a publish. Only one that says, in so many words, that this stream stored it at
// the predicted sequence, and not as a duplicate, proves anything.
func FuzzAck(f *testing.F) {
	f.Add([]byte(`{"stream":"OUTBOX","seq":42}`), "")
	f.Add([]byte(`{"stream":"OUTBOX","seq":42,"duplicate":true}`), "")
	f.Add([]byte(`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 41"}}`), "")
	f.Add([]byte(`{"stream":"OUTBOX","seq":42,"error":{}}`), "")
	f.Add([]byte(`{"stream":"OTHER","seq":42} `), "")
	f.Add([]byte(nil), "503")
	f.Add([]byte(`{"seq":42.0,"stream":"OUTBOX","domain":"x"}`), "")
	f.Fuzz(func(t *testing.T, data []byte, status string) {
		m := &nats.Msg{Data: data, Header: nats.Header{}}
		if status != "" {
			m.Header.Set("Status", status)
		}
		fault := checkAck(m, "OUTBOX", 42)
		if fault != nil {
			if fault.Code == "" || fault.Message == "" {
				t.Fatalf("%q: %+v", data, fault)
			}
			return
		}
		var a map[string]any
		d := json.NewDecoder(bytes.NewReader(data))
		d.UseNumber()
		if err := d.Decode(&a); err != nil {
			t.Fatalf("%q proves nothing: %v", data, err)
		}
		has := func(name string, want any) bool { // encoding/json takes names in any case
			for k, v := range a {
				if strings.EqualFold(k, name) && fmt.Sprint(v) == fmt.Sprint(want) {
					return true
				}
			}
			return false
		}
		if !has("stream", "OUTBOX") || !has("seq", 42) {
			t.Fatalf("%q proves nothing", data)
		}
	})
}

// FuzzStoredHeader feeds the header block of a stored message, ours or a stranger's.
func FuzzStoredHeader(f *testing.F) {
	f.Add([]byte("NATS/1.0\r\nNats-Expected-Last-Sequence: 4\r\nOutflow: v=1 lsn=0/1 i=0 n=0 of=1 due=0/1 " +
		"thru=0/1 pull=0 tl=1 sort=s id=a key=b\r\n\r\n"))
	f.Add([]byte("NATS/1.0\r\nX: y\r\n\r\n"))
	f.Add([]byte("Outflow:\r\nOutflow: v=1"))
	f.Fuzz(func(t *testing.T, block []byte) {
		h := stream.HeaderOf(block)
		if h == nil {
			return
		}
		if !bytes.Contains(block, []byte("Outflow:")) {
			t.Fatalf("%q has %+v", block, h)
		}
		if again := stream.HeaderOf(appendOutflow(nil, h)); again == nil || !again.Same(h) {
			t.Fatalf("%+v became %+v", h, again)
		}
	})
}

// FuzzMessage makes a message of any values and reads the frame as a server does: one frame, whose subject,
// headers and data are what they should be, whatever the values hold.
func FuzzMessage(f *testing.F) {
	f.Add("doc 1", "a", "id", []byte(`{"a":1}`), "edit\r\nX: y", "00-ab", uint64(41))
	f.Add("", "", "", []byte(nil), "", "", uint64(0))
	f.Add("a\r\nPUB x 0\r\n", "k=\n", "é", []byte("\r\nPUB x 1\r\na"), "\x00", " \t ", uint64(1<<64-2))
	f.Fuzz(func(t *testing.T, doc, key, id string, payload []byte, typ, trace string, last uint64) {
		enc := testEncoder(t, Config{MsgID: true, Headers: []MappedHeader{{"traceparent", "trace"},
			{"Event-Type", "type"}}})
		g := event(0, doc, payload)
		g.e.Key, g.e.ID, g.h.Key, g.h.ID, g.e.Extra = key, id, key, id, []string{typ, trace}
		var m message
		if r := enc.encode(&m, &g.e, &g.h, last); r != "" {
			return
		}
		for _, reply := range []string{"", "_INBOX.outflow.x.42"} {
			line, rest, ok := bytes.Cut(appendFrame(nil, &m, []byte(reply)), []byte("\r\n"))
			words := strings.Split(string(line), " ")
			if !ok || len(words) != 4+len(reply)/max(len(reply), 1) || words[0] != "HPUB" || reply != "" &&
				words[2] != reply {
				t.Fatalf("the frame begins with %q", line)
			}
			head, err1 := strconv.Atoi(words[len(words)-2])
			total, err2 := strconv.Atoi(words[len(words)-1])
			if err1 != nil || err2 != nil || head > total || len(rest) != total+2 ||
				!bytes.HasSuffix(rest, []byte("\r\n")) {
				t.Fatalf("%d bytes follow %q", len(rest), line)
			}
			if data := rest[head:total]; !bytes.Equal(data, payload) {
				t.Fatalf("the data %q came as %q", payload, data)
			}
			lines := strings.Split(string(rest[:head]), "\r\n")
			if n := len(lines); lines[0] != "NATS/1.0" || n != 8 || lines[n-1] != "" || lines[n-2] != "" {
				t.Fatalf("the headers are %q", lines)
			}
			for i, name := range []string{"Event-Type: ", "Nats-Expected-Last-Sequence: ", "Nats-Msg-Id: ",
				"Outflow: ", "traceparent: "} {
				if !strings.HasPrefix(lines[i+1], name) || strings.ContainsAny(lines[i+1], "\r\n") {
					t.Fatalf("header %d is %q", i, lines[i+1])
				}
			}
			if want := "Nats-Expected-Last-Sequence: " + strconv.FormatUint(last, 10); lines[2] != want {
				t.Fatalf("%q instead of %q", lines[2], want)
			}
		}
	})
}

// FuzzScrub: what an error says holds no secret of the configuration, wherever it stands in the text.
func FuzzScrub(f *testing.F) {
	f.Add("s3cret", "dial nats://app:s3cret@host:4222: connection refused")
	f.Add("p@ss/w:rd", "nats: authorization violation for p@ss/w:rd")
	f.Fuzz(func(t *testing.T, password, text string) {
		if len(password) < 4 || strings.ContainsAny(password, "*") {
			return
		}
		got := scrub(fmt.Errorf("%s and %s", text, password), Config{Password: password}).Error()
		if strings.Contains(got, password) {
			t.Fatalf("%q says %q", got, password)
		}
	})
}
