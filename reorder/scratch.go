package reorder

import (
	"errors"
	"io"
	"strconv"

	"github.com/outflowhq/outflow/outbox"
)

// Scratch is where a transaction that is too large for memory spills. Files are used by one goroutine, the
// buffer's.
type Scratch interface {
	Create() (ScratchFile, error)
}

// ScratchFile is a temporary file: written from its beginning to its end, read at any place, and gone when it
// is closed.
type ScratchFile = interface {
	io.ReaderAt
	io.Writer
	io.Closer
}

// disk keeps count of the scratch files: so that all can be dropped at once after an error, and of their
// size.
type disk struct {
	scratch Scratch
	open    []*file
	size    int64 // of the open files
	limit   int64 // of size; 0: none
	stop    func() error
}

var errNoScratch = errors.New("no scratch directory is configured")

// file is a scratch file with its size.
type file struct {
	ScratchFile
	disk *disk
	size int64
	buf  []byte // written next
}

// ioError is a failure of a scratch file.
type ioError struct {
	op  string
	err error
}

func (e *ioError) Error() string {
	return "spill: " + e.op + " scratch file (reorder.spill_dir): " + e.err.Error()
}
func (e *ioError) Unwrap() error { return e.err }

func (d *disk) create() (*file, error) {
	if d.scratch == nil {
		return nil, &ioError{"create", errNoScratch}
	}
	f, err := d.scratch.Create()
	if err != nil {
		return nil, &ioError{"create", err}
	}
	opened := &file{ScratchFile: f, disk: d}
	d.open = append(d.open, opened)
	return opened, nil
}

// drop closes every file.
func (d *disk) drop() {
	for len(d.open) > 0 {
		d.open[0].drop()
	}
}

// drop closes the file, which removes it. Nothing in it is wanted any more, so an error says nothing.
func (f *file) drop() {
	if f == nil {
		return
	}
	for i, o := range f.disk.open {
		if o == f {
			last := len(f.disk.open) - 1
			f.disk.open[i] = f.disk.open[last]
			f.disk.open[last] = nil
			f.disk.open = f.disk.open[:last]
			f.disk.size -= f.size
			_ = f.Close()
			break
		}
	}
}

// errLimit is fatal, unlike a disk that is full: the same transaction comes again and is not smaller.
func (d *disk) errLimit() error {
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "spill_limit",
		Message: "a transaction needs more than " + strconv.FormatInt(d.limit, 10) +
			" bytes on disk to be sorted (reorder.max_spill)",
		Hint: "Raise reorder.max_spill to about three times the transaction's size, with reorder.spill_dir " +
			"on a disk that has the room. " +
			"Nothing is lost: PostgreSQL keeps the transaction until it is published",
	}
}

// flush writes out what is in buf.
func (f *file) flush() error {
	if d := f.disk; d.limit > 0 && d.size+int64(len(f.buf)) > d.limit {
		return d.errLimit()
	}
	n, err := f.Write(f.buf)
	f.size += int64(n)
	f.disk.size += int64(n)
	if err == nil && n < len(f.buf) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return &ioError{"write", err}
	}
	f.buf = f.buf[:0]
	if cap(f.buf) > 4*writeSize { // grown by one huge event
		f.buf = nil
	}
	return nil
}
