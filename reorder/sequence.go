package reorder

import "strings"

// sequence holds the held events of one document by one actor, ready to be taken lowest (key, position)
// first. Events come almost in order: run is sorted, and an event that belongs within its last reach places
// is put in there. One that belongs further back goes to the heap, so that the cost is bounded whatever the
// order in which keys come.
type sequence struct {
	hash     uint64
	run      []*slot // ascending by (key, position), from first on
	first    int
	heap     []*slot // a binary heap: each before the two at 2i+1 and 2i+2
	top      *slot   // while a window is closed: the taken event with the greatest key; nil if none is
	doc      string  // as long as top is set: to sort by, without looking for it
	from, to int     // while a window is closed: which of the taken events are its own
	few      [2]*slot
}

const reach = 64

// is reports whether this is the sequence of that name.
func (q *sequence) is(doc, actor string) bool {
	var s *slot
	if n := len(q.run); n > q.first {
		s = q.run[n-1]
	} else {
		s = q.heap[0]
	}
	return s.Doc == doc && s.Actor == actor
}

func (q *sequence) empty() bool { return q.first == len(q.run) && len(q.heap) == 0 }

func byKey(a, b *slot) int {
	if c := strings.Compare(a.Key, b.Key); c != 0 {
		return c
	}
	return a.Pos.Compare(b.Pos)
}

// add puts in an event whose position is beyond all that have been put in.
func (q *sequence) add(s *slot) {
	n := len(q.run)
	if n == q.first || s.Key >= q.run[n-1].Key {
		q.append(s)
		return
	}
	lo, hi := q.first, n-1 // the place is in lo..hi
	if lo < n-reach {
		if lo = n - reach; s.Key < q.run[lo-1].Key {
			q.push(s)
			return
		}
	}
	for lo < hi {
		if mid := (lo + hi) / 2; q.run[mid].Key <= s.Key {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	back := n - lo
	q.append(nil)
	at := len(q.run) - 1 - back
	copy(q.run[at+1:], q.run[at:])
	q.run[at] = s
}

// append adds to the run, over what has left it when that is half.
func (q *sequence) append(s *slot) {
	if n := len(q.run); n == cap(q.run) && q.first > 0 && q.first*2 >= n {
		kept := copy(q.run, q.run[q.first:])
		clear(q.run[kept:])
		q.run, q.first = q.run[:kept], 0
	}
	q.run = append(q.run, s)
}

// least returns the event that pop would take, nil if there is none.
func (q *sequence) least() *slot {
	if q.first == len(q.run) {
		if len(q.heap) == 0 {
			return nil
		}
		return q.heap[0]
	}
	if len(q.heap) > 0 && byKey(q.heap[0], q.run[q.first]) < 0 {
		return q.heap[0]
	}
	return q.run[q.first]
}

// pop takes out the event that least returned last.
func (q *sequence) pop() {
	if q.first < len(q.run) && (len(q.heap) == 0 || byKey(q.run[q.first], q.heap[0]) < 0) {
		q.run[q.first] = nil
		if q.first++; q.first == len(q.run) {
			q.run, q.first = q.run[:0], 0
		}
		return
	}
	last := len(q.heap) - 1
	s := q.heap[last]
	q.heap[last] = nil
	if q.heap = q.heap[:last]; last > 0 {
		q.down(s)
	}
}

// push puts s into the heap.
func (q *sequence) push(s *slot) {
	q.heap = append(q.heap, s)
	i := len(q.heap) - 1
	for i > 0 {
		up := (i - 1) / 2
		if byKey(q.heap[up], s) < 0 {
			break
		}
		q.heap[i] = q.heap[up]
		i = up
	}
	q.heap[i] = s
}

// down puts s at the top, where a place is free, and lets it sink.
func (q *sequence) down(s *slot) {
	i := 0
	for {
		child := 2*i + 1
		if child >= len(q.heap) {
			break
		}
		if child+1 < len(q.heap) && byKey(q.heap[child+1], q.heap[child]) < 0 {
			child++
		}
		if byKey(s, q.heap[child]) < 0 {
			break
		}
		q.heap[i] = q.heap[child]
		i = child
	}
	q.heap[i] = s
}

// clear makes the sequence ready for another name, without much memory.
func (q *sequence) clear() {
	run, heap := q.run[:cap(q.run)], q.heap[:cap(q.heap)]
	if len(run) > reach {
		run = q.few[:]
	}
	if len(heap) > reach {
		heap = nil
	}
	clear(run)
	clear(heap)
	clear(q.few[:])
	*q = sequence{run: run[:0], heap: heap[:0]}
}
