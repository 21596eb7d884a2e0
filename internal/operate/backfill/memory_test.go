package backfill

import (
	"math/rand/v2"
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestALateEventIsOneThatTheRememberedMessagesKnow compares the memory with a look through the newest
// messages.
func TestALateEventIsOneThatTheRememberedMessagesKnow(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(1, 2))
	for limit := 1; limit <= 9; limit++ {
		m := &memory{limit: limit, newest: map[uint64]counted{}}
		var all []outbox.Counter
		late := 0
		for n := range 2000 {
			e := &relay.Event{Doc: string(rune('a' + rnd.IntN(4)))}
			if rnd.IntN(5) > 0 {
				e.Counter = outbox.Counter{First: int64(n/10 + rnd.IntN(9)), Span: uint32(1 + rnd.IntN(3))}
			}
			want := e.Counter
			if want.Span > 0 {
				want.Sequence = outbox.SequenceOf(e.Doc, "")
				for i := len(all) - 1; i >= max(0, len(all)-limit); i-- {
					if c := all[i]; c.Span > 0 && !c.Late && c.Sequence == want.Sequence {
						want.Late = want.Last() <= c.Last()
						break
					}
				}
			}
			if got := m.place(e); got != want {
				t.Fatalf("limit %d, message %d: got %+v, want %+v", limit, n, got, want)
			}
			if all = append(all, want); want.Late {
				late++
			}
			if m.count() != min(len(all), limit) || len(m.newest) > limit {
				t.Fatalf("limit %d: %d remembered, %d sequences", limit, m.count(), len(m.newest))
			}
		}
		if late == 0 {
			t.Errorf("limit %d: nothing was late", limit)
		}
	}
}
