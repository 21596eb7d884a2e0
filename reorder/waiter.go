package reorder

import (
	"cmp"
	"slices"
	"unsafe"

	"github.com/outflowhq/outflow/internal/relay"
)

// waiter is a held event of gap mode, with its place in each of the heaps that it is in.
type waiter struct {
	slot
	hold    *hold  // its sequence's; nil: it has left
	group   *group // what it waits in
	overdue bool   // it has waited as long as it may
	at      [heaps]int32
}

// hold is a sequence with held events. Every one of them has a last counter above base.
type hold struct {
	sequence uint64
	cold     bool // nobody knows what precedes them: base says nothing
	base     int64

	// its events: with one counter each, and with more, by (counter, position); the latter by last counter
	// too, because those that a release makes late need not be the lowest
	ones, spans, lasts heap
	// its events by position; also what it waits in, where that is the sequence
	group
	// where the checkpoint that was started from says that its events begin
	from relay.Hold
}

// group is what waits together: a sequence, or a document.
type group struct {
	key     uint64
	events  heap // by position
	overdue int  // events that have waited as long as they may
	listed  bool // among those with overdue events
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

// each goes through the hold's events, in no order. They may move to other heaps, but not out of the hold.
func (h *hold) each(f func(*waiter)) {
	for _, w := range h.events.items {
		f(w)
	}
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
	inTime // cold or warm
	heaps
)

// heap is a binary heap of waiters that can be taken out anywhere.
type heap struct {
	items []*waiter
	place uint8 // which of a waiter's places is the one in here
	less  func(a, b *waiter) bool
}

func (h *heap) len() int { return len(h.items) }

// top returns the first, nil if there is none.
func (h *heap) top() *waiter {
	if len(h.items) == 0 {
		return nil
	}
	return h.items[0]
}

func (h *heap) push(w *waiter) {
	h.items = append(h.items, w)
	h.up(len(h.items)-1, w)
}

func (h *heap) remove(w *waiter) {
	i, last := int(w.at[h.place]), len(h.items)-1
	moved := h.items[last]
	h.items[last] = nil
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

func (h *heap) set(i int, w *waiter) {
	h.items[i] = w
	w.at[h.place] = int32(i)
}

// up puts w at i, where a place is free, or further up.
func (h *heap) up(i int, w *waiter) {
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
func (h *heap) down(i int, w *waiter) {
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
		ones:     heap{place: inCounters, less: beforeByCounter},
		spans:    heap{place: inCounters, less: beforeByCounter},
		lasts:    heap{place: inLasts, less: beforeByLast},
		group:    group{key: sequence, events: heap{place: inHold, less: beforeByPosition}},
	}
}

func newGroup(key uint64) *group {
	return &group{key: key, events: heap{place: inGroup, less: beforeByPosition}}
}
