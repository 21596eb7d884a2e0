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
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
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
		err = c.refresh(t.Context(), made)
		if f := outbox.FaultOf(err); left == 0 && f != nil && f.Code == archive.CodeEmpty {
			continue // it is away
		}
		must.Succeed(t, err)
		if got := len(c.archive.Segments); got != left || left == 0 {
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

// TestAnArchiveOfOtherMessagesIsNotComplete: the stream was put back from a backup, and keeps the time at
// which it was made. What was published since under sequences that are archived is in no segment.
func TestAnArchiveOfOtherMessagesIsNotComplete(t *testing.T) {
	t.Parallel()
	conn, err := sink.Connect(t.Context(), sink.Config{URL: natstest.Server(t).URL(), Table: "public.outbox",
		Stream: "OUTBOX"})
	must.Succeed(t, err)
	t.Cleanup(conn.Close)
	js, err := conn.API().JetStream()
	must.Succeed(t, err)
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX",
		Subjects: []string{"outbox.d"}})
	must.Succeed(t, err)
	for range 4 {
		_, err := js.Publish(t.Context(), "outbox.d", nil)
		must.Succeed(t, err)
	}
	store, err := archive.Open(t.Context(), "file://"+t.TempDir())
	must.Succeed(t, err)
	defer func() { must.Succeed(t, store.Close()) }()
	made := s.CachedInfo().Created
	a, err := archive.Load(t.Context(), store, archive.FolderOf("OUTBOX", made), nil)
	must.Succeed(t, err)
	archived := func(first, last uint64) { // of what was in the stream
		segment, err := a.NewSegment()
		must.Succeed(t, err)
		for seq := first; seq <= last; seq++ {
			m := &archive.Message{Seq: seq, Subject: "outbox.d", Time: made}
			if stored, err := s.GetMsg(t.Context(), seq); err == nil {
				m.Time = stored.Time
			}
			must.Succeed(t, segment.Add(m))
		}
		_, err = a.Append(t.Context(), segment, 0)
		must.Succeed(t, err)
	}
	c := &command{cfg: config.Config{Stream: "OUTBOX"}, store: store, known: &archive.Known{},
		l: &backfill.Conns{Conns: &conns.Conns{NATS: conn}}}
	confirmed := func(seq uint64) partition.Reach {
		return c.reach(t.Context(), backfill.Readings{Readings: checkpoint.Readings{
			Stream: relay.StreamState{Created: made},
			Server: relay.ServerState{SystemID: "1", History: relay.History{Timeline: 1}},
			Record: &checkpoint.Record{SystemID: "1", Created: made,
				Checkpoints: []checkpoint.StoredCheckpoint{{Checkpoint: relay.Checkpoint{Seq: seq, Due: 1000,
					Timeline: 1}}}},
		}})
	}
	whole := partition.Reach{Last: 3, Complete: 1000, Whole: 1000}
	archived(1, 3)
	if got := confirmed(3); got != whole {
		t.Errorf("all is archived: %+v", got)
	}
	must.Succeed(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(4)))
	if got := confirmed(3); got != whole {
		t.Errorf("all is archived, and what was has left the stream: %+v", got)
	}
	archived(4, 8)
	if got := confirmed(6); got != (partition.Reach{Last: 8}) {
		t.Errorf("the archive is longer: %+v", got)
	}
	for range 4 {
		_, err := js.Publish(t.Context(), "outbox.d", []byte("another"))
		must.Succeed(t, err)
	}
	for _, seq := range []uint64{8, 9} {
		got := confirmed(seq)
		if f := outbox.FaultOf(got.Err); f == nil || f.Code != archive.CodeDiffers || got.Complete != 0 {
			t.Errorf("the archive ends with another message: %+v", got)
		}
	}
}
