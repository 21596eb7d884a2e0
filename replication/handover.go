package replication

import (
	"encoding/binary"
	"fmt"
	"io"
)

// handover is the reader under pgconn's frontend. It reads ahead itself, but hands out the bytes of one protocol message at a time,
// so that at each message boundary the frontend holds nothing that it has not returned, and the rest can be taken over.
type handover struct {
	src  io.Reader
	buf  []byte
	r, w int // buf[r:w] is read and not handed out
	left int // bytes of the present message that are not handed out
}

func newHandover(src io.Reader) *handover { return &handover{src: src, buf: make([]byte, 8192)} }

// Read implements [io.Reader].
func (h *handover) Read(p []byte) (int, error) {
	if h.left == 0 {
		for h.w-h.r < frameHeader {
			if err := h.fill(); err != nil {
				return 0, err
			}
		}
		n := int(int32(binary.BigEndian.Uint32(h.buf[h.r+1:])))
		if n < 4 {
			return 0, fmt.Errorf("message of length %d from the server", n)
		}
		h.left = 1 + n
	}
	if h.r == h.w {
		if err := h.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, h.buf[h.r:min(h.w, h.r+h.left)])
	h.r += n
	h.left -= n
	return n, nil
}

func (h *handover) fill() error {
	if h.r > 0 {
		h.w = copy(h.buf, h.buf[h.r:h.w])
		h.r = 0
	}
	n, err := h.src.Read(h.buf[h.w:])
	h.w += n
	if n > 0 {
		return nil
	}
	return err
}

// take ends the handing out: rest is what was read and not handed out, and begins with a message.
func (h *handover) take() (rest []byte, err error) {
	if h.left != 0 {
		return nil, fmt.Errorf("take-over in the middle of a message, %d bytes before its end", h.left)
	}
	return h.buf[h.r:h.w], nil
}
