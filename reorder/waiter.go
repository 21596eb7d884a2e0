package reorder

import (
	"cmp"
	"slices"
	"unsafe"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// waiter is a held event of gap mode, with its place in each of the heaps that it is in.
type waiter struct {
	slot
	start outbox.LSN // where its commit record starts
	hold  *hold      // its sequence's; nil: it has left
	group *group     // what it waits in
	sum   uint64     // what it has added to the hold's; 0: nothing yet
	at    [places]int32
}

// hold is a sequence with held events. Every one of them has a last counter above base.
type hold struct {
	sequence uint64
	cold     bool // nobody knows what precedes them: base says nothing
	base     int64

	// its events: with one counter each, and with more, by (counter, position); the latter by last counter
	// too, because those that a release makes late need not be the lowest
	ones, spans, lasts heap[*waiter]
	// its events by position; also what it waits in, where that is the sequence
	group
	sum uint64 // of its events, as in relay.Hold; those of the input in hand are not in it yet

	// what the checkpoint that was started from says: where its events begin, and their sum
	from    outbox.Position
	fromSum uint64
}

// group is what waits together: a sequence, or a document.
type group struct {
	key    uint64
	events heap[*waiter] // by position
	times  heap[*waiter] // by time

	// among groups: by what it held when it was put there
	in     *heap[*group]
	place  int32
	oldest outbox.Position
	first  int64 // the lowest time
}

func (h *hold) empty() bool { return h.events.len() == 0 }

// lowest returns the event with the lowest (counter, position).
func (h *hold) lowest() *waiter {
	one, span := h.ones.top(), h.spans.top()
	if one == nil || span != nil && beforeByCounter(span, one) {
		return span
	}
	return one
}

// The weights are what the books count; a clone is one allocation, rounded up.
const (
	waiterWeight = int(unsafe.Sizeof(waiter{})) + 5*16 + 32
	holdWeight   = int64(unsafe.Sizeof(hold{})) + 32 + 4*16
	groupWeight  = int64(unsafe.Sizeof(group{})) + 32 + 16
)

// tallyOfWaiter is what a held event counts.
func tallyOfWaiter(e *relay.Event) tally {
	return tally{1, e.Size(), weight(e) + int64(waiterWeight-slotWeight)}
}

// own copies an event's bytes into memory of its own, so that nothing that was decoded with it stays alive.
func own(e *relay.Event) {
	n := len(e.Payload)
	texts := [...]*string{&e.Doc, &e.Actor, &e.Key, &e.ID, &e.Bad}
	for _, s := range texts {
		n += len(*s)
	}
	for _, x := range e.Extra {
		n += len(x)
	}
	b := make([]byte, 0, n)
	text := func(s string) string {
		from := len(b)
		b = append(b, s...)
		return unsafe.String(unsafe.SliceData(b[from:]), len(s))
	}
	for _, s := range texts {
		*s = text(*s)
	}
	e.Extra = slices.Clone(e.Extra)
	for i, x := range e.Extra {
		e.Extra[i] = text(x)
	}
	if e.Payload != nil {
		from := len(b)
		b = append(b, e.Payload...)
		e.Payload = b[from:len(b):len(b)]
	}
}

// The places that a waiter has in heaps.
const (
	inCounters = iota // of its hold: in ones or in spans
	inLasts
	inHold
	inGroup // where that is not the hold
	inAll
	inTimes
	places
)

// heap is a binary heap of values that can be taken out anywhere.
type heap[T comparable] struct {
	items []T
	at    func(T) *int32 // a value's place in here
	less  func(a, b T) bool
}

func (h *heap[T]) len() int { return len(h.items) }

// top returns the first, the zero value if there is none.
func (h *heap[T]) top() (v T) {
	if len(h.items) == 0 {
		return v
	}
	return h.items[0]
}

func (h *heap[T]) push(w T) {
	h.items = append(h.items, w)
	h.up(len(h.items)-1, w)
}

func (h *heap[T]) remove(w T) {
	var none T
	i, last := int(*h.at(w)), len(h.items)-1
	moved := h.items[last]
	h.items[last] = none
	if h.items = h.items[:last]; i < last {
		if i > 0 && h.less(moved, h.items[(i-1)/2]) {
			h.up(i, moved)
		} else {
			h.down(i, moved)
		}
	}
	if last == 0 && cap(h.items) > maxScratch {
		h.items = nil
	}
}

func (h *heap[T]) set(i int, w T) {
	h.items[i] = w
	*h.at(w) = int32(i)
}

// up puts w at i, where a place is free, or further up.
func (h *heap[T]) up(i int, w T) {
	for i > 0 {
		up := (i - 1) / 2
		if !h.less(w, h.items[up]) {
			break
		}
		h.set(i, h.items[up])
		i = up
	}
	h.set(i, w)
}

// down puts w at i, where a place is free, or further down.
func (h *heap[T]) down(i int, w T) {
	for {
		child := 2*i + 1
		if child >= len(h.items) {
			break
		}
		if child+1 < len(h.items) && h.less(h.items[child+1], h.items[child]) {
			child++
		}
		if !h.less(h.items[child], w) {
			break
		}
		h.set(i, h.items[child])
		i = child
	}
	h.set(i, w)
}

// compareByCounter is the order of a sequence's events.
func compareByCounter(a, b *waiter) int {
	if c := cmp.Compare(a.Counter.First, b.Counter.First); c != 0 {
		return c
	}
	return a.Pos.Compare(b.Pos)
}

func beforeByCounter(a, b *waiter) bool  { return compareByCounter(a, b) < 0 }
func beforeByLast(a, b *waiter) bool     { return a.Counter.Last() < b.Counter.Last() }
func beforeByPosition(a, b *waiter) bool { return a.Pos.Compare(b.Pos) < 0 }
func beforeByTime(a, b *waiter) bool     { return a.Time < b.Time }

func newHold(sequence uint64) *hold {
	return &hold{
		sequence: sequence,
		ones:     newHeap(inCounters, beforeByCounter),
		spans:    newHeap(inCounters, beforeByCounter),
		lasts:    newHeap(inLasts, beforeByLast),
		group:    *newGroup(sequence, inHold),
	}
}

func newGroup(key uint64, place int) *group {
	return &group{key: key, events: newHeap(place, beforeByPosition), times: newHeap(inTimes, beforeByTime)}
}

func newHeap(place int, less func(a, b *waiter) bool) heap[*waiter] {
	return heap[*waiter]{at: atPlace[place], less: less}
}

var atPlace = [places]func(*waiter) *int32{
	func(w *waiter) *int32 { return &w.at[0] }, func(w *waiter) *int32 { return &w.at[1] },
	func(w *waiter) *int32 { return &w.at[2] }, func(w *waiter) *int32 { return &w.at[3] },
	func(w *waiter) *int32 { return &w.at[4] }, func(w *waiter) *int32 { return &w.at[5] },
}

// newGroups makes a heap of groups.
func newGroups(less func(a, b *group) bool) *heap[*group] {
	return &heap[*group]{at: func(p *group) *int32 { return &p.place }, less: less}
}

func beforeByFirst(a, b *group) bool  { return a.first < b.first }
func beforeByOldest(a, b *group) bool { return a.oldest.Compare(b.oldest) < 0 }
