package jsapi

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

func TestAStreamIsReadWithWhatTheCallerWantsOfItsConfiguration(t *testing.T) {
	t.Parallel()
	nc, err := nats.Connect(natstest.Server(t).URL(), nats.Timeout(time.Minute))
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	must.Succeed(t, err)
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
