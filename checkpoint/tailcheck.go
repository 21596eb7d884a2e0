package checkpoint

import (
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TailCheck counts the first messages of a session, those that are in the stream already, and compares the
// last of them with what the stream holds. Until it is verified a session sends, records and confirms
// nothing. Not safe for concurrent use.
type TailCheck struct {
	cfg    Config
	start  Start
	made   uint64
	seq    uint64         // of the message that was made last
	stored []relay.Stored // what is left to compare, ascending
	whole  bool           // each message was there to compare
	at     time.Time      // when the broker stored that message; zero: it was not read
}

// NewTailCheck returns the check that a session from start needs.
func NewTailCheck(cfg Config, start Start) *TailCheck {
	return &TailCheck{cfg: cfg, start: start, seq: start.Checkpoint.Seq}
}

// Compares returns which messages of the stream can be compared: those above one sequence, up to another.
func (c *TailCheck) Compares() (above, upTo uint64) {
	return min(max(c.start.Checkpoint.Seq, c.start.Accepted), c.start.End), c.start.End
}

// Stored takes messages of that range, ascending, at best all that can have been in flight when the last
// session ended: a stranger's may have taken a sequence, and what was behind ours that was refused for it may
// have come in after him, so that the stream's end looks right. The error is a gap fault with code
// foreign_message: one of them is not ours; or that of a cut among them, which the record does not have. Call
// it before the first message is made.
func (c *TailCheck) Stored(all []relay.Stored) error {
	for _, m := range all {
		if m.Header == nil && m.Cut == nil {
			return &outbox.Fault{
				Class: outbox.Gap, Code: "foreign_message", Observed: true, From: c.start.Checkpoint.Start(),
				To: max(c.start.Thru, c.start.Checkpoint.Due),
				Message: fmt.Sprintf("the message at sequence %d of stream %s has no %s header: one of "+
					"ours may have been refused for it and be missing",
					m.Seq, c.cfg.Stream, outbox.HeaderName),
				Hint: c.cfg.hintOf("foreign_message", c.cfg.hintForeign()),
			}
		}
	}
	if err := c.checkCuts(all); err != nil {
		return err
	}
	if c.start.Newest != nil || len(c.start.Cuts) > 0 { // else the WAL may be another one
		c.stored = all
		c.whole = uint64(len(all)) >= c.start.AlreadyStored
	}
	return nil
}

// Whole reports whether each message that is in the stream already is compared: then the first one that
// differs is known.
func (c *TailCheck) Whole() bool { return c.whole }

// Verified reports whether all messages that are in the stream already were made, and those that were
// compared agreed.
func (c *TailCheck) Verified() bool { return c.made >= c.start.AlreadyStored }

// Skip counts a message. skip says that it is in the stream already and must not be sent. The error is a gap
// fault with code divergence: the stream holds another message.
func (c *TailCheck) Skip(h *outbox.Header) (skip bool, err error) {
	if c.Verified() {
		return false, nil
	}
	there := c.next()
	want := there.Header
	if c.Verified() && c.start.Newest != nil {
		want = c.start.Newest
	}
	switch {
	case there.Cut != nil:
		err = c.differs("the cut "+there.Cut.String(), h)
	case want != nil && !h.Same(want):
		err = c.differs(want.String(), h)
	}
	return true, err
}

// Cut counts a cut that is carried out, before the messages of the window that it closes: its own message is
// in the stream. The error is a gap fault with code divergence: it is not where the WAL and the cuts before
// it make it.
func (c *TailCheck) Cut(cut StoredCut) error {
	if c.Verified() {
		return c.divergence("the checkpoint record has a cut at %v, and the WAL up to there makes more than "+
			"the %d messages up to sequence %d of stream %s", cut, c.start.AlreadyStored, c.start.End,
			c.cfg.Stream)
	}
	there := c.next()
	switch {
	case c.seq != cut.Seq:
		c.made--
		return c.divergence("the checkpoint record has a cut at %v, and the WAL up to there makes the "+
			"messages before sequence %d of stream %s", cut, c.seq, c.cfg.Stream)
	case there.Header != nil || there.Cut != nil && there.Cut.LSN != cut.LSN:
		c.made--
		return c.divergence("sequence %d of stream %s is not the cut at %v that the checkpoint record has "+
			"there",
			c.seq, c.cfg.Stream, cut.LSN)
	}
	return nil
}

// next counts a message and returns what the stream has at its sequence, as far as that was read.
func (c *TailCheck) next() (there relay.Stored) {
	c.made++
	for c.seq++; within(c.start.Holes, c.seq); c.seq++ {
	}
	for len(c.stored) > 0 && c.stored[0].Seq <= c.seq {
		if c.stored[0].Seq == c.seq {
			there = c.stored[0]
		}
		c.stored = c.stored[1:]
	}
	c.at = there.Time
	return there
}

// differs is the divergence of the message that was made last.
func (c *TailCheck) differs(there string, made *outbox.Header) error {
	c.made--
	return c.divergence("the message at sequence %d of stream %s is %s, the WAL makes %v", c.seq,
		c.cfg.Stream, there, made)
}

// Skipped returns the sequence of the message that Skip last said to be in the stream already, and when the
// broker stored it, by its clock; zero where that was not read.
func (c *TailCheck) Skipped() (seq uint64, stored time.Time) { return c.seq, c.at }

// Input is called with the LSN of each input before the buffer reads it, and with that of each keepalive (a
// WAL that is silent would never show it otherwise). One beyond the input that closed the newest message's
// window, when that message was not made yet, is a divergence. Inputs up to the checkpoint's due make no
// messages: gap mode reads them again for the events that were held.
func (c *TailCheck) Input(lsn outbox.LSN) error {
	if c.Verified() || c.start.Thru == 0 ||
		lsn <= max(c.start.Thru, c.start.Checkpoint.Due) {
		return nil
	}
	newest := "a cut at " + c.start.Thru.String()
	if c.start.Newest != nil {
		newest = c.start.Newest.String()
	}
	return c.divergence("the message at sequence %d of stream %s is %s, and the WAL up to %v makes only %d "+
		"of the %d messages up to it",
		c.start.End, c.cfg.Stream, newest, lsn, c.made, c.start.AlreadyStored)
}

func (c *TailCheck) divergence(what string, args ...any) error {
	return &outbox.Fault{
		Class: outbox.Gap, Code: "divergence", Message: fmt.Sprintf(what, args...),
		Hint: c.cfg.hintOf("divergence", c.cfg.hintDivergence()),
		From: c.start.Checkpoint.Start(), To: max(c.start.Thru, c.start.Checkpoint.Due),
	}
}
