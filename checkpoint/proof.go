package checkpoint

import (
	"fmt"

	"github.com/outflowhq/outflow/outbox"
)

// Proof counts the first messages of a session, those that are in the stream already, and compares the last of them with what
// the stream holds. Until it is proved a session sends, records and confirms nothing. Not safe for concurrent use.
type Proof struct {
	cfg   Config
	start Start
	made  uint64
}

// NewProof returns the proof that a session from start needs.
func NewProof(cfg Config, start Start) *Proof { return &Proof{cfg: cfg, start: start} }

// Proved reports whether all messages that are there were made, and the last of them agreed.
func (p *Proof) Proved() bool { return p.made >= p.start.There }

// Skip counts a message. skip says that it is in the stream already and must not be sent. The error is a gap fault with code
// divergence: the stream holds another message.
func (p *Proof) Skip(h *outbox.Header) (skip bool, err error) {
	if p.Proved() {
		return false, nil
	}
	p.made++
	if want := p.start.Newest; p.Proved() && want != nil && !h.Same(want) {
		p.made--
		return true, p.divergence("the message at sequence %d of stream %s is %v, the WAL makes %v", p.start.End, p.cfg.Stream, want, h)
	}
	return true, nil
}

// Input is called with the LSN of each input before the buffer reads it, and with that of each keepalive's marker (a WAL that is
// silent would never show it otherwise). One beyond the input that closed the newest message's window, when that message was not
// made yet, is a divergence.
func (p *Proof) Input(lsn outbox.LSN) error {
	if p.Proved() || p.start.Thru == 0 || lsn <= p.start.Thru {
		return nil
	}
	return p.divergence("the message at sequence %d of stream %s is %v, and the WAL up to %v makes only %d of the %d messages up to it",
		p.start.End, p.cfg.Stream, p.start.Newest, lsn, p.made, p.start.There)
}

func (p *Proof) divergence(what string, args ...any) error {
	return &outbox.Fault{
		Class: outbox.Gap, Code: "divergence", What: fmt.Sprintf(what, args...), Cure: p.cfg.cureOf("divergence", p.cfg.cureDivergence()),
		From: p.start.Place.Due, To: max(p.start.Thru, p.start.Place.Due),
	}
}
