package pipeline

import (
	"math/rand/v2"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestAwayStartsBeforeEveryInputThatIsMissing: wherever a start is asked for, all inputs above it come behind
// it, and it never goes back; where nothing came since the last input, it is where the WAL was read up to.
func TestAwayStartsBeforeEveryInputThatIsMissing(t *testing.T) {
	t.Parallel()
	for seed := range uint64(tier.Size(200)) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		a := newAway(relay.Checkpoint{Due: 10, Read: 1000})
		type input struct{ lsn, start, end outbox.LSN }
		var all []input
		home, here, asked, last := outbox.LSN(10), outbox.LSN(1000), outbox.LSN(10), outbox.LSN(1000)
		n := 500
		if seed == 0 {
			n = 3 * maxPlaces // and nothing is asked for meanwhile
		}
		for range n {
			here += outbox.LSN(1 + rnd.IntN(9))
			switch rnd.IntN(4) {
			case 0:
				a.passed(here)
			case 1:
				a.commit(&relay.Commit{Kind: relay.NoInput, Read: here})
			default:
				start := here
				here += outbox.LSN(1 + rnd.IntN(9))
				home += outbox.LSN(2 + rnd.IntN(3))
				a.commit(&relay.Commit{Kind: relay.Events, LSN: home, Read: here})
				all = append(all, input{home, start, here})
			}
			if seed == 0 || rnd.IntN(5) > 0 {
				continue
			}
			asked += outbox.LSN(rnd.IntN(int(home-asked) + 1))
			at := a.start(asked)
			if at < last {
				t.Fatalf("seed %d: starts at %v, before that at %v", seed, at, last)
			}
			if asked == home && at != here {
				t.Fatalf("seed %d: nothing is missing, and it starts at %v, not %v", seed, at, here)
			}
			last = at
			for _, in := range all {
				if in.lsn > asked && in.start < at {
					t.Fatalf("seed %d: the input at %v is above %v, and starts at %v, before %v", seed,
						in.lsn, asked, in.start, at)
				}
			}
		}
		if len(a.places) > maxPlaces {
			t.Fatalf("%d places", len(a.places))
		}
		if seed == 0 {
			for range 1000 {
				in := all[rnd.IntN(len(all))]
				b := away{places: append([]place{}, a.places...), read: a.read}
				if at := b.start(in.lsn - 1); at > in.start {
					t.Fatalf("the input at %v starts at %v, before %v", in.lsn, in.start, at)
				}
			}
		}
	}
}
