package consumer

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// The sources that offsets refer to: the live stream, and the replay that is read before it.
const (
	live   = "live"
	replay = "replay"
)

// offset says that a partition is done up to a message of the stream, which need not belong to the partition.
// If that is a cut, Due, N and Pos are those of the newest event before it.
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

// layout says how documents are divided into partitions.
type layout struct {
	Keying     string `json:"keying,omitempty"` // how the document of a message is found: Config.keying
	Partitions int    `json:"partitions"`       // 0: the consumer is new
}

// offsets are those of the partitions that an instance has.
type offsets map[int]offset

// list returns them by partition.
func (o offsets) list() []offset {
	all := make([]offset, 0, len(o))
	for _, p := range o.partitions() {
		all = append(all, o[p])
	}
	return all
}

// partitions returns them in ascending order.
func (o offsets) partitions() []int { return slices.Sorted(maps.Keys(o)) }

// state is what a store holds of a consumer, as a session finds it when it has claimed its partitions.
type state struct {
	Filters []string // sorted
	Layout  layout
	// Anew: nobody has claimed its partitions since the consumer began, or since this instance has had them.
	Anew bool
	// Wanted is the layout that is to follow; nil: none. Nothing is done beyond Barrier, a sequence of the
	// live stream, until all offsets stand there.
	Wanted     *layout
	Barrier    uint64
	ReplayedTo uint64               // live events at or below this sequence are marked as replayed
	Created    map[string]time.Time // of the streams that the offsets refer to, by source
	// by source, of this instance's partitions; none if the source was never read
	Offsets map[string]offsets
	// Furthest is the newest offset of all partitions in the replay, also of those of other instances.
	Furthest uint64
}

// switchable reports whether all offsets of a layout stand at the barrier, and those of a replay at one
// place.
func switchable(st *state, l layout, barrier uint64) bool {
	for source, all := range st.Offsets {
		at := newest(all.list()).Seq
		if source == live && at != barrier || len(all) != l.Partitions {
			return false
		}
		for _, m := range all {
			if m.Seq != at || m.Lost {
				return false
			}
		}
	}
	return len(st.Offsets[live]) > 0
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

// covers reports whether a message is done by this offset. If it may have been published again under a new
// sequence, the header of a lost offset decides.
func (m offset) covers(o offset, republished bool) bool {
	return o.Seq <= m.Seq || republished && m.Lost && o.order(m) <= 0
}
