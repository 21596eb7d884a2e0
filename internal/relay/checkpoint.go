package relay

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"github.com/outflowhq/outflow/outbox"
)

// MaxPublishedAhead is how many events beyond its due a checkpoint may list; a window that would leave more
// takes everything held.
const MaxPublishedAhead = 512

// MaxHolds is how many sequences with held events a checkpoint of gap mode may list. While there are more,
// windows end without a checkpoint.
const MaxHolds = 512

// Checkpoint is a point to go on from: all windows up to stream sequence Seq are complete and acknowledged,
// and replication may start at Start.
type Checkpoint struct {
	// In gap mode inputs at or below it were read, and of their events only those of Holds are not published.
	Due outbox.LSN `json:"due"`
	// sequence in the stream; 0: nothing is published yet
	Seq uint64 `json:"seq"`
	// events beyond Due that are in the stream already, ascending, MaxPublishedAhead at most
	PublishedAhead []outbox.Position `json:"taken,omitempty"`
	Settings       Settings          `json:"settings"` // the settings in force at Due
	Timeline       uint32            `json:"timeline"` // the timeline that Due lies on

	// Holds are the sequences that have events at or below Due that are not published yet: gap mode's. In
	// ascending order of Oldest, MaxHolds at most.
	Holds []Hold `json:"holds,omitempty"`
	// From is where the commit record of the oldest held event starts (its [Commit.Start]); 0 without Holds.
	// PostgreSQL skips a transaction whose commit record starts before the LSN that is confirmed or asked
	// for, so neither may lie beyond From. The record's end, which positions have, is beyond it.
	From outbox.LSN `json:"from,omitempty"`
	// Remembered is how many of the newest messages up to Seq gap mode remembers, at most
	// Settings.Gap.Memory. It is less for a while after gap mode came into force, or Memory was raised.
	Remembered int `json:"remembered,omitempty"`
	// Read is set where a home's rows are read on another server: there replication has to start, in that
	// server's WAL, to bring all of the home's inputs above [Checkpoint.Published]. All else is the home's.
	Read outbox.LSN `json:"read,omitempty"`
	// Tally counts the home's events up to Due, where there is a control table; zero where that is not known:
	// before the first watermark was read, and at a checkpoint of an older outflow.
	Tally Tally `json:"tally,omitzero"`
	// Home is what the home has said to be confirmed, where its rows are read on another server; zero where
	// it has said nothing.
	Home Confirmed `json:"home,omitzero"`
	// Said is the newest watermark that was known, where there is a control table; zero where none was.
	Said Said `json:"said,omitzero"`
}

// Published is up to where all inputs are published, and need not be read again: before the oldest held
// event's commit record, or Due. It never goes back from a checkpoint to a newer one.
func (p Checkpoint) Published() outbox.LSN {
	if len(p.Holds) == 0 {
		return p.Due
	}
	return p.From
}

// Start is where replication has to start, in the WAL that is read. It never goes back either.
func (p Checkpoint) Start() outbox.LSN {
	if p.Read != 0 {
		return p.Read
	}
	return p.Published()
}

// At is up to where the WAL was read for this checkpoint, to compare it with the server's end of WAL. Where a
// home's rows are read on another server and events are held, it was read further.
func (p Checkpoint) At() outbox.LSN {
	if p.Read != 0 {
		return p.Read
	}
	return p.Due
}

// Hold is a sequence of which a checkpoint holds events back. These are the sequence's events from Oldest to
// the checkpoint's due whose last counter is above Base; all of them where it is cold.
type Hold struct {
	Sequence uint64 // see [outbox.SequenceOf]
	Cold     bool   // nothing is known of what precedes them, and Base says nothing
	Base     int64  // the greatest counter of the sequence that was released
	Oldest   outbox.Position
	// Sum is that of HeldSum over the events, modulo 2^64. Where one of them does not come again, or comes
	// with another counter, it is another one.
	Sum uint64
}

// HeldSum is what a held event adds to its [Hold.Sum]. What tells documents and actors apart is the hold's
// sequence.
func HeldSum(pos outbox.Position, c outbox.Counter) uint64 {
	var b [24]byte
	binary.BigEndian.PutUint64(b[:], uint64(pos.LSN))
	binary.BigEndian.PutUint32(b[8:], pos.Index)
	binary.BigEndian.PutUint32(b[12:], c.Span)
	binary.BigEndian.PutUint64(b[16:], uint64(c.First))
	sum := sha256.Sum256(b[:])
	return binary.BigEndian.Uint64(sum[:])
}

// MarshalText writes "<sequence> <base> <position> <sum>", with a dash for the base of a cold one.
func (h Hold) MarshalText() ([]byte, error) {
	b := append(outbox.AppendSequence(nil, h.Sequence), ' ')
	if h.Cold {
		b = append(b, '-')
	} else {
		b = strconv.AppendInt(b, h.Base, 10)
	}
	b = append(h.Oldest.Append(append(b, ' ')), ' ')
	return outbox.AppendSequence(b, h.Sum), nil
}

// UnmarshalText reads what MarshalText writes.
func (h *Hold) UnmarshalText(b []byte) (err error) {
	parts := strings.Split(string(b), " ")
	if len(parts) != 4 {
		return fmt.Errorf("hold %q: want sequence, base, position and sum", b)
	}
	*h = Hold{Cold: parts[1] == "-"}
	if h.Sequence, err = outbox.ParseSequence(parts[0]); err != nil {
		return fmt.Errorf("hold %q: %w", b, err)
	}
	if !h.Cold {
		if h.Base, err = strconv.ParseInt(parts[1], 10, 64); err != nil {
			return fmt.Errorf("hold %q: base: %w", b, err)
		}
	}
	if err := h.Oldest.UnmarshalText([]byte(parts[2])); err != nil {
		return fmt.Errorf("hold %q: %w", b, err)
	}
	if h.Sum, err = outbox.ParseSequence(parts[3]); err != nil {
		return fmt.Errorf("hold %q: sum: %w", b, err)
	}
	return nil
}

// Same reports whether two checkpoints are the same point.
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
