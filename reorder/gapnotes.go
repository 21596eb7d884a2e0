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
	reasons
)

func (r Reason) String() string { return [...]string{"bound", "cold", "size", "settings"}[r] }

// GivenUp is a gap that is waited for no longer. What is missing may still come: late.
type GivenUp struct {
	Gap    // Since is that of the event behind it, and Waiting says nothing
	Reason Reason
}

// maxGivenUp is how many gaps are kept until GivenUp is called.
const maxGivenUp = 32

// notes are what operators are told. Nothing depends on them.
type notes struct {
	list   []GivenUp
	counts [reasons]uint64
	// late events, and those of them with a first counter
	repeats, resets uint64
}

// giveUp takes note of a gap before w, the lowest of its hold.
func (n *notes) giveUp(w *waiter, why Reason) {
	n.counts[why]++
	if len(n.list) < maxGivenUp {
		gap := gapBefore(w)
		gap.Doc, gap.Actor = strings.Clone(gap.Doc), strings.Clone(gap.Actor)
		n.list = append(n.list, GivenUp{gap, why})
	}
}

// late takes note of a late event; reset: it has a first counter.
func (n *notes) late(reset bool) {
	n.repeats++
	if reset {
		n.resets++
	}
}

func gapBefore(w *waiter) Gap {
	return Gap{Doc: w.Doc, Actor: w.Actor, Sequence: w.Counter.Sequence, Cold: w.hold.cold,
		First: w.hold.base + 1, Last: w.Counter.First - 1, Since: w.Time}
}

// GapCounts counts what gap mode has given up and found, since the buffer was made.
type GapCounts struct {
	Bound, Cold, Size, Settings uint64 // gaps given up, by reason
	Late                        uint64 // events at or below the counter that their sequence had reached
	// of these, those with a first counter: their sequence seems to begin anew
	Resets uint64
}

// GapCounts returns the counts.
func (b *Buffer) GapCounts() GapCounts {
	if b.gap == nil {
		return GapCounts{}
	}
	n := &b.gap.notes
	return GapCounts{n.counts[ByBound], n.counts[ByCold], n.counts[BySize], n.counts[BySettings],
		n.repeats, n.resets}
}

// GivenUp returns the gaps that have been given up since it was called last: the first few of them, their
// number is in GapCounts.
func (b *Buffer) GivenUp() []GivenUp {
	if b.gap == nil {
		return nil
	}
	list := b.gap.notes.list
	b.gap.notes.list = nil
	return list
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
