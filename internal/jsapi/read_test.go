package jsapi

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// Each message is stored only when the one before it was read, as on a replica that lags: at each of them
// nothing more is pending.
func TestAStreamIsReadUpToASequenceThatTheConsumerDoesNotHaveYet(t *testing.T) {
	t.Parallel()
	nc, err := nats.Connect(natstest.Server(t).URL(), nats.Timeout(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S"}); err != nil {
		t.Fatal(err)
	}
	publish := func() error {
		_, err := js.Publish(t.Context(), "S", nil)
		return err
	}
	if err := publish(); err != nil {
		t.Fatal(err)
	}
	var read uint64
	err = ReadStream(t.Context(), js, "S", jetstream.OrderedConsumerConfig{}, 3,
		func(_ jetstream.Msg, meta *jetstream.MsgMetadata) error {
			read = meta.Sequence.Stream
			return publish()
		})
	if err != nil || read != 3 {
		t.Errorf("read up to %d: %v", read, err)
	}
}
