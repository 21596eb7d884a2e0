package reorder

import (
	"errors"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Window is a closed, ordered group of events. It is valid until the next Append or Commit, by when it must
// have been read to its end.
type Window struct {
	Due  outbox.LSN  // of the newest input that was due, or Thru if nothing is held behind the window
	Thru outbox.LSN  // of the input that closed it
	Of   int         // number of events, at least 1
	Pull int         // how many of them lie beyond what was due
	Sort outbox.Sort // the rule in force

	Bytes int64 // of its events, by [relay.Event.Size]
	// where it ends; Seq and Timeline are left to the caller, and PublishedAhead may not be changed. Gap mode
	// leaves it zero: [Buffer.Marker] with Thru makes it where it is wanted, because it lists all that is
	// held.
	Checkpoint relay.Checkpoint

	buffer *Buffer
	n      int
	from   *merge // where the events come from if they are not in the buffer's order
}

// open makes the window of the events that have been put in order.
func (b *Buffer) open(due outbox.LSN, out tally, pull int, from *merge) *Window {
	b.window = Window{
		Due: due, Thru: b.input.lsn, Of: out.events, Pull: pull, Sort: b.inForce().Sort, Bytes: out.bytes,
		Checkpoint: relay.Checkpoint{Due: due, PublishedAhead: b.takenBeyond(due), Settings: b.atDue},
		buffer:     b, from: from,
	}
	b.unread, b.leaving = true, out.weight
	return &b.window
}

var errMissing = errors.New("reorder: events are missing in a scratch file")

// Next hands out the next event; false at the end. The event is copied, its bytes are not: they stay valid as
// long as they are wanted.
func (w *Window) Next(e *relay.Event) (bool, error) {
	if w.n == w.Of {
		return false, nil
	}
	b := w.buffer
	if b.err != nil {
		return false, b.err
	}
	if w.from == nil {
		s := b.order[w.n]
		b.order[w.n] = nil
		*e = s.Event
		w.saw(e, s.hash)
		*s = slot{}
	} else {
		next, err := w.from.next()
		if err == nil && next == nil {
			err = errMissing
		}
		if err != nil {
			return false, b.fail(err)
		}
		*e = *next
		w.saw(e, 0)
		*next = relay.Event{}
	}
	if w.n++; w.n == w.Of {
		b.finish()
	}
	return true, nil
}

// saw counts late events, which gap mode has done already.
func (w *Window) saw(e *relay.Event, hash uint64) {
	if w.Sort != outbox.ByGap {
		w.buffer.late.see(&w.buffer.index, e, hash)
	}
}

// finish gives back what the window took up, once it has been read.
func (b *Buffer) finish() {
	b.unread, b.leaving = false, 0
	b.order = small(b.order)
	b.other = small(b.other)
	b.pulled = small(b.pulled)
	if cap(b.touched) > maxScratch {
		b.touched = nil
	}
	if b.window.from != nil {
		b.window.from = nil
		b.disk.drop()
		b.spill, b.sorting = nil, 0
	}
	b.fifo.release(b.release)
}

// maxScratch is the size up to which working slices are kept for the next window.
const maxScratch = 4096

func small(s []*slot) []*slot {
	if cap(s) > maxScratch {
		return nil
	}
	return s[:0]
}
