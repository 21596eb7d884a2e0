package outbox

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// MetadataErased is the name in the metadata of a stream under which it says which of its messages were
// erased, as text of [Sequences].
const MetadataErased = "outflow-erased"

// SequenceRange is a range of a stream's sequences, both ends included.
type SequenceRange struct {
	From uint64 `json:"from"`
	To   uint64 `json:"to"`
}

// Sequences is a set of a stream's sequences: ranges in ascending order that neither overlap nor touch. nil
// is the empty one.
type Sequences []SequenceRange

// ParseSequences reads the text that String makes: ranges, separated by commas. Each is how far its first
// sequence lies behind the last one of the range before it (behind 0 for the first range), and then, where
// it has more than one, + and how many more: 12,3+2,23 are 12, 15 to 17, and 40.
func ParseSequences(text string) (Sequences, error) {
	if text == "" {
		return nil, nil
	}
	var s Sequences
	at := uint64(0)
	for item := range strings.SplitSeq(text, ",") {
		gap, more, several := strings.Cut(item, "+")
		from, err := strconv.ParseUint(gap, 10, 64)
		n := uint64(0)
		if err == nil && several {
			n, err = strconv.ParseUint(more, 10, 64)
		}
		least := uint64(2)
		if at == 0 {
			least = 1
		}
		if err != nil || from < least || at+from < at || at+from+n < at+from || several && n == 0 {
			return nil, fmt.Errorf("%q is no range of sequences behind %d", item, at)
		}
		s = append(s, SequenceRange{at + from, at + from + n})
		at += from + n
	}
	return s, nil
}

// String is the text that [ParseSequences] reads.
func (s Sequences) String() string {
	var b []byte
	at := uint64(0)
	for _, r := range s {
		if at > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, r.From-at, 10)
		if r.To > r.From {
			b = strconv.AppendUint(append(b, '+'), r.To-r.From, 10)
		}
		at = r.To
	}
	return string(b)
}

// Has reports whether a sequence is in the set.
func (s Sequences) Has(seq uint64) bool {
	_, is := slices.BinarySearchFunc(s, seq, func(r SequenceRange, seq uint64) int {
		switch {
		case r.To < seq:
			return -1
		case r.From > seq:
			return 1
		}
		return 0
	})
	return is
}

// With returns the set with the sequences of others as well, which may be in any order and overlap.
func (s Sequences) With(others ...SequenceRange) Sequences {
	all := slices.Concat(s, others)
	slices.SortFunc(all, func(a, b SequenceRange) int {
		if a.From < b.From {
			return -1
		}
		return 1
	})
	var merged Sequences
	for _, r := range all {
		if n := len(merged); n > 0 && r.From <= merged[n-1].To+1 {
			merged[n-1].To = max(merged[n-1].To, r.To)
		} else {
			merged = append(merged, r)
		}
	}
	return merged
}

// Within returns the sequences of the set from one to another.
func (s Sequences) Within(from, to uint64) (part Sequences) {
	i, _ := slices.BinarySearchFunc(s, from, func(r SequenceRange, seq uint64) int {
		return cmp.Compare(r.To, seq)
	})
	for _, r := range s[i:] {
		if r.From > to {
			break
		}
		part = append(part, SequenceRange{max(r.From, from), min(r.To, to)})
	}
	return part
}

// Lacking returns the sequences from one to another that are not in the set.
func (s Sequences) Lacking(from, to uint64) (rest Sequences) {
	for _, r := range s.Within(from, to) {
		if r.From > from {
			rest = append(rest, SequenceRange{from, r.From - 1})
		}
		from = r.To + 1
	}
	if from <= to {
		rest = append(rest, SequenceRange{from, to})
	}
	return rest
}

// Count is how many sequences are in the set.
func (s Sequences) Count() (n uint64) {
	for _, r := range s {
		n += r.To - r.From + 1
	}
	return n
}
