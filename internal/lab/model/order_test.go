package model

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// input is one input of the WAL with its events.
type input struct {
	lsn      outbox.LSN
	time     int64 // microseconds
	kind     relay.Kind
	events   []relay.Event
	settings relay.Settings // for a change
}

// message is what the stream holds: comparable, so that two runs can be compared.
type message struct {
	header   outbox.Header
	doc, key string
}

// window is what an orderer gives.
type window struct {
	due, thru outbox.LSN
	pull      int
	sort      outbox.Sort
	events    []relay.Event
	place     relay.Checkpoint
}

// orderer is the buffer: the real one, or the slow one of this file.
type orderer interface {
	add(in *input) (*window, error)
	held() bool
	marker(lsn outbox.LSN) relay.Checkpoint
}

// slow is the rules of ordering as they are written down, without a thought for speed.
type slow struct {
	set, atDue relay.Settings
	maxTaken   int
	start      outbox.LSN
	taken      []outbox.Position
	inputs     []*input // those above the last due, oldest first
	events     []relay.Event
}

func newSlow(p relay.Checkpoint, maxTaken int) orderer {
	return &slow{set: p.Settings, atDue: p.Settings, start: p.Due, taken: slices.Clone(p.PublishedAhead), maxTaken: maxTaken}
}

func (s *slow) held() bool { return len(s.events) > 0 }

func (s *slow) marker(lsn outbox.LSN) relay.Checkpoint {
	return relay.Checkpoint{Due: lsn, PublishedAhead: beyond(s.taken, lsn), Settings: s.set, Timeline: timeline}
}

