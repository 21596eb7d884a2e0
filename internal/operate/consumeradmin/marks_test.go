package consumeradmin

import (
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

func marks(seqs ...uint64) (all []mark) {
	for _, s := range seqs {
		all = append(all, mark{Seq: s, Due: outbox.LSN(s)})
	}
	return all
}

func seqs(all []mark) (out []uint64) {
	for _, m := range all {
		out = append(out, m.Seq)
	}
	return out
}

// TestLower: no mark rises, none stays beyond the place, and what an earlier number of partitions had done stays done below it.
func TestLower(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		marks, before []uint64
		to            uint64
		want          string
	}{
		{[]uint64{10, 7, 12}, nil, 8, "[8 7 8] [] 12"},
		{[]uint64{10, 7, 12}, nil, 0, "[0 0 0] [] 12"},
		{[]uint64{5, 5}, []uint64{9, 3, 20}, 7, "[5 5] [[7 3 7]] 20"},
		{[]uint64{5, 5}, []uint64{9, 3, 20}, 4, "[4 4] [] 20"},
	} {
		s := &state{marks: marks(test.marks...)}
		replays := generation{Source: "replay", Marks: marks(100)}
		if test.before != nil {
			s.before = []generation{{Source: live, Marks: marks(test.before...)}}
		}
		s.before = append(s.before, replays)
		s.lower(mark{Seq: test.to, Due: 99})
		var before [][]uint64
		for _, g := range s.before {
			if g.Source == live {
				before = append(before, seqs(g.Marks))
			}
		}
		if got := fmt.Sprint(seqs(s.marks), before, s.replayedTo); got != test.want {
			t.Errorf("%v %v to %d: %s, want %s", test.marks, test.before, test.to, got, test.want)
		}
		if last := s.before[len(s.before)-1]; last.Source != "replay" || last.Marks[0].Seq != 100 {
			t.Errorf("what a replay had done is changed: %+v", s.before)
		}
		for _, m := range s.marks {
			if (m.Seq == test.to) != (m.Due == 99) {
				t.Errorf("mark %+v is not that of its message", m)
			}
		}
	}
}
