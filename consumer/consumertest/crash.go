package consumertest

import (
	"errors"
	"fmt"
	"sync"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/internal/stream"
)

// ErrCrash is what Run returns when [Crash] has crashed the consumer.
var ErrCrash = errors.New("crashed, as the test wanted")

// Crash crashes a consumer once: give it to [NewConsumer]. Run returns [ErrCrash] then, and nothing of it
// goes on: what was not committed is lost, and nobody has been told of what was.
type Crash struct {
	Point    Point
	Sequence uint64 // at the first event from here on that comes to the point

	mu   sync.Mutex
	done bool
}

// Point is a moment in the life of an event.
type Point uint8

// The points, in their order.
const (
	AtBegin   = Point(stream.AtBegin)   // before the transaction
	AtHandled = Point(stream.AtHandled) // the handler has returned, nothing is committed
	// it is committed, but the answer is lost: Run goes on with another session
	AtCommit = Point(stream.AtCommit)
	AtDone   = Point(stream.AtDone) // it is committed, and nothing has been acknowledged
)

// NewConsumer returns a consumer that reads a stream in memory, and that crashes unless crash is nil.
func NewConsumer(s *Stream, crash *Crash, offsets consumer.Offsets, cfg consumer.Config) (*consumer.Consumer,
	error) {
	var at func(stream.Point, uint64) error
	if crash != nil {
		at = crash.at
	}
	return newConsumer(s, at, offsets, cfg)
}

func newConsumer(s *Stream, crash func(stream.Point, uint64) error, offsets consumer.Offsets,
	cfg consumer.Config) (*consumer.Consumer, error) {
	stream.Install(&cfg, stream.Hooks{Source: source{s}, Crash: crash})
	return consumer.New(nil, offsets, cfg)
}

func (c *Crash) at(point stream.Point, seq uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done || Point(point) != c.Point || seq < c.Sequence {
		return nil
	}
	c.done = true
	return ErrCrash
}

// everywhere crashes a consumer each time that an event comes to a point for the first time.
type everywhere struct {
	every int // only each so many of them

	mu   sync.Mutex
	seen map[moment]bool
}

// moment is a point in the life of an event.
type moment struct {
	point    Point
	sequence uint64
}

func (m moment) String() string {
	return fmt.Sprintf("%s event %d", [...]string{
		AtBegin: "before the transaction of", AtHandled: "after the handler, before the commit of",
		AtCommit: "between the commit and its answer of", AtDone: "after the commit of",
	}[m.point], m.sequence)
}

func (c *everywhere) at(point stream.Point, seq uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := moment{Point(point), seq}
	if c.seen[m] {
		return nil
	}
	if c.seen[m] = true; len(c.seen)%c.every != 0 {
		return nil
	}
	return ErrCrash
}
