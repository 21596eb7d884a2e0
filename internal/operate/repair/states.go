package repair

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/conns"
)

// forgets reports whether the repair leaves rows of the table out that no slot may have read: what the former
// slot has read must show nothing of them. A repair that goes on with the slot of a killed one may have
// another --where than that had.
func (r *repair) forgets(f *finding, p *plan) bool {
	return r.o.Where != "" && p.scan != nil && p.scan.snap != nil &&
		(p.mode == modeNewSlot || f.code == checkpoint.CodeUnfinished)
}

// checkRights makes sure, before anything is changed, that the tables of states and of erasures can be
// written if they have to be.
func (r *repair) checkRights(ctx context.Context, f *finding, p *plan) error {
	if r.forgets(f, p) {
		p.notes = append(p.notes, fmt.Sprintf("rows of table %s that --where leaves out and that are in no "+
			"message count as never published: retention keeps them until that is accepted", r.cfg.Table))
		if err := conns.States(ctx, r.cfg, f.Server, (*partition.Manager).CheckForget); err != nil {
			return err
		}
	}
	return r.cuts(ctx, f, p.scan, (*erasure.Ledger).CheckLower)
}

// forgetStates lets retention forget what the former slot has shown, while the record says that a repair is
// under way.
func (r *repair) forgetStates(ctx context.Context, f *finding, p *plan) error {
	if !r.forgets(f, p) {
		return nil
	}
	return conns.States(ctx, r.cfg, f.Server, (*partition.Manager).Forget)
}
