package reorder

import (
	"cmp"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// gapModel is the rule of gap mode in the slowest and most obvious form: lists, and loops over them. While a
// horizon is in force it is a model.
type gapModel struct {
	set      relay.Settings
	maxHolds int
	horizon  *model // nil in gap mode
	cfg      Config

	now        int64
	held       []relay.Event // by position
	bases      map[uint64]*int64
	made       []outbox.Counter // of all messages
	remembered int
	out        []relay.Event
	givenUp    GapCounts
	missing    []missing // the newest that were given up
	sequence   func(doc, actor string) uint64

	// while a transaction that was sorted is taken in: what was released of the sequence in hand
	sorted bool
	inHand uint64
	kept   *int64
}

func newGapModel(cfg Config) *gapModel {
	m := &gapModel{set: cfg.Settings, maxHolds: cfg.MaxHolds, cfg: cfg, bases: map[uint64]*int64{},
		sequence: outbox.SequenceOf}
	if !m.set.ByGap() {
		m.horizon = newModel(cfg)
	}
	return m
}

func (m *gapModel) group(e relay.Event) string {
	if m.set.Gap.Scope == relay.OfDocument {
		return e.Doc
	}
	return outbox.LSN(m.sequence(e.Doc, e.Actor)).String()
}

// known is what the newest messages say of a sequence.
func (m *gapModel) known(q uint64) *int64 {
	for n := 1; n <= m.remembered; n++ {
		if c := m.made[len(m.made)-n]; c.Span > 0 && !c.Late && c.Sequence == q {
			last := c.Last()
			return &last
		}
	}
	return nil
}

func (m *gapModel) emit(e relay.Event, late bool) {
	e.Counter.Late = late
	m.out = append(m.out, e)
	m.made = append(m.made, e.Counter)
	m.remembered = min(m.remembered+1, m.set.Gap.Memory)
	if late {
		first := e.Counter.First <= m.set.Gap.First
		switch {
		case slices.ContainsFunc(m.missing, func(g missing) bool {
			return g.sequence == e.Counter.Sequence && (!g.cold || !first) && e.Counter.First <= g.last &&
				(g.cold || g.first <= e.Counter.Last())
		}):
			m.givenUp.Missed++
		case first:
			m.givenUp.Resets++
		default:
			m.givenUp.Repeats++
		}
	}
}

// of returns what of the held events is of a sequence, by (counter, position).
func (m *gapModel) of(q uint64) (list []relay.Event) {
	for _, e := range m.held {
		if e.Counter.Sequence == q {
			list = append(list, e)
		}
	}
	slices.SortStableFunc(list, func(a, b relay.Event) int {
		return cmp.Compare(a.Counter.First, b.Counter.First)
	})
	return list
}

func (m *gapModel) remove(e relay.Event) {
	m.held = slices.DeleteFunc(m.held, func(h relay.Event) bool { return h.Pos == e.Pos })
}

func (m *gapModel) take(e relay.Event) {
	if e.Counter.Span == 0 {
		e.Counter = outbox.Counter{}
		m.emit(e, false)
		return
	}
	q := m.sequence(e.Doc, e.Actor)
	e.Counter.Sequence = q
	base, isHeld := m.bases[q]
	if !isHeld {
		base = m.known(q)
	}
	if !m.sorted || m.inHand != q {
		m.kept = nil
	}
	if m.inHand = q; !isHeld && base == nil {
		base = m.kept
	}
	defer func() { // what was released of it now or before
		if base := m.bases[q]; base != nil {
			m.kept = base
		}
	}()
	if base == nil && e.Counter.First <= m.set.Gap.First {
		before := e.Counter.First - 1
		base = &before
		if isHeld {
			m.bases[q] = base
		}
	}
	if base != nil && e.Counter.Last() <= *base {
		m.kept = base
		m.emit(e, true)
		return
	}
	m.held = append(m.held, e)
	slices.SortFunc(m.held, func(a, b relay.Event) int { return a.Pos.Compare(b.Pos) })
	if !isHeld {
		m.bases[q] = base
	}
	m.goOn(m.group(e))
}

// oldest returns the oldest held event of a group.
func (m *gapModel) oldest(group string) *relay.Event {
	for _, e := range m.held {
		if m.group(e) == group {
			return &e
		}
	}
	return nil
}

func (m *gapModel) goOn(group string) {
	for {
		oldest := m.oldest(group)
		if oldest == nil {
			return
		}
		q := oldest.Counter.Sequence
		base := m.bases[q]
		low := m.of(q)[0]
		if base == nil || low.Counter.First > *base+1 {
			return
		}
		m.remove(low)
		m.emit(low, false)
		last := low.Counter.Last()
		m.bases[q] = &last
		if q == m.inHand {
			m.kept = &last
		}
		for _, e := range m.of(q) {
			if e.Counter.Last() <= last {
				m.remove(e)
				m.emit(e, true)
			}
		}
		if len(m.of(q)) == 0 {
			delete(m.bases, q)
		}
	}
}

func (m *gapModel) giveUp(group string, why *uint64) {
	q := m.oldest(group).Counter.Sequence
	if why == nil {
		why = &m.givenUp.Bound
		if m.bases[q] == nil {
			why = &m.givenUp.Cold
		}
	}
	*why++
	base := m.of(q)[0].Counter.First - 1
	lost := missing{sequence: q, cold: m.bases[q] == nil, first: 1, last: base}
	if was := m.bases[q]; was != nil {
		lost.first = *was + 1
	}
	m.missing = append(m.missing, lost)
	m.missing = m.missing[max(0, len(m.missing)-maxMissing):]
	m.bases[q] = &base
	m.goOn(group)
}

// limit is how long the events of a group wait: as its oldest does.
func (m *gapModel) limit(e relay.Event) int64 {
	if m.bases[m.oldest(m.group(e)).Counter.Sequence] == nil {
		return m.set.Gap.Cold.Microseconds()
	}
	return m.set.Gap.Bound.Microseconds()
}

func (m *gapModel) byTime() {
	for {
		group := ""
		for _, e := range m.held { // by position: the first group found whose oldest is oldest
			over := slices.ContainsFunc(m.held, func(h relay.Event) bool {
				return m.group(h) == m.group(e) && h.Time <= m.now-m.limit(h)
			})
			if over {
				group = m.group(e)
				break
			}
		}
		if group == "" {
			return
		}
		m.giveUp(group, nil)
	}
}

func (m *gapModel) bySize() {
	for len(m.held) > m.set.MaxEvents || sizes(m.held) > m.set.MaxBytes {
		m.giveUp(m.group(m.held[0]), &m.givenUp.Size)
	}
}

// read reads one commit and returns the window that it closes, nil if none.
func (m *gapModel) read(in input) *closed {
	if in.commit.Kind == relay.NoInput || in.commit.LSN <= m.cfg.Start && !in.cut() {
		return nil
	}
	if in.cut() && m.horizon == nil {
		m.out = nil
		m.end(&m.givenUp.Cut)
		return m.window(in.commit.LSN)
	}
	next := in.commit.Settings
	change := in.commit.Kind == relay.SettingsChange
	if m.horizon != nil {
		if change && next.ByGap() && !m.cfg.Unkeyed {
			return m.begin(in.commit)
		}
		w := m.horizon.read(in)
		m.set = m.horizon.set
		if w != nil {
			for i := range w.Events {
				w.Events[i].Counter = outbox.Counter{}
				m.made = append(m.made, outbox.Counter{})
			}
		}
		return w
	}
	m.out, m.now = nil, in.commit.Time
	large := len(in.events) > m.set.MaxEvents || sizes(in.events) > m.set.MaxBytes
	events := slices.Clone(in.events)
	m.sorted, m.kept = large, nil
	if large {
		slices.SortFunc(events, func(a, b relay.Event) int {
			has := func(e relay.Event) int { return min(int(e.Counter.Span), 1) }
			return cmp.Or(cmp.Compare(a.Doc, b.Doc), cmp.Compare(a.Actor, b.Actor),
				cmp.Compare(has(a), has(b)),
				cmp.Compare(a.Counter.First, b.Counter.First), a.Pos.Compare(b.Pos))
		})
	}
	for _, e := range events {
		m.take(e)
		m.bySize()
	}
	if change {
		m.change(next, in.commit)
	}
	if m.horizon == nil {
		m.byTime()
		m.bySize()
	}
	return m.window(in.commit.LSN)
}

// window is what was released.
func (m *gapModel) window(lsn outbox.LSN) *closed {
	if len(m.out) == 0 {
		return nil
	}
	cp, _ := m.cp(lsn)
	return &closed{Due: lsn, Thru: lsn, Of: len(m.out), Sort: outbox.ByGap, Bytes: sizes(m.out),
		Events: m.out, Checkpoint: cp}
}

// end gives up everything, the oldest first.
func (m *gapModel) end(why *uint64) {
	for len(m.held) > 0 {
		m.giveUp(m.group(m.held[0]), why)
	}
}

// begin is a change from a horizon to gap mode.
func (m *gapModel) begin(c relay.Commit) *closed {
	by := m.horizon.inForce().Sort
	events := modelSort(m.horizon.events, by)
	for i := range events {
		events[i].Counter = outbox.Counter{}
		m.made = append(m.made, outbox.Counter{})
	}
	m.horizon, m.set, m.remembered = nil, c.Settings, 0
	if len(events) == 0 {
		return nil
	}
	cp, _ := m.cp(c.LSN)
	return &closed{Due: c.LSN, Thru: c.LSN, Of: len(events), Sort: by, Bytes: sizes(events), Events: events,
		Checkpoint: cp}
}

func (m *gapModel) change(next relay.Settings, c relay.Commit) {
	if next.Sort != m.set.Sort || next.Gap.Scope != m.set.Gap.Scope || next.Gap.First != m.set.Gap.First {
		m.end(&m.givenUp.Settings)
	}
	m.set = next
	m.remembered = min(m.remembered, next.Gap.Memory)
	if !next.ByGap() {
		cfg := m.cfg
		cfg.Start, cfg.Settings, cfg.PublishedAhead = c.LSN, next, nil
		m.horizon = newModel(cfg)
	}
}

// cp is the checkpoint behind the last input; none is true if there are too many holds.
func (m *gapModel) cp(due outbox.LSN) (p relay.Checkpoint, none bool) {
	p = relay.Checkpoint{Due: due, Settings: m.set, Remembered: m.remembered}
	for q, base := range m.bases {
		h := relay.Hold{Sequence: q, Cold: base == nil}
		if base != nil {
			h.Base = *base
		}
		i := slices.IndexFunc(m.held, func(e relay.Event) bool { return e.Counter.Sequence == q })
		h.Oldest = m.held[i].Pos
		for _, e := range m.of(q) {
			h.Sum += relay.HeldSum(e.Pos, e.Counter)
		}
		p.Holds = append(p.Holds, h)
	}
	slices.SortFunc(p.Holds, func(a, b relay.Hold) int { return a.Oldest.Compare(b.Oldest) })
	if len(p.Holds) > m.maxHolds {
		return relay.Checkpoint{}, true
	}
	if len(p.Holds) > 0 {
		p.From = m.held[0].Pos.LSN - 1 // as gapWriter.add makes it
	}
	return p, false
}

func (m *gapModel) events() []relay.Event {
	if m.horizon != nil {
		return m.horizon.events
	}
	return m.held
}

// marker is what Marker says.
func (m *gapModel) marker(lsn outbox.LSN) (p relay.Checkpoint, ok bool) {
	if m.horizon != nil {
		if len(m.horizon.events) > 0 {
			return relay.Checkpoint{}, false
		}
		return m.horizon.marker(lsn), true
	}
	p, none := m.cp(lsn)
	return p, !none
}

// gaps lists the open gaps, oldest first.
func (m *gapModel) gaps() (list []Gap) {
	if m.horizon != nil {
		return nil
	}
	seen := map[string]bool{}
	for _, e := range m.held {
		if seen[m.group(e)] {
			continue
		}
		seen[m.group(e)] = true
		low := m.of(e.Counter.Sequence)[0]
		g := Gap{Doc: low.Doc, Actor: low.Actor, Sequence: e.Counter.Sequence, Since: e.Time,
			Last: low.Counter.First - 1}
		if base := m.bases[e.Counter.Sequence]; base == nil {
			g.Cold = true
		} else {
			g.First = *base + 1
		}
		for _, h := range m.held {
			if m.group(h) == m.group(e) {
				g.Waiting++
			}
		}
		list = append(list, g)
	}
	return list
}

func (m *gapModel) deadline() (at int64, ok bool) {
	if m.horizon != nil {
		return 0, false
	}
	for _, e := range m.held {
		if t := e.Time + m.limit(e); !ok || t < at {
			at, ok = t, true
		}
	}
	return at, ok
}
