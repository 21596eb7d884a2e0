package decoder

import "encoding/binary"

// reader walks over one message. After the first read beyond its end every read gives zero values, so that a
// parser may check once, at the end, instead of at each field; it never reads, and never makes room for, more
// than the message holds.
type reader struct {
	b     []byte
	off   int
	short bool // a read went beyond the end; off is where it began
}

func (r *reader) u8() byte {
	if r.short || r.off >= len(r.b) {
		r.short = true
		return 0
	}
	v := r.b[r.off]
	r.off++
	return v
}

func (r *reader) u16() uint16 {
	if r.short || len(r.b)-r.off < 2 {
		r.short = true
		return 0
	}
	v := binary.BigEndian.Uint16(r.b[r.off:])
	r.off += 2
	return v
}

func (r *reader) u32() uint32 {
	if r.short || len(r.b)-r.off < 4 {
		r.short = true
		return 0
	}
	v := binary.BigEndian.Uint32(r.b[r.off:])
	r.off += 4
	return v
}

func (r *reader) u64() uint64 {
	if r.short || len(r.b)-r.off < 8 {
		r.short = true
		return 0
	}
	v := binary.BigEndian.Uint64(r.b[r.off:])
	r.off += 8
	return v
}

// text reads up to a NUL, which it skips. The result aliases the message.
func (r *reader) text() []byte {
	if !r.short {
		for i, c := range r.b[r.off:] {
			if c == 0 {
				s := r.b[r.off : r.off+i]
				r.off += i + 1
				return s
			}
		}
	}
	r.short = true
	return nil
}

// skip passes over n bytes and reports where they began; n may be any number that a message can claim.
func (r *reader) skip(n uint32) (start int) {
	start = r.off
	if r.short || uint64(n) > uint64(len(r.b)-r.off) {
		r.short = true
		return start
	}
	r.off += int(n)
	return start
}
