package pipeline

import (
	"context"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Conns are the connections of a session to both sides, and what was learned from the table when they were
// opened. The session owns them: it closes them, and puts what Reopen returns in their place.
type Conns struct {
	Source    Source
	JetStream JetStream
	Store     Store
	Writer    Writer // nil: heartbeats are left to others and settings are not changed
	// Observer is told what becomes of the session's messages; nil: nobody is.
	Observer Observer
	// Reopen opens JetStream and Store again, after JetStream was closed; ctx limits the opening, not what it
	// returns. It is called outside the loop, once at a time. nil: a session ends with its connection to
	// NATS.
	Reopen func(ctx context.Context) (JetStream, Store, error)

	Checkpoint checkpoint.Config
	Decoder    decoder.Config // of the table as it is now
	Binary     bool           // every type that is read has a binary reader
}

// Close closes both connections at once. It does not close the Writer, which outlives sessions.
func (c *Conns) Close() {
	c.Source.Close()
	c.JetStream.Close()
}

// Source is the PostgreSQL side of a session: a replication connection and an ordinary one to the same
// server. Server, Slot and Publication use the ordinary one and are never called at the same time; the other
// methods may be called beside them.
type Source interface {
	Server(ctx context.Context) (relay.ServerState, error)
	Slot(ctx context.Context) (relay.SlotState, error)
	// Publication returns a fault where the publication does not publish the table's inserts whole.
	Publication(ctx context.Context) (relay.PublicationIdentity, error)
	// Start starts the stream. A slot in use is a fault with code relay.CodeSlotInUse.
	Start(ctx context.Context, from outbox.LSN, binary bool) error
	// Batches is closed when the stream ends; Err then says why. Each batch must be released.
	Batches() <-chan *relay.Batch
	Err() error
	// Confirm sets the LSN that is reported as written, flushed and applied. It never blocks, and the server
	// may get it later or never: nothing may depend on it.
	Confirm(lsn outbox.LSN)
	// Stop ends the stream in order: the last status has been sent when it returns.
	Stop(ctx context.Context) error
	Close()
}

// JetStream is one connection to NATS, which does not reconnect. What it has acknowledged is stored, not
// necessarily durable. Its methods may be called from several goroutines, Publisher and Resume only from the
// loop.
type JetStream interface {
	// Check returns a fault where the stream is not set up as it must be. A missing stream is no fault: State
	// says so.
	Check(ctx context.Context) error
	State(ctx context.Context) (relay.StreamState, error)
	// Tail is State while messages are published, and cheaper: its Durables are not set. A stream that
	// changed too fast to be read is a fault with code relay.CodeStreamMoved. Beside an error the state says
	// only whether the stream is Open, if that is known.
	Tail(ctx context.Context) (relay.StreamState, error)
	// Watch listens, from when it returns, for what others publish to the stream: a stranger's message ends
	// the connection, and Err is a gap then. Acknowledgements come behind the strangers' messages that were
	// stored before.
	Watch(ctx context.Context) error
	// Stored reads the messages above one sequence and up to another, of these the last ones that can have
	// been in flight together; with more, also those before, unless they are too many or it takes too long.
	// What can't be read is left out.
	Stored(ctx context.Context, above, upTo uint64, more bool) ([]relay.Stored, error)
	// Recent reads the counters of the newest n messages of ours above one sequence and up to another, newest
	// first; of one that has none, the Span is 0. There are fewer only where the stream has fewer.
	Recent(ctx context.Context, above, upTo uint64, n int) ([]outbox.Counter, error)
	// Publisher returns the only publisher of this connection; its first message expects lastSeq, which was
	// read after Watch. The broker lost the messages from lostFrom to lastSeq, which that message says; 0: it
	// lost none. Where clusters share the stream each message names its newest cut, at sequence fence (0: it
	// has none), and is refused if there is another one.
	Publisher(lastSeq, lostFrom, fence uint64) Publisher
	// Resume is Publisher for a session that goes on over this connection: the new publisher sends again what
	// the session's last one, of a connection that was closed, has sent behind lastSeq, and goes on where
	// that one has ended. Every message of the stream up to lastSeq that was not acknowledged to the last one
	// is one of its own.
	Resume(lastSeq uint64) (Publisher, error)
	// NewestCut reads the newest cut of the stream; nil: it has none. lastSeq was read as its last sequence
	// before: a cut behind it is a fault with code relay.CodeStreamMoved.
	NewestCut(ctx context.Context, lastSeq uint64) (*relay.Stored, error)
	// StoreCut stores a cut directly behind lastSeq, where the newest cut before it is at sequence fence (0:
	// there is none). nil: it is there, not necessarily durable. It may be called again with the same cut.
	// Only when all that this connection has sent is acknowledged: what it publishes behind the cut is for
	// another connection's Publisher.
	StoreCut(ctx context.Context, cut outbox.Cut, lastSeq, fence uint64) error
	// Lost is closed when the connection is gone; Err then says why.
	Lost() <-chan struct{}
	Err() error
	Close()
}

// Publisher publishes messages in order; see package sink. It belongs to the loop. It does not take a message
// for which Publish returned an error, and must not be given one while it is Full. Sent and Acked are
// sequences of the stream; what is above Acked may be there or not.
type Publisher interface {
	Full() bool
	Publish(e *relay.Event, h *outbox.Header) error
	Flush(now time.Time) time.Duration
	Notify() <-chan struct{}
	Acked() uint64
	Sent() uint64
	Check(now time.Time) error
	InFlight() (messages, bytes int)
	// Header is that of a message that was sent and is not acknowledged, or of the newest one that is; nil:
	// it is not known.
	Header(seq uint64) *outbox.Header
}

// Observer is told what becomes of a session's messages, in the order of their sequences. It belongs to the
// loop, which waits for it: it must not block. Nothing that the pipeline does depends on it. It may keep what
// an event points to, not the event or the header themselves. received is when the event was read, to a
// millisecond; zero: that is not known.
type Observer interface {
	// Found is called for a message that was made again and is in the stream already. stored is the broker's
	// time for it; zero: that was not read. It is of what can have been in flight when the last session
	// ended.
	Found(e *relay.Event, h *outbox.Header, seq uint64, received, stored time.Time)
	// Sent is called for a message that the publisher has taken.
	Sent(e *relay.Event, h *outbox.Header, seq uint64, received time.Time)
	// Acked is called again and again: everything up to seq is acknowledged.
	Acked(seq uint64)
}

// Store keeps the checkpoint record. Save is a compare-and-set: it fails unless revision is the record's
// present one. After checkpoint.ErrUnknown the record may have been stored, or may still be, also while Load
// returns the one before it. What was saved is stored, not necessarily durable.
type Store interface {
	Load(ctx context.Context) (record *checkpoint.Record, revision uint64, err error)
	Save(ctx context.Context, record *checkpoint.Record, revision uint64) (uint64, error)
	// SaveGaps stores the names of open gaps beside the record; nothing depends on them.
	SaveGaps(ctx context.Context, doc []byte) error
}

// Writer writes logical messages into the WAL over a connection of its own, which it opens and reopens by
// itself.
type Writer interface {
	Heartbeat(ctx context.Context) error
	Change(ctx context.Context, s relay.Settings) error
	// Watermark is called where there is a control table alone.
	Watermark(ctx context.Context, w relay.Watermark) error
	// ClusterRow writes a row not later than until, by the server's clock. After an error nobody knows
	// whether it was written, or will be by then.
	ClusterRow(ctx context.Context, row relay.ClusterRow, until time.Time) error
}
