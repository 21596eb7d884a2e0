package checkpoint

import (
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func check(there uint64, newest *outbox.Header) *TailCheck {
	s := Start{Checkpoint: relay.Checkpoint{Due: 0x1000, Seq: 5}, End: 5 + there, LastSeq: 5 + there,
		AlreadyStored: there, Newest: newest}
	if newest != nil {
		s.Thru = newest.Thru
	}
	return NewTailCheck(config, s)
}

func headers(n int) []*outbox.Header {
	out := make([]*outbox.Header, n)
	for i := range out {
		out[i] = &outbox.Header{Pos: outbox.Position{LSN: 0x1100, Index: uint32(i)}, N: i, Of: n, Due: 0x1100,
			Thru: 0x1200, Timeline: 1, Key: "a:1"}
	}
	return out
}

func TestTheTailOfTheStreamIsVerified(t *testing.T) {
	t.Parallel()
	made := headers(5)
	for _, newest := range []*outbox.Header{made[2], nil} {
		p := check(3, newest)
		for i, h := range made {
			if p.Verified() != (i >= 3) {
				t.Fatalf("after %d of 3: proved is %t", i, p.Verified())
			}
			if skip, err := p.Skip(h); err != nil || skip != (i < 3) {
				t.Fatalf("message %d of 3: skip %t, %v", i, skip, err)
			}
			must.Succeed(t, p.Input(0x1200))
		}
		if err := p.Input(0x9000); err != nil {
			t.Fatalf("an input after the check: %v", err)
		}
	}
	if p := check(0, nil); !p.Verified() {
		t.Fatal("nothing to prove, and not proved")
	}
}

func TestAnyDifferenceAtTheTailIsADivergence(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(h *outbox.Header){
		"lsn":  func(h *outbox.Header) { h.Pos.LSN++ },
		"i":    func(h *outbox.Header) { h.Pos.Index++ },
		"n":    func(h *outbox.Header) { h.N++ },
		"of":   func(h *outbox.Header) { h.Of++ },
		"due":  func(h *outbox.Header) { h.Due++ },
		"thru": func(h *outbox.Header) { h.Thru++ },
		"pull": func(h *outbox.Header) { h.Pull++ },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			made := headers(3)
			there := *made[2]
			change(&there)
			p := check(3, &there)
			for _, h := range made[:2] {
				if _, err := p.Skip(h); err != nil {
					t.Fatal(err)
				}
			}
			skip, err := p.Skip(made[2])
			refused(t, err, "divergence", outbox.Gap, "0/1000 to "+there.Thru.String(), []string{
				there.String(), made[2].String(), "sequence 8 of stream OUTBOX", anewCure,
			})
			if !skip || p.Verified() {
				t.Error("a diverging session may not send")
			}
		})
	}
	made := headers(3)
	same := *made[2]
	same.Timeline, same.Sort, same.ID = 2, outbox.ByCommit, "another spelling"
	p := check(3, &same)
	for _, h := range made {
		if _, err := p.Skip(h); err != nil {
			t.Fatalf("a header that agrees: %v", err)
		}
	}
}

func TestInputBeyondTheNewestMessage(t *testing.T) {
	t.Parallel()
	made := headers(3)
	p := check(3, made[2])
	for _, h := range made[:2] {
		if _, err := p.Skip(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Input(0x1200); err != nil {
		t.Fatalf("the input that closed the window: %v", err)
	}
	refused(t, p.Input(0x1201), "divergence", outbox.Gap, "0/1000 to 0/1200",
		[]string{"only 2 of the 3", made[2].String(), rowsCure})
	before := *made[2]
	before.Thru = 0x800 // as no window that follows the checkpoint was closed
	refused(t, check(3, &before).Input(0x1201), "divergence", outbox.Gap, "0/1000 to 0/1000", nil)
	if err := check(3, nil).Input(0x9000); err != nil {
		t.Fatalf("nothing is known of the newest message: %v", err)
	}
}

// Each message that was read is compared with the one that is made again at its sequence. Holes have none;
// what was not read, or was accepted by a repair, is not compared; nor is anything where the end can't be
// read.
func TestEachMessageAtTheTailIsCompared(t *testing.T) {
	t.Parallel()
	made := headers(4)
	start := Start{
		Checkpoint: relay.Checkpoint{Due: 0x1000, Seq: 5}, AlreadyStored: 4, End: 11, LastSeq: 11,
		Holes:  []Range{{7, 8}},
		Newest: made[3], Thru: made[3].Thru,
	}
	at := []uint64{6, 9, 10, 11}
	stored := func(change func(all []relay.Stored) []relay.Stored) []relay.Stored {
		var all []relay.Stored
		for i, h := range made {
			c := *h
			all = append(all, relay.Stored{Seq: at[i], Header: &c})
		}
		return change(all)
	}
	keep := func(all []relay.Stored) []relay.Stored { return all }
	for name, c := range map[string]struct {
		start  func(s *Start)
		stored func(all []relay.Stored) []relay.Stored
		fails  uint64 // at which sequence; 0: it is proved
	}{
		"all agree": {nil, keep, 0},
		"the first differs": {nil, func(all []relay.Stored) []relay.Stored {
			all[0].Header.N++
			return all
		}, 6},
		"one behind a hole": {nil, func(all []relay.Stored) []relay.Stored {
			all[1].Header.Due++
			return all
		}, 9},
		"one is shifted": {nil, func(all []relay.Stored) []relay.Stored {
			all[2].Header = all[1].Header
			return all
		}, 10},
		"it was not read": {nil, func(all []relay.Stored) []relay.Stored {
			all[1].Header.Due++
			return append(all[:1], all[2:]...)
		}, 0},
		"only the last were read": {nil, func(all []relay.Stored) []relay.Stored { return all[2:] }, 0},
		"the end can't be read": {func(s *Start) { s.Newest, s.Thru = nil, 0 },
			func(all []relay.Stored) []relay.Stored { all[1].Header.Due++; return all[:3] }, 0},
	} {
		s := start
		if c.start != nil {
			c.start(&s)
		}
		p := NewTailCheck(config, s)
		if err := p.Stored(stored(c.stored)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var err error
		for i := 0; i < len(made) && err == nil; i++ {
			if _, err = p.Skip(made[i]); err != nil {
				refused(t, err, "divergence", outbox.Gap, "0/1000 to 0/1200",
					[]string{fmt.Sprintf("at sequence %d of stream OUTBOX", c.fails)})
			}
		}
		if (err != nil) != (c.fails > 0) || p.Verified() != (err == nil) {
			t.Errorf("%s: proved %t, %v", name, p.Verified(), err)
		}
	}

	p := NewTailCheck(config, start)
	err := p.Stored(stored(func(all []relay.Stored) []relay.Stored { all[2].Header = nil; return all }))
	refused(t, err, "foreign_message", outbox.Gap, "0/1000 to 0/1200",
		[]string{"at sequence 10", "outflow repair --accept foreign_message"})
	if !outbox.FaultOf(err).Observed {
		t.Error("the record is not to say so: whoever removes the message would hide it")
	}
	for accepted, want := range map[uint64]uint64{0: 5, 4: 5, 9: 9, 11: 11, 20: 11} {
		s := start
		s.Accepted = accepted
		if above, upTo := NewTailCheck(config, s).Compares(); above != want || upTo != 11 {
			t.Errorf("accepted up to %d: %d to %d", accepted, above, upTo)
		}
	}
}
