package repair

import (
	"context"
	"fmt"

	catalogue "github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// lossWords are what an operator has to write to accept that events which are in no table may be lost.
const lossWords = "message events"

// lossOf says what a plan loses because no table has it; "" if nothing.
func (r *repair) lossOf(p *plan) string {
	if p.mode == modeRecord {
		return ""
	}
	switch r.cfg.Source {
	case relay.FromMessage:
		return "source is message: there is no table to publish from. Events of the range that are neither " +
			"in the stream nor still to come from the slot are lost; " +
			"nobody can say which. If the services that wrote them can, let them write them again"
	case relay.FromBoth:
		return "source is both: events of the range that were written as messages are in no table. Those " +
			"that are neither in the stream nor still to come from the slot are lost; nobody can say " +
			"which. If the services that wrote them can, let them write them again"
	}
	return ""
}

// checkLoss refuses a plan that loses events, unless the operator has accepted that in words.
func (r *repair) checkLoss(p *plan) error {
	loss := r.lossOf(p)
	if loss == "" || r.o.AcceptLoss == lossWords {
		return nil
	}
	said := ""
	if r.o.AcceptLoss != "" {
		said = fmt.Sprintf("; --accept-loss says %q", r.o.AcceptLoss)
	}
	return &outbox.Fault{
		Class: outbox.Usage, Code: "accept_loss", Message: loss + said,
		Hint: fmt.Sprintf("Nothing was changed. If that is accepted, say so in these words: --accept-loss %s",
			catalogue.Word(lossWords)),
	}
}

// checkLossFirst does so before anything is changed.
func (r *repair) checkLossFirst(ctx context.Context, f *finding) error {
	if !r.cfg.Source.Messages() || r.o.AcceptLoss == lossWords || r.checkAccepted(f) != nil {
		return nil // execute says so if the fault isn't accepted at all
	}
	l, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer l.Close()
	p, err := r.plan(ctx, l, f)
	if err != nil {
		return err
	}
	defer p.close()
	return r.checkLoss(p)
}
