package consumer

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
)

// Message is a message of the stream as a [Source] hands it out.
type Message struct {
	Subject  string
	Header   nats.Header
	Data     []byte
	Sequence uint64 // in the stream
	Time     time.Time
	Replay   bool // it comes from the replay of a range: see Event.Replayed
}

// StreamState is what a source says of its stream.
type StreamState struct {
	Created time.Time
	First   uint64 // sequence of the first message; Last+1 if there is none
	Last    uint64 // sequence of the last message that was ever stored
}

// Source is a stream as one consumer sees it: the messages of its filter. The package makes one of a JetStream stream; consumertest
// makes one in memory. Its methods are called from one goroutine at a time, those of its [Reader] too, but Ack beside Read.
type Source interface {
	// State reads the stream's state, as its leader has it.
	State(ctx context.Context) (StreamState, error)
	// Get reads the message at a sequence, whether the filter matches it or not; nil if there is none.
	Get(ctx context.Context, seq uint64) (*Message, error)
	// Next returns the sequence of the first message of the filter at or behind seq; 0 if there is none.
	Next(ctx context.Context, seq uint64) (uint64, error)
	// Open begins to read behind a sequence. Whoever read before is cut off, or notices that it has not been handed everything.
	Open(ctx context.Context, after uint64) (Reader, error)
}

// Reader hands out the messages of a source.
type Reader interface {
	// Read waits for the next message. Messages come by ascending sequence, none is left out and none comes twice: a reader that can't
	// say so any more returns an error.
	Read(ctx context.Context) (*Message, error)
	// Ack says that all messages up to a sequence are done, so that more may come. It does not wait, and nothing depends on it but that.
	Ack(seq uint64) error
	// Check returns the sequence of the newest message that the source has handed out to this reader, read or not, and an error if it has
	// handed out messages that Read never saw.
	Check(ctx context.Context) (handed uint64, err error)
	// Close ends the reading; a Read that waits returns. Ack may still be called.
	Close()
}
