package replay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
)

const (
	publishTimeout = 5 * time.Second
	publishTries   = 100 // of one message, while others publish as well
	publishWithin  = time.Minute
	retryPause     = 100 * time.Millisecond
)

// publisher publishes the messages of a replay one after the other. Each expects the target's last known
// sequence. If that fails, because an answer was lost or somebody else published, it reads what is in the
// target since then: if the message is among it, it has been published, otherwise it is sent again. So each
// message of a replay is in the target once and in order, even if others publish there too, or a killed
// process of the same replay still had messages on their way.
type publisher struct {
	js      jetstream.JetStream
	api     *jsapi.Client
	target  *target
	id      string
	last    uint64 // the target's last known sequence; everything up to it was looked at
	timeout time.Duration
	guard   *erasure.Guard
}

// message makes the message to publish.
func (p *publisher) message(m *Message) *nats.Msg {
	out := &nats.Msg{Subject: p.target.subject(m.Subject), Header: nats.Header{}, Data: m.Data}
	for name, values := range eventHeaders(m.Header) {
		out.Header[name] = values
	}
	out.Header[HeaderReplay] = []string{p.id}
	out.Header[HeaderPlace] = []string{m.resume.String()}
	if m.Seq > 0 {
		out.Header[HeaderSequence] = []string{fmt.Sprint(m.Seq)}
	}
	return out
}

// publish returns when the message is in the target.
func (p *publisher) publish(ctx context.Context, m *Message) error {
	out := p.message(m)
	begun := time.Now()
	var err error
	for try := 1; ; try++ {
		if err := p.guard.Check(ctx); err != nil {
			return err
		}
		one, cancel := context.WithTimeout(ctx, p.timeout)
		var ack *jetstream.PubAck
		ack, err = p.js.PublishMsg(one, out, jetstream.WithExpectLastSequence(p.last),
			jetstream.WithRetryAttempts(0))
		cancel()
		if err == nil && ack.Stream != p.target.stream.CachedInfo().Config.Name {
			return fmt.Errorf("subject %s: stream %s took it, not %s", out.Subject, ack.Stream,
				p.target.stream.CachedInfo().Config.Name)
		}
		if err == nil && ack.Sequence > p.last {
			p.last = ack.Sequence
			return nil
		}
		var refused *jetstream.APIError
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, nats.ErrMaxPayload):
			return fatal("replay_refused", fmt.Sprintf("the message for %s (%d bytes of data) is above the "+
				"server's max_payload with the headers of a replay", out.Subject, len(m.Data)),
				"Raise max_payload of the server, or leave the event out")
		case p.api.NATS().IsClosed():
			return fmt.Errorf("publish to %s: the connection to NATS is lost: %w", out.Subject, err)
		case errors.As(err, &refused) && refused.ErrorCode != jetstream.JSErrCodeStreamWrongLastSequence &&
			(refused.Code != 503 || refused.ErrorCode == jsapi.StreamStoreFailed):
			return fatal("replay_refused", fmt.Sprintf("stream %s refuses the message for %s: %v",
				p.target.stream.CachedInfo().Config.Name, out.Subject, err),
				"Give the stream room, or name another one")
		}
		known := p.last
		there, lookErr := p.lookFor(ctx, m.resume.n)
		if there || ctx.Err() != nil {
			return ctx.Err()
		}
		if try == publishTries || time.Since(begun) > publishWithin {
			return fmt.Errorf("publish to %s: no success in %d tries; is stream %s there, and does nobody "+
				"else publish to it all the time? %w", out.Subject, try,
				p.target.stream.CachedInfo().Config.Name, errors.Join(err, lookErr))
		}
		if p.last > known && lookErr == nil {
			continue // somebody else published first: retry at once
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retryPause):
		}
	}
}

