package oracle

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// plain is the rules as they are written down, lists and loops only: what order must give, whatever it does
// to be quick.
type plain struct {
	set      Settings
	maxTaken int
	inputs   []testInput
	events   []*Event
	taken    map[Position]bool
}

type testInput struct {
	lsn    LSN
	time   int64
	set    *Settings
	events []*Event
	cut    bool // all inputs up to lsn have come
}

// feed gives an input, or a cut, to the rules.
func (in *testInput) feed(o *order) (*window, []*Event) {
	if in.cut {
		return o.cut(in.lsn)
	}
	return o.add(in.lsn, in.time, in.events, in.set)
}

// cutAnywhere puts cuts between the inputs of half of the WALs, before the first and behind the last one: at
// the LSN of the input before, or above it, and now and then twice.
func cutAnywhere(r *rand.Rand, wal []testInput) (all []testInput) {
	often, last := []float64{0, 0, 0.05, 0.3}[r.IntN(4)], LSN(0)
	for i := range len(wal) + 1 {
		next := last + 4
		if i < len(wal) {
			next = wal[i].lsn
		}
		for next > last && r.Float64() < often {
			last += LSN(r.IntN(int(next - last)))
			all = append(all, testInput{lsn: last, cut: true})
		}
		if i < len(wal) {
			all, last = append(all, wal[i]), next
		}
	}
	return all
}

func sizeOf(e *Event) int64 { return int64(len(e.Doc) + len(e.Actor) + len(e.Key) + e.Size + 64) }

func (p *plain) add(in testInput) (*window, []*Event) {
	p.inputs = append(p.inputs, in)
	if in.set != nil {
		p.set = *in.set
	}
	p.events = append(p.events, in.events...)
	due := LSN(0)
	for _, c := range p.inputs {
		if p.set.Horizon == 0 || in.cut || c.lsn < in.lsn && in.time-c.time >= p.set.Horizon.Microseconds() {
			due = c.lsn
		}
	}
	left, bytes := len(p.events), int64(0)
	for _, e := range p.events {
		bytes += sizeOf(e)
	}
	for _, c := range p.inputs {
		if left <= p.set.MaxEvents && bytes <= p.set.MaxBytes {
			break
		}
		for _, e := range p.events {
			if e.Pos.LSN == c.lsn {
				left--
				bytes -= sizeOf(e)
			}
		}
		due = max(due, c.lsn)
	}
	if due == 0 {
		return nil, nil
	}
	var take, stay []*Event
	top := map[[2]string]string{}
	for _, e := range p.events {
		if q := [2]string{e.Doc, e.Actor}; e.Pos.LSN <= due {
			take = append(take, e)
			top[q] = max(top[q], e.Key)
		}
	}
	beyond, pull := 0, 0
	for pos := range p.taken {
		if pos.LSN > due {
			beyond++
		}
	}
	for _, e := range p.events {
		if e.Pos.LSN <= due {
			continue
		}
		if key, ok := top[[2]string{e.Doc, e.Actor}]; ok && e.Key < key {
			take = append(take, e)
			pull++
		} else {
			stay = append(stay, e)
		}
	}
	if beyond+pull > p.maxTaken {
		pull += len(stay)
		take, stay = append(take, stay...), nil
	}
	p.events = stay
	for _, e := range take {
		p.taken[e.Pos] = true
	}
	if len(stay) == 0 {
		due = in.lsn
	}
	for pos := range p.taken {
		if pos.LSN <= due {
			delete(p.taken, pos)
		}
	}
	p.inputs = slices.DeleteFunc(p.inputs, func(c testInput) bool { return c.lsn <= due })
	if len(take) == 0 {
		return nil, nil
	}
	byKey := func(a, b *Event) int { return cmp.Or(cmp.Compare(a.Key, b.Key), a.Pos.Compare(b.Pos)) }
	if p.set.Sort == BySeqKey {
		slices.SortFunc(take, func(a, b *Event) int { return cmp.Or(cmp.Compare(a.Doc, b.Doc), byKey(a, b)) })
		return &window{due, in.lsn, pull, len(take), BySeqKey, nil}, take
	}
	slices.SortFunc(take, func(a, b *Event) int { return a.Pos.Compare(b.Pos) })
	own := map[[2]string][]*Event{}
	for _, e := range take {
		q := [2]string{e.Doc, e.Actor}
		own[q] = append(own[q], e)
	}
	for _, v := range own {
		slices.SortFunc(v, byKey)
	}
	for i, e := range take {
		q := [2]string{e.Doc, e.Actor}
		take[i], own[q] = own[q][0], own[q][1:]
	}
	return &window{due, in.lsn, pull, len(take), ByCommit, nil}, take
}

