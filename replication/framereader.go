package replication

import (
	"encoding/binary"
	"fmt"
	"io"
)

// frameReader is the reader under pgconn's frontend. It reads ahead itself, but hands out the bytes of one
// protocol message at a time, so that at each message boundary the frontend holds nothing that it has not
// returned, and the rest can be taken over.
type frameReader struct {
	src  io.Reader
	buf  []byte
	r, w int // buf[r:w] is read and not handed out
	left int // bytes of the present message that are not handed out
}

func newFrameReader(src io.Reader) *frameReader {
	return &frameReader{src: src, buf: make([]byte, 8192)}
}

// Read implements [io.Reader].
func (f *frameReader) Read(p []byte) (int, error) {
	if f.left == 0 {
		for f.w-f.r < frameHeader {
			if err := f.fill(); err != nil {
				return 0, err
			}
		}
		n := int(int32(binary.BigEndian.Uint32(f.buf[f.r+1:])))
		if n < 4 {
			return 0, fmt.Errorf("message of length %d from the server", n)
		}
		f.left = 1 + n
	}
	if f.r == f.w {
		if err := f.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, f.buf[f.r:min(f.w, f.r+f.left)])
	f.r += n
	f.left -= n
	return n, nil
}

func (f *frameReader) fill() error {
	if f.r > 0 {
		f.w = copy(f.buf, f.buf[f.r:f.w])
		f.r = 0
	}
	n, err := f.src.Read(f.buf[f.w:])
	f.w += n
	if n > 0 {
		return nil
	}
	return err
}

// detach ends the reading: rest is what was read and not handed out, and begins with a message.
func (f *frameReader) detach() (rest []byte, err error) {
	if f.left != 0 {
		return nil, fmt.Errorf("take-over in the middle of a message, %d bytes before its end", f.left)
	}
	return f.buf[f.r:f.w], nil
}
