package reorder

import (
	"hash/maphash"
	"math/bits"
)

// index finds the held events of a sequence, lowest key first. It is a hash table of the sequences that have
// held events; the hash and the table's layout decide nothing but where a sequence is found. Names are
// compared with those of an event that is held, so the table keeps no memory alive that its events don't.
type index struct {
	seed  maphash.Seed
	table []*sequence // open addressing; the length is a power of two
	live  int
	free  []*sequence
}

// The table is at most half full, and gets smaller when it is less than a sixteenth full: passing over it
// costs what has been put in. maxFree sequences are kept for the next ones.
const (
	minTable = 64
	maxFree  = 1024
)

// sequenceWeight is what a sequence takes up: itself and its share of the table.
const sequenceWeight = 128 + 32

func (x *index) init() {
	x.seed = maphash.MakeSeed()
	x.table = make([]*sequence, minTable)
}

func (x *index) weight() int64 { return int64(x.live) * sequenceWeight }

func hash(seed maphash.Seed, doc, actor string) uint64 {
	h := maphash.String(seed, doc)
	if actor != "" {
		h = bits.RotateLeft64(h, 29)*0x9E3779B97F4A7C15 + maphash.String(seed, actor)
	}
	return h
}

// sequence sets the sequence of an event: a new one without events if it is not there.
func (x *index) sequence(s *slot) *sequence {
	h := hash(x.seed, s.Doc, s.Actor)
	s.hash = h
	mask := uint64(len(x.table) - 1)
	i := h & mask
	for ; x.table[i] != nil; i = (i + 1) & mask {
		if q := x.table[i]; q.hash == h && q.is(s.Doc, s.Actor) {
			s.seq = q
			return q
		}
	}
	q := x.take()
	q.hash, s.seq = h, q
	x.table[i] = q
	if x.live++; x.live*2 > len(x.table) {
		x.resize(len(x.table) * 2)
	}
	return q
}

// find returns the sequence of an event, nil if it is not there.
func (x *index) find(doc, actor string) *sequence {
	h := hash(x.seed, doc, actor)
	mask := uint64(len(x.table) - 1)
	for i := h & mask; x.table[i] != nil; i = (i + 1) & mask {
		if q := x.table[i]; q.hash == h && q.is(doc, actor) {
			return q
		}
	}
	return nil
}

func (x *index) add(s *slot) {
	x.sequence(s).add(s)
}

// remove takes out a sequence whose last event has been popped.
func (x *index) remove(q *sequence) {
	mask := uint64(len(x.table) - 1)
	hole := q.hash & mask
	for x.table[hole] != q {
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; x.table[i] != nil; i = (i + 1) & mask {
		if home := x.table[i].hash & mask; (i-home)&mask >= (i-hole)&mask {
			x.table[hole], hole = x.table[i], i
		}
	}
	x.table[hole] = nil
	x.give(q)
	if x.live--; len(x.table) > minTable && x.live*16 < len(x.table) {
		x.resize(len(x.table) / 4)
	}
}

// reset takes out everything.
func (x *index) reset() {
	if x.live == 0 {
		return
	}
	for i, q := range x.table {
		if q != nil {
			x.table[i] = nil
			x.give(q)
		}
	}
	if x.live = 0; len(x.table) > minTable*16 {
		x.table = make([]*sequence, minTable)
	}
}

func (x *index) resize(n int) {
	old := x.table
	x.table = make([]*sequence, max(n, minTable))
	mask := uint64(len(x.table) - 1)
	for _, q := range old {
		if q == nil {
			continue
		}
		i := q.hash & mask
		for x.table[i] != nil {
			i = (i + 1) & mask
		}
		x.table[i] = q
	}
}

func (x *index) take() *sequence {
	last := len(x.free) - 1
	if last < 0 {
		q := new(sequence)
		q.run = q.few[:0]
		return q
	}
	q := x.free[last]
	x.free[last] = nil
	x.free = x.free[:last]
	return q
}

func (x *index) give(q *sequence) {
	if len(x.free) < maxFree {
		q.clear()
		x.free = append(x.free, q)
	}
}
