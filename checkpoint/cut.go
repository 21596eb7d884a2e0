package checkpoint

import (
	"fmt"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The codes of the faults of a cut, which a session finds when it compares the stream with the WAL.
const (
	CodeCutHome  = "cut_home"  // another home's
	CodeCutOrder = "cut_order" // not above the one before it, or not as the record has it
	CodeCutAhead = "cut_ahead" // behind the checkpoint
)

// cuts takes over what the record says of cuts. Where clusters share a stream, each cut that has something
// behind it is in the record, and what the record has is in the stream: it was durable before.
func (v *resolver) cuts() error {
	s, st, rec := &v.start, v.Stream, v.Record
	if rec.Epoch == 0 {
		return nil
	}
	s.Shared, s.Cuts, s.Told = true, rec.Cuts, rec.Confirmed
	refuse := func(what string, args ...any) error {
		return v.gap(CodeCutOrder, v.left(), v.Server.WALEnd, hintCut, what, args...)
	}
	if n := len(rec.Cuts); n > 0 && rec.Cuts[n-1].Seq > s.End {
		return refuse("the checkpoint record has a cut at %v, and stream %s ends at sequence %d",
			rec.Cuts[n-1], v.cfg.Stream, s.End)
	}
	if st.Cut == nil || st.NewestSeq <= rec.Base {
		return nil
	}
	// Where a checkpoint lies at or behind it, whoever made that had it in the record.
	known := s.Checkpoints != nil && s.Checkpoints[len(s.Checkpoints)-1].Seq >= st.NewestSeq
	if n := len(rec.Cuts); n > 0 && rec.Cuts[n-1].Seq == st.NewestSeq {
		if known = true; rec.Cuts[n-1].LSN != st.Cut.LSN {
			return refuse("sequence %d of stream %s is a cut at %v, the checkpoint record has one at %v",
				st.NewestSeq, v.cfg.Stream, st.Cut.LSN, rec.Cuts[n-1])
		}
	}
	if !known {
		s.NewCut = &relay.Stored{Seq: st.NewestSeq, Cut: st.Cut}
	}
	return nil
}

// checkCuts refuses a start with a cut behind its checkpoint that it can't carry out: a gap fault with one of
// the codes above. A cut ends a window that the WAL alone does not end there. Where the record has it, what
// follows it can be made again; otherwise not, whether the stream is one that clusters share or no record
// could have it. A cut at or below the checkpoint is done with.
func (c *TailCheck) checkCuts(all []relay.Stored) error {
	var first, earlier *relay.Stored
	for i := range all {
		m := &all[i]
		switch {
		case m.Cut == nil:
			continue
		case c.start.SystemID != "" && !m.Cut.Of(c.start.SystemID):
			return c.cutFault(CodeCutHome, c.cfg.cutOfAnotherHome(m.Seq, m.Cut, c.start.SystemID))
		case earlier != nil && m.Cut.GoesBack(earlier.Cut):
			return c.cutFault(CodeCutOrder, fmt.Sprintf("sequence %d of stream %s is a cut at %v, and "+
				"sequence %d before it is one at %v", m.Seq, c.cfg.Stream, m.Cut.LSN,
				earlier.Seq, earlier.Cut.LSN))
		}
		earlier = m
		if recorded := slices.Contains(c.start.Cuts, StoredCut{m.Cut.LSN, m.Seq}); !recorded && first == nil {
			first = m
		}
	}
	if first == nil {
		return nil
	}
	if c.start.Shared {
		return c.cutFault(CodeCutOrder, fmt.Sprintf("sequence %d of stream %s is a cut at %v, which cluster "+
			"%d has written and the checkpoint record does not have: nobody may publish behind such a one",
			first.Seq, c.cfg.Stream, first.Cut.LSN, first.Cut.Owner))
	}
	return c.cutFault(CodeCutAhead, fmt.Sprintf("sequence %d of stream %s, behind the checkpoint at %d, "+
		"is a cut at %v, which cluster %d has written: this Outflow does not go on behind a cut", first.Seq,
		c.cfg.Stream, c.start.Checkpoint.Seq, first.Cut.LSN, first.Cut.Owner))
}

func (c *TailCheck) cutFault(code, message string) error {
	return &outbox.Fault{Class: outbox.Gap, Code: code, Message: message, Hint: c.cfg.hintOf(code, hintCut),
		From: c.start.Checkpoint.Start(), To: max(c.start.Thru, c.start.Checkpoint.Due)}
}

// cutOfAnotherHome says that another home's cluster has written a cut into this stream.
func (c Config) cutOfAnotherHome(seq uint64, cut *outbox.Cut, systemID string) string {
	return fmt.Sprintf("sequence %d of stream %s is a cut of the home with system identifier %d, not of %s: "+
		"cluster %d has written it into another home's stream", seq, c.Stream, cut.SystemID, systemID,
		cut.Owner)
}

const hintCut = "First stop what writes cuts into this stream: no other cluster may go on with it meanwhile"
