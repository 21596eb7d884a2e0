// Package stream is what a consumer reads from: a JetStream stream, or, in tests, one in memory. It is
// internal to Outflow: its API may change at any time.
package stream

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
)

// Message is a message of the stream.
type Message struct {
	Subject  string
	Header   nats.Header
	Data     []byte
	Sequence uint64 // in the stream
	Time     time.Time
	Replay   bool // it comes from the replay of a range: see consumer.Event.Replayed
}

// State is what a source says of its stream.
type State struct {
	Created time.Time
	First   uint64 // sequence of the first message; Last+1 if there is none
	Last    uint64 // sequence of the last message that was ever stored
}

// Source is a stream as one consumer sees it: the messages of its filter. Its methods and those of its
// [Reader] are called from one goroutine at a time, except that Ack may be called beside Read.
type Source interface {
	// State reads the stream's state, as its leader has it.
	State(ctx context.Context) (State, error)
	// Get reads the message at a sequence, whether the filter matches it or not; nil if there is none.
	Get(ctx context.Context, seq uint64) (*Message, error)
	// Next returns the sequence of the first message of the filter at or behind seq; 0 if there is none.
	Next(ctx context.Context, seq uint64) (uint64, error)
	// Open begins to read behind a sequence. Whoever read before is cut off, or notices that it was not
	// handed everything.
	Open(ctx context.Context, after uint64) (Reader, error)
}

// Reader hands out the messages of a source.
type Reader interface {
	// Read waits for the next message. Messages come by ascending sequence, none is left out and none comes
	// twice: a reader that can't be sure of that any more returns an error.
	Read(ctx context.Context) (*Message, error)
	// Ack says that all messages up to a sequence are done, so that more may come. It does not wait, and
	// correctness does not depend on it.
	Ack(seq uint64) error
	// Check returns the sequence of the newest message that the source has handed out to this reader, read or
	// not, and an error if it has handed out messages that Read never saw.
	Check(ctx context.Context) (handed uint64, err error)
	// Close ends the reading; a Read that waits returns. Ack may still be called.
	Close()
}

// Hooks are what tests put into a consumer.
type Hooks struct {
	Source Source // read in place of the JetStream stream
	// Crash is called for the event of a sequence at each point. An error drops everything at once, as a
	// crash of the process would, and Run returns it.
	Crash func(at Point, seq uint64) error
}

// Point is a moment in the life of an event at which a consumer may crash.
type Point uint8

// The points, in their order.
const (
	AtBegin   Point = iota // before the transaction
	AtHandled              // the handler has returned, nothing is committed
	// it is committed, but the answer is lost: this one ends the session, not the instance
	AtCommit
	AtDone // it is committed, and nothing has been acknowledged
)

// These are set by package consumer, for package consumertest.
var (
	Install func(config any, h Hooks) // of a *consumer.Config
	// of a message's document, by a *consumer.Consumer
	Partition func(consumer any, m *Message) (n int, err error)
)
