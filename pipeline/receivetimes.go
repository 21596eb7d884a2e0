package pipeline

import (
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// receiveTimes remembers when what is held was received, to a granularity that keeps it small.
type receiveTimes struct {
	queue []receiveTime
	head  int
}

type receiveTime struct {
	upTo outbox.LSN // commits up to this one
	at   time.Time
}

// granularity is that of receiveTimes.
const granularity = time.Millisecond

func (r *receiveTimes) add(lsn outbox.LSN, at time.Time) {
	if n := len(r.queue); n > r.head && at.Sub(r.queue[n-1].at) < granularity {
		r.queue[n-1].upTo = lsn
		return
	}
	r.queue = append(r.queue, receiveTime{lsn, at})
}

// of returns when the commit lsn was received, at most one granularity early, and forgets what is older.
func (r *receiveTimes) of(lsn outbox.LSN) (time.Time, bool) {
	for r.head < len(r.queue) && r.queue[r.head].upTo < lsn {
		r.head++
	}
	if r.head == len(r.queue) {
		r.clear()
		return time.Time{}, false
	}
	if r.head > 1024 {
		r.queue = append(r.queue[:0], r.queue[r.head:]...)
		r.head = 0
	}
	return r.queue[r.head].at, true
}

// clear forgets everything.
func (r *receiveTimes) clear() { r.queue, r.head = r.queue[:0], 0 }
