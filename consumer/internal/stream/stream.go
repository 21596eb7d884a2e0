// Package stream is what a consumer reads from: a JetStream stream, or, in tests, one in memory.
package stream

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

// Message is a message of the stream.
type Message struct {
	Subject  string
	Header   nats.Header
	Data     []byte
	Sequence uint64 // in the stream
	Time     time.Time
	Replay   bool // it comes from a replay: see consumer.Event.Replayed
}

// State is the state of a source's stream.
type State struct {
	Created time.Time
	First   uint64 // sequence of the first message; Last+1 if there is none
	Last    uint64 // sequence of the last message ever stored
	Erased  outbox.Sequences
	// Kept is the first message that the stream itself has. First may lie before it, in the archive. 0: First
	Kept uint64
}

// Source is a stream as one consumer sees it: the messages that match its filter. Its methods and those of
// its [Reader] are called from one goroutine at a time.
type Source interface {
	// State reads the stream's state from its leader.
	State(ctx context.Context) (State, error)
	// Get reads the message at a sequence, whether the filter matches it or not; nil if there is none.
	Get(ctx context.Context, seq uint64) (*Message, error)
	// Next returns the sequence of the filter's first message at or after seq; 0 if there is none.
	Next(ctx context.Context, seq uint64) (uint64, error)
	// Open begins to read after a sequence.
	Open(ctx context.Context, after uint64) (Reader, error)
}

// Reader hands out the messages of a source.
type Reader interface {
	// Read waits for the next message. Sequences ascend, and no message is missing or repeated: a reader that
	// can no longer be sure of that returns an error.
	Read(ctx context.Context) (*Message, error)
	// Check returns the sequence of the newest message that the source has handed out to this reader, read or
	// not, and an error if it has handed out messages that Read never saw.
	Check(ctx context.Context) (handed uint64, err error)
	// Buffered is how many messages have come for certain that Read has not returned yet, or were handed out
	// by the last Check.
	Buffered() int
	// Close ends reading, including a Read in progress.
	Close()
}

// Archive has messages that retention has taken from streams.
type Archive interface {
	// Past opens what it has of the stream that was made at that time.
	Past(ctx context.Context, stream string, created time.Time) (Past, error)
}

// Past is what an archive has of one stream: all messages from the first one up to some sequence. Read may
// run while other methods are called.
type Past interface {
	// Next is the sequence behind the last message that it has; 1 if it has none.
	Next() uint64
	// Refresh looks for what has been archived since.
	Refresh(ctx context.Context) error
	// Get reads a message; nil if there is none.
	Get(ctx context.Context, seq uint64) (*Message, error)
	// Same reports whether a message of the stream is what was archived under its sequence.
	Same(ctx context.Context, m *Message) (bool, error)
	// Read calls f with the messages from one sequence to below another, in order, and lost with each range
	// that was lost before it could be archived, in its place. An error of either ends it and is returned.
	Read(ctx context.Context, from, below uint64, f func(*Message) error, lost func(*Gap) error) error
}

// Gap is the error of a reader for sequences whose messages nobody has any more. Reading goes on behind them.
type Gap struct{ From, To uint64 }

// Error implements error.
func (g *Gap) Error() string { return fmt.Sprintf("messages %d to %d are gone", g.From, g.To) }

// Hooks are set by tests.
type Hooks struct {
	Source Source // instead of the JetStream stream
	// Crash is called for each event at each point. An error ends everything at once, as a crash of the
	// process would, and Run returns it.
	Crash func(at Point, seq uint64) error
}

// Point is a moment in the processing of an event at which a consumer may crash.
type Point uint8

// The points, in order.
const (
	AtBegin   Point = iota // before the transaction
	AtHandled              // the handler has returned, nothing is committed
	AtCommit               // committed, but the answer is lost: this ends the session, not Run
	AtDone                 // committed, but not acknowledged
)

// Package consumer sets these for package consumertest.
var (
	Install   func(config any, h Hooks)                         // into a *consumer.Config
	Partition func(consumer any, m *Message) (n int, err error) // of a *consumer.Consumer
)
