package checkpoint

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The codes of the faults of a cut.
const (
	codeCutHome  = "cut_home"  // another home's
	codeCutOrder = "cut_order" // not above the one before it
	codeCutAhead = "cut_ahead" // behind the checkpoint
)

// checkCuts refuses a start with a cut behind its checkpoint: a gap fault with one of the codes above. A cut
// ends a window that the WAL alone does not end there, and no record says yet where one is. So what follows
// it can't be made again. A cut at or below the checkpoint is done with.
func (c *TailCheck) checkCuts(all []relay.Stored) error {
	var first, earlier *relay.Stored
	for i := range all {
		m := &all[i]
		switch {
		case m.Cut == nil:
			continue
		case c.start.SystemID != "" && !m.Cut.Of(c.start.SystemID):
			return c.cutFault(codeCutHome, c.cfg.cutOfAnotherHome(m.Seq, m.Cut, c.start.SystemID))
		case earlier != nil && m.Cut.GoesBack(earlier.Cut):
			return c.cutFault(codeCutOrder, fmt.Sprintf("sequence %d of stream %s is a cut at %v, and "+
				"sequence %d before it is one at %v", m.Seq, c.cfg.Stream, m.Cut.LSN,
				earlier.Seq, earlier.Cut.LSN))
		}
		if earlier = m; first == nil {
			first = m
		}
	}
	if first == nil {
		return nil
	}
	return c.cutFault(codeCutAhead, fmt.Sprintf("sequence %d of stream %s, behind the checkpoint at %d, "+
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
