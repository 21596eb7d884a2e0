package replay

import (
	"context"
	"time"
)

// limiter keeps a rate. After a delay it catches up with at most a tenth of a second's worth of events.
type limiter struct {
	every time.Duration // 0: no limit
	next  time.Time
}

const paceSlack = 100 * time.Millisecond

func newLimiter(perSecond float64) *limiter {
	p := &limiter{}
	if perSecond > 0 {
		p.every = time.Duration(float64(time.Second) / perSecond)
	}
	return p
}

// wait returns when the next event may go. If it has to wait noticeably long, it calls before first.
func (p *limiter) wait(ctx context.Context, before func() error) error {
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
