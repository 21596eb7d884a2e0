package archive

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// counting counts the manifests and objects that are read.
type counting struct {
	Store
	mu        sync.Mutex
	manifests int
	objects   int
}

func (c *counting) Read(ctx context.Context, name string, limit int64) ([]byte, error) {
	data, err := c.Store.Read(ctx, name, limit)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err != nil:
	case strings.HasSuffix(name, ".json"):
		c.manifests++
	default:
		c.objects++
	}
	return data, err
}

// TestAManifestIsReadOnce: by a process that runs on, as long as it is there; and nothing of a segment is
// taken for read that was not read now.
func TestAManifestIsReadOnce(t *testing.T) {
	t.Parallel()
	plain, dir := folderOf(t)
	for _, to := range []uint64{100, 150, 300} {
		must.Succeed(t, add(t, load(t, plain, nil), to))
	}
	store, k := &counting{Store: plain}, &Known{}
	folder := FolderOf("S", made)
	look := func(next uint64, manifests int) *Archive {
		t.Helper()
		store.manifests = 0
		a, err := k.Load(t.Context(), store, folder, nil)
		must.Succeed(t, err)
		if a.Next() != next || store.manifests != manifests {
			t.Fatalf("up to %d, %d manifests were read, want %d and %d", a.Next(), store.manifests, next,
				manifests)
		}
		return a
	}
	file := func(first string) string {
		return filepath.Join(dir, "v1", folder, strings.Repeat("0", 20-len(first))+first+".json")
	}
	verify := func(a *Archive, i, messages int) {
		t.Helper()
		store.manifests = 0
		n := 0
		must.Succeed(t, a.Verify(t.Context(), a.Segments[i], func(*Message) error { n++; return nil }))
		if n != messages || store.manifests == 0 {
			t.Errorf("segment %d has %d messages, want %d; %d manifests were read", i, n, messages,
				store.manifests)
		}
	}
	look(301, 3)
	look(301, 0)
	must.Succeed(t, add(t, load(t, plain, nil), 400))
	a := look(401, 1)
	verify(a, 1, 50)

	for _, m := range a.Segments {
		if unsafe.Sizeof(*m) > 512 || len(m.Missing)+len(m.Docs)+len(m.Erasure)+len(m.Erased) > 0 ||
			m.Least != nil || m.Greatest != nil {
			t.Errorf("more is remembered than is said: %+v", m)
		}
	}

	// what was erased since it was read
	gone := func(m *Message) (bool, error) { return m.Subject == "outbox.doc3", nil }
	_, err := load(t, plain, nil).Erase(t.Context(), Erasing{Request: "r", Is: gone})
	must.Succeed(t, err)
	verify(look(401, 0), 1, 50-8)

	// a manifest that is lost: where it is needed at once, elsewhere when all are listed again
	hide := func(name string) (back func()) {
		must.Succeed(t, os.Rename(name, name+".away"))
		return func() { must.Succeed(t, os.Rename(name+".away", name)) }
	}
	erased := strings.Replace(file("101"), ".json", ".e000001.json", 1)
	back := hide(erased)
	a = look(401, 0)
	a.Segments[1].named = 1 // by now it is that
	wantFault(t, a.Verify(t.Context(), a.Segments[1], nil), CodeDamaged, "101.e000001.json: it is lost")
	k.listed = k.listed.Add(-relist)
	_, err = k.Load(t.Context(), store, folder, nil)
	wantFault(t, err, CodeDamaged, "101.json")
	back()
	look(401, 4) // nothing of it counted any more

	// an older copy in place of the archive
	defer hide(file("301"))()
	defer hide(strings.Replace(file("301"), ".json", ".e000001.json", 1))()
	look(301, 3)
}

// TestAnArchiveThatIsAwayIsNoNewOne: its volume is not mounted. Whoever has read it before says so at each
// look, and goes on when it is back.
func TestAnArchiveThatIsAwayIsNoNewOne(t *testing.T) {
	t.Parallel()
	plain, dir := folderOf(t)
	k, folder := &Known{}, FolderOf("S", made)
	_, err := k.Load(t.Context(), plain, folder, nil)
	must.Succeed(t, err) // there is none yet
	must.Succeed(t, add(t, load(t, plain, nil), 100))
	_, err = k.Load(t.Context(), plain, folder, nil)
	must.Succeed(t, err)
	must.Succeed(t, os.Rename(filepath.Join(dir, "v1"), filepath.Join(dir, "away")))
	for range 2 {
		_, err = k.Load(t.Context(), plain, folder, nil)
		wantFault(t, err, CodeEmpty, "up to 100")
	}
	_, err = k.Load(t.Context(), plain, FolderOf("S", made.Add(time.Hour)), nil)
	must.Succeed(t, err) // the stream was made anew
	must.Succeed(t, os.Rename(filepath.Join(dir, "away"), filepath.Join(dir, "v1")))
	a, err := k.Load(t.Context(), plain, folder, nil)
	must.Succeed(t, err)
	if a.Next() != 101 {
		t.Errorf("up to %d", a.Next())
	}
}

