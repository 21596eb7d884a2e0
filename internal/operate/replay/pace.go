package replay

import (
	"context"
	"time"
)

// pace holds a rate. What was late is not made up for by a burst of more than a tenth of a second.
type pace struct {
	every time.Duration // 0: no limit
	next  time.Time
}

const paceSlack = 100 * time.Millisecond

func newPace(perSecond float64) *pace {
	p := &pace{}
	if perSecond > 0 {
		p.every = time.Duration(float64(time.Second) / perSecond)
	}
	return p
}

// wait returns when the next event may go. before is called if it has to wait for long enough that somebody could notice.
func (p *pace) wait(ctx context.Context, before func() error) error {
	if p.every == 0 {
		return ctx.Err()
	}
	now := time.Now()
	if p.next.Before(now.Add(-paceSlack)) {
		p.next = now.Add(-paceSlack)
	}
	pause := p.next.Sub(now)
	p.next = p.next.Add(p.every)
	if pause < time.Millisecond {
		return ctx.Err()
	}
	if err := before(); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pause):
		return nil
	}
}
