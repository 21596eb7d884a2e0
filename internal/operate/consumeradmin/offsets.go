package consumeradmin

import (
	"cmp"
	"slices"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// offset is how far a partition is, as package consumer stores it.
type offset struct {
	Seq uint64          `json:"seq"`
	Due outbox.LSN      `json:"due"`
	N   uint32          `json:"n"`
	Pos outbox.Position `json:"pos"`

	// the broker has lost that message, and what it lost is published again under new sequences
	Lost bool `json:"holed,omitempty"`
}

// live is the source of the offsets in the stream itself.
const live = "live"

// state is the stored state of a consumer of package consumer.
type state struct {
	partitions int
	filters    []string
	stream     string
	created    time.Time // of the stream that the offsets are of; zero: not known
	replayedTo uint64
	offsets    []offset // live, by partition; none: it has read nothing yet

	// in a database
	keying  string
	change  *Change
	owners  []string // of each partition; "": nobody, or one that does not run
	members []Member

	owner string // in a bucket: who has the lease; "": nobody
}

// Member is an instance of a consumer that shares its partitions. The JSON names are stable.
type Member struct {
	Instance   string    `json:"instance"`
	Joined     time.Time `json:"joined"`
	Expires    time.Time `json:"expires"` // it renews that for as long as it runs
	Alive      bool      `json:"alive"`   // that is not over yet
	Partitions []int     `json:"partitions"`
}

// Change is a change of the layout, the number of partitions or how a document is found, that is under way.
// The JSON names are stable.
type Change struct {
	Partitions int    `json:"partitions"`
	Keying     string `json:"keying"`
	Barrier    uint64 `json:"barrier"` // it happens when all partitions are done up to this sequence
	Reached    int    `json:"reached"` // how many are
}

// furthest is the newest offset of any partition.
func (s *state) furthest() (most uint64) {
	for _, m := range s.offsets {
		most = max(most, m.Seq)
	}
	return most
}

func (s *state) lowest() offset {
	if len(s.offsets) == 0 {
		return offset{}
	}
	return slices.MinFunc(s.offsets, func(a, b offset) int { return cmp.Compare(a.Seq, b.Seq) })
}

// holed lists the partitions whose message the broker has lost.
func (s *state) holed() (all []int) {
	for p, m := range s.offsets {
		if m.Lost {
			all = append(all, p)
		}
	}
	return all
}

// unowned lists the partitions that nobody works on.
func (s *state) unowned() (all []int) {
	for p, owner := range s.owners {
		if owner == "" {
			all = append(all, p)
		}
	}
	return all
}

// alive lists the instances that run.
func (s *state) alive() (all []string) {
	for _, m := range s.members {
		if m.Alive {
			all = append(all, m.Instance)
		}
	}
	return all
}

// changeTo is a change of the layout that is to happen at a barrier.
func (s *state) changeTo(partitions int, keying string, barrier uint64) *Change {
	c := &Change{Partitions: partitions, Keying: keying, Barrier: barrier}
	for _, m := range s.offsets {
		if m.Seq >= barrier && !m.Lost {
			c.Reached++
		}
	}
	return c
}
