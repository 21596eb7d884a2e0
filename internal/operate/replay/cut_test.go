package replay

import (
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

// A cut is not replayed, and is no stranger's message. As the first message of the stream it says what lies
// before it.
func TestACutIsNotReplayed(t *testing.T) {
	t.Parallel()
	c := outbox.Cut{SystemID: 7, LSN: 0x3000, Epoch: 2, Owner: 2}
	s, n := &streamSource{name: "OUTBOX"}, 0
	count := func(*Message) error { n++; return nil }
	m := &Message{Seq: 3, Subject: outbox.CutSubject, Header: nats.Header{outbox.HeaderCut: {c.String()}}}
	if err := s.event(m, count); err != nil || n != 0 {
		t.Errorf("a cut: %d events, %v", n, err)
	}
	s.setHeader(m.Subject, m.Header)
	if s.header == nil || s.header.Thru != c.LSN {
		t.Errorf("as the first message: %v", s.header)
	}
	m.Header = nats.Header{}
	if err := s.event(m, count); outbox.FaultOf(err) == nil || outbox.FaultOf(err).Code != "foreign_message" {
		t.Errorf("without its header: %v", err)
	}
	if s.setHeader(m.Subject, m.Header); s.header != nil {
		t.Errorf("without its header, as the first message: %v", s.header)
	}
	m.Subject, m.Header = "outbox.d", nats.Header{outbox.HeaderName: {header(4)}}
	if err := s.event(m, count); err != nil || n != 1 {
		t.Errorf("an event: %d events, %v", n, err)
	}
}
