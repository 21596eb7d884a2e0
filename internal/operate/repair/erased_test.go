package repair

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/relay"
)

// TestWhatWasErasedFromAFormerStreamIsNotThisOnes, which has other messages at the same sequences, unless
// it was restored from that one.
func TestWhatWasErasedFromAFormerStreamIsNotThisOnes(t *testing.T) {
	t.Parallel()
	cfg := config.Config{Stream: "OUTBOX"}
	cfg.Archive.URL = "file://" + t.TempDir()
	store, err := archive.Open(t.Context(), cfg.Archive.URL)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, store.Close()) }()
	made := func(day int) time.Time { return time.Date(2026, 3, day, 0, 0, 0, 1, time.UTC) }
	for day := 1; day <= 3; day++ { // message n is erased from the archive of the n-th stream
		a, err := archive.Load(t.Context(), store, archive.FolderOf(cfg.Stream, made(day)), nil)
		must.Succeed(t, err)
		s, err := a.NewSegment()
		must.Succeed(t, err)
		for seq := uint64(1); seq <= 3; seq++ {
			must.Succeed(t, s.Add(&archive.Message{Seq: seq, Time: made(day), Subject: "outbox.a",
				Header: nats.Header{}, Data: []byte("{}")}))
		}
		_, err = a.Append(t.Context(), s, 0)
		must.Succeed(t, err)
		_, err = a.Erase(t.Context(), archive.Erasing{Request: "r",
			Is: func(m *archive.Message) (bool, error) { return m.Seq == uint64(day), nil }})
		must.Succeed(t, err)
	}
	r := &repair{cfg: cfg}
	for _, c := range []struct {
		created time.Time
		from    string
		want    string
	}{
		{created: made(3), want: "3"},
		{created: made(4), from: archive.FolderOf(cfg.Stream, made(2)), want: "1+1"},
		{created: made(4)},
	} {
		got, err := r.erasedFromArchive(t.Context(), []*erasure.Record{{Request: "r", Stream: cfg.Stream}},
			sameSequences(&relay.StreamState{Created: c.created, Restored: c.from}))
		if must.Succeed(t, err); got.String() != c.want {
			t.Errorf("of the stream of %v, restored from %q: %q, want %q", c.created, c.from, got, c.want)
		}
	}
}
