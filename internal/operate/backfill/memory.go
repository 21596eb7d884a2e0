package backfill

import (
	"context"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// memory is what gap mode remembers of the newest messages: what is published marks its late events by it,
// because a start reads it back from the messages.
type memory struct {
	limit  int
	n      int                // messages so far
	recent []uint64           // the sequences of the newest messages: message i is at i modulo limit
	newest map[uint64]counted // of each sequence, the newest message that was not late
}

// counted is a message's last counter, and its number.
type counted struct {
	last int64
	n    int
}

// remember reads the memory at the end of the stream.
func (l *Conns) remember(ctx context.Context, seq uint64, limit int) (*memory, error) {
	m := &memory{limit: limit, newest: map[uint64]counted{}}
	end := relay.Checkpoint{Seq: seq, Remembered: limit}
	recent, err := checkpoint.Start{Checkpoint: end, Accepted: seq}.Recent(ctx, l.NATS.Recent)
	for i := len(recent) - 1; i >= 0; i-- {
		m.add(recent[i])
	}
	return m, err
}

// count is how many messages are remembered; nil remembers none.
func (m *memory) count() int {
	if m == nil {
		return 0
	}
	return min(m.n, m.limit)
}

// place names the event's sequence, and says whether the event is late in it. It takes note of the event.
func (m *memory) place(e *relay.Event) outbox.Counter {
	c := relay.Countable(e.Counter)
	if c.Span > 0 {
		c.Sequence = outbox.SequenceOf(e.Doc, e.Actor)
		was, known := m.newest[c.Sequence]
		c.Late = known && c.Last() <= was.last
	}
	m.add(c)
	return c
}

func (m *memory) add(c outbox.Counter) {
	if i := m.n % m.limit; m.n < m.limit {
		m.recent = append(m.recent, c.Sequence)
	} else {
		if old := m.recent[i]; m.newest[old].n == m.n-m.limit {
			delete(m.newest, old)
		}
		m.recent[i] = c.Sequence
	}
	if c.Span > 0 && !c.Late {
		m.newest[c.Sequence] = counted{c.Last(), m.n}
	}
	m.n++
}
