package consumeradmin

import (
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// A cut is no event that a rewind could name, and no message of somebody else.
func TestCutsAreNoEventsOfARewind(t *testing.T) {
	t.Parallel()
	nc, js := natstest.Connect(t, natstest.Server(t).URL())
	a := &Admin{Stream: "OUTBOX", API: jsapi.New(nc, ""), JS: js}
	s, err := a.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX",
		Subjects: []string{"outbox.>", outbox.CutSubject}})
	must(t, err)
	w := &world{t: t}
	cut := outbox.Cut{SystemID: 7, LSN: 40, Epoch: 2, Owner: 2}
	header := nats.Header{outbox.HeaderCut: {cut.String()}}
	publish := func() {
		t.Helper()
		_, err := a.JS.PublishMsg(t.Context(), &nats.Msg{Subject: outbox.CutSubject, Header: header})
		must(t, err)
	}
	w.publish(a.JS, "outbox.d", 1)
	w.publish(a.JS, "outbox.d", 2)
	publish()
	w.publish(a.JS, "outbox.d", 4)
	publish()
	created := s.CachedInfo().Created

	at, err := a.message(t.Context(), 3)
	first, err2 := a.firstFrom(t.Context(), 3, nil)
	last, err3 := a.firstFrom(t.Context(), 5, nil)
	if err != nil || err2 != nil || err3 != nil || at != nil || first == nil || first.seq != 4 ||
		last != nil {
		t.Errorf("at the cut %v, %v; first behind it %v, %v; and behind the last %v, %v", at, err, first,
			err2, last, err3)
	}
	marks := &state{offsets: []offset{{Seq: 3, Due: 32, Pos: outbox.Position{LSN: 32}}}}
	if same, err := a.isOf(t.Context(), marks, created); !same || err != nil {
		t.Errorf("marks at a cut are of this stream: %t, %v", same, err)
	}
	for position, want := range map[outbox.LSN]uint64{32: 1, 64: 3, 65: 5} {
		to, err := a.resolve(t.Context(), s, "texts", target{kind: "position",
			position: outbox.Position{LSN: position}})
		if err != nil || to != want {
			t.Errorf("back to %v: %d, %v, want %d", position, to, err, want)
		}
	}
	archived := &archive.Message{Seq: 3, Subject: outbox.CutSubject, Header: header}
	if m, err := (*past)(nil).stored(archived); m != nil || err != nil {
		t.Errorf("archived: %v, %v", m, err)
	}
	archived.Header = nats.Header{}
	if _, err := (*past)(nil).stored(archived); outbox.FaultOf(err) == nil {
		t.Errorf("of somebody else: %v", err)
	}
}
