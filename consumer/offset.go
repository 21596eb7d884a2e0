package consumer

import (
	"cmp"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// The sources that offsets count in: the live stream, and the replay that is read before it.
const (
	live   = "live"
	replay = "replay"
)

// offset says that a partition is done up to a message of the stream, whichever partition that message
// belongs to.
type offset struct {
	Seq uint64          `json:"seq"` // 0: nothing yet
	Due outbox.LSN      `json:"due"` // of that message's header, as N and Pos; 0: it is not known
	N   uint32          `json:"n"`   // its place in its window; a repair's event: its index
	Pos outbox.Position `json:"pos"`

	// Lost: the broker has lost that message and has gone on. What it lost comes again under new sequences.
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

// order compares two messages of one stretch of WAL by the order in which Outflow publishes them: by the due
// of their window, then by their place in it. A repair's events all have the same due, which the window
// before them may have too; their indexes ascend and are above every place in a window.
func (m offset) order(o offset) int {
	if c := cmp.Compare(m.Due, o.Due); c != 0 {
		return c
	}
	return cmp.Compare(m.N, o.N)
}

// oldLayout is how far a consumer was when the number of its partitions changed: an event is done if it is
// not beyond the offset that its document had then. It never changes.
type oldLayout struct {
	Source  string   `json:"source"`
	Offsets []offset `json:"marks"` // by partition
}

// state is what a store holds of a consumer, as a session finds it when it has taken the lease.
type state struct {
	Filter     string
	Partitions int // 0: it is new
	OldLayouts []oldLayout
	ReplayedTo uint64               // live events at or below this sequence are marked as replayed
	Created    map[string]time.Time // of the streams that the offsets count in, by source
	Offsets    map[string][]offset  // by source and partition; none if the source was never read
}

// all are a source's offsets, also those of its old layouts.
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

// newest and oldest compare offsets by their sequences.
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

// repartition makes offsets for another number of partitions. Everything up to the oldest offset is done for
// all documents. What is done beyond it is in the old offsets, which become an old layout. If the oldest
// offset by sequence is not the oldest by its header as well (events come again under new sequences, or the
// database was moved), only the sequence of the new offsets is known.
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

// obsolete reports whether all offsets are beyond an old layout, so that it can be dropped.
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

// covers reports whether a message is done according to the offset. If it may have been published again under
// a new sequence, the headers of a lost offset tell.
func (m offset) covers(o offset, republished bool) bool {
	return o.Seq <= m.Seq || republished && m.Lost && o.order(m) <= 0
}
