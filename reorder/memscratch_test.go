package reorder

import (
	"errors"
	"io"
)

// memScratch keeps scratch files in memory, counts them, and fails on request.
type memScratch struct {
	open, made, most int
	written          int64
	onWrite          func()
	failAfter        int64 // bytes that may be written; < 0: no limit
	failRead         bool
	failCreate       bool
	flip             bool // damages what is read
	calls, failAt    int  // the call that fails, counted from 1; 0: none
}

// fails counts a call, and reports whether it is the one that fails.
func (m *memScratch) fails() bool { m.calls++; return m.calls == m.failAt }

var errDisk = errors.New("no space left on device")

func (m *memScratch) Create() (ScratchFile, error) {
	if m.fails() || m.failCreate {
		return nil, errDisk
	}
	m.open++
	m.made++
	return &memFile{m: m}, nil
}

type memFile struct {
	m      *memScratch
	b      []byte
	closed bool
}

func (f *memFile) Write(p []byte) (int, error) {
	if f.m.onWrite != nil {
		f.m.onWrite()
	}
	if f.m.fails() || f.m.failAfter >= 0 && f.m.written+int64(len(p)) > f.m.failAfter {
		return 0, errDisk
	}
	f.m.written += int64(len(p))
	f.b = append(f.b, p...)
	return len(p), nil
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	if f.m.fails() || f.m.failRead {
		return 0, errDisk
	}
	n := copy(p, f.b[off:])
	if f.m.flip && n > 0 {
		p[n-1] ^= 0x10
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) Close() error {
	if f.closed {
		return errors.New("closed twice")
	}
	f.closed = true
	f.b = nil
	f.m.open--
	return nil
}
