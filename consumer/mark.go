package consumer

import (
	"cmp"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// The sources that marks count in: the live stream, and the replay that is read before it.
const (
	live   = "live"
	replay = "replay"
)

// mark says that a partition is done up to a message of the stream, whichever partition that message belongs to.
type mark struct {
	Seq uint64          `json:"seq"` // 0: nothing yet
	Due outbox.LSN      `json:"due"` // of that message's header, as N and Pos; 0: it is not known
	N   uint32          `json:"n"`   // its place in its window; a repair's event: its index
	Pos outbox.Position `json:"pos"`

	// Holed: the broker has lost that message, and goes on under new sequences. What it had before comes again there.
	Holed bool `json:"holed,omitempty"`
}

// markOf is the mark behind a message.
func markOf(seq uint64, h *outbox.Header) mark {
	n := uint32(h.N)
	if h.Pos.Repaired() {
		n = h.Pos.Index
	}
	return mark{Seq: seq, Due: h.Due, N: n, Pos: h.Pos}
}

// known reports whether the message's header is known.
func (m mark) known() bool { return m.Due != 0 || m.Pos.LSN != 0 }

// order compares two messages of one stretch of WAL by the order in which Outflow publishes them: by the due of their window, then by
// their place in it. A repair's events all have the same due, which the window before them may have too; their indexes ascend and
// are above every place in a window.
func (m mark) order(o mark) int {
	if c := cmp.Compare(m.Due, o.Due); c != 0 {
		return c
	}
	return cmp.Compare(m.N, o.N)
}

// generation is how far a consumer was when the number of its partitions changed: an event is done if it is not beyond the mark that its
// document had then. It never changes.
type generation struct {
	Source string `json:"source"`
	Marks  []mark `json:"marks"` // by partition
}

// state is what a store holds of a consumer, as a session finds it when it has taken the lease.
type state struct {
	Filter     string
	Partitions int // 0: it is new
	Before     []generation
	ReplayedTo uint64               // live events at or below this sequence are marked as replayed
	Created    map[string]time.Time // of the streams that the marks count in, by source
	Marks      map[string][]mark    // by source and partition; none if the source was never read
}

// all are a source's marks, also those of its generations.
func (s *state) all(source string) []*mark {
	var all []*mark
	for i := range s.Marks[source] {
		all = append(all, &s.Marks[source][i])
	}
	for i := range s.Before {
		if s.Before[i].Source == source {
			for j := range s.Before[i].Marks {
				all = append(all, &s.Before[i].Marks[j])
			}
		}
	}
	return all
}

// partitionOf is the partition of a document's hash.
func partitionOf(hash uint32, partitions int) int { return int(hash % uint32(partitions)) }

// newest and oldest of some marks.
func newest(marks []mark) mark { return extreme(marks, 1) }
func oldest(marks []mark) mark { return extreme(marks, -1) }

func extreme(marks []mark, sign int) mark {
	var best mark
	for i, m := range marks {
		if i == 0 || cmp.Compare(m.Seq, best.Seq) == sign {
			best = m
		}
	}
	return best
}

// repartition makes marks for another number of partitions. Everything up to the oldest mark is done for all documents; what is done
// beyond it, the old marks say, which become a generation. Where the oldest mark by sequence is not the oldest by its header too (events
// come again under new sequences, or the database was moved), the new marks are known by their sequence only.
func repartition(source string, marks []mark, partitions int) ([]mark, generation) {
	at := oldest(marks)
	for _, m := range marks {
		if !at.known() || !m.known() || m.order(at) < 0 {
			at = mark{Seq: at.Seq}
		}
	}
	fresh := make([]mark, partitions)
	for i := range fresh {
		fresh[i] = at
	}
	return fresh, generation{Source: source, Marks: marks}
}

// passed reports whether all marks are beyond a generation, so that it says nothing any more.
func (g *generation) passed(marks []mark) bool {
	for _, at := range marks {
		if !at.known() || at.Seq < newest(g.Marks).Seq {
			return false
		}
		for _, m := range g.Marks {
			if m.Holed && at.order(m) < 0 {
				return false
			}
		}
	}
	return true
}

// of is the generation's mark for a document.
func (g *generation) of(hash uint32) mark { return g.Marks[partitionOf(hash, len(g.Marks))] }

// has reports whether the mark has a message behind it. again says that the message may be one that comes again under a new sequence:
// then its header tells.
func (m mark) has(o mark, again bool) bool {
	return o.Seq <= m.Seq || again && m.Holed && o.order(m) <= 0
}
