package replay

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// newTestPublisher is the publisher of replay "r" into a new stream.
func newTestPublisher(t *testing.T) (*publisher, jetstream.JetStream) {
	t.Helper()
	nc, js := natstest.Connect(t, natstest.Server(t).URL())
	stream, err := js.CreateStream(t.Context(),
		jetstream.StreamConfig{Name: "TO", Subjects: []string{"to.>", "other"}})
	must(t, err)
	return &publisher{
		js: js, api: jsapi.New(nc, ""), id: "r", timeout: 5 * time.Second,
		target: &target{kind: toStream, name: "TO", prefix: "to.", stream: stream},
	}, js
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func nth(n uint64) *Message {
	return &Message{Seq: n, Subject: "s", Header: nats.Header{"Nats-Expected-Last-Sequence": {"7"},
		"Outflow-Replay": {"another"}, "X": {"y"}},
		Data: fmt.Append(nil, n), resume: resumePoint{n: n, hash: "h", from: FromStream, seq: n, end: 9}}
}

// content is what the stream has.
func content(t *testing.T, js jetstream.JetStream) string {
	t.Helper()
	var all []string
	must(t, jsapi.ReadStream(t.Context(), js, "TO", jetstream.OrderedConsumerConfig{}, 0,
		func(m jetstream.Msg, _ *jetstream.MsgMetadata) error {
			all = append(all, m.Subject()+"="+string(m.Data()))
			return nil
		}))
	return strings.Join(all, " ")
}

// TestAMessageIsPublishedOnceAndInOrder: whatever came in that this publisher does not know of, a message is
// there once and behind the one before it.
func TestAMessageIsPublishedOnceAndInOrder(t *testing.T) {
	t.Parallel()
	p, js := newTestPublisher(t)
	at, err := p.begin(t.Context(), true)
	if err != nil || at != nil {
		t.Fatalf("in an empty stream: %v, %v", at, err)
	}
	must(t, p.publish(t.Context(), nth(1)))
	// Somebody else publishes.
	_, err = js.Publish(t.Context(), "other", []byte("x"))
	must(t, err)
	must(t, p.publish(t.Context(), nth(2)))
	// A process of the same replay that was killed had still sent the next one, and another replay its own.
	late := p.message(nth(3))
	_, err = js.PublishMsg(t.Context(), late)
	must(t, err)
	strange := p.message(nth(4))
	strange.Header[HeaderReplay] = []string{"q"}
	strange.Data = []byte("q")
	_, err = js.PublishMsg(t.Context(), strange)
	must(t, err)
	for n := uint64(3); n <= 5; n++ {
		must(t, p.publish(t.Context(), nth(n)))
	}
	if got, want := content(t, js), "to.s=1 other=x to.s=2 to.s=3 to.s=q to.s=4 to.s=5"; got != want {
		t.Errorf("the stream has %s, want %s", got, want)
	}
	m, err := p.target.stream.GetMsg(t.Context(), 1)
	must(t, err)
	for name, want := range map[string]string{"X": "y", HeaderReplay: "r", HeaderSequence: "1",
		HeaderPlace: "v=1 n=1 of=h from=stream seq=1 end=9", "Nats-Expected-Last-Sequence": "0"} {
		if got := m.Header.Get(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for _, id := range []string{"r", "q", "none"} {
		again := *p
		again.id = id
		at, err := again.begin(t.Context(), true)
		must(t, err)
		if want := map[string]uint64{"r": 5, "q": 4}[id]; (at == nil) != (want == 0) || at != nil &&
			at.n != want {
			t.Errorf("replay %s goes on behind %v, want %d", id, at, want)
		}
	}
}

// TestAMessageThatTheTargetNeverTakesEndsAReplay: what the target will never take ends a replay at once.
func TestAMessageThatTheTargetNeverTakesEndsAReplay(t *testing.T) {
	t.Parallel()
	p, js := newTestPublisher(t)
	_, err := p.begin(t.Context(), false)
	must(t, err)
	must(t, p.publish(t.Context(), nth(1)))
	large := nth(2)
	large.Data = make([]byte, 1<<20)
	if err := p.publish(t.Context(), large); err == nil || !strings.Contains(err.Error(), "max_payload") {
		t.Errorf("too large for the server: %v", err)
	}
	_, err = js.UpdateStream(t.Context(), jetstream.StreamConfig{Name: "TO",
		Subjects: []string{"to.>", "other"}, Discard: jetstream.DiscardNew, MaxMsgs: 1})
	must(t, err)
	if err := p.publish(t.Context(), nth(2)); err == nil || !strings.Contains(err.Error(), "refuses") {
		t.Errorf("into a full stream: %v", err)
	}
	if got := content(t, js); got != "to.s=1" {
		t.Errorf("the stream has %s", got)
	}
}

// TestAReplayGoesOnWhereItWasOnAReplicaThatLags: its newest message is not the target's, and it is found.
func TestAReplayGoesOnWhereItWasOnAReplicaThatLags(t *testing.T) {
	t.Parallel()
	p, js := newTestPublisher(t)
	_, err := p.begin(t.Context(), false)
	must(t, err)
	for n := range uint64(3) {
		must(t, p.publish(t.Context(), nth(n+1)))
	}
	_, err = js.Publish(t.Context(), "other", []byte("x"))
	must(t, err)
	_, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "BEHIND",
		Subjects: []string{"behind.>"}, SubjectTransform: &jetstream.SubjectTransformConfig{
			Source: "behind.>", Destination: "to.>"}})
	must(t, err)
	n := uint64(0)
	more := func() {
		if n++; n <= 3 {
			m, err := p.target.stream.GetMsg(t.Context(), n)
			must(t, err)
			h := m.Header
			h.Del(jetstream.ExpectedLastSeqHeader)
			_, err = js.PublishMsg(t.Context(), &nats.Msg{Subject: "behind.s", Header: h})
			must(t, err)
		}
	}
	more()
	p.js = natstest.Lagging{JetStream: js, Behind: "BEHIND", More: more}
	at, err := p.begin(t.Context(), true)
	if err != nil || at == nil || at.n != 3 {
		t.Errorf("it goes on behind %+v: %v", at, err)
	}
}
