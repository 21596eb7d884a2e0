package sink

import (
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

const (
	ackTimeout = 5 * time.Second      // without any acknowledgement while some are due
	holdBack   = 2 * time.Millisecond // how long Flush waits for an outstanding acknowledgement
	// between two Checks: the process stood still and may not have read what arrived
	standstill = 2 * time.Second

	// maxDirectBytes is how many bytes in flight certainly fit into the sockets' buffers, so that writing
	// them does not block.
	maxDirectBytes = 64 << 10
)

// Publisher publishes messages in order, each at its predicted sequence, and counts what is acknowledged. One
// goroutine owns it; Notify and Acked may be used from any.
//
// After an error of Publish or Check the publisher and its connection are of no more use, except for
// [Conn.Resume] of another one, and except where the error is a fault of class Poison: then nothing was sent.
// What Publish returned an error for was not taken.
type Publisher struct {
	conn    *Conn
	enc     *encoder
	out     writer
	window  inflight
	unacked *unacked

	// For the time-out, set by Check.
	since  time.Time // of the last progress: an acknowledgement, or the first one that became outstanding
	due    bool      // some were outstanding at the last Check
	seen   uint64    // acknowledged at the last Check
	looked time.Time // time of the last Check

	held      []*message // the last messages, not sent yet: one, or several that may become a batch
	heldBytes int
	heldAt    time.Time // time of the first Flush that left something unwritten; zero if none did
	written   uint64    // the last sequence that was put on the wire
	next      *message  // a spare buffer
	free      []*message
	last      uint64 // predicted for the last message, held back or sent
	reply     []byte // conn.inbox, and room for a sequence
	batch     batching
	turns     bool // see Conn.inTurns
	began     time.Time

	// Written by the connection's goroutine, where acknowledgements arrive; everything above belongs to the
	// publisher's owner.
	ackedAt atomic.Int64 // since began; where batches are allowed
	acked   atomic.Uint64
	fence   atomic.Uint64                // that of enc; written by the owner
	refused atomic.Pointer[outbox.Fault] // the first failure; it ends the publisher
	notify  chan struct{}
}

// Publisher starts publishing; the first message expects lastSeq to be the stream's last sequence.
// CheckStream must have learned the stream, and Watch have begun, before that was read. A connection has one
// publisher.
func (c *Conn) Publisher(lastSeq uint64) *Publisher {
	p := c.newPublisher(lastSeq)
	c.attach(p)
	return p
}

// AfterLoss says that the broker lost the messages from a sequence to the stream's last one: the first
// message tells consumers so ([outbox.HeaderLost]). It is called before Publish.
func (p *Publisher) AfterLoss(from uint64) { p.enc.lostFrom, p.enc.lostTo = from, p.last }

// attach makes p the publisher of the connection.
func (c *Conn) attach(p *Publisher) {
	p.out = newFrameWriter(c.dialer.current(), c.lost, func(err error) { c.fail(c.lostFault(err)) })
	c.publisher.Store(p)
}

func (c *Conn) newPublisher(lastSeq uint64) *Publisher {
	enc := *c.enc
	c.mu.Lock()
	if c.config != nil {
		enc.ingress = c.config.Ingress()
	}
	allowed, turns := c.batches(), c.inTurns()
	c.mu.Unlock()
	p := &Publisher{
		conn: c, enc: &enc, last: lastSeq, next: new(message), unacked: newUnacked(lastSeq),
		reply: []byte(c.inbox), batch: newBatching(allowed), turns: turns, began: time.Now(),
		notify: make(chan struct{}, 1),
	}
	p.batch.on = turns && allowed != nil
	p.window.acked, p.window.sent, p.written = lastSeq, lastSeq, lastSeq
	p.window.countSince = ackEvery - 1
	p.acked.Store(lastSeq)
	return p
}

// Full reports whether 2000 messages or 8 MiB are in flight, including what is held back; fewer while the
// server's pace is measured, and where messages go in turns. If so call Flush, then wait for Notify.
func (p *Publisher) Full() bool {
	p.settle()
	if p.turns {
		return len(p.held) >= maxBatch || p.heldBytes >= maxBatchBytes
	}
	limit := MaxInFlight
	if p.batch.probing() {
		limit = paceWindow
	}
	return !p.window.fits(p.heldBytes) || p.window.messages()+len(p.held) >= limit
}

// Publish takes the event's message and sends those before it: the last one is held back until the next
// Publish or Flush, and so are some before it while they may become a batch. It never blocks. It must not be
// called while Full. The event's payload is used until the message has been sent. A fault of class Poison
// means that the row can't be published and that nothing of it was or will be sent.
func (p *Publisher) Publish(e *relay.Event, h *outbox.Header) error {
	if err := p.failure(); err != nil {
		return err
	}
	if r := p.enc.encode(p.next, e, h, p.last); r != "" {
		if p.enc.deadTo == "" {
			return p.enc.fault(e, r)
		}
		p.enc.deadLetter(p.next, e, h, p.last, r)
		if count := p.conn.cfg.DeadLettered; count != nil {
			count(r)
		}
		p.conn.cfg.Logger.Warn("dead letter", slog.String("reason", string(r)),
			slog.String("position", e.Pos.String()),
			slog.String("id", cut(e.ID, cutValue)), slog.Uint64("seq", p.next.seq))
	}
	if !p.turns {
		p.flushHeld(p.next)
	}
	p.held = append(p.held, p.next)
	p.heldBytes += p.next.size()
	if n := len(p.free); n > 0 {
		p.next, p.free = p.free[n-1], p.free[:n-1]
	} else {
		p.next = new(message)
	}
	p.last++
	return nil
}

// flushHeld sends what need not be held back any longer now that m is next.
func (p *Publisher) flushHeld(m *message) {
	if len(p.held) == 0 {
		return
	}
	// m may have to wait until these are acknowledged: then the last of them must ask for that.
	ask := p.window.bytes+p.heldBytes+m.size() > MaxInFlightBytes
	switch together := p.batchable(m); {
	case p.batch.open():
		p.send(ask || !together || p.batch.full(p.heldBytes))
	case !p.batch.on:
		p.send(ask)
	case ask || !together || !p.batchable(p.held[0]):
		p.send(true)
	case len(p.held) >= minBatch || p.heldBytes >= minBatchBytes:
		p.sendBatched(false)
	}
}

// Flush says that what is ready is complete. It goes on the wire, the message held back with a reply subject,
// unless the acknowledgement of something on the wire is outstanding: then it waits for that one, 2 ms at
// most, and goes in one write with what is published meanwhile. A duration above 0 says so: call Flush again
// after it or at the next Notify, whichever comes first.
func (p *Publisher) Flush(now time.Time) time.Duration {
	p.settle()
	if p.failure() != nil || len(p.held) == 0 && p.window.sent == p.written {
		return 0
	}
	if p.turns {
		if p.window.messages() > 0 {
			return ackTimeout // at the next Notify
		}
		p.sendTurn()
		p.written = p.window.sent
		p.out.flush(p.window.bytes <= maxDirectBytes)
		return 0
	}
	if p.outstanding() {
		if p.heldAt.IsZero() {
			p.heldAt = now
		}
		if wait := holdBack - now.Sub(p.heldAt); wait > 0 {
			return wait
		}
	}
	if len(p.held) > 0 && p.window.fits(p.heldBytes) {
		p.send(true)
	}
	p.written, p.heldAt = p.window.sent, time.Time{}
	p.batch.flushed(p.window.acked, p.written, now.Sub(p.began))
	p.out.flush(p.window.bytes <= maxDirectBytes)
	if len(p.held) > 0 {
		return holdBack // an acknowledgement is outstanding that makes room
	}
	return 0
}

// outstanding reports whether an acknowledgement is missing that a message on the wire has asked for.
func (p *Publisher) outstanding() bool {
	return len(p.window.pending) > 0 && p.window.pending[0].seq <= p.written
}

// send sends what is held back, as part of the batch if one is open; ask: the last of it asks for an
// acknowledgement, and ends the batch.
func (p *Publisher) send(ask bool) {
	if p.batch.open() {
		p.sendBatched(ask)
		return
	}
	for i, m := range p.held {
		p.unacked.add(m)
		p.sendOne(m, ask && i == len(p.held)-1 || p.window.needsReply(m.size()))
	}
	p.release(len(p.held))
}

// sendBatched sends what is held back as part of a batch, of a new one if none is open.
func (p *Publisher) sendBatched(commit bool) {
	for i, m := range p.held {
		last := commit && i == len(p.held)-1
		p.unacked.add(m)
		p.batch.add(m, last)
		p.sendOne(m, last)
	}
	p.release(len(p.held))
}

// release takes the first n messages out of those that are held back.
func (p *Publisher) release(n int) {
	for _, m := range p.held[:n] {
		p.heldBytes -= m.size()
		m.data = nil
	}
	p.free = append(p.free, p.held[:n]...)
	p.held = append(p.held[:0], p.held[n:]...)
}

// sendOne sends a message that is in unacked.
func (p *Publisher) sendOne(m *message, reply bool) {
	var to []byte
	switch {
	case reply:
		to = strconv.AppendUint(p.reply, m.seq, 10)
	case p.batch.open() && m.seq == p.batch.first: // if it is refused, its answer alone says why
		to = append(p.reply, replyOpened...)
	}
	p.out.send(m, to)
	p.window.add(m.seq, m.size(), reply)
}

// replyOpened stands for the sequence where the first message of a batch asks whether it was taken.
const replyOpened = "batch"

// Notify is sent to when an acknowledgement came, and when Check has something to say. Several may be one.
func (p *Publisher) Notify() <-chan struct{} { return p.notify }

// Acked is the last sequence that is proved to be in the stream, with all before it.
func (p *Publisher) Acked() uint64 { return p.acked.Load() }

// Sent is the sequence predicted for the last message, held back or not.
func (p *Publisher) Sent() uint64 { return p.last }

// InFlight is how many messages are neither acknowledged nor known to have failed, and their bytes; one held
// back counts.
func (p *Publisher) InFlight() (messages int, bytes int) {
	p.settle()
	return p.window.messages() + len(p.held), p.window.bytes + p.heldBytes
}

// Check says whether the session must end: a message was refused, an acknowledgement is not the one that was
// predicted, the connection is lost, or 5 s have passed without any acknowledgement while some were due of
// what Flush has written. now must not go back. Call it after each Notify, and once a second at least while
// messages are in flight: where more than two seconds lie between two calls, the 5 s begin anew, because what
// has come meanwhile may not have been read.
func (p *Publisher) Check(now time.Time) error {
	p.settle()
	if err := p.failure(); err != nil {
		return err
	}
	due := p.outstanding() // what was not written can't be late: the caller may have been busy elsewhere
	if !due || !p.due || p.window.acked != p.seen || now.Sub(p.looked) > standstill {
		p.since = now
	}
	p.due, p.seen, p.looked = due, p.window.acked, now
	if due && now.Sub(p.since) >= ackTimeout {
		f := transient("ack_timeout",
			fmt.Sprintf("stream %s: no acknowledgement for %v; sequences %d to %d may be stored or not",
				p.conn.cfg.Stream, ackTimeout, p.window.acked+1, p.window.sent), nil)
		p.refuse(f)
		return f
	}
	return nil
}

// settle takes over what was acknowledged since the last call.
func (p *Publisher) settle() {
	if a := p.acked.Load(); a != p.window.acked {
		p.window.settle(a)
		p.unacked.drop(a)
		if each, turned := p.batch.settled(a, time.Duration(p.ackedAt.Load())); turned {
			p.conn.cfg.Logger.Info("the server syncs each message: they go in atomic batches from now on",
				slog.Duration("each", each))
		}
	}
}

func (p *Publisher) failure() error {
	if f := p.refused.Load(); f != nil {
		return f
	}
	if p.enc.ingress == "" {
		return fatal("stream_missing", fmt.Sprintf("stream %s: there is none", p.conn.cfg.Stream),
			"Run `outflow init`.", nil)
	}
	return p.conn.Err()
}

func (p *Publisher) signal() {
	select {
	case p.notify <- struct{}{}:
	default:
	}
}

func (p *Publisher) refuse(f *outbox.Fault) {
	if f.Code == codeBatchRefused && p.batch.allowed != nil && !p.batch.allowed.refused.Swap(true) {
		p.conn.cfg.Logger.Warn("messages do not go in atomic batches any more", slog.String("err", f.Error()))
	}
	p.refused.CompareAndSwap(nil, f)
	p.signal()
}

// answered takes what an answer says that is no acknowledgement, and reports whether it is none.
func (p *Publisher) answered(f *outbox.Fault) bool {
	if f == nil {
		return false
	}
	if p.enc.fenced && f.Code == codeWrongSequence && p.refused.Load() == nil {
		f = p.conn.fenced(f, p.fence.Load())
	}
	p.refuse(f)
	return true
}

// handleAck takes what comes back on a reply subject.
func (c *Conn) handleAck(m *nats.Msg) {
	p := c.publisher.Load()
	if p == nil {
		return
	}
	to := strings.TrimPrefix(m.Subject, c.inbox)
	if to == replyOpened {
		p.answered(checkBatchStart(m, c.cfg.Stream))
		return
	}
	seq, err := strconv.ParseUint(to, 10, 64)
	if err != nil {
		return // not a reply to anything we sent
	}
	if p.answered(checkAck(m, c.cfg.Stream, seq)) {
		return
	}
	if p.refused.Load() == nil && seq > p.acked.Load() {
		if p.batch.allowed != nil {
			p.ackedAt.Store(int64(time.Since(p.began)))
		}
		p.acked.Store(seq)
	}
	p.signal()
}
