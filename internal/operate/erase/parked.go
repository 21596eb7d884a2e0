package erase

import (
	"context"
	"time"

	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/outbox"
)

// parkedEvents is the place of what consumers have parked: no stream is called so.
const parkedEvents = "parked events"

// eraseParked erases what consumers have parked, or counts it.
func (c *command) eraseParked(ctx context.Context, erase bool) (err error) {
	streams := []string{c.cfg.Stream}
	for _, k := range c.rep.Copies {
		if k.Stream != replayed(c.cfg.Stream) { // that is read by consumers of the stream
			streams = append(streams, k.Stream)
		}
	}
	look := func(erase bool) error {
		c.untold[parkedEvents], c.stays[parkedEvents] = 0, nil
		c.parked, err = c.o.Parked(ctx, c.l.NATS.API(), streams, erase, c.wasParked,
			func() { c.o.Hit("erase.parked") })
		return err
	}
	if err := look(false); err != nil {
		return err
	}
	c.rep.Databases = append(c.rep.Databases, c.parked.Seen...)
	if c.rep.Parked = c.parked.Events; !erase || c.parked.Events == 0 {
		return nil
	}
	c.rec.Parked = max(c.rec.Parked, c.parked.Events) // a run that is killed leaves fewer
	if err := c.ledger.Save(ctx, c.rec); err != nil {
		return err
	}
	untold, stays := c.untold[parkedEvents], c.stays[parkedEvents]
	err = look(true)
	c.untold[parkedEvents], c.stays[parkedEvents] = untold, stays // it may have read one twice
	return err
}

// wasParked reports whether a parked event goes.
func (c *command) wasParked(e *erasure.Parked) bool {
	is, known := c.doc.Is(c.original(e.Stream, e.Subject, e.Header), e.Header, e.Data)
	if !known {
		c.untold[parkedEvents]++
	}
	var goes, unsure bool
	switch header := e.Header.Get(outbox.HeaderName); {
	case e.Stream != c.cfg.Stream:
		goes, unsure = c.inCopies(e.Stream)(e.Header, e.Sequence, time.Now())
	case e.Created.IsZero() || e.Sequence == 0:
		goes, unsure = c.goesFrom(c.rec.Created, header, 0)
	default:
		goes, unsure = c.goesFrom(micro(e.Created), header, e.Sequence)
	}
	if is && unsure {
		c.stays[parkedEvents] = append(c.stays[parkedEvents], e.Sequence)
	}
	return is && goes
}
