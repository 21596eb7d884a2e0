package partition

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
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

// counting is a store that counts how many objects are read at once. The first ones wait for others.
type counting struct {
	archive.Store

	mu        sync.Mutex
	now, most int
	enough    chan struct{} // closed when four are read at once
}

func (s *counting) Read(ctx context.Context, name string, limit int64) ([]byte, error) {
	if strings.HasSuffix(name, ".json") {
		return s.Store.Read(ctx, name, limit)
	}
	s.mu.Lock()
	s.now++
	if s.now > s.most {
		if s.most = s.now; s.most == 4 {
			close(s.enough)
		}
	}
	s.mu.Unlock()
	select {
	case <-s.enough:
	case <-ctx.Done():
	}
	for range 100 {
		runtime.Gosched() // others come, if they may
	}
	object, err := s.Store.Read(ctx, name, limit)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now--
	return object, err
}

// TestFewSegmentsAreInMemoryAtOnce: on a machine of many processors, what a run needs is no more than the
// examples' limit.
func TestFewSegmentsAreInMemoryAtOnce(t *testing.T) { //nolint:paralleltest // it sets GOMAXPROCS
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16))
	made := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	files, err := archive.Open(t.Context(), "file://"+t.TempDir())
	must.Succeed(t, err)
	defer func() { must.Succeed(t, files.Close()) }()
	a, err := archive.Load(t.Context(), files, archive.FolderOf("OUTBOX", made), nil)
	must.Succeed(t, err)
	for seq := range uint64(2 * archive.AtOnce()) {
		s, err := a.NewSegment()
		must.Succeed(t, err)
		must.Succeed(t, s.Add(&archive.Message{Seq: seq + 1, Time: made, Subject: "outbox.d",
			Header: nats.Header{}, Data: []byte("{}")}))
		_, err = a.Append(t.Context(), s, 0)
		must.Succeed(t, err)
	}
	store := &counting{Store: files, enough: make(chan struct{})}
	c := &command{cfg: config.Config{Stream: "OUTBOX"}, store: store, known: &archive.Known{}}
	must.Succeed(t, c.archived(t.Context(), made, partition.Period{}, func([16]byte) error { return nil }))
	if store.most != 4 {
		t.Errorf("%d were read at once", store.most)
	}
}
