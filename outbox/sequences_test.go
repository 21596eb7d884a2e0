package outbox

import (
	"math/rand/v2"
	"testing"
)

// TestSequencesAreASet compares it with a map, and reads back the text that it writes.
func TestSequencesAreASet(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		var s Sequences
		has := map[uint64]bool{}
		for range rnd.IntN(12) {
			r := SequenceRange{From: 1 + rnd.Uint64N(60)}
			r.To = r.From + rnd.Uint64N(4)
			s = s.With(r)
			for seq := r.From; seq <= r.To; seq++ {
				has[seq] = true
			}
		}
		read, err := ParseSequences(s.String())
		if err != nil || read.String() != s.String() || s.Count() != uint64(len(has)) {
			t.Fatalf("%v: %v, %v, %d of %d", s, read, err, s.Count(), len(has))
		}
		from, to := 1+rnd.Uint64N(60), 1+rnd.Uint64N(60)
		within, lacking := s.Within(from, to), s.Lacking(from, to)
		for seq := uint64(1); seq < 70; seq++ {
			in := seq >= from && seq <= to
			if read.Has(seq) != has[seq] || within.Has(seq) != (in && has[seq]) ||
				lacking.Has(seq) != (in && !has[seq]) {
				t.Fatalf("%v, %d to %d, at %d: %v, %v", s, from, to, seq, within, lacking)
			}
		}
	}
}

func TestSequencesThatCanNotBe(t *testing.T) {
	t.Parallel()
	for _, text := range []string{",", "0", "3,1", "3,0", "3+0", "3+", "-1", "x", "3,",
		"18446744073709551615,2", "5+18446744073709551615", "3++1"} {
		if s, err := ParseSequences(text); err == nil {
			t.Errorf("%q: %v", text, s)
		}
	}
	s, err := ParseSequences("12,3+2,23")
	if err != nil || s.String() != "12,3+2,23" || !s.Has(12) || !s.Has(17) || !s.Has(40) || s.Count() != 5 {
		t.Errorf("%v, %v", s, err)
	}
}
