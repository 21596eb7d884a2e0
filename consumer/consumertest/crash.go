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

// Crash crashes a consumer once: pass it to [NewConsumer]. Run returns [ErrCrash]. As in a real crash, what
// was not committed is lost, and what was committed has not been acknowledged.
type Crash struct {
	Point    Point
	Sequence uint64 // crash at the first event from this sequence on that gets to the point

	mu   sync.Mutex
	done bool
}

// Point is a moment in the processing of an event.
type Point uint8

// The points, in order.
const (
	AtBegin   = Point(stream.AtBegin)   // before the transaction
	AtHandled = Point(stream.AtHandled) // the handler has returned, nothing is committed
	AtCommit  = Point(stream.AtCommit)  // committed, but the answer is lost: Run begins another session
	AtDone    = Point(stream.AtDone)    // committed, but not acknowledged
)

// NewConsumer returns a consumer that reads a stream in memory. crash may be nil.
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

// everywhere crashes a consumer whenever an event gets to a point for the first time.
type everywhere struct {
	every int // 1: always; n: every n-th time

	mu   sync.Mutex
	seen map[moment]bool
}

// moment is a point in the processing of one event.
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
