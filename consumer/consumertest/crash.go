package consumertest

import (
	"errors"
	"fmt"
	"sync"

	"github.com/outflowhq/outflow/consumer"
)

// ErrCrash is what Run returns when [Crash] has crashed the consumer.
var ErrCrash = errors.New("crashed, as the test wanted")

// Crash crashes a consumer once: set it as Config.Faults. Run returns [ErrCrash] then, and nothing of it goes on; what was not committed
// is lost, nobody has been told of what was.
type Crash struct {
	Point    consumer.Point
	Sequence uint64 // at the first event from here on that comes to the point

	mu   sync.Mutex
	done bool
}

// At implements [consumer.Faults].
func (c *Crash) At(point consumer.Point, e *consumer.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done || point != c.Point || e.Sequence < c.Sequence {
		return nil
	}
	c.done = true
	return ErrCrash
}

// everywhere crashes a consumer each time that an event comes to a point for the first time.
type everywhere struct {
	every int // only each so many of them

	mu    sync.Mutex
	seen  map[spot]bool
	last  spot
	count int // crashes
}

// spot is a point in the life of an event.
type spot struct {
	point    consumer.Point
	sequence uint64
}

func (s spot) String() string {
	return fmt.Sprintf("%s event %d", [...]string{
		consumer.AtBegin: "before the transaction of", consumer.AtHandled: "after the handler, before the commit of",
		consumer.AtCommit: "between the commit and its answer of", consumer.AtDone: "after the commit of",
	}[s.point], s.sequence)
}

func (c *everywhere) At(point consumer.Point, e *consumer.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := spot{point, e.Sequence}
	if c.seen[s] {
		return nil
	}
	if c.seen[s] = true; len(c.seen)%c.every != 0 {
		return nil
	}
	c.last = s
	c.count++
	return ErrCrash
}
