package pipeline

import (
	"cmp"
	"slices"
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

// of returns when the commit lsn was received, at most one granularity early.
func (r *receiveTimes) of(lsn outbox.LSN) (time.Time, bool) {
	i := r.index(lsn)
	if i == len(r.queue) {
		return time.Time{}, false
	}
	return r.queue[i].at, true
}

// forget forgets what is before the commit lsn.
func (r *receiveTimes) forget(lsn outbox.LSN) {
	r.head = r.index(lsn)
	if r.head > 1024 {
		r.queue = append(r.queue[:0], r.queue[r.head:]...)
		r.head = 0
	}
}

// clear forgets everything.
func (r *receiveTimes) clear() { r.queue, r.head = r.queue[:0], 0 }

// index is that of the first one that is not before the commit lsn.
func (r *receiveTimes) index(lsn outbox.LSN) int {
	i, _ := slices.BinarySearchFunc(r.queue[r.head:], lsn, func(t receiveTime, lsn outbox.LSN) int {
		return cmp.Compare(t.upTo, lsn)
	})
	return r.head + i
}
