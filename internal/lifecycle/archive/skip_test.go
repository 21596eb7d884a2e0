package archive

import (
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// TestASegmentMayEndWithoutAMessage: with lost ones, or it has none at all. It is read back, something of it
// is erased, and the chain goes on behind it.
func TestASegmentMayEndWithoutAMessage(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	for _, c := range []struct{ messages, last uint64 }{{5, 8}, {0, 12}, {3, 15}, {0, 20}} {
		s, err := a.NewSegment()
		must.Succeed(t, err)
		for range c.messages {
			must.Succeed(t, s.Add(message(s.Next())))
		}
		if s.Next() <= c.last {
			s.Gap(outbox.Sequences{{From: s.Next(), To: c.last}}, nil)
			s.Skip(c.last)
		}
		_, err = a.Append(t.Context(), s, 0)
		must.Succeed(t, err)
	}
	_, err := a.Erase(t.Context(), docOf("doc3")) // message 3
	must.Succeed(t, err)
	a = load(t, store, nil)
	var got []uint64
	for _, m := range a.Segments {
		must.Succeed(t, a.Verify(t.Context(), m, func(m *Message) error {
			got = append(got, m.Seq)
			return nil
		}))
	}
	if want := []uint64{1, 2, 4, 5, 13, 14, 15}; !slices.Equal(got, want) || a.Next() != 21 {
		t.Errorf("%v up to %d, want %v", got, a.Next()-1, want)
	}
	for i, m := range a.Segments {
		if version := []int{3, 3, 2, 3}[i]; m.Version != version {
			t.Errorf("segment %d has version %d", i, m.Version)
		}
		if i > 0 && m.From.Before(a.Segments[i-1].To) {
			t.Errorf("segment %d is of %v", i, m.From)
		}
	}
	if all := everything(t, dir); strings.Contains(all, "outbox.doc3") {
		t.Error("the message is there")
	}
}
