package archive_test

import (
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/consumer/archive"
	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/must"
	segments "github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// TestLostMessagesOfTheArchiveAreToldOf: before a message of a segment, at its end, and in one without a
// message.
func TestLostMessagesOfTheArchiveAreToldOf(t *testing.T) {
	t.Parallel()
	folder, made := "file://"+t.TempDir(), time.Now()
	store, err := segments.Open(t.Context(), folder)
	must.Succeed(t, err)
	defer store.Close() //nolint:errcheck // a test
	a, err := segments.Load(t.Context(), store, segments.FolderOf("OUTBOX", made), nil)
	must.Succeed(t, err)
	for _, seqs := range [][]uint64{{1, 2}, {}, {10, 12}} {
		s, err := a.NewSegment()
		must.Succeed(t, err)
		gap := func(to uint64) {
			if from := s.Next(); from <= to {
				s.Gap(outbox.Sequences{{From: from, To: to}}, nil)
			}
		}
		for _, seq := range seqs {
			gap(seq - 1)
			must.Succeed(t, s.Add(&segments.Message{Seq: seq, Time: made, Subject: "outbox.d"}))
		}
		if last := map[uint64]uint64{1: 5, 6: 9}[a.Next()]; last > 0 {
			gap(last)
			s.Skip(last)
		}
		_, err = a.Append(t.Context(), s, 0)
		must.Succeed(t, err)
	}
	of, err := archive.Open(t.Context(), folder)
	must.Succeed(t, err)
	defer of.Close() //nolint:errcheck // a test
	past, err := of.Past(t.Context(), "OUTBOX", made)
	must.Succeed(t, err)
	for _, c := range []struct {
		from, below uint64
		read        []uint64
		lost        []stream.Gap
	}{
		{1, 13, []uint64{1, 2, 10, 12}, []stream.Gap{{From: 3, To: 5}, {From: 6, To: 9}, {From: 11, To: 11}}},
		{4, 8, nil, []stream.Gap{{From: 4, To: 5}, {From: 6, To: 7}}},
		{2, 6, []uint64{2}, []stream.Gap{{From: 3, To: 5}}},
	} {
		var read []uint64
		var lost []stream.Gap
		must.Succeed(t, past.Read(t.Context(), c.from, c.below, func(m *stream.Message) error {
			read = append(read, m.Sequence)
			return nil
		}, func(g *stream.Gap) error {
			lost = append(lost, *g)
			return nil
		}))
		if !slices.Equal(read, c.read) || !slices.Equal(lost, c.lost) {
			t.Errorf("from %d below %d: %v, lost %v", c.from, c.below, read, lost)
		}
	}
}
