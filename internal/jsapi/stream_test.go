package jsapi

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

func TestAStreamIsReadWithWhatTheCallerWantsOfItsConfiguration(t *testing.T) {
	t.Parallel()
	nc, js := natstest.Connect(t, natstest.Server(t).URL())
	c := New(nc, "")
	type config struct {
		MaxBytes int64 `json:"max_bytes"`
	}
	if info, err := Stream[config](t.Context(), c, "S"); info != nil || err != nil {
		t.Errorf("one that does not exist: %+v, %v", info, err)
	}
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", MaxBytes: 1 << 20})
	must.Succeed(t, err)
	for range 5 {
		_, err = js.Publish(t.Context(), "S", []byte("x"))
		must.Succeed(t, err)
	}
	must.Succeed(t, s.DeleteMsg(t.Context(), 1))
	must.Succeed(t, s.DeleteMsg(t.Context(), 3))
	info, err := Stream[config](t.Context(), c, "S")
	must.Succeed(t, err)
	st := info.State
	if info.Config.MaxBytes != 1<<20 || info.Created.IsZero() || info.Now.IsZero() || st.First != 2 ||
		st.Last != 5 || st.Messages != 3 || st.Deleted != 1 || st.Subjects != 1 || st.Bytes == 0 ||
		st.LastTime.IsZero() {
		t.Errorf("%+v", info)
	}
}

// TestAnAnswerWithoutALeaderIsNotThatOfTheLeader: outside of a cluster there is only one server to answer.
func TestAnAnswerWithoutALeaderIsNotThatOfTheLeader(t *testing.T) {
	t.Parallel()
	for led, cluster := range map[bool]*Cluster{true: {Leader: "n1"}, false: {}} {
		if got := (&StreamInfo[struct{}]{Cluster: cluster}).Led(); got != led {
			t.Errorf("%+v: %v", cluster, got)
		}
	}
	if !(&StreamInfo[struct{}]{}).Led() {
		t.Error("a single server is not the leader")
	}
}

// TestAListOfStreamsLacksNone, although one that was listed is deleted before the next page.
func TestAListOfStreamsLacksNone(t *testing.T) {
	t.Parallel()
	there, asked, always := []string{"a", "b", "c", "d", "e", "f"}, 0, false
	c := answering(t, func(m *nats.Msg) {
		var r struct {
			Offset int `json:"offset"`
		}
		must.Succeed(t, json.Unmarshal(m.Data, &r))
		if asked++; asked == 2 || always && r.Offset > 0 {
			there = there[1:]
		}
		from := min(r.Offset, len(there))
		text, err := json.Marshal(map[string]any{"total": len(there),
			"streams": there[from:min(from+3, len(there))]})
		must.Succeed(t, err)
		must.Succeed(t, m.Respond(text))
	})
	got, err := c.Streams(t.Context(), ">")
	must.Succeed(t, err)
	if !slices.Equal(got, []string{"b", "c", "d", "e", "f"}) {
		t.Errorf("got %v", got)
	}
	there, always = strings.Split("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", ""), true
	if got, err := c.Streams(t.Context(), ">"); err == nil {
		t.Errorf("they change all the time: %v", got)
	}
}
