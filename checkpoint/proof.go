package checkpoint

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Proof counts the first messages of a session, those that are in the stream already, and compares the last of them with what
// the stream holds. Until it is proved a session sends, records and confirms nothing. Not safe for concurrent use.
type TailCheck struct {
	cfg    Config
	start  Start
	made   uint64
	seq    uint64         // of the message that was made last
	stored []relay.Stored // what is left to compare, ascending
}

// NewProof returns the proof that a session from start needs.
func NewTailCheck(cfg Config, start Start) *TailCheck {
	return &TailCheck{cfg: cfg, start: start, seq: start.Checkpoint.Seq}
}

// Compares returns which messages of the stream can be compared: those above one sequence, up to another.
func (p *TailCheck) Compares() (above, upTo uint64) {
	return min(max(p.start.Checkpoint.Seq, p.start.Accepted), p.start.End), p.start.End
}

// Stored takes messages of that range, ascending, at best all that can have been in flight when the last session ended: a stranger's may
// have taken a sequence, and what was behind ours that was refused for it may have come in after him, so that the stream's end looks
// right. The error is a gap fault with code foreign_message: one of them is not ours. Call it before the first message is made.
func (p *TailCheck) Stored(all []relay.Stored) error {
	for _, m := range all {
		if m.Header == nil {
			return &outbox.Fault{
				Class: outbox.Gap, Code: "foreign_message", Observed: true, From: p.start.Checkpoint.Due, To: max(p.start.Thru, p.start.Checkpoint.Due),
				Message: fmt.Sprintf("the message at sequence %d of stream %s has no %s header: one of ours may have been refused for it and be missing",
					m.Seq, p.cfg.Stream, outbox.HeaderName),
				Hint: p.cfg.cureOf("foreign_message", p.cfg.cureForeign()),
			}
		}
	}
	if p.start.Newest != nil { // else the WAL may be another one, and nothing is compared
		p.stored = all
	}
	return nil
}

// Proved reports whether all messages that are there were made, and those that were compared agreed.
func (p *TailCheck) Verified() bool { return p.made >= p.start.AlreadyStored }

// Skip counts a message. skip says that it is in the stream already and must not be sent. The error is a gap fault with code
// divergence: the stream holds another message.
func (p *TailCheck) Skip(h *outbox.Header) (skip bool, err error) {
	if p.Verified() {
		return false, nil
	}
	p.made++
	for p.seq++; within(p.start.Holes, p.seq); p.seq++ {
	}
	var want *outbox.Header
	for len(p.stored) > 0 && p.stored[0].Seq <= p.seq {
		if p.stored[0].Seq == p.seq {
			want = p.stored[0].Header
		}
		p.stored = p.stored[1:]
	}
	if p.Verified() && p.start.Newest != nil {
		want = p.start.Newest
	}
	if want != nil && !h.Same(want) {
		p.made--
		return true, p.divergence("the message at sequence %d of stream %s is %v, the WAL makes %v", p.seq, p.cfg.Stream, want, h)
	}
	return true, nil
}

// Input is called with the LSN of each input before the buffer reads it, and with that of each keepalive's marker (a WAL that is
// silent would never show it otherwise). One beyond the input that closed the newest message's window, when that message was not
// made yet, is a divergence.
func (p *TailCheck) Input(lsn outbox.LSN) error {
	if p.Verified() || p.start.Thru == 0 || lsn <= p.start.Thru {
		return nil
	}
	return p.divergence("the message at sequence %d of stream %s is %v, and the WAL up to %v makes only %d of the %d messages up to it",
		p.start.End, p.cfg.Stream, p.start.Newest, lsn, p.made, p.start.AlreadyStored)
}

func (p *TailCheck) divergence(what string, args ...any) error {
	return &outbox.Fault{
		Class: outbox.Gap, Code: "divergence", Message: fmt.Sprintf(what, args...), Hint: p.cfg.cureOf("divergence", p.cfg.cureDivergence()),
		From: p.start.Checkpoint.Due, To: max(p.start.Thru, p.start.Checkpoint.Due),
	}
}
