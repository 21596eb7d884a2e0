package archive

import "crypto/sha256"

// merkle makes the root of a Merkle tree of leaves as RFC 6962 does, from left to right: it keeps the roots
// of complete subtrees only. Its zero value has no leaves.
type merkle struct {
	n     uint64
	roots []Hash // of complete subtrees, from the largest to the smallest: one for each bit of n
}

func (t *merkle) add(leaf Hash) {
	var b [1 + len(leaf)]byte
	copy(b[1:], leaf[:])
	root := Hash(sha256.Sum256(b[:]))
	for n := t.n; n&1 == 1; n >>= 1 {
		last := len(t.roots) - 1
		root = node(t.roots[last], root)
		t.roots = t.roots[:last]
	}
	t.roots = append(t.roots, root)
	t.n++
}

func (t *merkle) root() Hash {
	if t.n == 0 {
		return sha256.Sum256(nil)
	}
	root := t.roots[len(t.roots)-1]
	for i := len(t.roots) - 2; i >= 0; i-- {
		root = node(t.roots[i], root)
	}
	return root
}

func node(left, right Hash) Hash {
	b := [1 + 2*len(left)]byte{1}
	copy(b[1:], left[:])
	copy(b[1+len(left):], right[:])
	return sha256.Sum256(b[:])
}
