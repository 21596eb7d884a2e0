package outbox

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Position is an event's identity and its place in the total order: the end LSN of its commit, and its
// 0-based index among the commit's events. A row's own LSN is never an identity: the rows of one COPY share
// it.
type Position struct {
	LSN   LSN
	Index uint32
}

// Compare orders positions: by LSN, then by index.
func (p Position) Compare(q Position) int {
	if c := cmp.Compare(p.LSN, q.LSN); c != 0 {
		return c
	}
	return cmp.Compare(p.Index, q.Index)
}

// RepairedIndex is the first index that no row of a commit has: from it on, outflow repair numbers the events
// that it publishes from the table, where the WAL that held them is gone. Their LSN is that from which on the
// WAL brings what follows.
const RepairedIndex = 1 << 30

// Repaired reports whether the position is one that outflow repair gave.
func (p Position) Repaired() bool { return p.Index >= RepairedIndex }

// String prints the position as <lsn>-<index>, the form of the optional Nats-Msg-Id.
func (p Position) String() string { return string(p.Append(make([]byte, 0, 24))) }

// Append appends the text form to b.
func (p Position) Append(b []byte) []byte {
	b = p.LSN.Append(b)
	b = append(b, '-')
	return strconv.AppendUint(b, uint64(p.Index), 10)
}

// MarshalText implements [encoding.TextMarshaler].
func (p Position) MarshalText() ([]byte, error) { return p.Append(nil), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (p *Position) UnmarshalText(b []byte) error {
	lsn, index, ok := strings.Cut(string(b), "-")
	if !ok {
		return fmt.Errorf("position %q: not of the form X/X-N", b)
	}
	l, err := ParseLSN(lsn)
	if err != nil {
		return fmt.Errorf("position %q: %w", b, err)
	}
	i, err := strconv.ParseUint(index, 10, 32)
	if err != nil {
		return fmt.Errorf("position %q: index: %w", b, err)
	}
	*p = Position{LSN: l, Index: uint32(i)}
	return nil
}
