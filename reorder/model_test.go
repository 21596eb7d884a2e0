package reorder

import (
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// model is what the package doc says of windows, in the slowest and most obvious form: it keeps lists and
// goes through them.
type model struct {
	start    outbox.LSN
	maxTaken int
	unkeyed  bool

	set, atDue relay.Settings
	taken      []outbox.Position
	inputs     []input // above the last due, oldest first
	events     []relay.Event
}

// input is a commit with its events, a tick, a change of settings or a cut.
type input struct {
	commit relay.Commit
	events []relay.Event // with their positions
}

// aCut is the kind of an input that is a cut.
const aCut relay.Kind = 255

func (in *input) cut() bool { return in.commit.Kind == aCut }

// closed is a window in a form that can be compared.
type closed struct {
	Due, Thru  outbox.LSN
	Of, Pull   int
	Sort       outbox.Sort
	Bytes      int64
	Events     []relay.Event
	Checkpoint relay.Checkpoint
}

func newModel(c Config) *model {
	m := &model{start: c.Start, maxTaken: c.MaxPublishedAhead, unkeyed: c.Unkeyed, set: c.Settings,
		atDue: c.Settings}
	m.taken = slices.Clone(c.PublishedAhead)
	if m.maxTaken == 0 {
		m.maxTaken = relay.MaxPublishedAhead
	}
	return m
}

func (m *model) inForce() relay.Settings {
	if m.unkeyed {
		return m.set.Unkeyed()
	}
	return m.set
}

// read reads one commit and returns the window that it closes, nil if none.
func (m *model) read(in input) *closed {
	if in.cut() {
		return m.cut(in.commit.LSN)
	}
	if in.commit.Kind == relay.NoInput || in.commit.LSN <= m.start {
		return nil
	}
	m.inputs = append(m.inputs, in)
	if in.commit.Kind == relay.SettingsChange {
		m.set = in.commit.Settings
	}
	for _, e := range in.events {
		if !slices.Contains(m.taken, e.Pos) {
			m.events = append(m.events, e)
		}
	}
	due, ok := m.due(in.commit)
	if !ok {
		return nil
	}
	return m.close(due, in.commit.LSN)
}

// cut closes everything that is held, with the settings in force.
func (m *model) cut(lsn outbox.LSN) *closed {
	if lsn < m.start {
		return nil
	}
	return m.close(lsn, lsn)
}

func (m *model) due(in relay.Commit) (due outbox.LSN, ok bool) {
	set := m.inForce()
	if set.Horizon == 0 {
		due, ok = in.LSN, true
	} else {
		for _, c := range m.inputs {
			if c.commit.LSN < in.LSN && in.Time-c.commit.Time >= set.Horizon.Microseconds() {
				due, ok = c.commit.LSN, true
			}
		}
	}
	events, bytes := len(m.events), sizes(m.events)
	for _, c := range m.inputs {
		if events <= set.MaxEvents && bytes <= set.MaxBytes {
			break
		}
		for _, e := range m.events {
			if e.Pos.LSN == c.commit.LSN {
				events--
				bytes -= e.Size()
			}
		}
		due, ok = max(due, c.commit.LSN), true
	}
	return due, ok
}

func (m *model) close(due, thru outbox.LSN) *closed {
	var head, pulled, rest []relay.Event
	for _, e := range m.events {
		if e.Pos.LSN <= due {
			head = append(head, e)
		}
	}
	for _, e := range m.events {
		if e.Pos.LSN <= due {
			continue
		}
		if slices.ContainsFunc(head, func(h relay.Event) bool {
			return h.Doc == e.Doc && h.Actor == e.Actor && h.Key > e.Key
		}) {
			pulled = append(pulled, e)
		} else {
			rest = append(rest, e)
		}
	}
	beyond := slices.DeleteFunc(slices.Clone(m.taken), func(p outbox.Position) bool { return p.LSN <= due })
	if len(beyond)+len(pulled) > m.maxTaken {
		pulled, rest = m.events[len(head):], nil
	}
	m.events = rest
	if len(rest) == 0 {
		due = thru
	}
	for _, c := range m.inputs {
		if c.commit.LSN <= due && c.commit.Kind == relay.SettingsChange {
			m.atDue = c.commit.Settings
		}
	}
	m.inputs = slices.DeleteFunc(m.inputs, func(c input) bool { return c.commit.LSN <= due })
	for _, e := range pulled {
		m.taken = append(m.taken, e.Pos)
	}
	m.taken = slices.DeleteFunc(m.taken, func(p outbox.Position) bool { return p.LSN <= due })
	slices.SortFunc(m.taken, outbox.Position.Compare)

	take := slices.Concat(head, pulled)
	if len(take) == 0 {
		return nil
	}
	if len(m.taken) == 0 {
		m.taken = nil
	}
	w := &closed{
		Due: due, Thru: thru, Of: len(take), Pull: len(pulled), Sort: m.inForce().Sort, Bytes: sizes(take),
		Checkpoint: relay.Checkpoint{Due: due, PublishedAhead: slices.Clone(m.taken), Settings: m.atDue},
	}
	w.Events = modelSort(take, w.Sort)
	return w
}

func modelSort(take []relay.Event, by outbox.Sort) []relay.Event {
	if by == outbox.BySeqKey {
		slices.SortFunc(take, func(a, b relay.Event) int {
			if c := strings.Compare(a.Doc, b.Doc); c != 0 {
				return c
			}
			return modelKey(a, b)
		})
		return take
	}
	slices.SortFunc(take, func(a, b relay.Event) int { return a.Pos.Compare(b.Pos) })
	type name struct{ doc, actor string }
	next := map[name][]relay.Event{}
	for _, e := range take {
		n := name{e.Doc, e.Actor}
		next[n] = append(next[n], e)
	}
	for _, of := range next {
		slices.SortFunc(of, modelKey)
	}
	for i, e := range take {
		n := name{e.Doc, e.Actor}
		take[i] = next[n][0]
		next[n] = next[n][1:]
	}
	return take
}

func modelKey(a, b relay.Event) int {
	if c := strings.Compare(a.Key, b.Key); c != 0 {
		return c
	}
	return a.Pos.Compare(b.Pos)
}

func sizes(events []relay.Event) (n int64) {
	for i := range events {
		n += events[i].Size()
	}
	return n
}

// marker is the checkpoint of a keepalive's marker when nothing is held.
func (m *model) marker(lsn outbox.LSN) relay.Checkpoint {
	beyond := slices.DeleteFunc(slices.Clone(m.taken), func(p outbox.Position) bool { return p.LSN <= lsn })
	if len(beyond) == 0 {
		beyond = nil
	}
	return relay.Checkpoint{Due: lsn, PublishedAhead: beyond, Settings: m.set}
}