func TestTheOrderIsThatOfTheObviousRule(t *testing.T) {
	t.Parallel()
	trials := 3000
	if testing.Short() {
		trials = 300
	}
	var windows, pulled, everything, limits int
	for seed := range uint64(trials) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		first := randomSettings(rnd)
		slow, quick := &plain{set: first, maxTaken: 6, taken: map[Position]bool{}}, newOrder(first, false)
		quick.maxTaken = 6
		seen := map[Position]bool{}
		n := 0
		for _, in := range cutAnywhere(rnd, randomWAL(rnd)) {
			w, events := slow.add(in)
			got, gotEvents := in.feed(quick)
			if fmt.Sprint(got) != fmt.Sprint(w) || !slices.Equal(gotEvents, events) {
				t.Fatalf("seed %d, input %v: window %+v %v, want %+v %v", seed, in.lsn, got, gotEvents, w,
					events)
			}
			n += len(in.events)
			for _, e := range events {
				if seen[e.Pos] {
					t.Fatalf("seed %d: %v leaves twice", seed, e)
				}
				seen[e.Pos] = true
			}
			if w != nil {
				windows++
				pulled += w.pull
				if w.pull > 6 {
					everything++
				}
				if w.due < w.thru && slow.set.Horizon > time.Minute {
					limits++
				}
			}
			if held := len(quick.everything()); held != quick.events || held != len(slow.events) ||
				held == 0 && len(quick.sequences) > 0 {
				t.Fatalf("seed %d: %d held, said to be %d, want %d; %d sequences", seed, held, quick.events,
					len(slow.events), len(quick.sequences))
			}
		}
		if len(seen) != n {
			t.Fatalf("seed %d: %d of %d events", seed, len(seen), n)
		}
	}
	if windows < 1000 || pulled < 100 || everything < 10 || limits < 10 {
		t.Errorf("%d windows, %d pulled, %d took everything, %d by limits: too few of something", windows,
			pulled, everything, limits)
	}
}

func randomSettings(rnd *rand.Rand) Settings {
	horizons := []time.Duration{0, 500 * time.Microsecond, 2 * time.Millisecond, 5 * time.Millisecond,
		20 * time.Millisecond, time.Hour}
	return Settings{horizons[rnd.IntN(6)], Sort(rnd.IntN(2)), []int{5, 20, 1000}[rnd.IntN(3)],
		[]int64{400, 3000, 1 << 30}[rnd.IntN(3)], Gap{}}
}

// randomWAL makes inputs about a millisecond apart, with commit timestamps that do not quite ascend, and
// events that come late. The last two close everything.
func randomWAL(rnd *rand.Rand) (wal []testInput) {
	lsn, at := LSN(0), 0.0
	counters := map[[2]string]int{}
	var late [][]*Event
	changes := []float64{0, 0, 0.05, 0.3}[rnd.IntN(4)]
	add := func(in testInput) {
		lsn += LSN(1 + rnd.IntN(5))
		in.lsn, in.time = lsn, int64(1000*(at-0.3*rnd.Float64()))
		for i, e := range in.events {
			e.Pos = Position{lsn, uint32(i)}
		}
		wal = append(wal, in)
	}
	for range 5 + rnd.IntN(60) {
		at += rnd.ExpFloat64()
		if rnd.Float64() < changes {
			set := randomSettings(rnd)
			add(testInput{set: &set})
			continue
		}
		if rnd.Float64() < 0.15 {
			add(testInput{})
			continue
		}
		var events []*Event
		for range []int{1, 1, 2, 3, 12}[rnd.IntN(5)] {
			q := [2]string{fmt.Sprint("d", rnd.IntN(4)), fmt.Sprint("a", rnd.IntN(3))}
			if rnd.IntN(20) > 0 { // else the key of the one before again
				counters[q]++
			}
			events = append(events, &Event{Doc: q[0], Actor: q[1],
				Key: fmt.Sprintf("%s:%06d", q[1], counters[q]), Size: rnd.IntN(100)})
		}
		rnd.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
		if rnd.IntN(3) == 0 {
			late = append(late, events)
			continue
		}
		add(testInput{events: events})
		if len(late) > 0 && rnd.IntN(2) == 0 {
			i := rnd.IntN(len(late))
			add(testInput{events: late[i]})
			late = slices.Delete(late, i, i+1)
		}
	}
	at += 10 * 3600 * 1000
	add(testInput{})
	return wal
}