// TestAnArchiveThatWasDamagedAndIsAwayIsNoNewOne: whoever looks at what is wrong with its volume unmounts it.
func TestAnArchiveThatWasDamagedAndIsAwayIsNoNewOne(t *testing.T) {
	t.Parallel()
	plain, dir := folderOf(t)
	k, folder := &Known{}, FolderOf("S", made)
	for _, to := range []uint64{100, 200} {
		must.Succeed(t, add(t, load(t, plain, nil), to))
	}
	_, err := k.Load(t.Context(), plain, folder, nil)
	must.Succeed(t, err)
	k.listed = k.listed.Add(-relist)
	lost := filepath.Join(dir, "v1", folder, "00000000000000000001.json")
	must.Succeed(t, os.Rename(lost, lost+".away"))
	_, err = k.Load(t.Context(), plain, folder, nil)
	wantFault(t, err, CodeDamaged, "it is lost")
	must.Succeed(t, os.Rename(filepath.Join(dir, "v1"), filepath.Join(dir, "away")))
	_, err = k.Load(t.Context(), plain, folder, nil)
	wantFault(t, err, CodeEmpty, "up to 200")
}

// together lets reads of manifests end when so many are under way.
type together struct {
	Store
	mu   sync.Mutex
	left int
	all  chan struct{}
}

func (s *together) Read(ctx context.Context, name string, limit int64) ([]byte, error) {
	s.mu.Lock()
	if s.left--; s.left == 0 {
		close(s.all)
	}
	s.mu.Unlock()
	select {
	case <-s.all:
		return s.Store.Read(ctx, name, limit)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// TestManifestsAreReadSeveralAtOnce: a store may be far away, and an archive of a year has thousands.
func TestManifestsAreReadSeveralAtOnce(t *testing.T) {
	t.Parallel()
	plain, _ := folderOf(t)
	for to := range uint64(readers + 1) {
		must.Succeed(t, add(t, load(t, plain, nil), to+1))
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	store := &together{Store: plain, left: readers, all: make(chan struct{})}
	a, err := Load(ctx, store, FolderOf("S", made), nil)
	must.Succeed(t, err)
	if a.Next() != readers+2 {
		t.Errorf("up to %d", a.Next())
	}
}

// TestASegmentIsReadForAPartOfItOnce, by a process that runs on: the rest goes with all of it, or an hour
// later.
func TestASegmentIsReadForAPartOfItOnce(t *testing.T) {
	t.Parallel()
	plain, _ := folderOf(t)
	for _, to := range []uint64{100, 200} {
		must.Succeed(t, add(t, load(t, plain, nil), to))
	}
	store, k := &counting{Store: plain}, &Known{}
	holds := func(k *Known, from, to, want uint64, objects int) {
		t.Helper()
		a, err := k.Load(t.Context(), store, FolderOf("S", made), nil)
		must.Succeed(t, err)
		store.objects = 0
		upTo, err := a.Holds(t.Context(), nil, Range{From: from, To: to}, 0, false,
			func(context.Context, uint64) (uint64, error) { return 0, nil }) // the stream has none of them
		must.Succeed(t, err)
		a.Went(upTo)
		if upTo != want || store.objects != objects {
			t.Errorf("%d to %d: up to %d, not %d, and %d objects were read, not %d", from, to, upTo, want,
				store.objects, objects)
		}
	}
	holds(k, 1, 10, 10, 1)
	holds(k, 11, 20, 0, 0)
	holds(k, 11, 99, 0, 0)
	holds(nil, 11, 99, 99, 1)
	holds(k, 11, 110, 110, 2)
	holds(k, 111, 120, 100, 0)
	k.parted = k.parted.Add(-parts)
	holds(k, 111, 120, 120, 1)
	holds(k, 121, 200, 200, 1)
	holds(k, 1, 10, 10, 1)
	k.folder = "another stream's" // and this one is one that was made anew
	holds(k, 11, 20, 20, 1)
}