func beyond(taken []outbox.Position, due outbox.LSN) []outbox.Position {
	var out []outbox.Position
	for _, p := range taken {
		if p.LSN > due {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, outbox.Position.Compare)
	return out
}

type sequence struct{ doc, actor string }

func sequenceOf(e *relay.Event) sequence { return sequence{e.Doc, e.Actor} }

func (s *slow) add(in *input) (*window, error) {
	if in.lsn <= s.start {
		return nil, nil
	}
	s.inputs = append(s.inputs, in)
	if in.kind == relay.SettingsChange {
		s.set = in.settings
	}
	for _, e := range in.events {
		if e.Pos.LSN = in.lsn; !slices.Contains(s.taken, e.Pos) {
			s.events = append(s.events, e)
		}
	}
	if due := s.due(in); due != 0 {
		return s.close(due, in.lsn), nil
	}
	return nil, nil
}

func (s *slow) due(in *input) (due outbox.LSN) {
	if s.set.Horizon == 0 {
		due = in.lsn
	} else {
		for _, c := range s.inputs {
			if c.lsn < in.lsn && in.time-c.time >= s.set.Horizon.Microseconds() {
				due = c.lsn
			}
		}
	}
	left := len(s.events)
	if left <= s.set.MaxEvents {
		return due
	}
	for _, c := range s.inputs {
		if left <= s.set.MaxEvents {
			break
		}
		for _, e := range s.events {
			if e.Pos.LSN == c.lsn {
				left--
			}
		}
		due = max(due, c.lsn)
	}
	return due
}

func (s *slow) close(due, thru outbox.LSN) *window {
	var take, pulled, younger, left []relay.Event
	top := map[sequence]string{}
	for _, e := range s.events {
		if e.Pos.LSN <= due {
			take = append(take, e)
			top[sequenceOf(&e)] = max(top[sequenceOf(&e)], e.Key)
		} else {
			younger = append(younger, e)
		}
	}
	for _, e := range younger {
		if k, ok := top[sequenceOf(&e)]; ok && e.Key < k {
			pulled = append(pulled, e)
		} else {
			left = append(left, e)
		}
	}
	if len(beyond(s.taken, due))+len(pulled) > s.maxTaken {
		pulled, left = younger, nil
	}
	take = append(take, pulled...)
	s.events = left
	if len(left) == 0 {
		due = thru
	}
	for len(s.inputs) > 0 && s.inputs[0].lsn <= due {
		if s.inputs[0].kind == relay.SettingsChange {
			s.atDue = s.inputs[0].settings
		}
		s.inputs = s.inputs[1:]
	}
	for _, e := range pulled {
		s.taken = append(s.taken, e.Pos)
	}
	s.taken = beyond(s.taken, due)
	if len(take) == 0 {
		return nil
	}
	return &window{
		due: due, thru: thru, pull: len(pulled), sort: s.set.Sort, events: inOrder(take, s.set.Sort),
		place: relay.Checkpoint{Due: due, PublishedAhead: s.taken, Settings: s.atDue, Timeline: timeline},
	}
}

func inOrder(take []relay.Event, by outbox.Sort) []relay.Event {
	position := func(a, b relay.Event) int { return a.Pos.Compare(b.Pos) }
	key := func(a, b relay.Event) int { return cmp.Or(cmp.Compare(a.Key, b.Key), position(a, b)) }
	if by == outbox.BySeqKey {
		slices.SortFunc(take, func(a, b relay.Event) int { return cmp.Or(cmp.Compare(a.Doc, b.Doc), key(a, b)) })
		return take
	}
	slices.SortFunc(take, position)
	sequences := map[sequence][]relay.Event{}
	for _, e := range take {
		sequences[sequenceOf(&e)] = append(sequences[sequenceOf(&e)], e)
	}
	for _, v := range sequences {
		slices.SortFunc(v, key)
	}
	out := make([]relay.Event, len(take))
	for i, e := range take {
		q := sequenceOf(&e)
		out[i], sequences[q] = sequences[q][0], sequences[q][1:]
	}
	return out
}

// messages are those of a window.
func (w *window) messages() []message {
	out := make([]message, len(w.events))
	for n, e := range w.events {
		out[n] = message{
			header: outbox.Header{
				Pos: e.Pos, N: n, Of: len(w.events), Due: w.due, Thru: w.thru, Pull: w.pull, Timeline: timeline, Sort: w.sort, Key: e.Key,
			},
			doc: e.Doc, key: e.Key,
		}
	}
	return out
}

// undisturbed is the stream that the WAL makes.
func undisturbed(wal []*input, first relay.Settings, maxTaken int) []message {
	b := newSlow(relay.Checkpoint{Settings: first}, maxTaken)
	var out []message
	for _, in := range wal {
		if w, _ := b.add(in); w != nil {
			out = append(out, w.messages()...)
		}
	}
	return out
}

func pick[T any](rnd *rand.Rand, of ...T) T { return of[rnd.IntN(len(of))] }

func makeSettings(rnd *rand.Rand) relay.Settings {
	return relay.Settings{
		Horizon:   pick(rnd, 0, 500*time.Microsecond, 2*time.Millisecond, 5*time.Millisecond, 20*time.Millisecond),
		Sort:      pick(rnd, outbox.BySeqKey, outbox.ByCommit),
		MaxEvents: pick(rnd, 5, 20, 1000), MaxBytes: 1 << 30,
	}
}

// makeWAL makes n inputs or so, a millisecond apart on average: transactions that commit late or never, ticks, changes of settings.
func makeWAL(rnd *rand.Rand, n int) []*input {
	var wal []*input
	var lsn outbox.LSN
	t := 0.0
	counters := map[sequence]int{}
	var pending [][]relay.Event
	changes := pick(rnd, 0, 0, 0.05, 0.3)
	add := func(in *input, at float64) { in.lsn, in.time = lsn, int64(at*1000); wal = append(wal, in) }
	commit := func(events []relay.Event, at float64) {
		for i := range events {
			events[i].Pos.Index = uint32(i)
		}
		add(&input{kind: relay.Events, events: events}, at)
	}
	for range n {
		lsn += outbox.LSN(2 + rnd.IntN(5))
		t += rnd.ExpFloat64()
		if rnd.Float64() < changes {
			add(&input{kind: relay.SettingsChange, settings: makeSettings(rnd)}, t)
			continue
		}
		if rnd.Float64() < 0.15 {
			add(&input{kind: relay.Heartbeat}, t)
			continue
		}
		var events []relay.Event
		for range pick(rnd, 1, 1, 2, 3, 12) {
			q := sequence{fmt.Sprintf("d%d", rnd.IntN(4)), fmt.Sprintf("a%d", rnd.IntN(3))}
			counters[q]++
			events = append(events, relay.Event{Doc: q.doc, Actor: q.actor, Key: fmt.Sprintf("%s:%06d", q.actor, counters[q])})
		}
		rnd.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
		if rnd.Float64() < 0.3 {
			pending = append(pending, events)
			continue
		}
		commit(events, t-0.3*rnd.Float64()) // commit timestamps need not ascend
		if len(pending) > 0 && rnd.Float64() < 0.5 {
			i := rnd.IntN(len(pending))
			lsn += 2
			t += 0.01
			commit(pending[i], t)
			pending = slices.Delete(pending, i, i+1)
		}
	}
	lsn += 5
	add(&input{kind: relay.Heartbeat}, t+100) // closes everything
	return wal
}
