package consumer

import (
	"cmp"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// The sources that offsets refer to: the live stream, and the replay that is read before it.
const (
	live   = "live"
	replay = "replay"
)

// offset says that a partition is done up to a message of the stream, which need not belong to the partition.
type offset struct {
	Seq uint64          `json:"seq"` // 0: nothing yet
	Due outbox.LSN      `json:"due"` // of that message's header, as are N and Pos; 0: not known
	N   uint32          `json:"n"`   // index in its window; for a repair's event, Pos.Index
	Pos outbox.Position `json:"pos"`

	// The broker has lost that message. What it lost is published again under new sequences.
	Lost bool `json:"holed,omitempty"`
}

// offsetOf is the offset of a partition that is done up to a message.
func offsetOf(seq uint64, h *outbox.Header) offset {
	n := uint32(h.N)
	if h.Pos.Repaired() {
		n = h.Pos.Index
	}
	return offset{Seq: seq, Due: h.Due, N: n, Pos: h.Pos}
}

// known reports whether the message's header is known.
func (m offset) known() bool { return m.Due != 0 || m.Pos.LSN != 0 }

// order compares two messages of the same WAL by the order in which Outflow publishes them: by the due of
// their window, then by their index in it. A repair's events all have the same due, which the window before
// them may share; their indexes ascend, and are above any in a window.
func (m offset) order(o offset) int {
	if c := cmp.Compare(m.Due, o.Due); c != 0 {
		return c
	}
	return cmp.Compare(m.N, o.N)
}

// oldLayout holds the offsets of an earlier number of partitions: an event is done if it is not beyond the
// offset that its document had then. It never changes.
type oldLayout struct {
	Source  string   `json:"source"`
	Offsets []offset `json:"marks"` // by partition
}

// state is what a store holds of a consumer, as a session finds it after taking the lease.
type state struct {
	Filters    []string // sorted
	Partitions int      // 0: the consumer is new
	OldLayouts []oldLayout
	ReplayedTo uint64               // live events at or below this sequence are marked as replayed
	Created    map[string]time.Time // of the streams that the offsets refer to, by source
	Offsets    map[string][]offset  // by source and partition; none if the source was never read
}

// all returns a source's offsets, including those of its old layouts.
func (s *state) all(source string) []*offset {
	var all []*offset
	for i := range s.Offsets[source] {
		all = append(all, &s.Offsets[source][i])
	}
	for i := range s.OldLayouts {
		if s.OldLayouts[i].Source == source {
			for j := range s.OldLayouts[i].Offsets {
				all = append(all, &s.OldLayouts[i].Offsets[j])
			}
		}
	}
	return all
}

// partitionOf is the partition of a document's hash.
func partitionOf(hash uint32, partitions int) int { return int(hash % uint32(partitions)) }

// newest and oldest compare offsets by sequence.
func newest(offsets []offset) offset { return extreme(offsets, 1) }
func oldest(offsets []offset) offset { return extreme(offsets, -1) }

func extreme(offsets []offset, sign int) offset {
	var best offset
	for i, m := range offsets {
		if i == 0 || cmp.Compare(m.Seq, best.Seq) == sign {
			best = m
		}
	}
	return best
}

// repartition returns offsets for another number of partitions. Up to the oldest offset everything is done,
// for all documents. What is done beyond it is in the old offsets, which become an old layout. If the oldest
// offset by sequence is not also the oldest by its header (events are published again under new sequences, or
// the database was moved), the new offsets have only a sequence.
func repartition(source string, offsets []offset, partitions int) ([]offset, oldLayout) {
	at := oldest(offsets)
	for _, m := range offsets {
		if !at.known() || !m.known() || m.order(at) < 0 {
			at = offset{Seq: at.Seq}
		}
	}
	fresh := make([]offset, partitions)
	for i := range fresh {
		fresh[i] = at
	}
	return fresh, oldLayout{Source: source, Offsets: offsets}
}

// obsolete reports whether all offsets are beyond an old layout, so that it can be deleted.
func (g *oldLayout) obsolete(offsets []offset) bool {
	for _, at := range offsets {
		if !at.known() || at.Seq < newest(g.Offsets).Seq {
			return false
		}
		for _, m := range g.Offsets {
			if m.Lost && at.order(m) < 0 {
				return false
			}
		}
	}
	return true
}

// forHash is the old layout's offset for a document.
func (g *oldLayout) forHash(hash uint32) offset { return g.Offsets[partitionOf(hash, len(g.Offsets))] }

// covers reports whether a message is done by this offset. If it may have been published again under a new
// sequence, the header of a lost offset decides.
func (m offset) covers(o offset, republished bool) bool {
	return o.Seq <= m.Seq || republished && m.Lost && o.order(m) <= 0
}
