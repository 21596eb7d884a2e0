package reorder

import "github.com/outflowhq/outflow/outbox"

// due returns the LSN of the newest input that is due now that b.input has been read; false if none is. It is
// called once for each input.
//
// The horizon asks for the newest input whose time lies that far back. Commit timestamps do not ascend with
// the LSNs, so an input matters only as long as every later one is younger: a later one that is not younger
// is due whenever this one is. marks holds those that matter, with times that ascend; each input is put in
// and taken out once.
func (b *Buffer) due() (due outbox.LSN, ok bool) {
	set, in := b.inForce(), b.input
	if set.Horizon == 0 || b.cut {
		due, ok = in.lsn, true
	} else {
		horizon := set.Horizon.Microseconds()
		for b.marks.len() > 0 && in.time-b.marks.at(0).time >= horizon {
			due, ok = b.marks.popFront().lsn, true
		}
		for b.marks.len() > 0 && b.marks.back().time >= in.time {
			b.marks.popBack()
		}
		b.marks.push(in)
	}
	left := b.held
	for i := 0; left.events > set.MaxEvents || left.bytes > set.MaxBytes; i++ {
		c := b.commits.at(i)
		left.sub(c.tally)
		due, ok = max(due, c.lsn), true
	}
	return due, ok
}

// advance moves the last due: nothing will look at an input at or below it again.
func (b *Buffer) advance(due outbox.LSN) {
	for b.marks.len() > 0 && b.marks.at(0).lsn <= due {
		b.marks.popFront()
	}
	for b.changes.len() > 0 && b.changes.at(0).lsn <= due {
		b.atDue = b.changes.popFront().set
	}
	b.taken = b.taken[b.passed(due):]
}

// rest is called when no event is held. The next window that has events has a due above every input read so
// far, so none of them can decide anything any more, and the settings in force now will be those at that due
// or older than others that are.
func (b *Buffer) rest() {
	b.marks.clear()
	b.changes.clear()
	b.atDue = b.set
}
