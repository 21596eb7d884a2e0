package sink

import (
	"fmt"

	"github.com/outflowhq/outflow/outbox"
)

// Header returns our header of the message with a sequence, if it was sent and is not acknowledged, or is the
// newest acknowledged one; otherwise nil. Whoever goes on from there on another connection compares it with
// the message in the stream.
func (p *Publisher) Header(seq uint64) *outbox.Header {
	p.settle()
	return p.unacked.header(seq) // what is held back was never sent, so it can't be in the stream
}

// Resume returns the publisher of this connection, which goes on where old, that of one that was closed, has
// ended: what old has sent behind lastSeq is sent again, and what it held back is held back. lastSeq is the
// stream's last sequence, found on this connection, with CheckStream and Watch before it, and every message
// behind what old knows to be acknowledged is old's (see [Conn.Stored] and [Publisher.Header]). old is of no
// more use, also after an error.
//
// The package's documentation says why what the old connection still has on its way does no harm.
func (c *Conn) Resume(old *Publisher, lastSeq uint64) (*Publisher, error) {
	old.settle()
	if lastSeq < old.window.acked || lastSeq > old.window.sent {
		return nil, fmt.Errorf("stream %s: its last sequence is %d; %d to %d were to be found", c.cfg.Stream,
			lastSeq, old.window.acked, old.window.sent)
	}
	p := c.newPublisher(lastSeq)
	if p.enc.ingress != old.enc.ingress {
		return nil, fmt.Errorf("stream %s: its ingress is another one", c.cfg.Stream)
	}
	p.last = old.last
	p.enc.lostFrom, p.enc.lostTo = old.enc.lostFrom, old.enc.lostTo
	p.BehindCut(old.enc.fence)
	p.unacked = old.unacked
	p.unacked.drop(lastSeq)
	c.attach(p)
	p.batch.on, p.batch.pace.fast = old.batch.on && p.batch.allowed != nil, old.batch.pace.fast
	if p.turns && !p.batch.on && old.window.sent > lastSeq+1 {
		return nil, fmt.Errorf("stream %s: what was one batch can't be sent as one any more", c.cfg.Stream)
	}
	p.resend(old.window.sent)
	p.held, p.heldBytes = old.held, old.heldBytes
	p.written = p.window.sent
	p.out.flush(false)
	return p, nil
}

// resend sends what is not acknowledged, up to a sequence: in batches, if old sent it so.
func (p *Publisher) resend(upTo uint64) {
	for seq := p.window.sent + 1; seq <= upTo; seq++ {
		m, _ := p.unacked.at(seq)
		if !p.batch.on || !p.batchable(&m) {
			p.sendOne(&m, seq == upTo || p.window.needsReply(m.size()))
			continue
		}
		next, more := p.unacked.at(seq + 1)
		commit := !more || !p.batchable(&next) || p.batch.full(m.size())
		p.batch.add(&m, commit)
		p.sendOne(&m, commit)
	}
}
