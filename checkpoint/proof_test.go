package checkpoint

import (
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

func proof(there uint64, newest *outbox.Header) *Proof {
	s := Start{Place: outbox.Place{Due: 0x1000, Seq: 5}, End: 5 + there, LastSeq: 5 + there, There: there, Newest: newest}
	if newest != nil {
		s.Thru = newest.Thru
	}
	return NewProof(config, s)
}

func headers(n int) []*outbox.Header {
	out := make([]*outbox.Header, n)
	for i := range out {
		out[i] = &outbox.Header{Pos: outbox.Position{LSN: 0x1100, Index: uint32(i)}, N: i, Of: n, Due: 0x1100, Thru: 0x1200, Timeline: 1, Key: "a:1"}
	}
	return out
}

func TestProof(t *testing.T) {
	t.Parallel()
	made := headers(5)
	for _, newest := range []*outbox.Header{made[2], nil} {
		p := proof(3, newest)
		for i, h := range made {
			if p.Proved() != (i >= 3) {
				t.Fatalf("after %d of 3: proved is %t", i, p.Proved())
			}
			if skip, err := p.Skip(h); err != nil || skip != (i < 3) {
				t.Fatalf("message %d of 3: skip %t, %v", i, skip, err)
			}
			if err := p.Input(0x1200); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Input(0x9000); err != nil {
			t.Fatalf("an input after the proof: %v", err)
		}
	}
	if p := proof(0, nil); !p.Proved() {
		t.Fatal("nothing to prove, and not proved")
	}
}

func TestDivergence(t *testing.T) {
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
			p := proof(3, &there)
			for _, h := range made[:2] {
				if _, err := p.Skip(h); err != nil {
					t.Fatal(err)
				}
			}
			skip, err := p.Skip(made[2])
			refused(t, err, "divergence", outbox.Gap, "0/1000 to "+there.Thru.String(), []string{
				there.String(), made[2].String(), "sequence 8 of stream OUTBOX", slotCure, streamCure,
			})
			if !skip || p.Proved() {
				t.Error("a diverging session may not send")
			}
		})
	}
	made := headers(3)
	same := *made[2]
	same.Timeline, same.Sort, same.ID = 2, outbox.ByCommit, "another spelling"
	p := proof(3, &same)
	for _, h := range made {
		if _, err := p.Skip(h); err != nil {
			t.Fatalf("a header that agrees: %v", err)
		}
	}
}

func TestInputBeyondTheNewestMessage(t *testing.T) {
	t.Parallel()
	made := headers(3)
	p := proof(3, made[2])
	for _, h := range made[:2] {
		if _, err := p.Skip(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Input(0x1200); err != nil {
		t.Fatalf("the input that closed the window: %v", err)
	}
	refused(t, p.Input(0x1201), "divergence", outbox.Gap, "0/1000 to 0/1200", []string{"only 2 of the 3", made[2].String(), rowsCure})
	if err := proof(3, nil).Input(0x9000); err != nil {
		t.Fatalf("nothing is known of the newest message: %v", err)
	}
}
