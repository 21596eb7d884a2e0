package reorder

import "github.com/outflowhq/outflow/internal/relay"

// late counts events that leave after a higher key of their sequence. A table of fixed size remembers the
// greatest key of the sequences seen last, its first bytes at least: what it has forgotten is not counted.
// Nothing depends on the count.
type late struct {
	count uint64
	table []lastKey
}

// The table takes up 768 KiB at most; it begins small and grows while sequences get into each other's way.
// Its lengths are powers of two.
const (
	lateTable = 8192
	lateFirst = 64
)

type lastKey struct {
	hash uint64
	n    uint8
	key  [87]byte
}

// see takes note of an event that leaves. h is the hash of its sequence's name, 0 if it is not known. Inside
// a window a sequence's keys ascend, so a higher key is one of an earlier window.
func (l *late) see(x *index, e *relay.Event, h uint64) {
	if e.Key == "" {
		return
	}
	if l.table == nil {
		l.table = make([]lastKey, lateFirst)
	}
	if h == 0 {
		h = hash(x.seed, e.Doc, e.Actor)
	}
	last := l.of(h)
	for last.hash != h && last.hash != 0 && len(l.table) < lateTable {
		l.grow()
		last = l.of(h)
	}
	if last.hash == h {
		// A string is not below its own beginning, so a key that was cut counts only when the whole one
		// would.
		if string(last.key[:last.n]) > e.Key {
			l.count++
			return
		}
	}
	last.hash = h
	last.n = uint8(copy(last.key[:], e.Key))
}

func (l *late) of(h uint64) *lastKey { return &l.table[h&uint64(len(l.table)-1)] }

func (l *late) grow() {
	old := l.table
	l.table = make([]lastKey, 2*len(old))
	for i := range old {
		if old[i].hash != 0 {
			*l.of(old[i].hash) = old[i]
		}
	}
}
