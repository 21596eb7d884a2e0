package oracle

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// LSN is an address in the write-ahead log.
type LSN uint64

func (l LSN) String() string { return fmt.Sprintf("%X/%X", uint32(l>>32), uint32(l)) }

// ParseLSN reads the form X/X.
func ParseLSN(s string) (LSN, error) {
	high, low, found := strings.Cut(s, "/")
	h, err := strconv.ParseUint(high, 16, 32)
	l, errLow := strconv.ParseUint(low, 16, 32)
	if !found || err != nil || errLow != nil {
		return 0, fmt.Errorf("LSN %q: want X/X", s)
	}
	return LSN(h<<32 + l), nil
}

// Position is the identity of an event: the end LSN of its commit, and its index among the commit's events,
// from 0.
type Position struct {
	LSN   LSN
	Index uint32
}

func (p Position) String() string { return fmt.Sprintf("%v-%d", p.LSN, p.Index) }

// Compare orders positions as the WAL does.
func (p Position) Compare(q Position) int {
	return cmp.Or(cmp.Compare(p.LSN, q.LSN), cmp.Compare(p.Index, q.Index))
}
