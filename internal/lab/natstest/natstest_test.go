package natstest

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

func TestMain(m *testing.M) {
	RunChild()
	goleak.VerifyTestMain(m)
}

func connect(t *testing.T, url string) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(time.Minute))
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	must.Succeed(t, err)
	return js
}

func TestAServerOfATestHasJetStream(t *testing.T) {
	t.Parallel()
	s := Server(t, natsserver.Options{MaxPayload: 2 << 20})
	js := connect(t, s.URL())
	if got := js.Conn().MaxPayload(); got != 2<<20 {
		t.Errorf("max payload %d, want 2 MiB", got)
	}
	if _, err := js.CreateStream(t.Context(),
		jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Error(err)
	}
}

func TestProcessSurvivesWhatIsDoneToIt(t *testing.T) {
	t.Parallel()
	p := Process(t)
	js := connect(t, p.URL())
	if _, err := js.CreateStream(t.Context(),
		jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	publish := func() {
		t.Helper()
		if _, err := connect(t, p.URL()).Publish(t.Context(), "s", []byte("kept")); err != nil {
			t.Fatal(err)
		}
	}
	publish()
	must.Succeed(t, p.Kill())
	if nc, err := nats.Connect(p.URL()); err == nil {
		nc.Close()
		t.Fatal("a killed server accepts connections")
	}
	must.Succeed(t, p.Start())
	publish()
	must.Succeed(t, p.Stop())
	must.Succeed(t, p.Start())

	js = connect(t, p.URL())
	must.Succeed(t, p.Pause())
	if _, err := js.Publish(t.Context(), "s", []byte("frozen"), jetstream.WithRetryAttempts(0)); err == nil {
		t.Error("a paused server answered")
	}
	must.Succeed(t, p.Resume())
	publish()
	if err := p.Pause(); err != nil { // and the end of the test removes it
		t.Fatal(err)
	}
	must.Succeed(t, p.Kill())
	must.Succeed(t, p.Start())
	stream, err := connect(t, p.URL()).Stream(t.Context(), "S")
	must.Succeed(t, err)
	if info := stream.CachedInfo(); info.State.Msgs != 4 {
		t.Errorf("%d messages are left of 4", info.State.Msgs)
	}
}

func TestAClusterOfATestReplicates(t *testing.T) {
	t.Parallel()
	c := Cluster(t, 3)
	js := connect(t, c.URL(0))
	config := jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, Replicas: 3}
	if _, err := js.CreateStream(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), "s", []byte("kept")); err != nil {
		t.Fatal(err)
	}
	leader, err := c.WaitLeader("S", 3*time.Minute)
	must.Succeed(t, err)
	c.Stop(leader)
	must.Succeed(t, c.WaitReady(3*time.Minute))
	next, err := c.WaitLeader("S", 3*time.Minute)
	must.Succeed(t, err)
	stream, err := connect(t, c.URL(next)).Stream(t.Context(), "S")
	must.Succeed(t, err)
	if info := stream.CachedInfo(); info.State.Msgs != 1 {
		t.Errorf("%d messages, want 1", info.State.Msgs)
	}
	must.Succeed(t, c.Start(leader))
	if err := c.WaitReady(3 * time.Minute); err != nil {
		t.Error(err)
	}
}
