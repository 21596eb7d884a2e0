package partition

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
)

// TestAnOlderCopyOfTheArchiveIsNoticed by a run that goes on, such as one that deletes many rows.
func TestAnOlderCopyOfTheArchiveIsNoticed(t *testing.T) {
	t.Parallel()
	dir, made := t.TempDir(), time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	store, err := archive.Open(t.Context(), "file://"+dir)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, store.Close()) }()
	a, err := archive.Load(t.Context(), store, archive.FolderOf("OUTBOX", made), nil)
	must.Succeed(t, err)
	for seq := range uint64(2) {
		s, err := a.NewSegment()
		must.Succeed(t, err)
		must.Succeed(t, s.Add(&archive.Message{Seq: seq + 1, Time: made, Subject: "outbox.d",
			Header: nats.Header{}, Data: []byte("{}")}))
		_, err = a.Append(t.Context(), s, 0)
		must.Succeed(t, err)
	}
	c := &command{cfg: config.Config{Stream: "OUTBOX"}, store: store, known: &archive.Known{}}
	for _, left := range []int{2, 1, 0} {
		all, err := filepath.Glob(filepath.Join(dir, "v1", "*", "*"))
		must.Succeed(t, err)
		for _, name := range all[2*left:] { // a segment's manifest and its object
			must.Succeed(t, os.Remove(name))
		}
		must.Succeed(t, c.refresh(t.Context(), made))
		if got := len(c.archive.Segments); got != left {
			t.Errorf("%d segments are known, %d are there", got, left)
		}
	}
}
