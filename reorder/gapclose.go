package reorder

import (
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// gapMode reports whether gap mode is in force.
func (b *Buffer) gapMode() bool { return b.inForce().ByGap() }

// switches reports whether a change of settings ends or begins gap mode, or changes something in it: Close
// carries it out.
func (b *Buffer) switches(set relay.Settings) bool {
	return b.set.ByGap() || set.ByGap()
}

// closeGap is Close in gap mode, and where it begins or ends.
func (b *Buffer) closeGap() (*Window, error) {
	if b.gap == nil {
		b.gap = newGap(b, &Config{Settings: *b.change})
	}
	g := b.gap
	g.start = b.input.start
	if b.input.lsn <= b.cfg.Due && !b.cut {
		return nil, g.readAgain()
	}
	if err := g.complete(); err != nil {
		return nil, err
	}
	if !b.gapMode() {
		return b.beginGapMode()
	}
	b.order, g.out, g.now = b.order[:0], tally{}, b.input.time
	if err := g.read(); err != nil {
		return nil, err
	}
	if b.change != nil {
		g.apply(*b.change)
		b.change = nil
	}
	if b.cut {
		g.end(ByCut)
	}
	if b.gapMode() {
		g.expire()
		g.shrink()
	}
	if b.err != nil {
		return nil, b.err
	}
	return g.window()
}

// beginGapMode is a change of settings that begins gap mode: everything held leaves by the rule of before.
func (b *Buffer) beginGapMode() (*Window, error) {
	set := *b.change
	b.change = nil
	w, err := b.closeAll(0)
	if err != nil {
		return nil, err
	}
	b.set, b.gap.set = set, set
	b.gap.memory = newMemory(set.Gap.Memory)
	b.rest()
	if w != nil {
		w.Checkpoint = relay.Checkpoint{}
	}
	return w, nil
}

// apply is a change of settings. What decides what waits for what must not change below events that wait.
func (g *gap) apply(set relay.Settings) {
	b := g.b
	if set.Sort != g.set.Sort || set.Gap.Scope != g.set.Gap.Scope || set.Gap.First != g.set.Gap.First {
		g.end(BySettings)
	}
	b.set, g.set, b.atDue, g.same = set, set, set, false
	if set.ByGap() {
		g.memory.resize(set.Gap.Memory)
	} else {
		g.memory = newMemory(0)
	}
}

// read takes in the events of the transaction that was read.
func (g *gap) read() error {
	b := g.b
	large := b.read.events > g.set.MaxEvents || b.read.bytes > g.set.MaxBytes
	g.sorted = large
	if b.spill != nil {
		if err := g.readSpilled(large); err != nil {
			return err
		}
	} else {
		slots := b.other[:0]
		for n := b.start; n < b.fifo.tail; n++ {
			slots = append(slots, b.fifo.at(n))
		}
		if large {
			slices.SortFunc(slots, func(p, q *slot) int { return byCounter(&p.Event, &q.Event) })
		}
		for _, s := range slots {
			g.take(s)
			g.shrink()
		}
		clear(slots)
		b.other = small(slots)
	}
	g.ownFresh()
	g.unname()
	return nil
}

// unname forgets the sequence that came last.
func (g *gap) unname() { g.named, g.doc, g.actor, g.sorted, g.kept = false, "", "", false, false }

// ownFresh gives the events that have come to be held, and still are, their own bytes, and a part in the sum.
func (g *gap) ownFresh() {
	for i, w := range g.fresh {
		if w.hold != nil {
			own(&w.Event)
			w.sum = relay.HeldSum(w.Pos, w.Counter)
			w.hold.sum += w.sum
		}
		g.fresh[i] = nil
	}
	if g.fresh = g.fresh[:0]; cap(g.fresh) > maxScratch {
		g.fresh = nil
	}
}

// readSpilled takes in a transaction that is in scratch files. What it releases goes into another one.
func (g *gap) readSpilled(large bool) error {
	b, s := g.b, g.b.spill
	if err := s.flush(); err != nil { // room for the sorters
		return err
	}
	room := max(b.limit()/4, b.tune.least)
	spool := b.sorter(itemsByPlace, room)
	spool.serial = true
	g.spool = &spool
	sources, err := s.sources()
	if err != nil {
		return err
	}
	for _, src := range sources {
		src.of = s
	}
	events, err := newMerge(s.by, sources)
	if err != nil {
		return err
	}
	if !large { // it only takes up much memory
		byPosition := b.sorter(itemsByPosition, room)
		if err := events.into(&byPosition); err != nil {
			return err
		}
		s.drop()
		if events, err = byPosition.merge(); err != nil {
			return err
		}
	}
	var at slot
	for b.err == nil {
		e, err := events.next()
		if err != nil || e == nil {
			b.spill = nil
			return err
		}
		at.Event, *e = *e, relay.Event{}
		g.take(&at)
		g.ownFresh()
		g.shrink()
	}
	return b.err
}

// window makes the window of what was released, and gives back the room of the transaction that was read.
func (g *gap) window() (w *Window, err error) {
	b := g.b
	g.unname()
	spool := g.spool
	g.spool = nil
	b.read, b.spill, b.start = tally{}, nil, b.fifo.tail
	b.release, b.indexed = b.fifo.tail, b.fifo.tail
	if g.out.events == 0 {
		b.disk.drop()
		b.sorting = 0
		b.fifo.release(b.release)
		return nil, nil
	}
	var from *merge
	if spool != nil {
		if from, err = spool.merge(); err != nil {
			return nil, err
		}
	}
	w = b.open(b.input.lsn, g.out, 0, from)
	w.Sort = outbox.ByGap
	w.Checkpoint = relay.Checkpoint{}
	if spool != nil {
		b.leaving = 0
	}
	return w, nil
}

// marker is Marker in gap mode. Inputs up to lsn were read, and the window of the last one too.
func (g *gap) marker(lsn outbox.LSN) (p relay.Checkpoint, ok bool) {
	if !g.whole || g.holds.live > g.b.cfg.MaxHolds {
		return relay.Checkpoint{}, false
	}
	p = relay.Checkpoint{Due: lsn, Settings: g.b.set, Remembered: g.memory.len}
	if !g.same {
		g.holding, g.same = nil, true
		if g.holds.live > 0 {
			g.holding = make([]relay.Hold, 0, g.holds.live)
		}
		g.holds.all(func(h *hold) bool {
			base := h.base
			if h.cold {
				base = 0
			}
			oldest := h.events.top().Pos
			g.holding = append(g.holding, relay.Hold{Sequence: h.sequence, Cold: h.cold, Base: base,
				Oldest: oldest, Sum: h.sum})
			return true
		})
		slices.SortFunc(g.holding, func(a, b relay.Hold) int { return a.Oldest.Compare(b.Oldest) })
	}
	if p.Holds = g.holding; len(p.Holds) > 0 {
		p.From = g.all.top().start
	}
	return p, true
}

// readAgain holds the events again that the checkpoint holds back of an input at or below its due. All others
// are published.
func (g *gap) readAgain() error {
	b := g.b
	see := func(e *relay.Event) bool {
		c := relay.Countable(e.Counter)
		if c.Span == 0 {
			return true
		}
		c.Sequence = g.sequence(e)
		h := g.holds.find(c.Sequence)
		if h == nil || e.Pos.Compare(h.from) < 0 || !h.cold && c.Last() <= h.base {
			return true
		}
		w := &waiter{slot: slot{Event: *e}, start: g.start, hold: h}
		w.Counter = c
		g.hold(w)
		g.settle(w.group)
		g.ownFresh()
		return true
	}
	if b.spill != nil {
		if err := b.spill.each(see); err != nil {
			return err
		}
	}
	for n := b.start; n < b.fifo.tail; n++ {
		see(&b.fifo.at(n).Event)
	}
	g.unname()
	b.forget()
	return nil
}

// complete checks that all that the checkpoint holds back came again as it was. What does not would be lost.
// All inputs up to the checkpoint's due were read.
func (g *gap) complete() error {
	if g.whole {
		return nil
	}
	for h := range g.holds.all {
		if h.empty() || h.sum != h.fromSum {
			return &outbox.Fault{
				Class: outbox.Fatal, Code: "held_missing",
				Message: "the checkpoint holds back events of one sequence from " + h.from.String() +
					" on that PostgreSQL does not send again as they were",
				Hint: "The columns of an event's document, actor and counter must not change while events " +
					"are held: give them their old values until reorder.bound has passed",
			}
		}
	}
	g.whole = true
	return nil
}

// weight is what the sequences and documents of held events take up.
func (g *gap) weight() int64 {
	return int64(g.holds.live)*holdWeight + int64(g.groups.live)*groupWeight
}
