package reorder

import (
	"cmp"
	"math"
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

	// all held events: by position, and by time: of sequences that are cold and of others
	all, cold, warm heap
	fresh           []*waiter // held since the last close, with bytes that are not their own yet
	late            []*waiter // scratch
	overdue         []*group  // scratch: a binary heap by oldest position, which may have moved on since
	now             int64     // time of the last input
	giving          *group    // the one of them that is given up
	moved           bool      // another one has lost events
	// the name of the sequence that came last, while an input is read
	named      bool
	doc, actor string
	name       uint64
	sorted     bool // the transaction was sorted
	kept       bool // last is its base
	last       int64

	out   tally   // what this input releases
	spool *sorter // where it goes, if it may not fit in memory
	// what the checkpoint that was started from holds has been read again: all inputs up to its due
	whole bool

	holding []relay.Hold // of the last checkpoint; never written to
	same    bool         // nothing has changed since
	notes   notes
}

func newGap(b *Buffer, cfg *Config) *gap {
	g := &gap{b: b, set: cfg.Settings, memory: recall(cfg.Settings.Gap.Memory, cfg.Remembered, cfg.Recent)}
	g.holds = newTable(func(h *hold) uint64 { return h.sequence })
	g.groups = newTable(func(p *group) uint64 { return p.key })
	g.all = heap{place: inAll, less: beforeByPosition}
	g.whole = len(cfg.Holds) == 0
	g.cold = heap{place: inTime, less: beforeByTime}
	g.warm = heap{place: inTime, less: beforeByTime}
	for _, from := range cfg.Holds {
		h := newHold(from.Sequence)
		h.cold, h.base, h.from = from.Cold, from.Base, from
		g.holds.put(h)
	}
	return g
}

// take is the rule for an event: it is released, or held and what follows then released. The slot keeps what
// is released until the window is read; a held event leaves it.
func (g *gap) take(s *slot) {
	c := &s.Counter
	if *c = normal(*c); c.Span == 0 {
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
		w := &waiter{slot: slot{Event: s.Event}, hold: h}
		*s = slot{}
		g.hold(w)
		g.goOn(w.group)
	}
}

// sequence names an event's sequence. Often it is that of the event before.
func (g *gap) sequence(e *relay.Event) uint64 {
	if !g.named || e.Doc != g.doc || e.Actor != g.actor {
		g.named, g.doc, g.actor, g.name = true, e.Doc, e.Actor, outbox.SequenceOf(e.Doc, e.Actor)
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

// normal takes a counter away that no rule could count from: the numbers around it do not exist.
func normal(c outbox.Counter) outbox.Counter {
	if c.Span == 0 || c.First == math.MinInt64 || c.First > math.MaxInt64-int64(c.Span)+1 {
		return outbox.Counter{}
	}
	return outbox.Counter{First: c.First, Span: c.Span}
}

// hold puts an event into everything that it is found by.
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
			w.group = newGroup(key)
			g.groups.put(w.group)
		}
		w.group.events.push(w)
	}
	g.all.push(w)
	g.times(h).push(w)
	g.b.held.add(tallyOfWaiter(&w.Event))
	g.fresh = append(g.fresh, w)
	g.same = false
}

// times returns what a hold's events are in by time.
func (g *gap) times(h *hold) *heap {
	if h.cold {
		return &g.cold
	}
	return &g.warm
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
	if w.group != &h.group {
		w.group.events.remove(w)
	}
	g.all.remove(w)
	if w.overdue {
		w.overdue = false
		w.group.overdue--
	} else {
		g.times(h).remove(w)
	}
	if w.group != &h.group && w.group.events.len() == 0 {
		g.groups.remove(w.group)
	}
	g.moved = g.moved || w.group.listed && w.group != g.giving
	w.hold, w.group = nil, nil
	g.b.held.sub(tallyOfWaiter(&w.Event))
	g.same = false
}

