package archive

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// TestWhatAKilledProcessWasWritingGoes, and nothing that a living one is writing, or is about to.
func TestWhatAKilledProcessWasWritingGoes(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	must.Succeed(t, add(t, a, 12))
	in := filepath.Join(dir, filepath.FromSlash(a.folder))
	hidden := func() []string {
		all, err := filepath.Glob(filepath.Join(in, temporary+"*"))
		must.Succeed(t, err)
		for i := range all {
			all[i] = filepath.Base(all[i])
		}
		return all
	}
	if got := hidden(); len(got) > 0 {
		t.Fatalf("left: %q", got)
	}
	const dead, born = temporary + "DEAD", temporary + "BORN"
	must.Succeed(t, os.WriteFile(filepath.Join(in, dead), []byte("outbox.doc3"), 0o600))
	must.Succeed(t, os.WriteFile(filepath.Join(in, born), nil, 0o600)) // its writer holds it in a moment
	asked := false
	f := store.(*folder)
	err := f.write(a.folder, []byte("outbox.doc3"), func(temp string) error {
		asked = true
		busy, err := load(t, store, nil).Tidy(t.Context())
		must.Succeed(t, err)
		if !slices.Equal(busy, []string{temp}) {
			t.Errorf("%q are being written, not %s", busy, temp)
		}
		if got := hidden(); slices.Contains(got, dead) || !slices.Contains(got, born) || len(got) != 2 {
			t.Errorf("there are %q", got)
		}
		return nil // and it is killed before the object has its name
	})
	must.Succeed(t, err)
	busy, err := a.Tidy(t.Context())
	if got := hidden(); err != nil || len(busy) > 0 || !slices.Equal(got, []string{born}) || !asked {
		t.Errorf("left: %q, being written: %q, %v", got, busy, err)
	}
	mustBeErased(t, store, dir, 12)
}

// TestWhoFindsTheNameTakenWritesNothing: an archiver may have read a message before it was erased.
func TestWhoFindsTheNameTakenWritesNothing(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	const name = "v1/object"
	must.Succeed(t, store.Create(t.Context(), name, []byte("first")))
	in, before := filepath.Join(dir, "v1"), time.Unix(1_000_000_000, 0)
	must.Succeed(t, os.Chtimes(in, before, before)) // it changes with each file that comes or goes
	err := store.Create(t.Context(), name, []byte("second"))
	info, other := os.Stat(in)
	must.Succeed(t, other)
	if !errors.Is(err, ErrExists) || !info.ModTime().Equal(before) {
		t.Errorf("%v, and the folder was changed at %v", err, info.ModTime())
	}
}
