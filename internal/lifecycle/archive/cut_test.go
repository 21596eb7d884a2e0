package archive

import (
	"reflect"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// A cut is archived as it is, among the events.
func TestACutIsArchivedByteForByte(t *testing.T) {
	t.Parallel()
	store, _ := folderOf(t)
	a := load(t, store, nil)
	s, err := a.NewSegment()
	must.Succeed(t, err)
	c := outbox.Cut{SystemID: 7, Timeline: 1, LSN: 0x3000, Epoch: 2, Owner: 2}
	cut := &Message{Seq: 2, Time: made, Subject: outbox.CutSubject,
		Header: nats.Header{outbox.HeaderCut: {c.String() + " later=1"},
			"Nats-Expected-Last-Sequence": {"1"}}}
	for _, m := range []*Message{message(1), cut, message(3)} {
		must.Succeed(t, s.Add(m))
	}
	_, err = a.Append(t.Context(), s, 0)
	must.Succeed(t, err)
	var found *Message
	must.Succeed(t, load(t, store, nil).Read(t.Context(), 2, func(m *Message) error {
		if m.Seq == 2 {
			found = m
		}
		return nil
	}))
	if found == nil || found.Hash() != cut.Hash() || !reflect.DeepEqual(found.Header, cut.Header) {
		t.Errorf("read back as %+v", found)
	}
}
