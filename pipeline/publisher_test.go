package pipeline

import (
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// publisher keeps the contract of sink.Publisher: the last message is held back until it is known whether
// more come, and only some ask for an acknowledgement, which proves all before it.
type publisher struct {
	conn         *brokerConn
	last         uint64 // predicted for the last message
	lost, lostTo uint64 // the broker lost these messages
	fence        uint64 // the newest cut that its messages name
	acknowledged uint64
	dues         []uint64 // asked for and not acknowledged
	since        int      // messages since the last that asked
	held         *sent
	heldAt       time.Time
	waiting      time.Time // since when no acknowledgement has come though some are due
	err          error
	notify       chan struct{}
	rounds       int    // of the loop, by Flush
	calls        int    // of Full: about one for each message made
	sent         []line // all that was handed to it
	unacked      []sent // what was sent and is not proved, and the newest that is
}

func (p *publisher) Full() bool {
	p.conn.lock()
	defer p.conn.unlock()
	if p.calls++; p.conn.js.onFull != nil {
		p.conn.js.onFull(p.calls)
	}
	return int(p.last-p.acknowledged) >= p.conn.js.limit
}

func (p *publisher) Publish(e *relay.Event, h *outbox.Header) error {
	p.conn.lock()
	defer p.conn.unlock()
	if int(p.last-p.acknowledged) >= p.conn.js.limit {
		panic("published while full")
	}
	if p.err != nil {
		return p.err
	}
	if p.conn.js.poison != "" && string(e.Payload) == p.conn.js.poison {
		return &outbox.Fault{Class: outbox.Poison, Code: "too_large", Hint: "Make it smaller",
			Message: fmt.Sprintf("the row at %v can't be published", e.Pos)}
	}
	if p.held != nil {
		p.out(p.since+1 >= p.conn.js.ackEvery)
	}
	p.held = &sent{line: lineOf(e, h), last: p.last, fence: p.fence}
	if p.last == p.lostTo {
		p.held.lost = p.lost
	}
	p.heldAt = time.Time{}
	p.last++
	return nil
}

func (p *publisher) out(reply bool) {
	p.since++
	if reply {
		p.dues = append(p.dues, p.held.last+1)
		p.since = 0
	}
	p.held.reply = reply
	p.sent = append(p.sent, p.held.line)
	p.unacked = append(p.unacked, *p.held)
	p.conn.send(*p.held)
	p.held = nil
}

func (p *publisher) Flush(now time.Time) time.Duration {
	p.conn.lock()
	defer p.conn.unlock()
	p.rounds++
	if p.held == nil || p.err != nil {
		return 0
	}
	if len(p.dues) > 0 {
		if p.heldAt.IsZero() {
			p.heldAt = now
		}
		if wait := 2*time.Millisecond - now.Sub(p.heldAt); wait > 0 {
			return wait
		}
	}
	p.out(true)
	return 0
}

// answered takes an acknowledgement or a refusal. The lock is held.
func (p *publisher) answered(seq uint64, ok bool) {
	if !ok && p.err == nil {
		p.err = &outbox.Fault{Class: outbox.Transient, Code: "wrong_last_sequence",
			Message: fmt.Sprintf("message %d was refused", seq)}
	}
	if p.err == nil && seq > p.acknowledged {
		p.acknowledged = seq
		p.forget()
		for len(p.dues) > 0 && p.dues[0] <= seq {
			p.dues = p.dues[1:]
		}
		p.waiting = time.Time{}
	}
	select {
	case p.notify <- struct{}{}:
	default:
	}
}

// forget drops what is proved, all but the newest.
func (p *publisher) forget() {
	for len(p.unacked) > 0 && p.unacked[0].last+1 < p.acknowledged {
		p.unacked = p.unacked[1:]
	}
}

func (p *publisher) Header(seq uint64) *outbox.Header {
	p.conn.lock()
	defer p.conn.unlock()
	for _, s := range p.unacked {
		if s.last+1 == seq {
			h := s.header
			return &h
		}
	}
	return nil
}

// resume sends again what the one before it has sent behind where this one goes on.
func (p *publisher) resume(old *publisher) {
	p.last, p.held = old.last, old.held
	p.lost, p.lostTo, p.fence = old.lost, old.lostTo, old.fence
	p.unacked = old.unacked
	p.forget()
	again := p.unacked
	p.unacked = nil
	for _, s := range again {
		if s.last+1 <= p.acknowledged {
			p.unacked = append(p.unacked, s)
			continue
		}
		held := p.held
		p.held = &s
		p.out(s.last == again[len(again)-1].last || p.since+1 >= p.conn.js.ackEvery)
		p.held = held
	}
}

func (p *publisher) Notify() <-chan struct{} { return p.notify }

func (p *publisher) Acked() uint64 {
	p.conn.lock()
	defer p.conn.unlock()
	return p.acknowledged
}

func (p *publisher) Sent() uint64 {
	p.conn.lock()
	defer p.conn.unlock()
	return p.last
}

func (p *publisher) Check(now time.Time) error {
	p.conn.lock()
	defer p.conn.unlock()
	switch {
	case p.err != nil:
		return p.err
	case p.conn.dead:
		return errDown
	case len(p.dues) == 0:
		p.waiting = time.Time{}
	case p.waiting.IsZero():
		p.waiting = now
	case now.Sub(p.waiting) >= 5*time.Second:
		p.err = &outbox.Fault{Class: outbox.Transient, Code: "ack_timeout",
			Message: "no acknowledgement for 5s"}
		return p.err
	}
	return nil
}

func (p *publisher) InFlight() (messages, bytes int) {
	p.conn.lock()
	defer p.conn.unlock()
	return int(p.last - p.acknowledged), 0
}
