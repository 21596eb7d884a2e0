// Package tail is `outflow tail`: it shows the messages of the stream as they are published, a line each. It
// only reads, through an ordered consumer that it deletes at its end, and goes on by sequence when NATS was
// away.
package tail

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/outbox"
)

// Options say what is shown, and where it begins: with what is published from now on, unless one of Last,
// Since and Seq is set.
type Options struct {
	Last  int       // with so many of the newest messages that the filters select
	Since time.Time // with what was stored then
	Seq   uint64    // with this sequence

	Docs   []string // these documents only
	Filter string   // only subjects that match this one, which may have wildcards; not with Docs
	Count  int      // so many messages, then it ends; 0: it goes on until ctx ends

	Payload bool // also the payload, the first [maxPayload] bytes of it
	JSON    bool // an object a line

	Out io.Writer                        // a line for each message
	Say func(format string, args ...any) // what else there is to say: gaps, outages
	Log *slog.Logger
}

const (
	connectLimit = 10 * time.Second // to connect and to ask for the stream
	retryFirst   = 250 * time.Millisecond
	retryMost    = 2 * time.Second

	// inactive is after what time the server deletes the consumer of a process that was killed
	inactive = 30 * time.Second
	deleting = time.Second // how long deleting it may take

	// bufferMessages, without payloads, and bufferBytes with them, are how much the client holds for a slow
	// reader of the output. More waits on the server.
	bufferMessages = 256
	bufferBytes    = 8 << 20
)

// errDone ends a session: everything that was asked for is shown.
var errDone = errors.New("done")

type tail struct {
	cfg     config.Config
	o       Options
	filters []string
	lines   *lines
	out     *output

	created     time.Time // of the stream
	first, last uint64    // its sequences when this session began, or the last one that was shown since
	next        uint64    // the sequence to go on with; 0: not known yet
	skip        uint64    // so many messages are not shown: they are before the last ones
	shown       int
}

// Run shows messages until ctx ends, the output is closed, or as many are shown as were asked for. None of
// that is an error.
func Run(ctx context.Context, cfg config.Config, o Options) error {
	t := &tail{cfg: cfg, o: o}
	var err error
	if t.lines, err = newLines(cfg, o); err != nil {
		return err
	}
	if t.filters, err = t.lines.filters(o); err != nil {
		return err
	}
	t.out = newOutput(o.Out)
	away := false // that NATS is away was said
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		read := false
		err := t.session(ctx, func() {
			if read = true; away {
				o.Say("NATS is back; going on with sequence %d", t.next)
			}
			away = false
		})
		switch {
		case errors.Is(err, errDone):
			return t.out.finish(ctx)
		case ctx.Err() != nil, t.out.closed():
			return t.out.failure()
		case t.created.IsZero(), outbox.ClassOf(err) != outbox.Transient:
			return t.explain(err)
		case !away:
			o.Say("%v; trying again", err)
			away = true
		}
		if read {
			wait = retryFirst
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		case <-t.out.failed:
			return t.out.failure()
		}
	}
}

// explain says which rights are needed, where one is missing.
func (t *tail) explain(err error) error {
	f := outbox.FaultOf(err)
	if f == nil || f.Code != "nats_permission" {
		return err
	}
	said := *f
	said.Hint = fmt.Sprintf("Let the user publish to $JS.API.INFO, $JS.API.STREAM.INFO.%[1]s, "+
		"$JS.API.CONSUMER.CREATE.%[1]s.>, $JS.API.CONSUMER.MSG.NEXT.%[1]s.> and "+
		"$JS.API.CONSUMER.DELETE.%[1]s.>, and subscribe to _INBOX.outflow.>", t.cfg.Stream)
	return &said
}

// session reads over one connection until that is lost. It calls connected when it begins to read.
func (t *tail) session(ctx context.Context, connected func()) error {
	dial, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	conn, err := wiring.ConnectBroker(dial, t.cfg, t.o.Log)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, lost := conns.WhileConnected(ctx, conn)
	return lost(func() error {
		if err := t.locate(ctx, conn.API()); err != nil {
			return err
		}
		js, err := conn.API().JetStream()
		if err != nil {
			return err
		}
		consumer, err := t.open(ctx, js)
		if err != nil {
			return err
		}
		connected()
		defer progress.Show(ctx, func(time.Time) string {
			return "waiting for messages of stream " + t.cfg.Stream
		}).End()
		limit := []jetstream.PullMessagesOpt{jetstream.PullMaxMessages(bufferMessages)}
		if t.o.Payload {
			limit[0] = jetstream.PullMaxBytes(max(bufferBytes, 2*int(conn.NATS().MaxPayload()),
				2*t.cfg.Sink.MaxPayload))
		}
		return t.follow(ctx, js, consumer, limit)
	}())
}

