package reorder

import "github.com/outflowhq/outflow/outbox"

// memory is what gap mode knows of the newest messages: the last counter of each sequence that has one among
// them. It forgets by count, so that what it knows is in the stream, and a start reads it back from there. It
// is a ring of the messages, and a table of those that are the newest of their sequence.
type memory struct {
	limit  int // Settings.Gap.Memory
	ring   []remembered
	oldest int // index of the oldest message
	len    int // messages remembered
	newest table[uint32]
}

// remembered is a message; one without a counter, and one that was late, is in no table.
type remembered struct {
	sequence uint64
	last     int64
}

// memoryWeight is what a message takes up: its place in the ring and at most four places in the table.
const memoryWeight = 16 + 4*4

func newMemory(limit int) *memory {
	m := &memory{limit: limit}
	m.newest = newTable(func(i uint32) uint64 { return m.ring[i-1].sequence })
	return m
}

// last returns the last counter of a sequence's newest message that was not late.
func (m *memory) last(sequence uint64) (int64, bool) {
	if i := m.newest.find(sequence); i > 0 {
		return m.ring[i-1].last, true
	}
	return 0, false
}

// add takes note of a message that is made.
func (m *memory) add(c outbox.Counter) {
	if m.len == m.limit {
		m.forget()
	}
	if m.len == len(m.ring) {
		m.move(min(max(minTable, 2*m.len), m.limit))
	}
	i := m.oldest + m.len
	if i >= len(m.ring) {
		i -= len(m.ring)
	}
	m.len++
	m.ring[i] = remembered{}
	if c.Span > 0 && !c.Late {
		m.ring[i] = remembered{c.Sequence, c.Last()}
		m.newest.put(uint32(i) + 1)
	}
}

// forget lets go of the oldest message.
func (m *memory) forget() {
	i := uint32(m.oldest) + 1
	if m.newest.find(m.ring[m.oldest].sequence) == i {
		m.newest.remove(i)
	}
	if m.oldest++; m.oldest == len(m.ring) {
		m.oldest = 0
	}
	m.len--
}

// resize is a change of the limit.
func (m *memory) resize(limit int) {
	for m.len > limit {
		m.forget()
	}
	if m.limit = limit; len(m.ring) > limit {
		m.move(limit)
	}
}

// move puts the messages into a ring of another size.
func (m *memory) move(size int) {
	ring := make([]remembered, size)
	newest := newTable(func(i uint32) uint64 { return ring[i-1].sequence })
	for n := range m.len {
		i := (m.oldest + n) % len(m.ring)
		ring[n] = m.ring[i]
		if m.newest.find(ring[n].sequence) == uint32(i)+1 {
			newest.put(uint32(n) + 1)
		}
	}
	newest.key = m.newest.key
	m.ring, m.newest, m.oldest = ring, newest, 0
}

// recall makes a memory of the counters of the newest messages, newest first. Messages that are gone from the
// stream count, but nothing is known of them.
func recall(limit, count int, recent []outbox.Counter) *memory {
	m := newMemory(limit)
	count = min(count, limit)
	for n := count - 1; n >= 0; n-- {
		var c outbox.Counter
		if n < len(recent) {
			c = recent[n]
		}
		m.add(c)
	}
	return m
}
