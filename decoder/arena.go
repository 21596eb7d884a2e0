package decoder

import (
	"strings"
	"unsafe"
)

const (
	// blockSize is large enough that a block serves hundreds of rows and small enough that one event which is
	// held long keeps little else alive.
	blockSize = 256 << 10
	// ownBlock is from which size on a value gets memory of its own, so that little is lost at a block's end
	// and a held document name never keeps a large payload alive.
	ownBlock = 32 << 10
	// slabSize is how many strings a slab for Event.Extra holds.
	slabSize = 512
)

// arena gives out memory for the values of events. What it has given out is never written again: a block is
// filled once, from front to back, and then left to the garbage collector, which frees it when no event
// refers to it any more.
type arena struct {
	block []byte   // the length is what is given out
	slab  []string // what is left of the present slab
}

// take returns an empty slice with room for exactly n bytes.
func (a *arena) take(n int) []byte {
	if n >= ownBlock {
		return uncleared(n)[:0:n]
	}
	if a.block == nil || n > cap(a.block)-len(a.block) {
		a.block = uncleared(blockSize)
		a.slab = nil // so a slab keeps no more than a block or two alive
	}
	start := len(a.block)
	a.block = a.block[:start+n]
	return a.block[start : start : start+n]
}

// uncleared returns memory for n bytes at least that nobody has set to zero: whatever is taken of it is
// written before it is read. Only a builder gives such memory. What it has handed out it never writes to
// again.
func uncleared(n int) []byte {
	var b strings.Builder
	b.Grow(n)
	b.WriteByte(0)
	s := b.String()
	return unsafe.Slice(unsafe.StringData(s), b.Cap())[:0]
}

// copy returns a copy of b, not nil.
func (a *arena) copy(b []byte) []byte { return append(a.take(len(b)), b...) }

// strings returns n empty strings; alone is for those that may keep much memory alive and must not share a
// slab.
func (a *arena) strings(n int, alone bool) []string {
	if n == 0 {
		return nil
	}
	if alone {
		return make([]string, n)
	}
	if n > len(a.slab) {
		a.slab = make([]string, slabSize)
	}
	s := a.slab[:n:n]
	a.slab = a.slab[n:]
	return s
}

// asString returns b as a string without a copy; b must be memory of the arena.
func asString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
