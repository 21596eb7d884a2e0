package consumer

import (
	"fmt"
	"strconv"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// passedCut is a cut that was passed over; nil: none was.
type passedCut struct {
	*outbox.Cut
	seq uint64
}

// cutOf returns the cut that a message is, nil if it is none. What is replayed are events.
func cutOf(m *stream.Message) *outbox.Cut {
	if m.Replay {
		return nil
	}
	if c, is := outbox.CutOf(m.Subject, m.Header); is {
		return &c
	}
	return nil
}

// behindCut is the offset of a partition that is done up to a cut: that of the newest event before it, at the
// sequence of the cut, which has no place of its own among the events.
func (m offset) behindCut(seq uint64) offset {
	m.Seq, m.Lost = seq, false
	return m
}

// passCut passes over a cut. Nobody handles it, and it leaves the order of the events around it as it is: the
// window before it is whole, and another one follows.
func (d *dispatcher) passCut(m *stream.Message, c *outbox.Cut) error {
	if m.Sequence <= d.at.Seq {
		return d.cameLate(m.Sequence)
	}
	if err := d.checkCut(m, c); err != nil {
		return err
	}
	erased, err := d.explainJump(m)
	if err != nil {
		return err
	}
	if erased {
		d.header = nil // the next event need not follow the last one
	}
	d.newest = passedCut{c, m.Sequence}
	d.at, d.busy = d.at.behindCut(m.Sequence), true
	d.met.read(m.Sequence)
	return nil
}

// checkCut returns an error if nobody can tell what is behind a cut, or if it goes back.
//
// What the broker has lost comes again as the same messages, unless a cut comes first: it ends a window where
// there was none before, so the same events may be in other windows, and have other sequences, than when they
// were handled. Then nobody can tell which of them were.
func (d *dispatcher) checkCut(m *stream.Message, c *outbox.Cut) error {
	newest := d.check.newest.Seq
	if d.check.republishing || d.check.shorter && m.Sequence > d.check.last && m.Sequence <= newest {
		return fault(ErrStream, nil, hintStream(d.cfg), "stream %s, consumer %s: the broker has lost "+
			"messages that were read, and sequence %d is a cut: nobody can tell which of the events behind "+
			"it come again", d.cfg.Stream, d.cfg.Name, m.Sequence)
	}
	lost, err := strconv.ParseUint(m.Header.Get(outbox.HeaderLost), 10, 64)
	if err == nil && lost <= d.at.Seq && d.header != nil { // read by this session; the next one finds out
		return fmt.Errorf("stream %s: sequences from %d on are gone, and a cut at %d follows: %w",
			d.cfg.Stream, lost, m.Sequence, errLostEnd)
	}
	if d.newest.Cut != nil && c.GoesBack(d.newest.Cut) {
		return fault(ErrStream, nil, hintStream(d.cfg), "stream %s: sequence %d is a cut at %v, and "+
			"sequence %d before it is one at %v", d.cfg.Stream, m.Sequence, c.LSN, d.newest.seq, d.newest.LSN)
	}
	return nil
}
