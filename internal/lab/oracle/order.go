package oracle

import (
	"cmp"
	"container/heap"
	"slices"
)

// maxTaken is how many events beyond its due a window may leave behind it.
const maxTaken = 512

// overhead is what an event counts beside its bytes.
const overhead = 64

// window is what the messages of a window have in common.
type window struct {
	due, thru LSN
	pull, of  int
	sort      Sort
	late      []bool // in gap mode: which of the messages are
}

// entry is a held event.
type entry struct {
	*Event
	size int64
	in   *input
	seq  *sequence
	gone bool // it has left
}

func (e *entry) byKey(o *entry) int { return cmp.Or(cmp.Compare(e.Key, o.Key), e.Pos.Compare(o.Pos)) }

// input is an input above the last due, with what it still holds.
type input struct {
	lsn     LSN
	time    int64
	entries []*entry
	events  int
	bytes   int64
}

// sequence is what is held of one document by one actor, lowest key first, then by position.
type sequence struct {
	held []*entry
	top  *entry // of the window that is being made: the highest taken that is due
}

// order is the rules of ordering: inputs go in, windows come out. It knows nothing of restarts: the order
// does not depend on them.
type order struct {
	set     Settings
	unkeyed bool // horizon 0 and commit order, whatever the settings say

	inputs    []*input // oldest first
	ages      ages     // the same by time; those that are not above the last due any more do not count
	due       LSN      // the last
	events    int      // held
	bytes     int64
	sequences map[[2]string]*sequence
	taken     []Position // that have left though they are beyond due
	maxTaken  int
	gap       *gapOrder
}

func newOrder(set Settings, unkeyed bool) *order {
	o := &order{set: set, unkeyed: unkeyed, sequences: map[[2]string]*sequence{}, maxTaken: maxTaken}
	o.gap = newGapOrder(o.inForce())
	return o
}

func (o *order) inForce() Settings {
	s := o.set
	if o.unkeyed && s.Sort != ByGap {
		s.Horizon, s.Sort = 0, ByCommit
	}
	return s
}

// add reads an input and returns the window that it closes, nil if none. A change of settings is in force at
// once.
func (o *order) add(lsn LSN, time int64, events []*Event, set *Settings) (*window, []*Event) {
	gap := o.inForce().Sort == ByGap
	if set != nil && !gap && set.Sort == ByGap { // what is held leaves by the rule of before
		w, events := o.cut(lsn)
		o.set = *set
		o.gap = newGapOrder(o.set)
		return w, events
	}
	if set != nil {
		o.set = *set
	}
	if gap {
		return o.gap.add(lsn, time, events, o.inForce())
	}
	in := &input{lsn: lsn, time: time}
	for _, e := range events {
		o.hold(in, e)
	}
	o.inputs = append(o.inputs, in)
	due, ok := o.dueNow(in)
	if !ok {
		return nil, nil
	}
	return o.close(due, lsn)
}

// cut closes everything that is held. All inputs up to lsn were read, and none behind it.
func (o *order) cut(lsn LSN) (*window, []*Event) {
	if o.inForce().Sort == ByGap {
		return o.gap.cut(lsn)
	}
	return o.close(lsn, lsn)
}

func (o *order) hold(in *input, e *Event) {
	name := [2]string{e.Doc, e.Actor}
	q := o.sequences[name]
	if q == nil {
		q = &sequence{}
		o.sequences[name] = q
	}
	n := &entry{Event: e, size: e.size(), in: in, seq: q}
	at, _ := slices.BinarySearchFunc(q.held, n, (*entry).byKey)
	q.held = slices.Insert(q.held, at, n)
	in.entries = append(in.entries, n)
	in.events++
	in.bytes += n.size
	o.events++
	o.bytes += n.size
}

// dueNow is the newest input that is due after the last one was read.
func (o *order) dueNow(in *input) (due LSN, ok bool) {
	set := o.inForce()
	if set.Horizon == 0 {
		due, ok = in.lsn, true
	} else {
		for len(o.ages) > 0 && in.time-o.ages[0].time >= set.Horizon.Microseconds() {
			if c := heap.Pop(&o.ages).(*input); c.lsn > o.due {
				due, ok = max(due, c.lsn), true
			}
		}
		heap.Push(&o.ages, in)
	}
	events, bytes := o.events, o.bytes
	for _, c := range o.inputs {
		if events <= set.MaxEvents && bytes <= set.MaxBytes {
			break
		}
		events -= c.events
		bytes -= c.bytes
		due, ok = max(due, c.lsn), true
	}
	return due, ok
}