// lookFor reads what is in the target since the last known sequence, and reports whether this replay's n-th
// message is among it.
func (p *publisher) lookFor(ctx context.Context, n uint64) (bool, error) {
	last, err := p.lastSeq(ctx)
	if err != nil {
		return false, err
	}
	for seq := p.last + 1; seq <= last; seq++ {
		m, err := p.get(ctx, seq)
		if err != nil {
			return false, err
		}
		p.last = seq
		if m == nil { // removed
			continue
		}
		if at, mine := p.resumePointOf(m.Header); mine && at.n == n {
			return true, nil
		}
	}
	if last < p.last {
		return false, fatal("replay_target", fmt.Sprintf("stream %s went back from sequence %d to %d while "+
			"it was published to", p.target.stream.CachedInfo().Config.Name, p.last, last),
			"Its server lost what it had acknowledged: run the same command again")
	}
	return false, nil
}

// lastSeq reads the target's last sequence from its leader.
func (p *publisher) lastSeq(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	info, err := p.target.stream.Info(ctx)
	if err != nil {
		return 0, fmt.Errorf("stream %s: %w", p.target.stream.CachedInfo().Config.Name, err)
	}
	if info.Cluster != nil && info.Cluster.Leader == "" {
		return 0, fmt.Errorf("stream %s has no leader", info.Config.Name)
	}
	return info.State.LastSeq, nil
}

// get reads a message from the leader, not from a replica that may lag; nil if it is not there.
func (p *publisher) get(ctx context.Context, seq uint64) (*jsapi.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	return p.api.Message(ctx, p.target.stream.CachedInfo().Config.Name, jsapi.MessageRequest{Seq: seq})
}

// resumePointOf reads the resume point in a header block, if the message is of this replay.
func (p *publisher) resumePointOf(block []byte) (at resumePoint, mine bool) {
	id, text := "", ""
	for line := range strings.SplitSeq(string(block), "\r\n") {
		if v, ok := strings.CutPrefix(line, HeaderReplay+":"); ok {
			id = strings.TrimSpace(v)
		}
		if v, ok := strings.CutPrefix(line, HeaderPlace+":"); ok {
			text = strings.TrimSpace(v)
		}
	}
	if id != p.id {
		return resumePoint{}, false
	}
	at, err := parseResumePoint(text)
	return at, err == nil
}

// begin reads where the target ends, and finds this replay's last message in it, if there is one.
func (p *publisher) begin(ctx context.Context, known bool) (*resumePoint, error) {
	last, err := p.lastSeq(ctx)
	if err != nil {
		return nil, err
	}
	p.last = last
	if !known || last == 0 {
		return nil, nil // an id that was just made up
	}
	newest, err := p.get(ctx, last)
	if err != nil {
		return nil, err
	}
	if newest != nil {
		if at, mine := p.resumePointOf(newest.Header); mine {
			return &at, nil
		}
	}
	return p.scan(ctx, last)
}

// scan looks through the target's messages for the last one of this replay.
func (p *publisher) scan(ctx context.Context, last uint64) (found *resumePoint, err error) {
	name := p.target.stream.CachedInfo().Config.Name
	ask, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	newest, err := p.api.Message(ask, name, jsapi.MessageRequest{Last: p.target.filter()})
	if newest == nil || err != nil {
		return nil, err
	}
	err = jsapi.ReadStream(ctx, p.js, name, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverAllPolicy, HeadersOnly: true,
		FilterSubjects: []string{p.target.filter()},
	}, newest.Seq, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		if m.Headers().Get(HeaderReplay) == p.id {
			at, err := parseResumePoint(m.Headers().Get(HeaderPlace))
			if err != nil {
				return fmt.Errorf("stream %s, sequence %d: %w", name, meta.Sequence.Stream, err)
			}
			if found == nil || at.n > found.n {
				found = &at
			}
		}
		if meta.Sequence.Stream >= last {
			return jsapi.ErrStop
		}
		return nil
	})
	return found, err
}
