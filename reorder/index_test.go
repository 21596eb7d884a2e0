package reorder

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestKeysComeOutInOrderWhateverTheirDisorder puts keys in with every amount of disorder, so that they go
// through the run and the heap, and takes some out between.
func TestKeysComeOutInOrderWhateverTheirDisorder(t *testing.T) {
	t.Parallel()
	heaped := 0
	n := *trials / 15
	if tier.Long() {
		n *= 20
	}
	seeds.Each(t, "seed", "trials", n, func(seed uint64) {
		r := rand.New(rand.NewPCG(seed, 2))
		displacement := []int{0, 3, 40, 100, 1000, 1 << 20}[r.IntN(6)]
		q := &sequence{}
		q.run = q.few[:0]
		var want []*slot
		for n := range 1500 {
			s := &slot{Event: relay.Event{Key: fmt.Sprintf("%08d", max(0, 1000+n/2-r.IntN(displacement+1)))}}
			s.Pos = outbox.Position{LSN: outbox.LSN(1 + n/7), Index: uint32(n % 7)}
			q.add(s)
			want = append(want, s)
			heaped = max(heaped, len(q.heap))
			for r.IntN(3) == 0 && len(want) > 0 {
				i := 0
				for k := range want {
					if byKey(want[k], want[i]) < 0 {
						i = k
					}
				}
				if got := q.least(); got != want[i] {
					t.Fatalf("seed %d: %v %v, want %v %v", seed, got.Key, got.Pos, want[i].Key, want[i].Pos)
				}
				q.pop()
				want = slices.Delete(want, i, i+1)
			}
		}
		slices.SortFunc(want, byKey)
		for _, s := range want {
			if got := q.least(); got != s {
				t.Fatalf("seed %d: %v %v, want %v %v", seed, got.Key, got.Pos, s.Key, s.Pos)
			}
			q.pop()
		}
		if !q.empty() || q.least() != nil {
			t.Fatalf("seed %d: not empty", seed)
		}
	})
	if n > 50 && heaped < 100 {
		t.Errorf("the heap held %d events at most", heaped)
	}
}

// TestSequencesAreFoundWhereHashesCollide lets sequences come and go, with hashes that collide, and looks for
// those that should be there.
func TestSequencesAreFoundWhereHashesCollide(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 3))
	var x index
	x.init()
	there := make([]*slot, 3000)
	live, most := 0, 0
	for step := range 60000 {
		i := r.IntN(len(there))
		fill := 30
		if step%20000 > 10000 { // now and then nearly all leave
			fill = 1
		}
		switch s := there[i]; {
		case s == nil && r.IntN(30) < fill:
			s = &slot{Event: relay.Event{Doc: fmt.Sprint("d", i/3), Actor: []string{"", "a", "b"}[i%3]}}
			x.add(s)
			there[i] = s
			live++
		case s != nil:
			if q := x.find(s.Doc, s.Actor); q != s.seq {
				t.Fatalf("step %d: %q %q is not where it was put", step, s.Doc, s.Actor)
			}
			s.seq.pop()
			x.remove(s.seq)
			if x.find(s.Doc, s.Actor) != nil {
				t.Fatalf("step %d: %q %q is still there", step, s.Doc, s.Actor)
			}
			there[i] = nil
			live--
		}
		most = max(most, len(x.table))
		if x.live != live || x.live*2 > len(x.table) || len(x.table) > max(minTable, 16*x.live) {
			t.Fatalf("step %d: %d sequences (want %d) in a table of %d", step, x.live, live, len(x.table))
		}
	}
	for _, s := range there {
		if s != nil && x.find(s.Doc, s.Actor) != s.seq {
			t.Fatalf("%q %q was lost", s.Doc, s.Actor)
		}
	}
	if most < 2048 || len(x.table) >= most {
		t.Errorf("table of %d at most, %d at the end", most, len(x.table))
	}
	x.reset()
	if x.live != 0 || len(x.free) > maxFree ||
		slices.ContainsFunc(x.table, func(q *sequence) bool { return q != nil }) {
		t.Error("not empty after reset")
	}
}

func TestLateEventsAreCountedByActor(t *testing.T) {
	t.Parallel()
	long := make([]byte, 200)
	for i := range long {
		long[i] = 'k'
	}
	cut := string(long)
	var x index
	x.init()
	var l late
	for i, step := range []struct {
		actor, key string
		count      uint64
	}{
		{"ana", "5", 0}, {"ana", "6", 0}, {"ana", "6", 0}, {"ana", "4", 1}, {"ben", "4", 1}, {"ana", "5", 2},
		{"ana", "", 2}, {"ana", "7", 2},
		{"eve", cut + "b", 2}, {"eve", cut + "a", 2}, // they differ behind what is kept: not counted
		{"eve", cut[:150], 2}, {"eve", cut[:80], 3}, {"eve", "j", 4},
	} {
		l.see(&x, &relay.Event{Doc: "note", Actor: step.actor, Key: step.key}, 0)
		if l.count != step.count {
			t.Errorf("step %d, %s %.8s: %d late, want %d", i, step.actor, step.key, l.count, step.count)
		}
	}
}
