package reorder

import (
	"cmp"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// gap is the state of gap mode, and its rule. It holds events of sequences in which something is missing, and
// hands out the others as they come, in Buffer.order or into a spool.
type gap struct {
	b      *Buffer
	set    relay.Settings // in force; read by the rule
	memory *memory
	holds  table[*hold]
	groups table[*group] // documents with held events, with scope document
	free   []*hold

	all heap[*waiter] // held events, by position
	// Groups, each in one of them: by the lowest time of their events, where their oldest event's sequence is
	// cold and where it is not; and by their oldest event, those that have waited long enough.
	cold, warm, overdue *heap[*group]

	fresh []*waiter  // held since the last close, with bytes that are not their own yet
	late  []*waiter  // scratch
	going *group     // the one that goes on
	now   int64      // time of the last input
	start outbox.LSN // of its commit record
	// the name of the sequence that came last, while an input is read
	named      bool
	doc, actor string
	name       uint64
	sorted     bool // the transaction was sorted
	kept       bool // last is its base
	last       int64

	out   tally   // what this input releases
	spool *sorter // where it goes, if it may not fit in memory
	// all inputs up to the due of the checkpoint that was started from were read again, and brought what it
	// holds
	whole bool

	holding []relay.Hold // of the last checkpoint; never written to
	same    bool         // nothing has changed since
	notes   notes
}

func newGap(b *Buffer, cfg *Config) *gap {
	g := &gap{b: b, set: cfg.Settings, memory: recall(cfg.Settings.Gap.Memory, cfg.Remembered, cfg.Recent)}
	g.holds = newTable(func(h *hold) uint64 { return h.sequence })
	g.groups = newTable(func(p *group) uint64 { return p.key })
	g.all = newHeap(inAll, beforeByPosition)
	g.cold, g.warm, g.overdue = newGroups(beforeByFirst), newGroups(beforeByFirst), newGroups(beforeByOldest)
	g.whole = len(cfg.Holds) == 0
	for _, from := range cfg.Holds {
		h := newHold(from.Sequence)
		h.cold, h.base, h.from, h.fromSum = from.Cold, from.Base, from.Oldest, from.Sum
		g.holds.put(h)
	}
	return g
}

// take is the rule for an event: it is released, or held and what follows then released. The slot keeps what
// is released until the window is read; a held event leaves it.
func (g *gap) take(s *slot) {
	c := &s.Counter
	if *c = relay.Countable(*c); c.Span == 0 {
		g.release(s, false)
		return
	}
	c.Sequence = g.sequence(&s.Event)
	h := g.holds.find(c.Sequence)
	var base int64
	var known bool
	if h != nil {
		base, known = h.base, !h.cold
	} else if base, known = g.memory.last(c.Sequence); !known && g.kept {
		base, known = g.last, true
	}
	if !known && c.First <= g.set.Gap.First { // nothing precedes the first
		base, known = c.First-1, true
		if h != nil {
			g.know(h, base)
		}
	}
	switch {
	case known && c.Last() <= base:
		g.keep(base)
		g.release(s, true)
	case h == nil && known && c.First <= base+1 && !g.blocked(s): // held, it would go on at once
		g.keep(c.Last())
		g.release(s, false)
	default:
		if h == nil {
			h = g.newHold(c.Sequence)
			h.cold, h.base = !known, base
		}
		w := &waiter{slot: slot{Event: s.Event}, start: g.start, hold: h}
		*s = slot{}
		g.hold(w)
		g.goOn(w.group)
	}
}

// sequence names an event's sequence. Often it is that of the event before.
func (g *gap) sequence(e *relay.Event) uint64 {
	if !g.named || e.Doc != g.doc || e.Actor != g.actor {
		g.named, g.doc, g.actor, g.name = true, e.Doc, e.Actor, g.b.tune.sequence(e.Doc, e.Actor)
		g.kept = false
	}
	return g.name
}

// keep takes note of the base of the sequence that came last. In a transaction that was sorted it must not be
// forgotten while its events come: what was released of it may lie beyond an event that comes only now.
func (g *gap) keep(base int64) {
	g.kept, g.last = g.sorted, base
}

// blocked reports whether events of the document are held, where they matter.
func (g *gap) blocked(s *slot) bool {
	return g.set.Gap.Scope == relay.OfDocument && g.groups.find(outbox.SequenceOf(s.Doc, "")) != nil
}

// hold puts an event into everything that it is found by. The caller lets its group go on, or settles it.
func (g *gap) hold(w *waiter) {
	h := w.hold
	if w.Counter.Span == 1 {
		h.ones.push(w)
	} else {
		h.spans.push(w)
		h.lasts.push(w)
	}
	h.events.push(w)
	w.group = &h.group
	if g.set.Gap.Scope == relay.OfDocument {
		key := outbox.SequenceOf(w.Doc, "")
		if w.group = g.groups.find(key); w.group == nil {
			w.group = newGroup(key, inGroup)
			g.groups.put(w.group)
		}
		w.group.events.push(w)
	}
	w.group.times.push(w)
	g.all.push(w)
	g.b.held.add(tallyOfWaiter(&w.Event))
	g.fresh = append(g.fresh, w)
	g.same = false
}

// settle puts a group where its wait belongs, after it has changed.
func (g *gap) settle(p *group) {
	if p.in != nil {
		p.in.remove(p)
		p.in = nil
	}
	oldest := p.events.top()
	if oldest == nil {
		return
	}
	p.oldest, p.first, p.in = oldest.Pos, p.times.top().Time, g.warm
	if oldest.hold.cold {
		p.in = g.cold
	}
	p.in.push(p)
}

// pull takes an event out of everything that it is found by. Its hold and group stay, even if empty: see
// goOn.
func (g *gap) pull(w *waiter) {
	h := w.hold
	if w.Counter.Span == 1 {
		h.ones.remove(w)
	} else {
		h.spans.remove(w)
		h.lasts.remove(w)
	}
	h.events.remove(w)
	h.sum -= w.sum
	if w.group != &h.group {
		w.group.events.remove(w)
	}
	w.group.times.remove(w)
	g.all.remove(w)
	if w.group != &h.group && w.group.events.len() == 0 {
		g.groups.remove(w.group)
	}
	if w.group != g.going { // two documents have sequences of the same name
		g.settle(w.group)
	}
	w.hold, w.group = nil, nil
	g.b.held.sub(tallyOfWaiter(&w.Event))
	g.same = false
}

// goOn releases what a group's oldest event need not wait for any more, until that waits again.
func (g *gap) goOn(p *group) {
	g.going = p
	for p.events.len() > 0 {
		h := p.events.top().hold
		if h.cold {
			break
		}
		w := h.lowest()
		if w.Counter.First > h.base+1 {
			break
		}
		g.pull(w)
		h.base = w.Counter.Last()
		g.release(&w.slot, false)
		g.repeats(h)
		if h.empty() {
			g.drop(h)
		}
	}
	g.going = nil
	g.settle(p)
}

// repeats releases the hold's events that are not above its base any more.
func (g *gap) repeats(h *hold) {
	for w := h.ones.top(); w != nil && w.Counter.First <= h.base; w = h.ones.top() {
		g.pull(w)
		g.late = append(g.late, w)
	}
	for w := h.lasts.top(); w != nil && w.Counter.Last() <= h.base; w = h.lasts.top() {
		g.pull(w)
		g.late = append(g.late, w)
	}
	if len(g.late) == 0 {
		return
	}
	slices.SortFunc(g.late, compareByCounter)
	for i, w := range g.late {
		g.release(&w.slot, true)
		g.late[i] = nil
	}
	g.late = g.late[:0]
}

func (g *gap) newHold(sequence uint64) (h *hold) {
	if last := len(g.free) - 1; last >= 0 {
		h, g.free[last] = g.free[last], nil
		g.free = g.free[:last]
		h.sequence, h.key = sequence, sequence
	} else {
		h = newHold(sequence)
	}
	g.holds.put(h)
	return h
}

// drop takes out a hold without events.
func (g *gap) drop(h *hold) {
	if g.named && h.sequence == g.name {
		g.keep(h.base)
	}
	g.holds.remove(h)
	if len(g.free) < maxFree && cap(h.events.items) <= reach {
		g.free = append(g.free, h)
	}
}

// know says what precedes a cold hold's events.
func (g *gap) know(h *hold, base int64) {
	h.cold, h.base = false, base
	g.same = false
	for _, w := range h.events.items {
		if w.group.events.top() == w {
			g.settle(w.group)
		}
	}
}

// giveUp waits no longer for what is missing before a group's oldest event.
func (g *gap) giveUp(p *group, why Reason) {
	h := p.events.top().hold
	w := h.lowest()
	if h.cold && why == ByBound {
		why = ByCold
	}
	g.notes.giveUp(w, why)
	if h.cold {
		g.know(h, w.Counter.First-1)
	} else {
		h.base = w.Counter.First - 1
	}
	g.goOn(p)
}

// stopped asks Config.Stop: there may be as many holds to give up as the limits allow, at one input.
func (g *gap) stopped() bool {
	if stop := g.b.cfg.Stop; stop != nil {
		_ = g.b.fail(stop())
	}
	return g.b.err != nil
}

// expire gives up what has been waited for long enough, the oldest first.
func (g *gap) expire() {
	for !g.stopped() {
		g.ripe(g.cold, g.now-g.set.Gap.Cold.Microseconds())
		g.ripe(g.warm, g.now-g.set.Gap.Bound.Microseconds())
		p := g.overdue.top()
		if p == nil {
			return
		}
		g.giveUp(p, ByBound)
	}
}

// ripe moves the groups that hold an event whose time is at or below the limit to those that are overdue.
func (g *gap) ripe(groups *heap[*group], limit int64) {
	for p := groups.top(); p != nil && p.first <= limit; p = groups.top() {
		groups.remove(p)
		p.in = g.overdue
		g.overdue.push(p)
	}
}

// shrink gives up what is too much, the oldest first.
func (g *gap) shrink() {
	for (g.b.held.events > g.set.MaxEvents || g.b.held.bytes > g.set.MaxBytes) && !g.stopped() {
		g.giveUp(g.all.top().group, BySize)
	}
}

// end gives up everything.
func (g *gap) end(why Reason) {
	for w := g.all.top(); w != nil && !g.stopped(); w = g.all.top() {
		g.giveUp(w.group, why)
	}
}

// release hands out an event.
func (g *gap) release(s *slot, late bool) {
	s.Counter.Late = late
	if late {
		g.b.late.count++
		g.notes.isLate(&s.Event, s.Counter.First <= g.set.Gap.First)
	}
	g.memory.add(s.Counter)
	g.out.add(tallyOf(&s.Event))
	if g.spool == nil {
		g.b.order = append(g.b.order, s)
		return
	}
	if g.b.err == nil { // else the close fails as soon as the rule is through with the event in hand
		_ = g.b.fail(g.spool.add(&s.Event, outbox.Position{LSN: outbox.LSN(g.out.events)}))
	}
	*s = slot{}
}

// byCounter is the order in which the events of a transaction are read that is larger than what may be held.
func byCounter(a, b *relay.Event) int {
	if c := strings.Compare(a.Doc, b.Doc); c != 0 {
		return c
	}
	if c := strings.Compare(a.Actor, b.Actor); c != 0 {
		return c
	}
	if c := cmp.Compare(min(a.Counter.Span, 1), min(b.Counter.Span, 1)); c != 0 {
		return c
	}
	if c := cmp.Compare(a.Counter.First, b.Counter.First); c != 0 && a.Counter.Span > 0 {
		return c
	}
	return a.Pos.Compare(b.Pos)
}

func itemsByCounter(a, b item) int { return byCounter(a.e, b.e) }
