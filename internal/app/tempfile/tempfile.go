// Package tempfile makes temporary files that disappear with the process: a file has no name, so its bytes
// are gone when the process that holds it open ends.
package tempfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync/atomic"
)

// Dir is a directory for temporary files. The empty path is the system's directory for them.
type Dir string

// File is an open temporary file. Close removes it. It must not be used by several goroutines at the same
// time.
type File = interface {
	io.ReaderAt
	io.Writer
	io.Closer
}

// Create makes a file without a name, so that a kill at any moment leaves nothing. Where the file system
// can't do that it removes the name at once: a kill between the two leaves an empty file. The directory is
// made if it is missing. An error (no space, no permission) names the directory.
func (d Dir) Create() (File, error) {
	dir := string(d)
	if dir == "" {
		dir = os.TempDir()
	}
	f, err := create(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.MkdirAll(dir, 0o700); err == nil {
			f, err = create(dir)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("temporary file in %s: %w", dir, err)
	}
	return &counted{f: f}, nil
}

var inUse atomic.Int64

// InUse returns how many bytes all open files have. Safe for concurrent use.
func InUse() int64 { return inUse.Load() }

// counted is a file whose bytes count while it is open.
type counted struct {
	f *os.File
	n int64
}

func (c *counted) ReadAt(b []byte, at int64) (int, error) { return c.f.ReadAt(b, at) }

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.f.Write(b)
	c.n += int64(n)
	inUse.Add(int64(n))
	return n, err
}

func (c *counted) Close() error {
	inUse.Add(-c.n)
	c.n = 0
	return c.f.Close()
}

func create(dir string) (*os.File, error) {
	f, err := unnamed(dir)
	if err != nil {
		return named(dir)
	}
	return f, nil
}

// named makes a file and removes its name.
func named(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, "outflow-*.tmp")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
