package tempfile

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFileHasNoName(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "not", "there", "yet")
	f, err := Dir(dir).Create()
	if err != nil {
		t.Fatal(err)
	}
	names, err := os.ReadDir(dir)
	if err != nil || len(names) > 0 {
		t.Fatalf("the directory holds %v, %v; want nothing", names, err)
	}
	for what, c := range map[string]struct {
		stat func() (fs.FileInfo, error)
		want fs.FileMode
	}{"file": {f.(*counted).f.Stat, 0o600}, "directory": {func() (fs.FileInfo, error) { return os.Stat(dir) },
		0o700}} {
		if info, err := c.stat(); err != nil || info.Mode().Perm() != c.want {
			t.Errorf("the %s has mode %v, %v; want %v", what, info.Mode().Perm(), err, c.want)
		}
	}
	for _, part := range []string{`{"doc":"note",`, `"n":1}`} {
		if _, err := f.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	got := make([]byte, 6)
	if _, err := f.ReadAt(got, 14); err != nil || !bytes.Equal(got, []byte(`"n":1}`)) {
		t.Fatalf("read %q, %v", got, err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestNamedFileLosesItsName is the way of file systems that make no file without a name.
func TestNamedFileLosesItsName(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	f, err := named(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if names, err := os.ReadDir(dir); err != nil || len(names) > 0 {
		t.Fatalf("the directory holds %v, %v; want nothing", names, err)
	}
}

func TestAnErrorNamesTheDirectory(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Dir(file).Create()
	var path *fs.PathError
	if err == nil || !errors.As(err, &path) || !strings.Contains(err.Error(), file) {
		t.Fatalf("file %v, error %v; want one that names %s", f, err, file)
	}
}

// It does not run beside others, which write files as well.
func TestBytesOfOpenFilesAreCounted(t *testing.T) {
	f, err := Dir(t.TempDir()).Create()
	if err != nil {
		t.Fatal(err)
	}
	before := InUse()
	if n, err := f.Write(make([]byte, 1<<20)); n != 1<<20 || err != nil {
		t.Fatal(n, err)
	}
	if got := InUse() - before; got != 1<<20 {
		t.Errorf("%d bytes more", got)
	}
	if err := f.Close(); err != nil || InUse() != before {
		t.Errorf("%v, %d bytes more after it was closed", err, InUse()-before)
	}
}
