package replay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// stalled is how long a stream may bring nothing although there is more.
const stalled = 20 * time.Second

// errEnough ends a reading.
var errEnough = errors.New("enough")

// Read calls f with each message that a stream has now, by an ordered consumer of its own, which it takes away afterwards. It ends with the
// last message that there is, or when f returns an error.
func Read(ctx context.Context, js jetstream.JetStream, stream string, oc jetstream.OrderedConsumerConfig, f func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	consumer, err := js.OrderedConsumer(ctx, stream, oc)
	if err != nil {
		return fmt.Errorf("read stream %s: %w", stream, err)
	}
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if info := consumer.CachedInfo(); info != nil {
			_ = js.DeleteConsumer(last, stream, info.Name) // the server drops it by itself, some minutes later
		}
	}()
	if info := consumer.CachedInfo(); info != nil && info.NumPending == 0 {
		return nil
	}
	it, err := consumer.Messages(jetstream.PullMaxMessages(1024))
	if err != nil {
		return fmt.Errorf("read stream %s: %w", stream, err)
	}
	defer it.Stop()
	for {
		next, cancel := context.WithTimeout(ctx, stalled)
		m, err := it.Next(jetstream.NextContext(next))
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("read stream %s: %w", stream, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return fmt.Errorf("read stream %s: %w", stream, err)
		}
		if err := f(m, meta); err != nil {
			return err
		}
		if meta.NumPending == 0 {
			return nil
		}
	}
}
