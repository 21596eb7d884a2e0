package archive

import (
	"slices"

	"github.com/outflowhq/outflow/outbox"
)

// Reach is how far an archive has come, by the WAL of one server.
type Reach struct {
	Last uint64 // the newest sequence; 0: nothing is archived
	// Complete: the messages of all events below it are archived, or were lost by a gap that was accepted.
	Complete outbox.LSN
	Whole    outbox.LSN // at or below Complete: no accepted gap is among them
}

// Reach returns how far the archive has come. An LSN counts where valid says that it lies in the history of
// the server: another cluster, or a timeline that was left before, has other events below the same LSN.
func (a *Archive) Reach(valid func(system string, timeline uint32, lsn outbox.LSN) bool) (r Reach) {
	r.Last = a.Next() - 1
	whole := true
	for _, m := range a.Segments {
		whole = whole && len(m.Gaps) == 0
		if m.Complete == 0 || !valid(m.System, m.Timeline, m.Complete) {
			continue
		}
		r.Complete = max(r.Complete, m.Complete)
		if whole {
			r.Whole = r.Complete
		}
	}
	return r
}

// Gaps are the sequences whose messages were lost before they could be archived, which was accepted.
func (a *Archive) Gaps() (all outbox.Sequences) {
	for _, m := range a.Segments {
		all = append(all, m.Gaps...)
	}
	return outbox.Sequences(nil).With(all...)
}

// WasErased are the sequences whose messages were erased.
func (a *Archive) WasErased() (all outbox.Sequences) {
	for _, m := range a.Segments {
		all = append(all, m.Erased...)
	}
	return outbox.Sequences(nil).With(all...)
}

// HasGaps reports whether messages were lost before they could be archived, and that was accepted.
func (a *Archive) HasGaps() bool {
	return slices.ContainsFunc(a.Segments, func(m *Manifest) bool { return len(m.Gaps) > 0 })
}
