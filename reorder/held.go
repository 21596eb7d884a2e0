package reorder

import (
	"math"
	"unsafe"

	"github.com/outflowhq/outflow/internal/relay"
)

// slot is where an event lies in memory, once. A slot whose event has been taken or dropped is zero: no
// committed event has LSN 0.
type slot struct {
	relay.Event
	seq  *sequence // nil while the event is not in the index
	hash uint64    // of its sequence's name; 0: not known
}

// A chunk is what is allocated and given back at a time: 21 KiB.
const chunkLen = 128

type chunk [chunkLen]slot

// maxSpare is how many free chunks are kept for the next events. The rest is left to the garbage collector,
// so that a burst leaves nothing behind.
const maxSpare = 8

// fifo holds slots in the order of their positions. A slot's number never changes while it is there.
type fifo struct {
	chunks     []*chunk
	base       uint64 // number of the first slot of chunks[0], a multiple of chunkLen
	head, tail uint64 // slots in use: head <= n < tail
	spare      []*chunk
}

func (f *fifo) at(n uint64) *slot {
	i := n - f.base
	return &f.chunks[i/chunkLen][i%chunkLen]
}

// grow adds n zero slots at the tail and returns the number of the first.
func (f *fifo) grow(n uint64) uint64 {
	first := f.tail
	f.tail += n
	for f.tail > f.base+uint64(len(f.chunks))*chunkLen {
		if last := len(f.spare) - 1; last >= 0 {
			f.chunks = append(f.chunks, f.spare[last])
			f.spare[last] = nil
			f.spare = f.spare[:last]
		} else {
			f.chunks = append(f.chunks, new(chunk))
		}
	}
	return first
}

// truncate clears the slots from n on and takes them back.
func (f *fifo) truncate(n uint64) {
	for i := n; i < f.tail; i++ {
		*f.at(i) = slot{}
	}
	f.tail = n
	keep := int((n - f.base + chunkLen - 1) / chunkLen)
	for i := keep; i < len(f.chunks); i++ {
		f.recycle(i)
	}
	f.chunks = f.chunks[:keep]
}

// release gives back the slots below n, which are zero.
func (f *fifo) release(n uint64) {
	f.head = n
	done := int((n - f.base) / chunkLen)
	for i := range done {
		f.recycle(i)
	}
	f.chunks = f.chunks[done:]
	f.base += uint64(done) * chunkLen
	if len(f.chunks) == 0 {
		f.chunks = nil
	}
}

func (f *fifo) recycle(i int) {
	if len(f.spare) < maxSpare {
		f.spare = append(f.spare, f.chunks[i])
	}
	f.chunks[i] = nil
}

// queue is a first-in first-out list that can also be taken from behind.
type queue[T any] struct {
	items []T
	first int
}

func (q *queue[T]) len() int    { return len(q.items) - q.first }
func (q *queue[T]) at(i int) *T { return &q.items[q.first+i] }
func (q *queue[T]) back() *T    { return &q.items[len(q.items)-1] }

func (q *queue[T]) push(v T) {
	if len(q.items) == cap(q.items) && q.first > len(q.items)/2 {
		q.items = q.items[:copy(q.items, q.items[q.first:])]
		q.first = 0
	}
	q.items = append(q.items, v)
}

func (q *queue[T]) popFront() T {
	v := q.items[q.first]
	q.first++
	q.trim()
	return v
}

func (q *queue[T]) popBack() {
	q.items = q.items[:len(q.items)-1]
	q.trim()
}

func (q *queue[T]) clear() {
	q.first = len(q.items)
	q.trim()
}

// trim begins again when the queue is empty, and lets go of what a burst left.
func (q *queue[T]) trim() {
	if q.first < len(q.items) {
		return
	}
	q.items, q.first = q.items[:0], 0
	if cap(q.items) > 4096 {
		q.items = nil
	}
}

// tally counts events.
type tally struct {
	events int
	bytes  int64 // by Event.Size: what max_bytes limits
	weight int64 // what they take up in memory, by weight
}

func (t *tally) add(o tally) {
	t.events += o.events
	t.bytes += o.bytes
	t.weight += o.weight
}

func (t *tally) sub(o tally) {
	t.events -= o.events
	t.bytes -= o.bytes
	t.weight -= o.weight
}

func tallyOf(e *relay.Event) tally { return tally{1, e.Size(), weight(e)} }

// slotWeight is what an event takes up beside its bytes, as measured: the slot, its entries in the index and
// in a window's order or a sorter, the room that chunks and lists waste, and a commit that holds nothing
// else.
const slotWeight = int(unsafe.Sizeof(slot{})) + 72

// MaxWeight returns what a buffer with these settings holds at most, in bytes of memory: max_bytes as they
// are counted, and what an event weighs beyond the 64 bytes that it counts for, with a sequence of its own.
// Ids and further columns are not counted either: they come on top. In gap mode the messages that it
// remembers are counted too.
func MaxWeight(s relay.Settings) int64 {
	n := min(int64(s.MaxEvents), s.MaxBytes/relay.EventOverhead)
	if s.MaxBytes > math.MaxInt64/16 {
		return math.MaxInt64 / 2
	}
	each, fixed := int64(slotWeight)+sequenceWeight, int64(0)
	if s.ByGap() {
		each, fixed = int64(waiterWeight)+holdWeight, int64(s.Gap.Memory)*memoryWeight
		if s.Gap.Scope == relay.OfDocument {
			each += groupWeight
		}
	}
	return s.MaxBytes + n*(each-relay.EventOverhead) + fixed
}

// weight estimates the memory that an event takes up: slotWeight and the bytes of all its values. What the
// values lie in may be larger by what the decoder's arena holds beside them; arenas are freed as their last
// event leaves, in the order of the WAL.
func weight(e *relay.Event) int64 {
	n := len(e.Doc) + len(e.Actor) + len(e.Key) + len(e.ID) + len(e.Payload) + len(e.Bad) + slotWeight
	for _, x := range e.Extra {
		n += len(x) + 16
	}
	return int64(n)
}
