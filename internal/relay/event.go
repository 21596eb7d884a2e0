package relay

import (
	"math"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// EventOverhead is what an event counts beside its bytes when the buffer's limit in bytes is applied.
const EventOverhead = 64

// Event is one insert into the outbox, or one logical message in place of it. Its strings and its payload lie
// in memory that nobody writes to any more; an event may be copied and kept.
type Event struct {
	Pos  outbox.Position // LSN is 0 until the commit record has been read
	Time int64           // the commit's, likewise; see [Commit.Time]

	Doc   string // document
	Actor string // empty if there is no actor column, or NULL
	Key   string // seq_key; empty if the table has none, or NULL
	ID    string // empty if there is no id column, or NULL

	// Counter is the event's place in its sequence. The decoder sets First and Span in every mode, because it
	// can't know which mode will be in force; the buffer sets the rest in gap mode, and only then may it be
	// written into a header. Where Span is 0, First is one of the constants below.
	Counter outbox.Counter

	Payload []byte
	// PayloadSize is the payload's size in bytes. It is larger than len(Payload), which is then 0, where the
	// decoder left out a payload above its limit: no such payload is ever published.
	PayloadSize int

	// the further columns that subject and headers use, in the order of the decoder's configuration
	Extra []string
	Null  Nulls // which of the values are NULL; and whether it is a message
	// which column could not be decoded and why; empty: none. Such a row is never published as it is
	Bad string
}

// Why an event has no place in its sequence: Counter.First, where Counter.Span is 0.
const (
	NoCounter        int64 = iota // its counter is NULL, or no column is mapped; nothing is wrong with that
	CounterMissing                // the column was not in the table, or not published
	CounterNoInteger              // the counter is no integer, or does not fit 64 bits
	BadSpan                       // the span is none of 1 to 2^32-1
	CounterTooLarge               // its last counter would not fit 64 bits
)

// Unplaceable says why gap mode can't give the event a place in its sequence. It returns "" where it can, and
// where the counter is NULL, which gap mode allows. In gap mode such an event is bad, see Bad; in horizon
// mode its counter need not be a number at all.
func (e *Event) Unplaceable() string {
	if e.Counter.Span != 0 {
		return ""
	}
	switch e.Counter.First {
	case CounterMissing:
		return "the counter was not in the table, or not published, when it was written"
	case CounterNoInteger:
		return "the counter is not an integer of at most 64 bits"
	case BadSpan:
		return "the span is not an integer from 1 to 4294967295"
	case CounterTooLarge:
		return "counter and span give a last counter of more than 64 bits"
	}
	return ""
}

// Nulls is a set of an event's values, and says beside them where it came from: a field of its own would make
// each held event larger.
type Nulls uint64

// The members of a set. Those of Extra follow: see [Event.ExtraNull].
const (
	NullDoc Nulls = 1 << iota
	NullActor
	NullKey
	NullID
	NullPayload

	nullExtra = iota // the bit of Extra[0]
)

// IsMessage says that the event came as a logical message, not as a row.
const IsMessage Nulls = 1 << 63

// MaxExtra is the greatest number of further columns: what fits in a [Nulls] beside IsMessage.
const MaxExtra = 63 - nullExtra

// ExtraNull reports whether Extra[i] is NULL.
func (e *Event) ExtraNull(i int) bool { return e.Null&(1<<(nullExtra+i)) != 0 }

// SetExtraNull marks Extra[i] as NULL.
func (e *Event) SetExtraNull(i int) { e.Null |= 1 << (nullExtra + i) }

// Size is what the event counts against the buffer's limit in bytes: document, actor, key and payload, and
// EventOverhead.
func (e *Event) Size() int64 {
	return int64(len(e.Doc)+len(e.Actor)+len(e.Key)+e.PayloadSize) + EventOverhead
}

// Kind says which kind of input a commit is.
type Kind uint8

// The kinds of input. A transaction without any of them is no input.
const (
	NoInput        Kind = iota
	Events              // it holds outbox events (ticks and changes of settings beside them do not count)
	Heartbeat           // a tick and nothing else
	SettingsChange      // a change of this slot's ordering settings
)

// Commit is what is known when a transaction's commit record has been read. Its events came before it, one by
// one.
type Commit struct {
	LSN   outbox.LSN // end LSN of the commit record
	Start outbox.LSN // where the commit record starts; see [Checkpoint.From]
	// Read is the end LSN in the WAL that is read, where that is not the home's: LSN is the one at home then,
	// and 0 for what is not of the home, and Start the end LSN of the home's commit that was read before, 0
	// if there was none: an LSN from which the home would send this one as well. 0: this server is the home.
	Read     outbox.LSN
	Time     int64    // commit timestamp, microseconds since 2000-01-01 00:00 UTC, as PostgreSQL counts
	Kind     Kind     //
	Settings Settings // the new ones, for SettingsChange
	Events   int      // number of events, for Events
}

// CommitTime converts a commit timestamp, microseconds since 2000-01-01 00:00 UTC.
func CommitTime(t int64) time.Time {
	const epoch = 946_684_800 // 2000-01-01 in Unix seconds
	return time.UnixMicro(t).Add(epoch * time.Second).UTC()
}

// Countable is an event's counter without its sequence: without anything if no rule could count from it,
// because the numbers around it do not exist.
func Countable(c outbox.Counter) outbox.Counter {
	if c.Span == 0 || c.First == math.MinInt64 || c.First > math.MaxInt64-int64(c.Span)+1 {
		return outbox.Counter{}
	}
	return outbox.Counter{First: c.First, Span: c.Span}
}
