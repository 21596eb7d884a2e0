package reorder

import (
	"slices"

	"github.com/outflowhq/outflow/outbox"
)

// Close returns the window that the last input made due, nil if it made none. It is to be called once after
// each Commit. The window belongs to the buffer: it must be read to its end before the next Append or Commit,
// and not be used afterwards (its Checkpoint may be kept).
func (b *Buffer) Close() (*Window, error) {
	if b.err != nil {
		return nil, b.err
	}
	if !b.waiting {
		return nil, nil
	}
	b.waiting = false
	if b.gapMode() || b.change != nil {
		w, err := b.closeGap()
		return w, b.fail(err)
	}
	var w *Window
	if due, ok := b.due(); ok {
		var err error
		if w, err = b.close(due); err != nil {
			return nil, b.fail(err)
		}
	}
	if b.held.events == 0 {
		b.rest()
	}
	return w, nil
}

// close takes out of the buffer what a window with this due takes, and puts it in order.
func (b *Buffer) close(due outbox.LSN) (*Window, error) {
	var head tally
	n := 0 // commits at or below due
	for ; n < b.commits.len() && b.commits.at(n).lsn <= due; n++ {
		head.add(b.commits.at(n).tally)
	}
	beyond := len(b.taken) - b.passed(due)
	var pulled []*slot
	if head.events > 0 && head.events < b.held.events {
		var err error
		if pulled, err = b.pull(n, due, b.cfg.MaxPublishedAhead-beyond); err != nil {
			return nil, err
		}
	}
	if beyond+len(pulled) > b.cfg.MaxPublishedAhead || head.events == b.held.events {
		return b.closeAll(b.held.events - head.events)
	}

	out := head
	for n > 0 {
		b.release = b.commits.popFront().end
		n--
	}
	for _, s := range pulled {
		t := tallyOf(&s.Event)
		out.add(t)
		b.commitOf(s.Pos.LSN).sub(t)
	}
	b.held.sub(out)
	b.take(pulled, due)
	if b.spill != nil {
		b.spill.take(pulled)
	}
	for b.commits.len() > 0 && b.commits.at(0).events == 0 {
		b.release = b.commits.popFront().end
	}
	if b.held.events == 0 {
		due = b.input.lsn
	}
	b.advance(due)
	if out.events == 0 {
		b.fifo.release(b.release)
		return nil, nil
	}
	b.orderTaken(pulled)
	return b.open(due, out, len(pulled), nil), nil
}

// closeAll makes a window of everything held.
func (b *Buffer) closeAll(pull int) (*Window, error) {
	out, due := b.held, b.input.lsn
	resident := b.resident()
	b.advance(due)
	if out.events == 0 {
		return nil, nil
	}
	clear(b.touched) // of a pull that was given up
	clear(b.pulled)
	clear(b.order)
	b.index.reset()
	b.order = b.order[:0]
	for n := b.fifo.head; n < b.fifo.tail; n++ {
		if s := b.fifo.at(n); s.Pos.LSN != 0 {
			s.seq = nil
			b.order = append(b.order, s)
		}
	}
	var from *merge
	if b.spill == nil {
		b.orderAll()
	} else {
		var err error
		if from, err = b.orderSpilled(); err != nil {
			return nil, err
		}
	}
	b.release, b.indexed = b.fifo.tail, b.fifo.tail
	b.commits.clear()
	b.held = tally{}
	w := b.open(due, out, pull, from)
	b.leaving = resident
	return w, nil
}

// pull finds the held events beyond due that go before one at or below due: in the first n commits. It leaves
// the events that the window takes at the end of the index's account and in order, sequence by sequence;
// touched says which ones. When there are more than limit it stops short: everything held is taken then, and
// what it has done to the index does not matter.
func (b *Buffer) pull(n int, due outbox.LSN, limit int) (pulled []*slot, err error) {
	for ; b.indexed < b.fifo.tail; b.indexed++ {
		if s := b.fifo.at(b.indexed); s.Pos.LSN != 0 {
			b.index.add(s)
		}
	}
	b.touched, b.order = b.touched[:0], b.order[:0]
	for i, end := b.fifo.head, b.commits.at(n-1).end; i < end; i++ {
		s := b.fifo.at(i)
		if s.Pos.LSN == 0 {
			continue
		}
		if q := s.seq; q.top == nil {
			q.top, q.doc = s, s.Doc
			b.touched = append(b.touched, q)
		} else if s.Key > q.top.Key {
			q.top = s
		}
	}
	if b.spill != nil {
		spilled, err := b.pullSpilled(limit)
		if err != nil {
			return nil, err
		}
		if len(spilled) > limit {
			return spilled, nil
		}
		for i := range spilled {
			b.index.add(spilled[i])
		}
	}
	b.pulled = b.pulled[:0]
	for _, q := range b.touched {
		q.from = len(b.order)
		for {
			s := q.least()
			if s == nil || s.Pos.LSN > due && s.Key >= q.top.Key { // at or below due no key is above the top
				break
			}
			q.pop()
			b.order = append(b.order, s)
			if s.Pos.LSN > due {
				if b.pulled = append(b.pulled, s); len(b.pulled) > limit {
					return b.pulled, nil
				}
			}
		}
		q.to = len(b.order)
	}
	return b.pulled, nil
}

// take adds pulled events to those taken beyond due. The list is made anew, because checkpoints have the old
// one.
func (b *Buffer) take(pulled []*slot, due outbox.LSN) {
	if len(pulled) == 0 {
		return
	}
	old := b.takenBeyond(due)
	b.taken = append(make([]outbox.Position, 0, len(old)+len(pulled)), old...)
	for _, s := range pulled {
		at, _ := slices.BinarySearchFunc(b.taken, s.Pos, outbox.Position.Compare)
		b.taken = slices.Insert(b.taken, at, s.Pos)
	}
}

// commitOf returns the held commit with this LSN.
func (b *Buffer) commitOf(lsn outbox.LSN) *commit {
	lo, hi := 0, b.commits.len()
	for lo < hi {
		if mid := (lo + hi) / 2; b.commits.at(mid).lsn < lsn {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return b.commits.at(lo)
}