// goOn releases what a group's oldest event need not wait for any more, until that waits again.
func (g *gap) goOn(p *group) {
	for p.events.len() > 0 {
		h := p.events.top().hold
		if h.cold {
			return
		}
		w := h.lowest()
		if w.Counter.First > h.base+1 {
			return
		}
		g.pull(w)
		h.base = w.Counter.Last()
		g.release(&w.slot, false)
		g.repeats(h)
		if h.empty() {
			g.drop(h)
		}
	}
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
	limit := g.now - g.set.Gap.Bound.Microseconds()
	h.each(func(w *waiter) {
		switch {
		case !w.overdue:
			g.cold.remove(w)
		case w.Time <= limit:
			return
		default:
			w.overdue = false
			w.group.overdue--
		}
		g.warm.push(w)
	})
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
		h.base = max(h.base, w.Counter.First-1)
	}
	g.goOn(p)
}

// expire gives up what has been waited for long enough, the oldest first.
func (g *gap) expire() {
	g.ripe(&g.cold, g.now-g.set.Gap.Cold.Microseconds())
	g.ripe(&g.warm, g.now-g.set.Gap.Bound.Microseconds())
	for len(g.overdue) > 0 {
		p := g.overdue[0]
		if p.overdue > 0 {
			g.giving = p
			g.giveUp(p, ByBound)
			g.giving = nil
		}
		// its oldest event may be another one now, or none
		if p.overdue == 0 {
			p.listed = false
			last := len(g.overdue) - 1
			g.overdue[0], g.overdue[last] = g.overdue[last], nil
			g.overdue = g.overdue[:last]
		}
		if g.moved { // two documents have sequences of the same name
			for i := len(g.overdue)/2 - 1; i > 0; i-- {
				g.sink(i)
			}
		}
		g.sink(0)
		g.moved = false
	}
}

// ripe marks the events of a heap whose time is at or below the limit, and lists their groups.
func (g *gap) ripe(times *heap, limit int64) {
	for w := times.top(); w != nil && w.Time <= limit; w = times.top() {
		times.remove(w)
		w.overdue = true
		if w.group.overdue++; w.group.listed {
			continue
		}
		w.group.listed = true
		g.overdue = append(g.overdue, w.group)
		i := len(g.overdue) - 1
		for i > 0 && older(g.overdue[i], g.overdue[(i-1)/2]) {
			g.overdue[i], g.overdue[(i-1)/2] = g.overdue[(i-1)/2], g.overdue[i]
			i = (i - 1) / 2
		}
	}
}

// older orders groups by their oldest event. One that is empty is done with first.
func older(p, q *group) bool {
	a, b := p.events.top(), q.events.top()
	return a == nil || b != nil && beforeByPosition(a, b)
}

// sink restores the order of the overdue groups below i.
func (g *gap) sink(i int) {
	for {
		child := 2*i + 1
		if child >= len(g.overdue) {
			return
		}
		if child+1 < len(g.overdue) && older(g.overdue[child+1], g.overdue[child]) {
			child++
		}
		if !older(g.overdue[child], g.overdue[i]) {
			return
		}
		g.overdue[i], g.overdue[child] = g.overdue[child], g.overdue[i]
		i = child
	}
}

// shrink gives up what is too much, the oldest first.
func (g *gap) shrink() {
	for g.b.held.events > g.set.MaxEvents || g.b.held.bytes > g.set.MaxBytes {
		g.giveUp(g.all.top().group, BySize)
	}
}

// end gives up everything.
func (g *gap) end() {
	for w := g.all.top(); w != nil; w = g.all.top() {
		g.giveUp(w.group, BySettings)
	}
}

// release hands out an event.
func (g *gap) release(s *slot, late bool) {
	s.Counter.Late = late
	if late {
		g.b.late.count++
		g.notes.late(s.Counter.First <= g.set.Gap.First)
	}
	g.memory.add(s.Counter)
	g.out.add(tallyOf(&s.Event))
	if g.spool == nil {
		g.b.order = append(g.b.order, s)
		return
	}
	_ = g.b.fail(g.spool.add(&s.Event, outbox.Position{LSN: outbox.LSN(g.out.events)}))
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
