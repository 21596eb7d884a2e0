package relay

import "github.com/outflowhq/outflow/outbox"

// MaxPublishedAhead is how many events beyond its due a place may list; a window that would leave more takes
// everything held.
const MaxPublishedAhead = 512

// Checkpoint is a point to go on from: all windows up to stream sequence Seq are complete and acknowledged,
// and replication may start at Due.
type Checkpoint struct {
	Due outbox.LSN `json:"due"`
	// sequence in the stream; 0: nothing is published yet
	Seq uint64 `json:"seq"`
	// events beyond Due that are in the stream already, ascending, MaxPublishedAhead at most
	PublishedAhead []outbox.Position `json:"taken,omitempty"`
	Settings       Settings          `json:"settings"` // the settings in force at Due
	Timeline       uint32            `json:"timeline"` // the timeline that Due lies on
}

// Same reports whether two places are the same point.
func (p Checkpoint) Same(q Checkpoint) bool { return p.Due == q.Due && p.Seq == q.Seq }

// History is a server's timeline history: the timeline it is on and where the earlier ones were left.
type History struct {
	Timeline uint32   // the present one
	Switches []Switch // ascending; timelines that the present one descends from
}

// Switch says up to which LSN a timeline is part of the history.
type Switch struct {
	Timeline uint32
	End      outbox.LSN // the first LSN that is not on it any more; a commit whose end LSN is End lies on it
}

// At returns the timeline that lsn lies on: at or below a switch point, the old one.
func (h History) At(lsn outbox.LSN) uint32 {
	for _, s := range h.Switches {
		if lsn <= s.End {
			return s.Timeline
		}
	}
	return h.Timeline
}

// Left returns the LSN at which the history left timeline tl. left is false where tl is the present timeline;
// known is false where tl is not part of the history at all.
func (h History) Left(tl uint32) (end outbox.LSN, left, known bool) {
	if tl == h.Timeline {
		return 0, false, true
	}
	for _, s := range h.Switches {
		if s.Timeline == tl {
			return s.End, true, true
		}
	}
	return 0, false, false
}
