package tail

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

type message struct {
	jetstream.Msg
	header nats.Header
}

func (m message) Subject() string      { return outbox.CutSubject }
func (m message) Headers() nats.Header { return m.header }
func (m message) Data() []byte         { return nil }

func TestACutIsShownByName(t *testing.T) {
	t.Parallel()
	template, err := outbox.ParseSubjectTemplate("outbox.{doc_id}")
	must.Succeed(t, err)
	c := outbox.Cut{SystemID: 7301234567890123456, Timeline: 3, LSN: 0x16B3748, Epoch: 7, Owner: 2}
	m := message{header: nats.Header{outbox.HeaderCut: {c.String()}}}
	for _, test := range []struct {
		json bool
		want string
	}{
		{false, " cut=0/16B3748 home=7301234567890123456 tl=3 epoch=7 owner=2 subject=cut size=0\n"},
		{true, `"cut":{"system_id":"7301234567890123456","timeline":3,"lsn":"0/16B3748","epoch":7,` +
			`"owner":2}`},
	} {
		l := &lines{template: template, doc: "doc_id", json: test.json}
		line, err := l.of(m, &jetstream.MsgMetadata{})
		if err != nil || !strings.Contains(string(line), test.want) {
			t.Errorf("got %s, %v, want %s", line, err, test.want)
		}
		m.header = nats.Header{outbox.HeaderCut: {"v=1"}}
		line, err = l.of(m, &jetstream.MsgMetadata{})
		if err != nil || strings.Contains(string(line), "7301234567890123456") {
			t.Errorf("with a header that is none: %s, %v", line, err)
		}
		m.header = nats.Header{outbox.HeaderCut: {c.String()}}
	}
}

// Where several clusters publish for one another, a line says whose event it is.
func TestALineNamesTheHome(t *testing.T) {
	t.Parallel()
	template, err := outbox.ParseSubjectTemplate("outbox.{doc_id}")
	must.Succeed(t, err)
	h := outbox.Header{Pos: outbox.Position{LSN: 0x16B3748}, Of: 1, Due: 0x16B3748, Thru: 0x16B3748}
	for value, want := range map[string][2]string{
		"3": {" pos=0/16B3748-0 origin=3 ", `"home":3`},
		"":  {" pos=0/16B3748-0 subject=", `"position":"0/16B3748-0","subject"`},
		"0": {" pos=0/16B3748-0 subject=", `"position":"0/16B3748-0","subject"`},
	} {
		m := message{header: nats.Header{outbox.HeaderName: {h.String()}}}
		if value != "" {
			m.header[outbox.HeaderOrigin] = []string{value}
		}
		for i, want := range want {
			l := &lines{template: template, doc: "doc_id", json: i == 1}
			line, err := l.of(m, &jetstream.MsgMetadata{})
			if err != nil || !strings.Contains(string(line), want) ||
				i == 1 && value != "3" && strings.Contains(string(line), "home") {
				t.Errorf("%q: %s, %v, want %s", value, line, err, want)
			}
		}
	}
}
