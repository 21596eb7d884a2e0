package jsapi

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// oneMessage is a server with a stream S, which has one message.
func oneMessage(t *testing.T) jetstream.JetStream {
	t.Helper()
	_, js := natstest.Connect(t, natstest.Server(t).URL())
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S"}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), "S", nil); err != nil {
		t.Fatal(err)
	}
	return js
}

// Each message is stored only when the one before it was read, as on a replica that lags: at each of them
// nothing more is pending.
func TestAStreamIsReadUpToASequenceThatTheConsumerDoesNotHaveYet(t *testing.T) {
	t.Parallel()
	js := oneMessage(t)
	var read uint64
	err := ReadStream(t.Context(), js, "S", jetstream.OrderedConsumerConfig{}, 3,
		func(_ jetstream.Msg, meta *jetstream.MsgMetadata) error {
			read = meta.Sequence.Stream
			_, err := js.Publish(t.Context(), "S", nil)
			return err
		})
	if err != nil || read != 3 {
		t.Errorf("read up to %d: %v", read, err)
	}
}

// The first consumer brings nothing, as where the request for messages was lost on its way.
func TestAStreamIsReadThoughTheFirstRequestIsLost(t *testing.T) {
	t.Parallel()
	js := &losing{JetStream: oneMessage(t)}
	n := 0
	err := ReadStream(t.Context(), js, "S", jetstream.OrderedConsumerConfig{}, 0,
		func(jetstream.Msg, *jetstream.MsgMetadata) error {
			n++
			return nil
		})
	if err != nil || n != 1 || js.consumers < 2 {
		t.Errorf("%d messages by %d consumers: %v", n, js.consumers, err)
	}
}

// losing is a client whose first consumer's requests are lost: its messages are those of an empty stream.
type losing struct {
	jetstream.JetStream
	consumers int
}

func (l *losing) OrderedConsumer(ctx context.Context, stream string, cfg jetstream.OrderedConsumerConfig) (
	jetstream.Consumer, error) {
	c, err := l.JetStream.OrderedConsumer(ctx, stream, cfg)
	if l.consumers++; l.consumers > 1 || err != nil {
		return c, err
	}
	if _, err := l.CreateStream(ctx, jetstream.StreamConfig{Name: "EMPTY"}); err != nil {
		return nil, err
	}
	silent, err := l.JetStream.OrderedConsumer(ctx, "EMPTY", cfg)
	return split{c, silent}, err
}

type split struct {
	jetstream.Consumer
	messages jetstream.Consumer
}

func (s split) Messages(opts ...jetstream.PullMessagesOpt) (jetstream.MessagesContext, error) {
	return s.messages.Messages(opts...)
}

// TestAConsumerIsNotWaitedForForever: the answer of a leader that was lost never comes, and commands have
// hours.
func TestAConsumerIsNotWaitedForForever(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	var left time.Duration
	err := ReadStream(ctx, deaf{left: &left}, "S", jetstream.OrderedConsumerConfig{}, 0, nil)
	if !errors.Is(err, context.DeadlineExceeded) || left > unanswered {
		t.Errorf("it waits for %v: %v", left, err)
	}
}

// deaf is a client that gets no answer, and says how long it would wait for one.
type deaf struct {
	jetstream.JetStream
	left *time.Duration
}

func (d deaf) OrderedConsumer(ctx context.Context, _ string, _ jetstream.OrderedConsumerConfig) (
	jetstream.Consumer, error) {
	end, _ := ctx.Deadline()
	*d.left = time.Until(end)
	return nil, context.DeadlineExceeded
}
