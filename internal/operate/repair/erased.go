package repair

import (
	"fmt"
	"strings"

	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/outbox"
)

// erasures returns the fault of a plan that may publish what is erased: rows would be published while an
// erasure has not finished, which could not tell them from what was written before its cut; or the stream has
// erased messages that the database knows nothing of, so their rows may be in it again. It is nil if the plan
// publishes no rows.
func (r *repair) erasures(f *finding, p *plan) *outbox.Fault {
	if p.scan == nil || p.scan.counts[missing] == 0 {
		return nil
	}
	of := p.scan.requests
	if open := erasure.Unfinished(of, r.cfg.Slot); len(open) > 0 {
		return &outbox.Fault{Class: outbox.Gap, Code: "erase_unfinished",
			Message: fmt.Sprintf("%d rows would be published, and an erasure has not finished (request %s)",
				p.scan.counts[missing], strings.Join(open, ", "))}
	}
	unknown := erasure.Unknown(of, r.cfg.Slot, r.cfg.Stream, f.Stream.Erased)
	if n := unknown.Count(); n > 0 {
		return &outbox.Fault{Class: outbox.Gap, Code: "erase_forgotten",
			Message: fmt.Sprintf("%d messages were erased from stream %s, from %d to %d, by requests that "+
				"the database does not know: it is from before them, and may have their rows again among "+
				"the %d that would be published", n, r.cfg.Stream, unknown[0].From,
				unknown[len(unknown)-1].To, p.scan.counts[missing])}
	}
	return nil
}
