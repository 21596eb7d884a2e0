package pipeline

import (
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// arrivals remembers when what is held came in, to a granularity that keeps it small.
type arrivals struct {
	queue []arrival
	head  int
}

type arrival struct {
	upTo outbox.LSN // commits up to this one
	at   time.Time
}

// grain is the granularity of arrivals.
const grain = time.Millisecond

func (a *arrivals) add(lsn outbox.LSN, at time.Time) {
	if n := len(a.queue); n > a.head && at.Sub(a.queue[n-1].at) < grain {
		a.queue[n-1].upTo = lsn
		return
	}
	a.queue = append(a.queue, arrival{lsn, at})
}

// of returns when the commit lsn came in, at most one grain early, and forgets what is older.
func (a *arrivals) of(lsn outbox.LSN) (time.Time, bool) {
	for a.head < len(a.queue) && a.queue[a.head].upTo < lsn {
		a.head++
	}
	if a.head == len(a.queue) {
		a.clear()
		return time.Time{}, false
	}
	if a.head > 1024 {
		a.queue = append(a.queue[:0], a.queue[a.head:]...)
		a.head = 0
	}
	return a.queue[a.head].at, true
}

// clear forgets all of it: nothing is held.
func (a *arrivals) clear() { a.queue, a.head = a.queue[:0], 0 }
