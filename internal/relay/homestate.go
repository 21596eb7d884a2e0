package relay

import (
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// HomeState is what a home for which others publish has read in cluster rows up to a point of its WAL, as a
// record keeps it: what package internal/claim goes on from.
type HomeState struct {
	At       outbox.LSN `json:"at"`       // all rows up to there were read, and none beyond
	Timeline uint32     `json:"timeline"` // that At lies on

	Hello    uint64 `json:"hello"`              // the newest one; 0: none was read or asked for
	Greeted  bool   `json:"greeted,omitempty"`  // it was read
	Nameless bool   `json:"nameless,omitempty"` // another one is to be said, which had no number yet
	Waits    bool   `json:"waits,omitempty"`    // for echoes of it
	Yielded  bool   `json:"yielded,omitempty"`  // since then a yield was asked for
	Told     bool   `json:"told,omitempty"`     // and read

	Echoes  []uint64   `json:"echoes,omitempty"` // the newest ones, by cluster.id from 1
	From    outbox.LSN `json:"from,omitempty"`   // others publish what is above it
	Claimed outbox.LSN `json:"claimed"`          // and up to there
	Said    outbox.LSN `json:"said"`             // up to there it has said to have published itself

	Signed time.Duration `json:"signed"`        // when the newest sign of life was committed, since 2000
	Gap    bool          `json:"gap,omitempty"` // two were too far apart, and no hello was read since
}

// WaitsFor are the clusters whose echoes the home, which is cluster self, waits for: none where it has
// yielded before its next hello could be said, as it does without NATS.
func (s *HomeState) WaitsFor(self int) (all []int) {
	if s.Yielded && !s.Greeted {
		return nil
	}
	for n, echo := range s.Echoes {
		if s.Waits && n+1 != self && (!s.Greeted || echo != s.Hello) {
			all = append(all, n+1)
		}
	}
	return all
}