// locate decides where to go on, and names what is not there any more.
func (t *tail) locate(ctx context.Context, api *jsapi.Client) error {
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	now, err := jsapi.Stream[struct{}](ctx, api, t.cfg.Stream)
	switch {
	case err != nil:
		return err
	case now == nil:
		return &outbox.Fault{Class: outbox.Fatal, Code: "stream_missing",
			Message: fmt.Sprintf("stream %s does not exist", t.cfg.Stream),
			Hint:    "Run `outflow init`, or name the right stream and account"}
	case !now.Led(): // this server may lag, and seem to have lost messages
		return &outbox.Fault{Class: outbox.Transient, Code: "no_leader",
			Message: fmt.Sprintf("stream %s has no leader", t.cfg.Stream)}
	}
	before := t.last
	t.first, t.last = max(now.State.First, 1), now.State.Last
	switch {
	case t.created.IsZero():
		switch {
		case t.o.Seq > 0:
			t.next = t.o.Seq
		case t.o.Since.IsZero() && t.o.Last == 0:
			t.next = t.last + 1
		}
	case !now.Created.Equal(t.created):
		t.o.Say("stream %s was made again at %s: its sequences begin anew", t.cfg.Stream,
			now.Created.UTC().Format(time.RFC3339))
		t.next = 1
	case t.last < before && t.last+1 < t.next && t.next <= before+1: // else next is still to come
		t.o.Say("stream %s ends at sequence %d: it has lost what was shown behind that", t.cfg.Stream,
			t.last)
		t.next = t.last + 1
	}
	t.created = now.Created
	t.gone(t.first)
	return nil
}

// gone names the messages before a sequence that are still to be shown: they were removed.
func (t *tail) gone(before uint64) {
	if t.next == 0 || before <= t.next {
		return
	}
	if n := before - t.next; n == 1 {
		t.o.Say("sequence %d is not in the stream any more", t.next)
	} else {
		t.o.Say("sequences %d to %d are not in the stream any more: %d messages", t.next, before-1, n)
	}
	t.next = before
}

// open makes the consumer.
func (t *tail) open(ctx context.Context, js jetstream.JetStream) (jetstream.Consumer, error) {
	oc := jetstream.OrderedConsumerConfig{
		FilterSubjects: t.filters, HeadersOnly: !t.o.Payload, InactiveThreshold: inactive,
		MaxResetAttempts: 1, // the session begins anew then
		DeliverPolicy:    jetstream.DeliverByStartSequencePolicy, OptStartSeq: t.next,
	}
	switch {
	case t.next > 0:
	case !t.o.Since.IsZero():
		oc.DeliverPolicy, oc.OptStartTime = jetstream.DeliverByStartTimePolicy, &t.o.Since
	default:
		return t.openLast(ctx, js, oc)
	}
	return t.consumer(ctx, js, oc)
}

// openLast makes a consumer that begins before the last messages. How many of the newest sequences have them
// is not known, because of filters and of messages that were removed: it looks ever further back.
func (t *tail) openLast(ctx context.Context, js jetstream.JetStream,
	oc jetstream.OrderedConsumerConfig) (jetstream.Consumer, error) {
	want := uint64(t.o.Last)
	for width := want; ; width *= 4 {
		oc.OptStartSeq = t.last + 1 - min(width, t.last+1-t.first)
		consumer, err := t.consumer(ctx, js, oc)
		if err != nil {
			return nil, err
		}
		pending := consumer.CachedInfo().NumPending
		switch {
		case pending > want:
			t.skip = pending - want
		case pending == want || oc.OptStartSeq == t.first:
			t.skip, t.next = 0, oc.OptStartSeq
		default:
			remove(ctx, js, t.cfg.Stream, consumer)
			continue
		}
		return consumer, nil
	}
}

func (t *tail) consumer(ctx context.Context, js jetstream.JetStream,
	oc jetstream.OrderedConsumerConfig) (jetstream.Consumer, error) {
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	consumer, err := js.OrderedConsumer(ctx, t.cfg.Stream, oc)
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", t.cfg.Stream, err)
	}
	return consumer, nil
}

// remove deletes a consumer. If that fails the server deletes it a little later.
func remove(ctx context.Context, js jetstream.JetStream, stream string, consumer jetstream.Consumer) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleting)
	defer cancel()
	if now := consumer.CachedInfo(); now != nil {
		_ = js.DeleteConsumer(ctx, stream, now.Name)
	}
}

// follow shows what the consumer brings.
func (t *tail) follow(ctx context.Context, js jetstream.JetStream, consumer jetstream.Consumer,
	limit []jetstream.PullMessagesOpt) error {
	defer remove(ctx, js, t.cfg.Stream, consumer)
	it, err := consumer.Messages(limit...)
	if err != nil {
		return fmt.Errorf("read stream %s: %w", t.cfg.Stream, err)
	}
	stop := context.AfterFunc(ctx, it.Stop) // it does not look at ctx while it makes its consumer again
	defer stop()
	defer it.Stop()
	for {
		m, err := it.Next(jetstream.NextContext(ctx))
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		if err != nil {
			return fmt.Errorf("read stream %s: %w", t.cfg.Stream, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return fmt.Errorf("read stream %s: %w", t.cfg.Stream, err)
		}
		if err := t.show(ctx, m, meta); err != nil {
			return err
		}
	}
}

// show shows a message, unless it is before what is to be shown.
func (t *tail) show(ctx context.Context, m jetstream.Msg, meta *jetstream.MsgMetadata) error {
	seq := meta.Sequence.Stream
	switch {
	case t.skip > 0:
		if t.skip--; t.skip == 0 {
			t.next = seq + 1
		}
		return nil
	case seq < t.next: // the server begins at its end where that is before the sequence that was asked for
		return nil
	case len(t.filters) == 0: // else others may be between them
		t.gone(seq)
	}
	line, err := t.lines.of(m, meta)
	if err != nil {
		return err
	}
	if err := t.out.write(ctx, line); err != nil {
		return err
	}
	t.next, t.last = seq+1, max(t.last, seq)
	if t.shown++; t.shown == t.o.Count {
		return errDone
	}
	return nil
}
