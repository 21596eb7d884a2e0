package consumeradmin

import (
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

// TestLoweringRaisesNoOffset: no offset rises, none stays beyond the target, and one that stays is still
// known to be of a message that the broker has lost: what comes again under new sequences is recognized by it
// alone.
func TestLoweringRaisesNoOffset(t *testing.T) {
	t.Parallel()
	for to, want := range map[uint64]string{8: "[8 7 8] 12", 0: "[0 0 0] 12", 20: "[10 7 12] 12"} {
		s := &state{}
		for _, seq := range []uint64{10, 7, 12} {
			s.offsets = append(s.offsets, offset{Seq: seq, Due: outbox.LSN(seq), Lost: true})
		}
		s.lower(offset{Seq: to, Due: 99})
		var seqs []uint64
		for _, m := range s.offsets {
			seqs = append(seqs, m.Seq)
			if back := m.Due == 99; back != (m.Seq == to) || m.Lost == back {
				t.Errorf("to %d: %+v", to, m)
			}
		}
		if got := fmt.Sprint(seqs, s.replayedTo); got != want {
			t.Errorf("to %d: %s, want %s", to, got, want)
		}
	}
}
