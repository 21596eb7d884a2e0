package jsapi

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// stalled is how long the server may take to deliver the next message.
const stalled = 20 * time.Second

// ErrStop ends ReadStream early, without an error.
var ErrStop = errors.New("stop reading")

// ReadStream calls f with each message that the stream has now, in order, up to the last one or until f
// returns an error. It reads through an ordered consumer of its own, which it deletes at the end.
//
// The consumer may be on a replica that lags behind the leader, and then its last message is not the
// stream's. With upTo set, ReadStream waits for the message of that sequence.
func ReadStream(ctx context.Context, js jetstream.JetStream, stream string,
	oc jetstream.OrderedConsumerConfig, upTo uint64,
	f func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	consumer, err := js.OrderedConsumer(ctx, stream, oc)
	if err != nil {
		return fmt.Errorf("read stream %s: %w", stream, err)
	}
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if info := consumer.CachedInfo(); info != nil {
			// if this fails, the server deletes it some minutes later
			_ = js.DeleteConsumer(last, stream, info.Name)
		}
	}()
	if info := consumer.CachedInfo(); upTo == 0 && info != nil && info.NumPending == 0 {
		return nil
	}
	it, err := consumer.Messages(jetstream.PullMaxMessages(1024))
	if err != nil {
		return fmt.Errorf("read stream %s: %w", stream, err)
	}
	defer it.Stop()
	// One watchdog for all messages: a context for each costs as much as reading a small message does.
	next, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	watchdog := time.AfterFunc(stalled, func() { stop(context.DeadlineExceeded) })
	defer watchdog.Stop()
	for {
		watchdog.Reset(stalled)
		m, err := it.Next(jetstream.NextContext(next))
		watchdog.Stop() // f may take its time
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && next.Err() != nil {
			err = context.Cause(next)
		}
		if err != nil {
			return fmt.Errorf("read stream %s: %w", stream, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return fmt.Errorf("read stream %s: %w", stream, err)
		}
		switch err := f(m, meta); {
		case errors.Is(err, ErrStop):
			return nil
		case err != nil:
			return err
		}
		if upTo == 0 && meta.NumPending == 0 || upTo > 0 && meta.Sequence.Stream >= upTo {
			return nil
		}
	}
}
