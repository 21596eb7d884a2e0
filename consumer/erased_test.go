package consumer

import (
	"slices"
	"testing"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// without are the messages but for those of some sequences.
func without(all []*stream.Message, seqs ...int) (rest []*stream.Message) {
	for i, m := range all {
		if !slices.Contains(seqs, i+1) {
			rest = append(rest, m)
		}
	}
	return rest
}

// TestErasedMessagesAreNoGap: wherever they lie, whoever has not read them goes on; and what was removed
// beside them still is a gap.
func TestErasedMessagesAreNoGap(t *testing.T) {
	t.Parallel()
	t.Run("not read yet", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(30, 3)
		src.publish(all...)
		src.erase(1, 2, 10, 11, 12, 20)
		w.readAll(w.config(src), without(all, 1, 2, 10, 11, 12, 20))
	})
	t.Run("inside a window", func(t *testing.T) {
		t.Parallel()
		w, src := newHarness(t), newMemoryStream()
		var all []*stream.Message
		for n := range 6 {
			all = append(all, message("d", &outbox.Header{Pos: outbox.Position{LSN: 16, Index: uint32(n)},
				N: n, Of: 6, Due: 16, Thru: 16}))
		}
		src.publish(all...)
		src.erase(3, 4)
		w.readAll(w.config(src), without(all, 3, 4))
	})
	t.Run("behind what was read", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(20, 3)
		w.readFirst(src, all, 10)
		src.removeTo(10)
		src.erase(11, 12)
		w.readAll(w.config(src), without(all, 11, 12))
	})
	t.Run("what the offsets name", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(20, 3)
		src.publish(all[:10]...)
		w.readAll(w.config(src), all[:10])
		w.awaitOffsets(10)
		src.erase(10)
		src.publish(all[10:]...)
		w.readAll(w.config(src), all)
		h, err := outbox.ParseHeader(all[9].Header.Get(outbox.HeaderName))
		if err != nil {
			t.Fatal(err)
		}
		now, err := src.State(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		c, marks := streamCheck{}, offsets{0: offsetOf(10, &h)}
		err = c.findLost(t.Context(), &Config{}, src, now, marks)
		if err != nil || marks[0].Lost || c.changed {
			t.Errorf("%+v, %v: an offset is taken for lost", marks[0], err)
		}
	})
	t.Run("before what the broker lost", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(10, 3)
		src.publish(all...)
		src.lose(6, false)
		src.publish(all[5:]...)
		src.erase(4, 5)
		w.readAll(w.config(src), without(all, 4, 5))
	})
	t.Run("beside what was removed", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(10, 3)
		src.publish(all...)
		src.erase(4, 5, 8)
		src.remove(6, 7)
		w.fails(w.config(src), ErrGap, "sequences 6 to 7")
	})
	t.Run("beside what retention took", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(10, 3)
		w.readFirst(src, all, 1)
		src.removeTo(3)
		src.erase(2, 4)
		w.fails(w.config(src), ErrGap, "sequences 3 to 3")
	})
}
