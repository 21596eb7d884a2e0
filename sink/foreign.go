package sink

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

// Watch listens from now on for what others publish to the ingress that CheckStream has learned. The
// connection has no echo, so our own messages do not come back. Call it before reading the state of the
// stream that a publisher goes on from: what is published in between would go unnoticed.
//
// The expected sequence alone does not keep a stranger out. His message takes a sequence, the message of ours
// that was predicted for it is refused, and the next one finds exactly the last sequence that it expects: an
// event would be gone, and the stream's end would look right. So a stranger ends the run. What a zombie of
// this slot's outflow still sends is no stranger's: it is the very message that belongs there, and it has our
// header.
//
// Where this user may not subscribe to the ingress, nobody watches it: mayNotWatch says so in the log.
func (c *Conn) Watch(ctx context.Context) error {
	ingress := c.Ingress()
	if ingress == "" {
		return nil // no stream: nothing can be published
	}
	if _, err := c.nc.ChanSubscribe(ingress+">", c.incoming); err != nil {
		return c.lostFault(err)
	}
	ctx, cancel := context.WithTimeout(ctx, watchTimeout)
	defer cancel()
	if err := c.nc.FlushWithContext(ctx); err != nil {
		return c.lostFault(err)
	}
	return nil
}

// watchTimeout is how long the server may take to know the subscription.
const watchTimeout = 2 * time.Second

// handleForeign takes a message that somebody else has published to the ingress.
func (c *Conn) handleForeign(m *nats.Msg) {
	_, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
	if err == nil && (m.Header.Get(nats.ExpectedLastSeqHdr) != "" || m.Header.Get(headerBatchID) != "") {
		return
	}
	if c.cfg.Fence && isCut(m, c.Ingress()) {
		return
	}
	c.fail(&outbox.Fault{
		Class: outbox.Gap, Code: "foreign_message", Observed: true,
		Message: fmt.Sprintf("somebody else published to the ingress of stream %s (as %s): a message of "+
			"ours may have been refused for it and be missing",
			c.cfg.Stream, cut(strings.TrimPrefix(m.Subject, c.Ingress()), cutValue)),
		Hint: fmt.Sprintf("Keep everybody else out of Outflow's NATS account (docs/nats.md). Then run "+
			"`outflow repair`: it looks for messages of stream %s "+
			"without the %s header and says what is missing; `outflow repair --accept foreign_message` "+
			"publishes it", c.cfg.Stream, outbox.HeaderName),
	})
}

// mayNotWatch reports whether err says that this user may not subscribe to the ingress.
func (c *Conn) mayNotWatch(err error) bool {
	ingress := c.Ingress()
	if ingress == "" || !strings.Contains(err.Error(), `Subscription to "`+ingress+`>"`) {
		return false
	}
	c.cfg.Logger.Warn("NATS does not let this user subscribe to the stream's ingress: a stranger who "+
		"publishes there is not noticed at once",
		"stream", c.cfg.Stream)
	return true
}
