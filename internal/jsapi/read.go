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

// firstWaits are how long consumers, one after the other, may take for the first one. In a cluster the server
// of a consumer that was just made may not have told ours yet that it takes requests for messages: then ours
// drops the first one without a word (one in a hundred, with three servers on one machine).
var firstWaits = []time.Duration{250 * time.Millisecond, time.Second, stalled}

// ErrStop ends ReadStream early, without an error.
var ErrStop = errors.New("stop reading")

// MetadataReader is in the metadata of the consumers that ReadStream makes: who reads with it, as lists of
// consumers show it. Callers may say it; otherwise it is the constant below.
const MetadataReader = "outflow.reader"

const someCommand = "a command of outflow"

// ReadStream calls f with each message that the stream has now, in order, up to the last one or until f
// returns an error. It reads through an ordered consumer of its own, which it deletes at the end.
//
// The consumer may be on a replica that lags behind the leader, and then its last message is not the
// stream's. With upTo set, ReadStream waits for the message of that sequence.
func ReadStream(ctx context.Context, js jetstream.JetStream, stream string,
	oc jetstream.OrderedConsumerConfig, upTo uint64,
	f func(jetstream.Msg, *jetstream.MsgMetadata) error) (err error) {
	if oc.Metadata == nil {
		oc.Metadata = map[string]string{MetadataReader: someCommand}
	}
	for _, first := range firstWaits {
		if err = readStream(ctx, js, stream, oc, upTo, first, f); !errors.Is(err, errNothing) {
			return err
		}
	}
	return fmt.Errorf("read stream %s: %w", stream, err)
}

// errNothing ends readStream if not even the first message came.
var errNothing = fmt.Errorf("no message came: %w", context.DeadlineExceeded)

func readStream(ctx context.Context, js jetstream.JetStream, stream string,
	oc jetstream.OrderedConsumerConfig, upTo uint64, first time.Duration,
	f func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	limited, made := context.WithTimeout(ctx, unanswered) // nats.go has no limit where there is one already
	consumer, err := js.OrderedConsumer(limited, stream, oc)
	made()
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
	ahead := 1024 // messages that are asked for at once
	if oc.HeadersOnly {
		ahead = 4096
	}
	it, err := consumer.Messages(jetstream.PullMaxMessages(ahead))
	if err != nil {
		return fmt.Errorf("read stream %s: %w", stream, err)
	}
	defer it.Stop()
	// One watchdog for all messages: a context for each costs as much as reading a small message does.
	next, stop := context.WithCancel(ctx)
	defer func() { stop() }()
	watchdog := time.AfterFunc(first, stop)
	defer func() { watchdog.Stop() }()
	for nothing := true; ; nothing = false {
		m, err := it.Next(jetstream.NextContext(next))
		late := !watchdog.Stop() // f may take its time
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && late && nothing:
			return errNothing
		case err != nil && late:
			err = context.DeadlineExceeded
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
		if late { // the message came when its time was over
			next, stop = context.WithCancel(ctx)
			watchdog = time.AfterFunc(stalled, stop)
		} else {
			watchdog.Reset(stalled)
		}
	}
}
