package consumeradmin

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

func offsets(seqs ...uint64) (all []offset) {
	for _, s := range seqs {
		all = append(all, offset{Seq: s, Due: outbox.LSN(s)})
	}
	return all
}

func seqs(all []offset) (out []uint64) {
	for _, m := range all {
		out = append(out, m.Seq)
	}
	return out
}

// TestLoweringRaisesNoOffset: no offset rises, none stays beyond the target, and what an earlier number of
// partitions had done stays done below it.
func TestLoweringRaisesNoOffset(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		offsets, before []uint64
		to              uint64
		want            string
	}{
		{[]uint64{10, 7, 12}, nil, 8, "[8 7 8] [] 12"},
		{[]uint64{10, 7, 12}, nil, 0, "[0 0 0] [] 12"},
		{[]uint64{5, 5}, []uint64{9, 3, 20}, 7, "[5 5] [[7 3 7]] 20"},
		{[]uint64{5, 5}, []uint64{9, 3, 20}, 4, "[4 4] [] 20"},
	} {
		s := &state{offsets: offsets(test.offsets...)}
		replays := oldLayout{Source: "replay", Offsets: offsets(100)}
		if test.before != nil {
			s.oldLayouts = []oldLayout{{Source: live, Offsets: offsets(test.before...)}}
		}
		s.oldLayouts = append(s.oldLayouts, replays)
		s.lower(offset{Seq: test.to, Due: 99})
		var before [][]uint64
		for _, g := range s.oldLayouts {
			if g.Source == live {
				before = append(before, seqs(g.Offsets))
			}
		}
		if got := fmt.Sprint(seqs(s.offsets), before, s.replayedTo); got != test.want {
			t.Errorf("%v %v to %d: %s, want %s", test.offsets, test.before, test.to, got, test.want)
		}
		if last := s.oldLayouts[len(s.oldLayouts)-1]; last.Source != "replay" || last.Offsets[0].Seq != 100 {
			t.Errorf("what a replay had done is changed: %+v", s.oldLayouts)
		}
		for _, m := range s.offsets {
			if (m.Seq == test.to) != (m.Due == 99) {
				t.Errorf("mark %+v is not that of its message", m)
			}
		}
	}
}

// An offset whose message the broker has lost stays so, unless it is taken back, and so does an old layout
// that has one: the events that come again under new sequences are recognized by it alone.
func TestLoweringKeepsWhatTheBrokerHasLost(t *testing.T) {
	t.Parallel()
	const stored = `[{"source":"live","marks":[{"seq":20,"due":"0/14","n":1,"pos":"0/10-1","holed":true}]}]`
	s := &state{offsets: offsets(30, 40)}
	s.offsets[0].Lost, s.offsets[1].Lost = true, true
	if err := json.Unmarshal([]byte(stored), &s.oldLayouts); err != nil {
		t.Fatal(err)
	}
	s.lower(offset{Seq: 35})
	if !s.offsets[0].Lost || s.offsets[1].Lost {
		t.Errorf("offsets %+v", s.offsets)
	}
	if text, err := json.Marshal(s.oldLayouts); err != nil || string(text) != stored {
		t.Errorf("old layouts %s, %v, want %s", text, err, stored)
	}
}
