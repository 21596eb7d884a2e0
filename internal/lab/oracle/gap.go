package oracle

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"
	"time"
)

// Gap has the settings of gap mode.
type Gap struct {
	Bound, Cold time.Duration
	Memory      int
	First       int64
	Document    bool // the scope is the document, not the sequence
}

// DefaultGap are those that init takes where nothing else is said.
var DefaultGap = Gap{10 * time.Second, 20 * time.Millisecond, 16384, 1, false}

// Sequence is the name of a sequence in headers.
func Sequence(doc, actor string) uint64 {
	b := binary.BigEndian.AppendUint64(nil, uint64(len(doc)))
	sum := sha256.Sum256(append(append(b, doc...), actor...))
	return binary.BigEndian.Uint64(sum[:])
}

func (e *Event) last() int64 { return e.Counter + e.Span - 1 }

// place is the event's counter, if there is one that can be used.
func (e *Event) place(counter, span int64) {
	if span >= 1 && span <= math.MaxUint32 && counter > math.MinInt64 && counter <= math.MaxInt64-span+1 {
		e.Counter, e.Span = counter, span
	}
}

// known is what is known of a sequence: the counter that its events have come to.
type known struct {
	counter int64
	is      bool
	message int // which one says so, where it is remembered
}

// gapOrder is the rule of gap mode.
type gapOrder struct {
	set        Settings
	made       int // messages
	remembered int // so many of the newest count
	newest     map[uint64]known
	held       []*Event // by position
	time       map[*Event]int64
	base       map[uint64]known // of the sequences of held events
	run        *uint64          // the sequence that the large transaction is at, and what it came to
	came       known

	out  []*Event
	late []bool
}

func newGapOrder(set Settings) *gapOrder {
	return &gapOrder{set: set, newest: map[uint64]known{}, time: map[*Event]int64{},
		base: map[uint64]known{}}
}

func (g *gapOrder) add(lsn LSN, time int64, events []*Event, set Settings) (*window, []*Event) {
	g.out, g.late = nil, nil
	if set.Sort != g.set.Sort || set.Gap.Document != g.set.Gap.Document || set.Gap.First != g.set.Gap.First {
		for len(g.held) > 0 {
			g.giveUp(g.group(g.held[0]))
		}
	}
	g.set = set
	g.remembered = min(g.remembered, set.Gap.Memory)
	size := int64(0)
	for _, e := range events {
		size += e.size()
	}
	large := len(events) > set.MaxEvents || size > set.MaxBytes
	if large {
		events = slices.Clone(events)
		slices.SortFunc(events, func(a, b *Event) int {
			return cmp.Or(cmp.Compare(a.Doc, b.Doc), cmp.Compare(a.Actor, b.Actor),
				cmp.Compare(min(a.Span, 1), min(b.Span, 1)), cmp.Compare(a.Counter, b.Counter),
				a.Pos.Compare(b.Pos))
		})
	}
	for _, e := range events {
		if q := e.sequence(); large && (g.run == nil || *g.run != q) {
			g.run, g.came = &q, known{}
		}
		g.time[e] = time
		g.take(e)
		g.fit()
	}
	g.run = nil
	for g.expire(time) {
	}
	g.fit()
	if len(g.out) == 0 {
		return nil, nil
	}
	return &window{due: lsn, thru: lsn, of: len(g.out), sort: ByGap, late: g.late}, g.out
}

func (g *gapOrder) take(e *Event) {
	if e.Span == 0 {
		g.release(e, false)
		return
	}
	q := e.sequence()
	b, held := g.base[q]
	if !held {
		if b = g.newest[q]; b.is && b.message < g.made-g.remembered {
			b = known{}
		}
		if !b.is && g.run != nil && *g.run == q {
			b = g.came
		}
	}
	if !b.is && e.Counter <= g.set.Gap.First {
		b = known{counter: e.Counter - 1, is: true}
	}
	if g.run != nil && *g.run == q {
		g.came = b
	}
	if b.is && e.last() <= b.counter {
		g.release(e, true)
		return
	}
	g.base[q] = b
	at, _ := slices.BinarySearchFunc(g.held, e, func(a, b *Event) int { return a.Pos.Compare(b.Pos) })
	g.held = slices.Insert(g.held, at, e)
	g.goOn(g.group(e))
}

func (g *gapOrder) release(e *Event, late bool) {
	g.out, g.late = append(g.out, e), append(g.late, late)
	if e.Span > 0 && !late {
		g.newest[e.sequence()] = known{e.last(), true, g.made}
	}
	delete(g.time, e)
	g.made++
	g.remembered = min(g.remembered+1, g.set.Gap.Memory)
}

// group names what an event waits with.
func (g *gapOrder) group(e *Event) [2]string {
	if g.set.Gap.Document {
		return [2]string{e.Doc}
	}
	return [2]string{e.Doc, e.Actor}
}

// head is the oldest held event of a group, nil if there is none.
func (g *gapOrder) head(group [2]string) *Event {
	for _, e := range g.held {
		if g.group(e) == group {
			return e
		}
	}
	return nil
}

// own is what is held of a sequence, lowest counter first.
func (g *gapOrder) own(q uint64) (own []*Event) {
	for _, e := range g.held {
		if e.sequence() == q {
			own = append(own, e)
		}
	}
	slices.SortStableFunc(own, func(a, b *Event) int { return cmp.Compare(a.Counter, b.Counter) })
	return own
}

// goOn releases what now follows, as long as it is the turn of the sequence of the group's oldest event.
func (g *gapOrder) goOn(group [2]string) {
	for {
		head := g.head(group)
		if head == nil {
			return
		}
		q := head.sequence()
		own, b := g.own(q), g.base[q]
		if !b.is || own[0].Counter > b.counter+1 {
			return
		}
		b.counter = own[0].last()
		g.base[q] = b
		if g.run != nil && *g.run == q {
			g.came = b
		}
		stay := 0
		for i, e := range own {
			if i > 0 && e.last() > b.counter {
				stay++
				continue
			}
			g.held = slices.DeleteFunc(g.held, func(h *Event) bool { return h == e })
			g.release(e, i > 0)
		}
		if stay == 0 {
			delete(g.base, q)
		}
	}
}

// giveUp waits no longer for what is missing before the group's oldest event.
func (g *gapOrder) giveUp(group [2]string) {
	q := g.head(group).sequence()
	g.base[q] = known{counter: g.own(q)[0].Counter - 1, is: true}
	g.goOn(group)
}

// expire gives up the group with the oldest event of those that have waited long enough, if there is one.
func (g *gapOrder) expire(now int64) bool {
	waits := map[[2]string]time.Duration{}
	over := map[[2]string]bool{}
	for _, e := range g.held {
		p := g.group(e)
		if _, seen := waits[p]; !seen {
			waits[p] = g.set.Gap.Bound
			if !g.base[e.sequence()].is {
				waits[p] = g.set.Gap.Cold
			}
		}
		over[p] = over[p] || now-g.time[e] >= waits[p].Microseconds()
	}
	for _, e := range g.held {
		if p := g.group(e); over[p] {
			g.giveUp(p)
			return true
		}
	}
	return false
}

// fit gives up the oldest as long as too much is held.
func (g *gapOrder) fit() {
	for {
		size := int64(0)
		for _, e := range g.held {
			size += e.size()
		}
		if len(g.held) <= g.set.MaxEvents && size <= g.set.MaxBytes {
			return
		}
		g.giveUp(g.group(g.held[0]))
	}
}
