package oracle

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// The headers of a message that are Outflow's or the server's.
const (
	packedHeader     = "Outflow"
	deadLetterHeader = "Outflow-Dead-Letter"
	expectedHeader   = "Nats-Expected-Last-Sequence"
	msgIDHeader      = "Nats-Msg-Id"
	lostHeader       = "Outflow-Lost"
	originHeader     = "Outflow-Origin"

	// the fence of a stream that clusters share: the sequence of the newest cut
	fenceHeader        = "Nats-Expected-Last-Subject-Sequence"
	fenceSubjectHeader = "Nats-Expected-Last-Subject-Sequence-Subject"
)

// Sort is the rule that a window was sorted by.
type Sort uint8

// The rules.
const (
	BySeqKey Sort = iota
	ByCommit
	ByGap
)

func (s Sort) String() string { return [...]string{"seq_key", "commit", "gap"}[s] }

const sortLetters = "scg"

// Header is the packed header, read by the words of docs/format.md alone.
type Header struct {
	Pos       Position
	N, Of     int
	Due, Thru LSN
	Pull      int
	Timeline  uint32
	Sort      Sort
	ID, Key   string // raw; the encoded form where it was cut

	// In gap mode, of an event with a counter: its sequence, its first counter, how many it takes, and
	// whether it is late. Span is 0 where there is none.
	Sequence uint64
	Counter  int64
	Span     int64
	Late     bool
}

// String is the header's value.
func (h *Header) String() string {
	s := fmt.Sprintf("v=1 lsn=%v i=%d n=%d of=%d due=%v thru=%v pull=%d tl=%d sort=%c id=%s key=%s",
		h.Pos.LSN, h.Pos.Index, h.N, h.Of, h.Due, h.Thru, h.Pull, h.Timeline, sortLetters[h.Sort],
		headerValue(h.ID), headerValue(h.Key))
	if h.Span > 0 {
		s += fmt.Sprintf(" q=%016x c=%d", h.Sequence, h.Counter)
	}
	if h.Span > 1 {
		s += fmt.Sprintf(" span=%d", h.Span)
	}
	if h.Span > 0 && h.Late {
		s += " late=1"
	}
	return s
}

// ParseHeader reads a header of version 1. Fields that it does not know may follow.
func ParseHeader(value string) (h Header, err error) {
	fields := strings.Split(value, " ")
	for i, name := range []string{"v", "lsn", "i", "n", "of", "due", "thru", "pull", "tl", "sort", "id",
		"key"} {
		if i >= len(fields) || !strings.HasPrefix(fields[i], name+"=") {
			return h, fmt.Errorf("header %q: field %d is not %s", value, i+1, name)
		}
		v := fields[i][len(name)+1:]
		number := func(bits int) int {
			n, e := strconv.ParseUint(v, 10, bits)
			if e != nil {
				err = fmt.Errorf("not a number")
			}
			return int(n)
		}
		switch name {
		case "v":
			if v != "1" {
				err = fmt.Errorf("another version than 1")
			}
		case "lsn":
			h.Pos.LSN, err = ParseLSN(v)
		case "i":
			h.Pos.Index = uint32(number(32))
		case "n":
			h.N = number(63)
		case "of":
			h.Of = number(63)
		case "due":
			h.Due, err = ParseLSN(v)
		case "thru":
			h.Thru, err = ParseLSN(v)
		case "pull":
			h.Pull = number(63)
		case "tl":
			h.Timeline = uint32(number(32))
		case "sort":
			at := strings.Index(sortLetters, v)
			if len(v) != 1 || at < 0 {
				err = fmt.Errorf("want one of %s", sortLetters)
				break
			}
			h.Sort = Sort(at)
		case "id":
			h.ID = unescaped(v)
		case "key":
			h.Key = unescaped(v)
		}
		if err != nil {
			return h, fmt.Errorf("header %q: %s: %w", value, fields[i], err)
		}
	}
	for _, field := range fields[12:] {
		name, v, _ := strings.Cut(field, "=")
		switch name {
		case "q":
			h.Span = max(h.Span, 1)
			h.Sequence, err = strconv.ParseUint(v, 16, 64)
		case "c":
			h.Counter, err = strconv.ParseInt(v, 10, 64)
		case "span":
			h.Span, err = strconv.ParseInt(v, 10, 64)
		case "late":
			h.Late = v == "1"
		}
		if err != nil {
			return h, fmt.Errorf("header %q: %s: %w", value, field, err)
		}
	}
	return h, nil
}

// Token is a value as one token of a subject.
func Token(value string) string {
	if value == "" {
		return "="
	}
	return escaped(value, func(c byte) bool {
		return 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '_' || c == '-'
	})
}

// headerValue is an id or a key as it stands in the header.
func headerValue(value string) string {
	return escaped(value, func(c byte) bool { return '!' <= c && c <= '~' && c != '=' })
}

// escaped writes each byte that does not pass as =XX. What is longer than 200 bytes then becomes what of its
// units fits in 128 bytes, "=~", and 32 digits of the raw value's SHA-256.
func escaped(value string, passes func(byte) bool) string {
	plain := len(value) <= 200
	for i := 0; plain && i < len(value); i++ {
		plain = passes(value[i])
	}
	if plain {
		return value
	}
	var all strings.Builder
	fits := 0 // bytes of the whole units that fit in 128
	for i := range len(value) {
		if c := value[i]; passes(c) {
			all.WriteByte(c)
		} else {
			fmt.Fprintf(&all, "=%02X", c)
		}
		if all.Len() <= 128 {
			fits = all.Len()
		}
	}
	if all.Len() <= 200 {
		return all.String()
	}
	sum := sha256.Sum256([]byte(value))
	return all.String()[:fits] + "=~" + hex.EncodeToString(sum[:])[:32]
}

// unescaped reverses escaped, where nothing was cut.
func unescaped(text string) string {
	parts := strings.Split(text, "=")
	var raw strings.Builder
	raw.WriteString(parts[0])
	for _, part := range parts[1:] {
		if len(part) < 2 || part != strings.TrimSpace(part) {
			return text
		}
		b, err := hex.DecodeString(part[:2])
		if err != nil {
			return text
		}
		raw.Write(b)
		raw.WriteString(part[2:])
	}
	return raw.String()
}
