package checkpoint

import (
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
)

// upTo returns what of the ranges lies at or below last.
func upTo(holes []Range, last uint64) []Range {
	var out []Range
	for _, h := range holes {
		if h.From <= last {
			out = append(out, Range{h.From, min(h.To, last)})
		}
	}
	return out
}

// above returns what of the ranges lies above seq.
func above(holes []Range, seq uint64) []Range {
	var out []Range
	for _, h := range holes {
		if h.To > seq {
			out = append(out, Range{max(h.From, seq+1), h.To})
		}
	}
	return out
}

// add returns the ranges and r, joined where they touch.
func add(holes []Range, r Range) []Range {
	all := append(slices.Clone(holes), r)
	slices.SortFunc(all, func(a, b Range) int {
		if a.From < b.From {
			return -1
		}
		return 1
	})
	out := all[:1]
	for _, h := range all[1:] {
		if top := &out[len(out)-1]; h.From <= top.To+1 {
			top.To = max(top.To, h.To)
		} else {
			out = append(out, h)
		}
	}
	return out
}

// within reports whether a sequence lies in one of the ranges.
func within(holes []Range, seq uint64) bool {
	return slices.ContainsFunc(holes, func(h Range) bool { return h.From <= seq && seq <= h.To })
}

// below returns the sequence below the newest n that are at or below seq and in no hole; 0 where there are
// not so many.
func below(holes []Range, seq, n uint64) uint64 {
	for _, h := range slices.Backward(upTo(holes, seq)) {
		if n <= seq-h.To {
			break
		}
		n -= seq - h.To
		seq = h.From - 1
	}
	return seq - min(seq, n)
}

// needed returns the holes that a start needs whose oldest checkpoint is p: those above p, and those between
// the messages that it remembers. Without the latter nobody could tell them from messages that were removed.
func needed(holes []Range, p relay.Checkpoint) []Range {
	return above(holes, below(holes, p.Seq, uint64(p.Remembered)))
}

// count returns how many of the sequences in (from, to] lie in no hole.
func count(holes []Range, from, to uint64) uint64 {
	if to <= from {
		return 0
	}
	n := to - from
	for _, h := range above(upTo(holes, to), from) {
		n -= h.To - h.From + 1
	}
	return n
}
