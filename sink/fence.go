package sink

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// CodeFenced is the code of the transient fault of a message that was refused because the stream has a cut
// that its sender does not know: another cluster goes on with the stream.
const CodeFenced = "fenced"

// fenceTimeout is how long it may take to find out why a message was refused.
const fenceTimeout = 2 * time.Second

// checkFence refuses a server that would look at another subject than the one that the fence names.
func (c *Conn) checkFence(s *stream.Config) error {
	if !c.cfg.Fence || s == nil || level(s) >= fenceLevel {
		return nil
	}
	return fatal("nats_version", fmt.Sprintf("stream %s: its server is too old for a stream that clusters "+
		"share", c.cfg.Stream), "Install 2.11 or later on all servers that may have the stream.", nil)
}

// BehindCut says at which sequence the newest cut of the stream is, 0 if it has none: each message names it,
// and is refused if the stream has another one. It is called before Publish, where Config.Fence is set.
//
// The expected sequence alone does not keep out what a former owner has on its way when a cut is stored. The
// cut takes the sequence of its first message, which is refused; the second one is one further, where it was
// predicted.
func (p *Publisher) BehindCut(seq uint64) {
	p.enc.fence = seq
	p.fence.Store(seq)
}

// inTurns reports whether messages go in turns: each turn, one message or one atomic batch, waits until the
// one before it is acknowledged. A replicated stream refuses a message with a fence while another one with
// the same fence is not applied yet. mu is held.
func (c *Conn) inTurns() bool { return c.cfg.Fence && c.config != nil && c.config.Replicas > 1 }

// sendTurn sends the first messages that are held back: as many as can be one batch.
func (p *Publisher) sendTurn() {
	for i, m := range p.held {
		more := p.batch.on && i+1 < len(p.held) && p.batchable(m) && p.batchable(p.held[i+1])
		commit := !more || p.batch.open() && p.batch.full(m.size())
		p.unacked.add(m)
		if more || p.batch.open() {
			p.batch.add(m, commit)
		}
		p.sendOne(m, commit)
		if commit {
			p.release(i + 1)
			return
		}
	}
}

// fenced says whether a message was refused for its fence, where the server's answer is the same as for its
// expected sequence. f is returned if it was not, or if that can't be found out now: then the session that
// comes next does.
func (c *Conn) fenced(f *outbox.Fault, fence uint64) *outbox.Fault {
	ctx, cancel := context.WithTimeout(context.Background(), fenceTimeout)
	defer cancel()
	m, err := c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Last: outbox.CutSubject})
	switch {
	case err != nil || m != nil && m.Seq == fence || m == nil && fence == 0:
		return f
	case m == nil: // it left the front of the stream
		return transient(CodeFenced, fmt.Sprintf("stream %s: the cut at sequence %d, which messages of this "+
			"session name, is gone", c.cfg.Stream, fence), f)
	}
	by := ""
	if cut := stream.CutOf(m); cut != nil {
		by = fmt.Sprintf(", by which cluster %d goes on with it from %v, in epoch %d", cut.Owner, cut.LSN,
			cut.Epoch)
	}
	return transient(CodeFenced, fmt.Sprintf("stream %s has a cut at sequence %d%s", c.cfg.Stream, m.Seq, by),
		f)
}

// NewestCut reads the newest cut of the stream up to lastSeq, which was read as its last sequence before; nil
// if there is none. With one behind it the stream has moved, and what was read is of no use.
func (c *Conn) NewestCut(ctx context.Context, lastSeq uint64) (*relay.Stored, error) {
	m, err := c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Last: outbox.CutSubject})
	if err != nil || m == nil {
		return nil, err
	}
	if m.Seq > lastSeq {
		return nil, transient(relay.CodeStreamMoved, fmt.Sprintf("stream %s had its end at %d, and has a "+
			"cut at %d now", c.cfg.Stream, lastSeq, m.Seq), nil)
	}
	return &relay.Stored{Seq: m.Seq, Cut: stream.CutOf(m), Time: m.Time}, nil
}

// StoreCut stores a cut directly behind lastSeq, if fence is the sequence of the newest cut before it (0:
// there is none). Without an error it is there, with no word of whether it is durable. It may be called again
// with the same cut: one that is stored is found.
//
// A fault says what is known: another message is there (wrong_last_sequence, or CodeFenced if it is another
// cut), or nobody answered (ack_timeout): then the cut may be stored still, at this sequence or never.
func (c *Conn) StoreCut(ctx context.Context, cut outbox.Cut, lastSeq, fence uint64) error {
	if there, err := c.cutAt(ctx, cut, lastSeq+1); there || err != nil {
		return err
	}
	m := nats.NewMsg(c.Ingress() + outbox.CutSubject)
	m.Header.Set(outbox.HeaderCut, cut.String())
	m.Header.Set(headerExpected, strconv.FormatUint(lastSeq, 10))
	m.Header.Set(headerFence, strconv.FormatUint(fence, 10))
	m.Header.Set(headerFenceSubject, outbox.CutSubject)
	f := c.request(ctx, m, lastSeq+1)
	if f == nil {
		return nil
	}
	there, err := c.cutAt(ctx, cut, lastSeq+1) // a copy that was sent before may have been the first
	if there || err != nil {
		return err
	}
	if f.Code == codeWrongSequence {
		f = c.fenced(f, fence)
	}
	return f
}

// request publishes a message and reads its acknowledgement.
func (c *Conn) request(ctx context.Context, m *nats.Msg, seq uint64) *outbox.Fault {
	ctx, cancel := context.WithTimeout(ctx, ackTimeout)
	defer cancel()
	answer, err := c.nc.RequestMsgWithContext(ctx, m)
	if errors.Is(err, nats.ErrNoResponders) {
		return transient("no_responders", fmt.Sprintf("stream %s: nobody answers to its ingress",
			c.cfg.Stream), err)
	}
	if err != nil {
		return transient("ack_timeout", fmt.Sprintf("stream %s: no acknowledgement of the cut for sequence "+
			"%d, which may be stored or not", c.cfg.Stream, seq), err)
	}
	return checkAck(answer, c.cfg.Stream, seq)
}

// cutAt reports whether a cut is what the stream has at a sequence; a fault, if something else is.
func (c *Conn) cutAt(ctx context.Context, cut outbox.Cut, seq uint64) (bool, error) {
	m, err := c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: seq})
	if err != nil || m == nil {
		return false, err
	}
	switch found := stream.CutOf(m); {
	case found == nil:
		return false, transient(codeWrongSequence, fmt.Sprintf("stream %s: sequence %d, where a cut was to "+
			"be stored, is a message", c.cfg.Stream, seq), nil)
	case *found != cut:
		return false, transient(CodeFenced, fmt.Sprintf("stream %s: sequence %d, where the cut %v was to be "+
			"stored, is the cut %v", c.cfg.Stream, seq, &cut, found), nil)
	}
	return true, nil
}

// isCut reports whether a message that was published to the ingress is a cut. A session whose messages name
// the newest cut needs not hear of it: whatever it publishes behind it is refused.
func isCut(m *nats.Msg, ingress string) bool {
	return m.Header.Get(headerFence) != "" && m.Header.Get(headerExpected) != "" &&
		len(m.Subject) > len(ingress) && outbox.CutOf(m.Subject[len(ingress):], m.Header) != nil
}
