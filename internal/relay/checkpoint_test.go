package relay

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

func TestAHistoryKnowsTheTimelineOfAnLSN(t *testing.T) {
	t.Parallel()
	h := History{Timeline: 4, Switches: []Switch{{1, 100}, {3, 200}}}
	for lsn, want := range map[outbox.LSN]uint32{1: 1, 100: 1, 101: 3, 200: 3, 201: 4} {
		if got := h.At(lsn); got != want {
			t.Errorf("%v lies on timeline %d, want %d", lsn, got, want)
		}
	}
	for tl, want := range map[uint32]struct {
		end         outbox.LSN
		left, known bool
	}{1: {100, true, true}, 3: {200, true, true}, 4: {0, false, true}, 2: {}, 5: {}} {
		end, left, known := h.Left(tl)
		if end != want.end || left != want.left || known != want.known {
			t.Errorf("timeline %d: %v %v %v", tl, end, left, known)
		}
	}
}

func TestCheckpointsAreTheSameWhateverTheirTimeline(t *testing.T) {
	t.Parallel()
	p := Checkpoint{Due: 1, Seq: 2, PublishedAhead: []outbox.Position{{LSN: 1, Index: 1}}, Timeline: 1}
	if !p.Same(Checkpoint{Due: 1, Seq: 2, Timeline: 2}) || p.Same(Checkpoint{Due: 2, Seq: 2}) ||
		p.Same(Checkpoint{Due: 1, Seq: 3}) {
		t.Error("checkpoints are told apart by due and seq")
	}
}

// The oldest held event's transaction ends at 0/28; its commit record starts at 0/20.
func TestCheckpointWithHeldEventsStartsAtTheOldestCommitRecord(t *testing.T) {
	t.Parallel()
	p := Checkpoint{Due: 100, From: 32, Holds: []Hold{
		{Sequence: 255, Base: -7, Oldest: outbox.Position{LSN: 40, Index: 3}, Sum: 1 << 60},
		{Sequence: 1, Cold: true, Oldest: outbox.Position{LSN: 90}},
	}}
	if got := p.Start(); got != 32 {
		t.Errorf("starts at %v", got)
	}
	if got := (Checkpoint{Due: 100}).Start(); got != 100 {
		t.Errorf("starts at %v with nothing held", got)
	}
	b, err := json.Marshal(p.Holds)
	if want := `["00000000000000ff -7 0/28-3 1000000000000000","0000000000000001 - 0/5A-0 0000000000000000"]`; err != nil || string(b) != want {
		t.Errorf("holds are written as %s, %v", b, err)
	}
	var back []Hold
	if err := json.Unmarshal(b, &back); err != nil || !slices.Equal(back, p.Holds) {
		t.Errorf("and read as %v, %v", back, err)
	}
	const sum = " 0000000000000000"
	for _, text := range []string{"", "00000000000000ff -7 0/28-3", "ff -7 0/28-3" + sum,
		"00000000000000ff x 0/28-3" + sum, "00000000000000ff -7 0/28" + sum, "00000000000000ff -7 0/28-3 1"} {
		var h Hold
		if err := h.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is taken as %v", text, h)
		}
	}
}
