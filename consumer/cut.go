package consumer

import (
	"context"
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
	return outbox.CutOf(m.Subject, m.Header)
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
	newest, lost := d.check.newest.Seq, d.check.lastLost
	again := d.check.republishing && (d.at.Seq <= lost.Seq || d.at.order(lost) < 0) // more of it is to come
	if again || d.check.shorter && m.Sequence > d.check.last && m.Sequence <= newest {
		return fault(ErrStream, nil, hintStream(d.cfg), "stream %s, consumer %s: the broker has lost "+
			"messages that were read, and sequence %d is a cut: nobody can tell which of the events behind "+
			"it come again", d.cfg.Stream, d.cfg.Name, m.Sequence)
	}
	from, err := strconv.ParseUint(m.Header.Get(outbox.HeaderLost), 10, 64)
	if err == nil && from <= d.at.Seq && d.header != nil { // read by this session; the next one finds out
		return fmt.Errorf("stream %s: sequences from %d on are gone, and a cut at %d follows: %w",
			d.cfg.Stream, from, m.Sequence, errLostEnd)
	}
	if d.newest.Cut != nil && c.GoesBack(d.newest.Cut) {
		return fault(ErrStream, nil, hintStream(d.cfg), "stream %s: sequence %d is a cut at %v, and "+
			"sequence %d before it is one at %v", d.cfg.Stream, m.Sequence, c.LSN, d.newest.seq, d.newest.LSN)
	}
	return nil
}

// checkBefore returns an error if the message at an offset is a cut, and the event before that is not the one
// that the offset names: then the offset was at an event, which comes again behind the cut. With a filter the
// offset may name an earlier one.
func checkBefore(ctx context.Context, cfg *Config, src stream.Source, now stream.State, at offset) error {
	for seq := at.Seq - 1; seq >= now.First && !now.Erased.Has(seq); seq-- {
		m, err := src.Get(ctx, seq)
		if err != nil {
			return fmt.Errorf("stream %s: %w", cfg.Stream, err)
		}
		if m == nil && seq < now.Kept {
			return nil // the archive does not have it either: it was erased, if it was there
		}
		if m == nil || cutOf(m) != nil {
			continue
		}
		h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
		if err != nil {
			return fault(ErrForeign, err, hintStream(cfg), "stream %s, sequence %d", cfg.Stream, seq)
		}
		here := offsetOf(seq, &h)
		if here.Pos == at.Pos || !cfg.readsAll() && here.order(at) > 0 {
			return nil
		}
		return cutBack(cfg, at, at.Seq)
	}
	return nil
}

// checkWindow returns an error if a cut has closed the window of an event that was in another one when it was
// read. What was read before it may come behind it then.
func checkWindow(ctx context.Context, cfg *Config, src stream.Source, here offset) error {
	if here.Pos.Repaired() || here.Seq <= uint64(here.N)+1 {
		return nil
	}
	m, err := src.Get(ctx, here.Seq-uint64(here.N)-1)
	if err != nil {
		return fmt.Errorf("stream %s: %w", cfg.Stream, err)
	}
	if m == nil {
		return nil
	}
	if c := cutOf(m); c != nil && c.LSN == here.Due {
		return cutBack(cfg, here, m.Sequence)
	}
	return nil
}

// cutBack is the error of a cut before what was read already.
func cutBack(cfg *Config, at offset, seq uint64) error {
	return fault(ErrStream, nil, hintStream(cfg), "stream %s, consumer %s: the event at position %v was "+
		"read at sequence %d, and now sequence %d is a cut: nobody can tell which of the events behind it "+
		"come again", cfg.Stream, cfg.Name, at.Pos, at.Seq, seq)
}
