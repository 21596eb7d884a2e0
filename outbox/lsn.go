package outbox

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"
)

// LSN is an address in the write-ahead log, in bytes. The zero value means "none".
type LSN uint64

// ParseLSN reads the form that PostgreSQL prints: two hexadecimal numbers of at most eight digits with a
// slash between.
func ParseLSN(s string) (LSN, error) {
	hi, lo, ok := strings.Cut(s, "/")
	if !ok || len(hi) == 0 || len(hi) > 8 || len(lo) == 0 || len(lo) > 8 {
		return 0, fmt.Errorf("LSN %q: not of the form X/X", s)
	}
	h, err := strconv.ParseUint(hi, 16, 32)
	if err != nil {
		return 0, fmt.Errorf("LSN %q: not of the form X/X", s)
	}
	l, err := strconv.ParseUint(lo, 16, 32)
	if err != nil {
		return 0, fmt.Errorf("LSN %q: not of the form X/X", s)
	}
	return LSN(h<<32 | l), nil
}

// String prints the LSN as PostgreSQL does, X/X.
func (l LSN) String() string { return string(l.Append(make([]byte, 0, 17))) }

// Append appends the text form X/X to b.
func (l LSN) Append(b []byte) []byte {
	b = appendHex(b, uint32(l>>32))
	b = append(b, '/')
	return appendHex(b, uint32(l))
}

func appendHex(b []byte, v uint32) []byte {
	const digits = "0123456789ABCDEF"
	n := max(1, (bits.Len32(v)+3)/4)
	b = append(b, digits[:n]...)
	for i := len(b) - 1; n > 0; n, i = n-1, i-1 {
		b[i] = digits[v&0xF]
		v >>= 4
	}
	return b
}

// MarshalText implements [encoding.TextMarshaler].
func (l LSN) MarshalText() ([]byte, error) { return l.Append(nil), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (l *LSN) UnmarshalText(b []byte) error {
	v, err := ParseLSN(string(b))
	if err != nil {
		return err
	}
	*l = v
	return nil
}

// Distance returns the bytes of WAL between two LSNs, 0 where from is 0 (unknown) or beyond to.
func Distance(from, to LSN) uint64 {
	if from == 0 || to < from {
		return 0
	}
	return uint64(to - from)
}