// close makes a window of what is due and what it pulls.
func (o *order) close(due, thru LSN) (*window, []*Event) {
	var touched []*sequence
	for _, in := range o.inputs {
		if in.lsn > due {
			break
		}
		for _, e := range in.entries {
			if e.gone {
				continue
			}
			if e.seq.top == nil {
				touched = append(touched, e.seq)
				e.seq.top = e
			} else if e.Key > e.seq.top.Key {
				e.seq.top = e
			}
		}
	}
	var take []*entry
	pull := 0
	for _, q := range touched {
		for _, e := range q.held { // all that is due comes before the first that stays
			if e.Pos.LSN > due && e.Key >= q.top.Key {
				break
			}
			if e.Pos.LSN > due {
				pull++
			}
			take = append(take, e)
		}
		q.top = nil
	}
	if o.takenBeyond(due)+pull > o.maxTaken {
		take, pull = o.everything(), 0
		for _, e := range take {
			if e.Pos.LSN > due {
				pull++
			}
		}
	}
	for _, e := range take {
		if e.Pos.LSN > due {
			o.taken = append(o.taken, e.Pos)
		}
	}
	o.leave(take)
	if o.events == 0 {
		due = thru
	}
	o.advance(due)
	if len(take) == 0 {
		return nil, nil
	}
	set := o.inForce()
	sorted(take, set.Sort)
	events := make([]*Event, len(take))
	for i, e := range take {
		events[i] = e.Event
	}
	return &window{due, thru, pull, len(take), set.Sort, nil}, events
}

// leave takes events out of what is held.
func (o *order) leave(take []*entry) {
	for _, e := range take {
		e.gone = true
		e.in.events--
		e.in.bytes -= e.size
		o.events--
		o.bytes -= e.size
	}
	for _, e := range take {
		// Of a sequence the lowest leave.
		q := e.seq
		n := 0
		for n < len(q.held) && q.held[n].gone {
			q.held[n] = nil
			n++
		}
		if q.held = q.held[n:]; len(q.held) == 0 {
			delete(o.sequences, [2]string{e.Doc, e.Actor})
		}
	}
}

func (o *order) advance(due LSN) {
	o.due = due
	n := 0
	for n < len(o.inputs) && o.inputs[n].lsn <= due {
		o.inputs[n].entries = nil // ages may keep the input
		o.inputs[n] = nil
		n++
	}
	o.inputs = o.inputs[n:]
	o.taken = slices.DeleteFunc(o.taken, func(p Position) bool { return p.LSN <= due })
}

func (o *order) takenBeyond(due LSN) (n int) {
	for _, p := range o.taken {
		if p.LSN > due {
			n++
		}
	}
	return n
}

// remains are all events that are held, by position.
func (o *order) remains() []*Event { return append(eventsOf(o.everything()), o.gap.remains()...) }

// everything is what horizon mode holds, by position.
func (o *order) everything() (all []*entry) {
	for _, in := range o.inputs {
		for _, e := range in.entries {
			if !e.gone {
				all = append(all, e)
			}
		}
	}
	return all
}

// sorted puts a window's events in order.
func sorted(take []*entry, by Sort) {
	if by == BySeqKey {
		slices.SortFunc(take, func(a, b *entry) int { return cmp.Or(cmp.Compare(a.Doc, b.Doc), a.byKey(b)) })
		return
	}
	// Each sequence keeps its places and ascends in them.
	slices.SortFunc(take, func(a, b *entry) int { return a.Pos.Compare(b.Pos) })
	places := map[*sequence][]int{}
	for i, e := range take {
		places[e.seq] = append(places[e.seq], i)
	}
	before := slices.Clone(take)
	for _, at := range places {
		own := make([]*entry, len(at))
		for i, n := range at {
			own[i] = before[n]
		}
		slices.SortFunc(own, (*entry).byKey)
		for i, n := range at {
			take[n] = own[i]
		}
	}
}

// ages is a heap of inputs, oldest time first.
type ages []*input

func (a ages) Len() int           { return len(a) }
func (a ages) Less(i, j int) bool { return a[i].time < a[j].time }
func (a ages) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }
func (a *ages) Push(x any)        { *a = append(*a, x.(*input)) }
func (a *ages) Pop() any {
	last := len(*a) - 1
	x := (*a)[last]
	(*a)[last] = nil
	*a = (*a)[:last]
	return x
}
