package failpoint

import (
	"io/fs"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/outflowhq/outflow/reorder"
)

// full is a disk that is full from a write on, and has room again after some more.
type full struct {
	from, failures int64 // failures 0: for ever
	writes         atomic.Int64
}

func parseFull(text string) (f *full, err error) {
	from, failures, limited := strings.Cut(text, "+")
	f = &full{}
	if f.from, err = number(from); err == nil && limited {
		f.failures, err = number(failures)
	}
	return f, err
}

// noRoom counts a write and returns what it fails with.
func (f *full) noRoom() error {
	n := f.writes.Add(1)
	if n < f.from || f.failures > 0 && n >= f.from+f.failures {
		return nil
	}
	return &fs.PathError{Op: "write", Path: "scratch file", Err: syscall.ENOSPC}
}

type disk struct {
	reorder.Scratch
	set *Set
}

func (s *disk) Create() (reorder.ScratchFile, error) {
	s.set.hit("spill.before")
	f, err := s.Scratch.Create()
	if err != nil {
		return nil, err
	}
	return &scratchFile{ScratchFile: f, set: s.set}, nil
}

type scratchFile struct {
	reorder.ScratchFile
	set     *Set
	written bool
}

func (f *scratchFile) Write(p []byte) (int, error) {
	if f.set.full != nil {
		if err := f.set.full.noRoom(); err != nil {
			return 0, err
		}
	}
	n, err := f.ScratchFile.Write(p)
	if err == nil && !f.written {
		f.written = true
		f.set.hit("spill.after")
	}
	return n, err
}
