package repair

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
)

// archived returns the fault of a plan that would fill an empty stream from the table while the archive has
// messages of a stream of that name, or is away: retention has removed rows of theirs, and consumers know
// them by their sequences. It is nil if the record knows the empty stream: that has lost nothing.
func (r *repair) archived(ctx context.Context, f *finding, p *plan) (*outbox.Fault, error) {
	st := f.Stream
	known := st.Exists && f.Record != nil && f.Record.Created.Equal(st.Created)
	if p.mode == modeRecord || st.LastSeq > 0 || known {
		return nil, nil
	}
	has, err := backfill.Archived(ctx, r.cfg, archive.OpenThere)
	if fault := outbox.FaultOf(err); fault != nil && fault.Code == archive.CodeEmpty {
		has, err = fault.Message, nil // what it has is not known
	}
	if has == "" {
		return nil, err
	}
	first := ""
	if st.Exists {
		first = fmt.Sprintf("remove the empty stream with `nats stream rm %s`, ", r.cfg.Stream)
	}
	return refuse("repair_archived", has+": a repair from the table has only the rows that are still there, "+
		"and gives them other sequences than consumers know",
		fmt.Sprintf("Bring them back: %s`outflow archive restore`, then `outflow repair`, which publishes "+
			"what the archive lacks. If the archived messages are not to count, say --archive.url \"\" with "+
			"the command", first)), nil
}
