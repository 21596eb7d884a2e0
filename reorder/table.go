package reorder

import (
	"hash/maphash"
	"math/bits"
)

// table finds values by a number that they have themselves: sequences and documents by their hash. It is open
// addressing in a slice whose length is a power of two; the zero value of T is an empty place. The seed keeps
// producers from choosing names that collide; it decides where a value lies and nothing else, and the table
// is never gone through to decide anything.
type table[T comparable] struct {
	slots []T
	live  int
	key   func(T) uint64
	seed  uint64
}

func newTable[T comparable](key func(T) uint64) table[T] {
	return table[T]{key: key, seed: maphash.String(maphash.MakeSeed(), "")}
}

func (t *table[T]) home(key uint64) int {
	hi, lo := bits.Mul64(key^t.seed, 0x9E3779B97F4A7C15)
	return int((hi ^ lo) & uint64(len(t.slots)-1))
}

// find returns the value with this key, the zero value if there is none.
func (t *table[T]) find(key uint64) (v T) {
	if t.live == 0 {
		return v
	}
	var empty T
	for i := t.home(key); t.slots[i] != empty; i = (i + 1) & (len(t.slots) - 1) {
		if t.key(t.slots[i]) == key {
			return t.slots[i]
		}
	}
	return empty
}

// put adds a value, in place of the one with the same key if there is one.
func (t *table[T]) put(v T) {
	if (t.live+1)*2 > len(t.slots) {
		t.resize(max(minTable, 2*len(t.slots)))
	}
	var empty T
	key := t.key(v)
	i := t.home(key)
	for ; t.slots[i] != empty; i = (i + 1) & (len(t.slots) - 1) {
		if t.key(t.slots[i]) == key {
			t.slots[i] = v
			return
		}
	}
	t.slots[i] = v
	t.live++
}

// remove takes out a value that is there.
func (t *table[T]) remove(v T) {
	var empty T
	mask := len(t.slots) - 1
	hole := t.home(t.key(v))
	for t.slots[hole] != v {
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; t.slots[i] != empty; i = (i + 1) & mask {
		if home := t.home(t.key(t.slots[i])); (i-home)&mask >= (i-hole)&mask {
			t.slots[hole], hole = t.slots[i], i
		}
	}
	t.slots[hole] = empty
	if t.live--; len(t.slots) > minTable && t.live*16 < len(t.slots) {
		t.resize(len(t.slots) / 4)
	}
}

func (t *table[T]) resize(n int) {
	var empty T
	old := t.slots
	t.slots = make([]T, n)
	for _, v := range old {
		if v == empty {
			continue
		}
		i := t.home(t.key(v))
		for t.slots[i] != empty {
			i = (i + 1) & (n - 1)
		}
		t.slots[i] = v
	}
}

// all returns the values, in no order.
func (t *table[T]) all(yield func(T) bool) {
	var empty T
	for _, v := range t.slots {
		if v != empty && !yield(v) {
			return
		}
	}
}
