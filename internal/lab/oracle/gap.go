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

// waiting is a held event.
type waiting struct {
	*Event
	q    uint64
	time int64
}

func (w *waiting) byCounter(o *waiting) int {
	return cmp.Or(cmp.Compare(w.Counter, o.Counter), w.Pos.Compare(o.Pos))
}

// gapOrder is the rule of gap mode.
type gapOrder struct {
	set        Settings
	made       int // messages
	remembered int // so many of the newest count
	newest     map[uint64]known
	held       map[[2]string][]*waiting // by group and position
	events     int
	bytes      int64
	base       map[uint64]known // of the sequences of held events
	run        *uint64          // the sequence that the large transaction is at, and what it came to
	came       known

	out  []*Event
	late []bool
}

func newGapOrder(set Settings) *gapOrder {
	return &gapOrder{set: set, newest: map[uint64]known{}, held: map[[2]string][]*waiting{},
		base: map[uint64]known{}}
}

func (g *gapOrder) add(lsn LSN, time int64, events []*Event, set Settings) (*window, []*Event) {
	g.out, g.late = nil, nil
	if set.Sort != g.set.Sort || set.Gap.Document != g.set.Gap.Document || set.Gap.First != g.set.Gap.First {
		g.end()
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
		g.take(e, time)
		g.fit()
	}
	g.run = nil
	for g.expire(time) {
	}
	g.fit()
	return g.window(lsn)
}

// cut gives up all gaps. What is remembered stays: it is what the messages say.
func (g *gapOrder) cut(lsn LSN) (*window, []*Event) {
	g.out, g.late = nil, nil
	g.end()
	return g.window(lsn)
}

// window is what was released.
func (g *gapOrder) window(lsn LSN) (*window, []*Event) {
	if len(g.out) == 0 {
		return nil, nil
	}
	return &window{due: lsn, thru: lsn, of: len(g.out), sort: ByGap, late: g.late}, g.out
}

// end gives up everything, the oldest first.
func (g *gapOrder) end() {
	for g.events > 0 {
		g.giveUp(g.oldest(g.everybody))
	}
}

func (g *gapOrder) take(e *Event, time int64) {
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
	group := g.group(e)
	w := &waiting{e, q, time}
	at, _ := slices.BinarySearchFunc(g.held[group], w, func(a, b *waiting) int {
		return a.Pos.Compare(b.Pos)
	})
	g.held[group] = slices.Insert(g.held[group], at, w)
	g.events++
	g.bytes += e.size()
	g.goOn(group)
}

func (g *gapOrder) release(e *Event, late bool) {
	g.out, g.late = append(g.out, e), append(g.late, late)
	if e.Span > 0 && !late {
		g.newest[e.sequence()] = known{e.last(), true, g.made}
	}
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

// goOn releases what now follows, as long as it is the turn of the sequence of the group's oldest event.
func (g *gapOrder) goOn(group [2]string) {
	for len(g.held[group]) > 0 {
		q := g.held[group][0].q
		b, next := g.base[q], g.lowest(group, q)
		if !b.is || next.Counter > b.counter+1 {
			return
		}
		b.counter = next.last()
		g.base[q] = b
		if g.run != nil && *g.run == q {
			g.came = b
		}
		var late []*waiting
		stays := false
		g.held[group] = slices.DeleteFunc(g.held[group], func(w *waiting) bool {
			goes := w.q == q && w.last() <= b.counter
			if goes && w != next {
				late = append(late, w)
			}
			stays = stays || w.q == q && !goes
			return goes
		})
		slices.SortFunc(late, (*waiting).byCounter)
		for i, w := range append([]*waiting{next}, late...) {
			g.events--
			g.bytes -= w.size()
			g.release(w.Event, i > 0)
		}
		if !stays {
			delete(g.base, q)
		}
	}
	delete(g.held, group)
}

// lowest is the held event of a sequence with the lowest counter.
func (g *gapOrder) lowest(group [2]string, q uint64) (low *waiting) {
	for _, w := range g.held[group] {
		if w.q == q && (low == nil || w.byCounter(low) < 0) {
			low = w
		}
	}
	return low
}

// oldest is the group with the oldest held event of those that are wanted, nil if none is.
func (g *gapOrder) oldest(wanted func([]*waiting) bool) (group *[2]string) {
	var at Position
	for p, all := range g.held {
		if pos := all[0].Pos; (group == nil || pos.Compare(at) < 0) && wanted(all) {
			group, at = &p, pos
		}
	}
	return group
}

func (g *gapOrder) everybody([]*waiting) bool { return true }

// giveUp waits no longer for what is missing before the group's oldest event.
func (g *gapOrder) giveUp(group *[2]string) {
	q := g.held[*group][0].q
	g.base[q] = known{counter: g.lowest(*group, q).Counter - 1, is: true}
	g.goOn(*group)
}

// expire gives up the group with the oldest event of those that have waited long enough, if there is one.
func (g *gapOrder) expire(now int64) bool {
	group := g.oldest(func(all []*waiting) bool {
		wait := g.set.Gap.Bound
		if !g.base[all[0].q].is {
			wait = g.set.Gap.Cold
		}
		return slices.ContainsFunc(all, func(w *waiting) bool { return now-w.time >= wait.Microseconds() })
	})
	if group != nil {
		g.giveUp(group)
	}
	return group != nil
}

// fit gives up the oldest as long as too much is held.
func (g *gapOrder) fit() {
	for g.events > g.set.MaxEvents || g.bytes > g.set.MaxBytes {
		g.giveUp(g.oldest(g.everybody))
	}
}

// remains are all events that are held, by position.
func (g *gapOrder) remains() (all []*Event) {
	for _, group := range g.held {
		for _, w := range group {
			all = append(all, w.Event)
		}
	}
	slices.SortFunc(all, func(a, b *Event) int { return a.Pos.Compare(b.Pos) })
	return all
}
