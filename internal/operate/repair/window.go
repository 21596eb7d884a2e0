package repair

import (
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// makeWindow makes the window that the missing rows are published as.
func (r *repair) makeWindow(l *backfill.Conns, s *scan, end uint64) *backfill.Window {
	of := s.counts[missing]
	return &backfill.Window{
		Conns: l, Snapshot: s.snap,
		Query: tablesnapshot.Query{Mapping: l.Layout.Mapping, ID: l.Layout.ID, Where: r.o.Where,
			Only: s.listed, Sorted: true},
		Of: of, Checkpoint: s.anchor, End: end, Index: s.freeIndex(),
		Wanted: func(e *relay.Event) bool {
			f, ok := s.outcomes[hashID(string(outbox.AppendHeaderValue(nil, e.ID)))]
			return ok && f == missing
		},
		Sent: r.o.sent,
	}
}
