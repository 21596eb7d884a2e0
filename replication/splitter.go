package replication

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/outflowhq/outflow/internal/relay"
)

const (
	frameHeader = 5       // a type byte and a length, which counts itself
	maxFrame    = 1 << 30 // as large as PostgreSQL makes a message
	bufferSize  = 256 << 10
	// firstAllocation bounds what a length alone can make us allocate; more follows as data comes.
	firstAllocation = 16 << 20
)

// Message is one thing that the server sent: a pgoutput message, or a keepalive.
type Message = relay.WALMessage

// batch is a batch and the buffer that its messages lie in.
type batch struct {
	relay.Batch

	buf      []byte
	large    []byte // a message that does not fit in buf, header included
	reserved int    // what large counts in the pool, in bytes
	home     *pool  // nil once released, or if it never came from one
}

// putBack is what releasing the batch does.
func (b *batch) putBack() {
	if home := b.home; home != nil {
		b.home = nil
		home.put(b)
	}
}

// splitter cuts a byte stream into protocol messages, without copying what lies whole in a buffer. One
// goroutine uses it.
type splitter struct {
	src  io.Reader
	pool *pool
	// the beginning of a message whose end has not been read; before the first read, what the take-over
	// brought
	carry []byte
	cur   *batch // in hand while no message of it has been kept
	n     int    // bytes of cur.buf that are filled
}

// next reads until at least one message was kept: handle gets each in order (its type, its body, the batch to
// keep it in) and may end the stream with an error. The batch that comes with an error holds what was kept
// before, and may be nil.
func (f *splitter) next(handle func(b *batch, typ byte, body []byte) error) (*batch, error) {
	if f.cur == nil {
		b, err := f.pool.get()
		if err != nil {
			return nil, err
		}
		f.cur, f.n = b, copy(b.buf, f.carry)
		f.carry = f.carry[:0]
	}
	b := f.cur
	for {
		used, err := f.cut(b, handle)
		if err != nil {
			f.cur = nil
			return b, err
		}
		tail := b.buf[used:f.n]
		if len(b.Messages) > 0 {
			f.carry = append(f.carry[:0], tail...)
			f.cur = nil
			return b, nil
		}
		f.n = copy(b.buf, tail)
		if f.n >= frameHeader && frameSize(b.buf) > len(b.buf) {
			if err := f.readLarge(b, handle); err != nil {
				f.cur = nil
				return b, err
			}
			continue
		}
		got, err := f.src.Read(b.buf[f.n:])
		f.n += got
		if got == 0 && err != nil {
			f.cur = nil
			return b, unexpected(err, f.n)
		}
	}
}

// cut hands out the complete messages in b's buffer and returns how many bytes they took.
func (f *splitter) cut(b *batch, handle func(*batch, byte, []byte) error) (used int, err error) {
	for f.n-used >= frameHeader {
		size := frameSize(b.buf[used:])
		if size < frameHeader || size > maxFrame {
			return used, fmt.Errorf("message of %d bytes from the server", size)
		}
		if f.n-used < size {
			break
		}
		if err := handle(b, b.buf[used], b.buf[used+frameHeader:used+size]); err != nil {
			return used, err
		}
		used += size
	}
	return used, nil
}

// readLarge reads a message that does not fit in the buffer, which holds its beginning, into memory of its
// own.
func (f *splitter) readLarge(b *batch, handle func(*batch, byte, []byte) error) error {
	size := frameSize(b.buf)
	if err := f.pool.reserve(b, size); err != nil {
		return err
	}
	b.large = make([]byte, f.n, min(size, firstAllocation))
	copy(b.large, b.buf[:f.n])
	f.n = 0
	for len(b.large) < size {
		if len(b.large) == cap(b.large) {
			grown := make([]byte, len(b.large), min(size, 2*cap(b.large)))
			copy(grown, b.large)
			b.large = grown
		}
		from := len(b.large)
		b.large = b.large[:cap(b.large)]
		got, err := io.ReadFull(f.src, b.large[from:])
		if err != nil {
			return unexpected(err, from+got)
		}
	}
	err := handle(b, b.large[0], b.large[frameHeader:])
	if len(b.Messages) == 0 {
		f.pool.unreserve(b)
	}
	return err
}

// frameSize is the size of the message that begins at b[0], its header included.
func frameSize(b []byte) int { return 1 + int(int32(binary.BigEndian.Uint32(b[1:]))) }

// unexpected names an end of the connection that cut a message in two.
func unexpected(err error, pending int) error {
	if errors.Is(err, io.EOF) && pending > 0 {
		return io.ErrUnexpectedEOF
	}
	return err
}
