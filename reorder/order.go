package reorder

import (
	"slices"
	"strings"

	"github.com/outflowhq/outflow/outbox"
)

// bySeqKey is the order of sort seq_key.
func bySeqKey(a, b *slot) int {
	if c := strings.Compare(a.Doc, b.Doc); c != 0 {
		return c
	}
	return byKey(a, b)
}

func byPosition(a, b *slot) int { return a.Pos.Compare(b.Pos) }

// orderTaken puts the taken events, which pull left in b.order sequence by sequence, in the window's order.
func (b *Buffer) orderTaken(pulled []*slot) {
	if b.inForce().Sort == outbox.ByCommit {
		b.takenByCommit(pulled)
	} else {
		b.takenBySeqKey()
	}
	for i, q := range b.touched {
		if q.top, q.doc = nil, ""; q.empty() {
			b.index.remove(q)
		}
		b.touched[i] = nil
	}
	clear(pulled)
}

// takenBySeqKey sorts documents, not events: a sequence's events are in order already.
func (b *Buffer) takenBySeqKey() {
	if len(b.touched) == 1 {
		return
	}
	slices.SortFunc(b.touched, func(p, q *sequence) int { return strings.Compare(p.doc, q.doc) })
	out := b.other[:0]
	for i := 0; i < len(b.touched); {
		from, actors := len(out), 0
		for name := b.touched[i].doc; i < len(b.touched) && b.touched[i].doc == name; i++ {
			out = append(out, b.order[b.touched[i].from:b.touched[i].to]...)
			actors++
		}
		if actors > 1 {
			slices.SortFunc(out[from:], byKey)
		}
	}
	b.swap(out)
}

// takenByCommit goes through the taken events by position and puts into each place the next event of the
// sequence that it belongs to.
func (b *Buffer) takenByCommit(pulled []*slot) {
	out := b.other[:0]
	for n := b.fifo.head; n < b.release && len(out) < len(b.order)-len(pulled); n++ {
		if s := b.fifo.at(n); s.Pos.LSN != 0 {
			out = append(out, s)
		}
	}
	slices.SortFunc(pulled, byPosition)
	out = append(out, pulled...)
	for i, s := range out {
		q := s.seq
		out[i] = b.order[q.from]
		q.from++
	}
	b.swap(out)
}

// swap makes out the window's order.
func (b *Buffer) swap(out []*slot) {
	clear(b.order)
	b.order, b.other = out, b.order[:0]
}

// orderAll puts everything held, which is in b.order by position, in the window's order.
func (b *Buffer) orderAll() {
	if len(b.order) == 1 {
		return
	}
	if b.inForce().Sort == outbox.BySeqKey {
		slices.SortFunc(b.order, bySeqKey)
		return
	}
	// The index is empty. It serves to tell the sequences apart: run takes a sequence's events as they come.
	sorted := true
	for _, s := range b.order {
		q := b.index.sequence(s)
		if n := len(q.run); n > 0 && s.Key < q.run[n-1].Key {
			sorted, q.to = false, 1
		}
		q.run = append(q.run, s)
	}
	if !sorted {
		for i, s := range b.order {
			q := s.seq
			if q.to == 1 {
				slices.SortFunc(q.run, byKey)
				q.to = 0
			}
			b.order[i] = q.run[q.from]
			q.from++
		}
	}
	b.index.reset()
	for _, s := range b.order {
		s.seq = nil
	}
}
