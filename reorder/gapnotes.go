package reorder

import (
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
)

// Gap is a gap that is open: what is missing before the oldest event of a sequence, or of a document.
type Gap struct {
	Doc, Actor  string
	Sequence    uint64
	Cold        bool  // nothing is known of what precedes Last+1, and First says nothing
	First, Last int64 // the counters that are missing
	Since       int64 // commit time of the oldest event that waits, as in [relay.Commit]
	Waiting     int   // how many events wait
}

// Reason says why a gap is waited for no longer.
type Reason uint8

// The reasons.
const (
	ByBound    Reason = iota // the bound has passed
	ByCold                   // nothing was known of what precedes it, and cold has passed
	BySize                   // max_events or max_bytes
	BySettings               // a change of settings
	ByCut                    // a cut
	reasons
)

func (r Reason) String() string { return [...]string{"bound", "cold", "size", "settings", "cut"}[r] }

// GivenUp is a gap that is waited for no longer. What is missing may still come: late.
type GivenUp struct {
	Gap    // Since is that of the event behind it, and Waiting says nothing
	Reason Reason
}

// LateEvent is an event at or below the counter that its sequence had reached.
type LateEvent struct {
	Doc, Actor string
	Counter    int64 // the first one that it takes
	Why        Lateness
}

// Lateness says why an event is late, as far as that is known.
type Lateness uint8

// Why events are late.
const (
	Missed Lateness = iota // its counter was missing and was given up lately
	Repeat                 // else: the counter has come before, or was given up long ago
	Reset                  // the same of a first counter: its sequence seems to begin anew
	latenesses
)

// maxNoted is how many gaps, and how many late events, are kept until GivenUp and LateEvents are called.
const maxNoted = 32

// maxMissing is how many of the gaps that were given up last tell a late event from a repeat.
const maxMissing = 256

// notes are what operators are told. Nothing depends on them.
type notes struct {
	list       []GivenUp
	counts     [reasons]uint64
	late       []LateEvent
	lateCounts [latenesses]uint64
	missing    [maxMissing]missing // a ring; next is overwritten next
	next       int
}

// missing are counters of a sequence that were given up: where it was cold, all up to last.
type missing struct {
	sequence    uint64
	cold        bool
	first, last int64
}

// giveUp takes note of a gap before w, the lowest of its hold.
func (n *notes) giveUp(w *waiter, why Reason) {
	n.counts[why]++
	gap := gapBefore(w)
	n.missing[n.next] = missing{gap.Sequence, gap.Cold, gap.First, gap.Last}
	n.next = (n.next + 1) % maxMissing
	if why != ByCold && len(n.list) < maxNoted {
		gap.Doc, gap.Actor = strings.Clone(gap.Doc), strings.Clone(gap.Actor)
		n.list = append(n.list, GivenUp{gap, why})
	}
}

// isLate takes note of a late event; first: it has a first counter.
func (n *notes) isLate(e *relay.Event, first bool) {
	c, why := e.Counter, Repeat
	if first {
		why = Reset
	}
	for i := range n.missing {
		m := &n.missing[i]
		if m.sequence == c.Sequence && c.First <= m.last &&
			(!m.cold && m.first <= c.Last() || m.cold && !first) {
			why = Missed
		}
	}
	n.lateCounts[why]++
	if len(n.late) < maxNoted {
		n.late = append(n.late, LateEvent{strings.Clone(e.Doc), strings.Clone(e.Actor), c.First, why})
	}
}

func gapBefore(w *waiter) Gap {
	return Gap{Doc: w.Doc, Actor: w.Actor, Sequence: w.Counter.Sequence, Cold: w.hold.cold,
		First: w.hold.base + 1, Last: w.Counter.First - 1, Since: w.Time}
}

// GapCounts counts what gap mode has given up and found, since the buffer was made.
type GapCounts struct {
	Bound, Cold, Size, Settings, Cut uint64 // gaps given up, by reason
	// events at or below the counter that their sequence had reached, by why they are late
	Missed, Repeats, Resets uint64
}

// GapCounts returns the counts.
func (b *Buffer) GapCounts() GapCounts {
	if b.gap == nil {
		return GapCounts{}
	}
	n := &b.gap.notes
	return GapCounts{n.counts[ByBound], n.counts[ByCold], n.counts[BySize], n.counts[BySettings],
		n.counts[ByCut], n.lateCounts[Missed], n.lateCounts[Repeat], n.lateCounts[Reset]}
}

// GivenUp returns the gaps that have been given up since it was called last: the first few of them, their
// number is in GapCounts. Cold ones, which are the usual beginning of a sequence that is not remembered, are
// only counted.
func (b *Buffer) GivenUp() []GivenUp {
	if b.gap == nil {
		return nil
	}
	list := b.gap.notes.list
	b.gap.notes.list = nil
	return list
}

// LateEvents returns the late events since it was called last: the first few of them, their number is in
// GapCounts.
func (b *Buffer) LateEvents() []LateEvent {
	if b.gap == nil {
		return nil
	}
	list := b.gap.notes.late
	b.gap.notes.late = nil
	return list
}

// TooManyHolds reports whether more sequences have held events than a checkpoint can list: there is none
// then, so nothing that was read since is confirmed.
func (b *Buffer) TooManyHolds() bool {
	return b.gapMode() && b.gap.holds.live > b.cfg.MaxHolds
}

// OpenGaps returns how many gaps are open: one for each sequence, or document, that waits.
func (b *Buffer) OpenGaps() int {
	switch {
	case !b.gapMode():
		return 0
	case b.set.Gap.Scope == relay.OfDocument:
		return b.gap.groups.live
	}
	return b.gap.holds.live
}

// Gaps returns the oldest open gaps, n at most. It goes through all of them.
func (b *Buffer) Gaps(n int) []Gap {
	if !b.gapMode() || n < 1 {
		return nil
	}
	var list []*group
	see := func(p *group) {
		if p.events.len() == 0 { // of a checkpoint, and not read again yet
			return
		}
		if len(list) == n && p.oldest.Compare(list[n-1].oldest) > 0 { // most of them, where there are many
			return
		}
		at, _ := slices.BinarySearchFunc(list, p, func(p, q *group) int { return p.oldest.Compare(q.oldest) })
		list = slices.Insert(list[:min(len(list), n-1)], at, p)
	}
	if b.set.Gap.Scope == relay.OfDocument {
		b.gap.groups.all(func(p *group) bool { see(p); return true })
	} else {
		b.gap.holds.all(func(h *hold) bool { see(&h.group); return true })
	}
	gaps := make([]Gap, len(list))
	for i, p := range list {
		oldest := p.events.top()
		gaps[i] = gapBefore(oldest.hold.lowest())
		gaps[i].Since, gaps[i].Waiting = oldest.Time, p.events.len()
	}
	return gaps
}

// Deadline returns the commit time at which the first wait ends; false if nothing waits. An input that is
// committed then or later ends it: a heartbeat, where nothing else is written.
func (b *Buffer) Deadline() (time int64, ok bool) {
	if !b.gapMode() {
		return 0, false
	}
	g := b.gap
	if p := g.warm.top(); p != nil {
		time, ok = p.first+g.set.Gap.Bound.Microseconds(), true
	}
	if p := g.cold.top(); p != nil {
		if t := p.first + g.set.Gap.Cold.Microseconds(); !ok || t < time {
			time, ok = t, true
		}
	}
	return time, ok
}
