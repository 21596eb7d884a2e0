// Package scratch makes temporary files that nothing outlives: a file loses its name as soon as it is open, and with the process
// that holds it open it loses its bytes.
package scratch

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// Dir is a directory for temporary files. The empty path is the system's directory for them.
type Dir string

// File is an open temporary file. Close removes it. It must not be used by several goroutines at the same time.
type File = interface {
	io.ReaderAt
	io.Writer
	io.Closer
}

// Create makes a file and removes its name at once, so that a kill at any moment leaves no data: if the process ends between the
// two, an empty file. The directory is made if it is missing. An error (no space, no permission) names the directory.
func (d Dir) Create() (File, error) {
	dir := string(d)
	if dir == "" {
		dir = os.TempDir()
	}
	f, err := os.CreateTemp(dir, "outflow-*.tmp")
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(dir, 0o700); err == nil {
			f, err = os.CreateTemp(dir, "outflow-*.tmp")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("temporary file in %s: %w", dir, err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("temporary file in %s: %w", dir, err), f.Close())
	}
	return f, nil
}
