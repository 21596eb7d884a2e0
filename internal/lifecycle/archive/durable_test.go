package archive

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// disk is what names a file system has after power was lost: those that were flushed.
type disk struct {
	t     *testing.T
	mu    sync.Mutex
	names map[string]bool
}

func (d *disk) flush(dir *os.File) error {
	entries, err := os.ReadDir(dir.Name())
	must.Succeed(d.t, err)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range entries {
		d.names[filepath.Join(dir.Name(), e.Name())] = true
	}
	return nil
}

// lacks returns which part of a path is not on it, of those below a folder; "": it has all.
func (d *disk) lacks(below, name string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for ; name != below; name = filepath.Dir(name) {
		if !d.names[name] {
			return name
		}
	}
	return ""
}

// TestWhatAStoreSaysOutlivesALossOfPower: also what another process has made, which did not come to flush it.
func TestWhatAStoreSaysOutlivesALossOfPower(t *testing.T) {
	t.Parallel()
	create := func(_ string, s Store) error { return s.Create(t.Context(), "v1/f/o", nil) }
	for what, c := range map[string]struct {
		before string // a folder that is there
		do     func(dir string, s Store) error
	}{
		"create":               {"", create},
		"create, folder there": {"a/b/v1/f", create},
		"list": {"", func(dir string, s Store) error {
			must.Succeed(t, s.Create(t.Context(), "v1/f/other", nil))
			must.Succeed(t, os.WriteFile(filepath.Join(dir, "v1", "f", "o"), nil, 0o600))
			_, err := s.List(t.Context(), "v1/f/", "")
			return err
		}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			below := t.TempDir()
			d, dir := &disk{t: t, names: map[string]bool{}}, filepath.Join(below, "a", "b")
			must.Succeed(t, os.MkdirAll(filepath.Join(below, c.before), 0o700))
			s, err := makeFolder(dir, d.flush)
			must.Succeed(t, err)
			defer func() { must.Succeed(t, s.Close()) }()
			must.Succeed(t, c.do(dir, s))
			if c.before != "" {
				below = dir // who has made it, has made it durable
			}
			if lost := d.lacks(below, filepath.Join(dir, "v1", "f", "o")); lost != "" {
				t.Errorf("%s is lost", lost)
			}
		})
	}
}

// TestAManifestThatComesDuringALookIsDurable: it is not among those that were listed, and is read.
func TestAManifestThatComesDuringALookIsDurable(t *testing.T) {
	t.Parallel()
	other, dir := folderOf(t)
	must.Succeed(t, add(t, load(t, other, nil), 10))
	d := &disk{t: t, names: map[string]bool{}}
	s, err := makeFolder(dir, d.flush)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, s.Close()) }()
	came := false
	a := load(t, listed{s, func() {
		if !came {
			came = true
			must.Succeed(t, add(t, load(t, other, nil), 20))
		}
	}}, nil)
	if a.Next() != 21 {
		t.Fatalf("it ends at %d", a.Next()-1)
	}
	for _, m := range a.Segments {
		for _, name := range []string{a.manifestName(m.First), a.ObjectName(m)} {
			name = filepath.Join(dir, filepath.FromSlash(name))
			if lost := d.lacks(filepath.Dir(name), name); lost != "" {
				t.Errorf("%s is lost", lost)
			}
		}
	}
}

// TestAnErrorOfAFolderNamesIt: several commands of several installations may say it.
func TestAnErrorOfAFolderNamesIt(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	must.Succeed(t, os.Mkdir(filepath.Join(dir, "v1"), 0o700))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	_, read := store.Read(t.Context(), "v1", 10)
	_, open := Open(t.Context(), "file://"+filepath.Join(dir, "file", "x"))
	for _, err := range []error{read, open} {
		if err == nil || !strings.Contains(err.Error(), dir) {
			t.Error(err)
		}
	}
}

// listed calls then behind each look at what is in a folder.
type listed struct {
	Store
	then func()
}

func (l listed) List(ctx context.Context, folder, after string) ([]string, error) {
	defer l.then()
	return l.Store.List(ctx, folder, after)
}

// TestAMissingRightHasACode, by which `outflow explain` says whose files these are, and so has a full disk.
func TestAMissingRightHasACode(t *testing.T) {
	t.Parallel()
	for _, cause := range []error{syscall.EACCES, syscall.EROFS, syscall.ENOSPC} {
		store, err := makeFolder(t.TempDir(), func(*os.File) error {
			return &fs.PathError{Op: "openat", Path: "v1", Err: cause}
		})
		must.Succeed(t, err)
		err = store.Create(t.Context(), "v1/object", []byte("x"))
		f := outbox.FaultOf(err)
		want := "archive_denied"
		if errors.Is(cause, syscall.ENOSPC) {
			want = "archive_full"
		}
		if f == nil || f.Code != want || !errors.Is(err, cause) {
			t.Errorf("%v: %v", cause, err)
		}
		must.Succeed(t, store.Close())
	}
}

// TestAFileSystemWithoutHardLinksIsNamed: vfat and exFAT refuse a link as if a right were missing.
func TestAFileSystemWithoutHardLinksIsNamed(t *testing.T) {
	t.Parallel()
	for cause, code := range map[error]string{syscall.EPERM: "archive_url", syscall.EOPNOTSUPP: "archive_url",
		syscall.EACCES: "archive_denied"} {
		link := &os.LinkError{Op: "linkat", Old: ".new-X", New: "v1/object", Err: cause}
		if fault := outbox.FaultOf(denied(linked(link))); fault == nil || fault.Code != code {
			t.Errorf("%v: %+v", cause, fault)
		}
	}
	if err := linked(&os.LinkError{Op: "linkat", Err: syscall.EEXIST}); !errors.Is(err, ErrExists) {
		t.Error(err)
	}
}

// TestTheHintSaysWhichKindOfObjectIsDamaged: without a manifest nothing is archived, without a segment it is.
func TestTheHintSaysWhichKindOfObjectIsDamaged(t *testing.T) {
	t.Parallel()
	a := &Archive{folder: "v1/OUTBOX-20260301T100000.123456789Z/"}
	for name, of := range map[string]string{a.manifestName(1): "the manifest back",
		a.ObjectName(&Manifest{First: 1, Last: 2}): "the segment's object back"} {
		fault := outbox.FaultOf(a.damaged(name, errors.New("it is lost")))
		if !strings.Contains(fault.Hint, of) || !strings.Contains(fault.Message, name) {
			t.Errorf("%s: %s. %s", name, fault.Message, fault.Hint)
		}
	}
}
