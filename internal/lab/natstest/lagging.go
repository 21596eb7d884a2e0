package natstest

import (
	"context"

	"github.com/nats-io/nats.go/jetstream"
)

// Lagging is a client whose ordered consumers are on a replica that lags behind the leader. The replica is
// another stream, Behind, which gets the next message when the one before it was read: More is called then.
type Lagging struct {
	jetstream.JetStream
	Behind string
	More   func()
}

// OrderedConsumer reads from the replica.
func (l Lagging) OrderedConsumer(ctx context.Context, _ string, cfg jetstream.OrderedConsumerConfig) (
	jetstream.Consumer, error) {
	c, err := l.JetStream.OrderedConsumer(ctx, l.Behind, cfg)
	return lagging{c, l.More}, err
}

type lagging struct {
	jetstream.Consumer
	more func()
}

func (l lagging) Messages(o ...jetstream.PullMessagesOpt) (jetstream.MessagesContext, error) {
	m, err := l.Consumer.Messages(o...)
	return coming{m, l.more}, err
}

type coming struct {
	jetstream.MessagesContext
	more func()
}

func (c coming) Next(o ...jetstream.NextOpt) (jetstream.Msg, error) {
	m, err := c.MessagesContext.Next(o...)
	c.more()
	return m, err
}
