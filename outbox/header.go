package outbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// HeaderName is the name of the packed header of each message.
const HeaderName = "Outflow"

// HeaderLost is the name of a header of the first message behind messages that the broker lost without going
// back: the stream sequence of the first of them, in decimal. They come again from this message on, under new
// sequences. If messages are missing before any other message, somebody removed them.
const HeaderLost = "Outflow-Lost"

// Header is the packed header of a message: v=1 lsn=0/16B3748 i=3 n=0 of=12 due=0/16B3748 thru=0/16B37F0
// pull=0 tl=1 sort=s id=... key=...
//
// In gap mode q=9f86d081884c7d65 c=41 follow; span=3 where the counter spans more than one, and late=1 where
// the event is late.
type Header struct {
	Pos      Position // lsn, i
	N        int      // place in the window, from 0
	Of       int      // size of the window
	Due      LSN      // the window's due
	Thru     LSN      // the window's thru
	Pull     int      // how many of the window's events were pulled from beyond what was due
	Timeline uint32   // the timeline that Pos.LSN lies on
	Sort     Sort     // the rule in force
	ID       string   // event id, raw; when parsed from a cut one, its encoded form
	Key      string   // seq_key, likewise
	Counter  Counter  // in gap mode: the event's place in its sequence
}

// Same reports whether two headers agree in what identifies a message: lsn i n of due thru pull.
func (h *Header) Same(o *Header) bool {
	return h.Pos == o.Pos && h.N == o.N && h.Of == o.Of && h.Due == o.Due && h.Thru == o.Thru &&
		h.Pull == o.Pull
}

// Append appends the header's value to b.
func (h *Header) Append(b []byte) []byte {
	b = append(b, "v=1 lsn="...)
	b = h.Pos.LSN.Append(b)
	b = strconv.AppendUint(append(b, " i="...), uint64(h.Pos.Index), 10)
	b = strconv.AppendInt(append(b, " n="...), int64(h.N), 10)
	b = strconv.AppendInt(append(b, " of="...), int64(h.Of), 10)
	b = h.Due.Append(append(b, " due="...))
	b = h.Thru.Append(append(b, " thru="...))
	b = strconv.AppendInt(append(b, " pull="...), int64(h.Pull), 10)
	b = strconv.AppendUint(append(b, " tl="...), uint64(h.Timeline), 10)
	b = append(append(append(b, " sort="...), h.Sort.letter()), " id="...)
	b = appendEscaped(b, h.ID, &passHeader)
	b = appendEscaped(append(b, " key="...), h.Key, &passHeader)
	return h.Counter.append(b)
}

// String is the header's value.
func (h *Header) String() string { return string(h.Append(nil)) }

// MaxHeaderLine is how many bytes the header's line takes in a message at most, with an id and a key that
// take so many bytes there. Which numbers it will have is known only when the event is published: most lines
// are 120 to 160 bytes shorter.
func MaxHeaderLine(id, key int) int {
	const last = LSN(math.MaxUint64)
	h := Header{
		Pos: Position{LSN: last, Index: math.MaxUint32}, N: math.MaxInt, Of: math.MaxInt, Due: last,
		Thru: last, Pull: math.MaxInt,
		Timeline: math.MaxUint32,
		Counter:  Counter{Sequence: math.MaxUint64, First: math.MinInt64, Span: math.MaxUint32, Late: true},
	}
	return len(HeaderName) + len(": ") + len(h.Append(nil)) + len("\r\n") + id + key
}

// ParseHeader reads the value of an Outflow header of version 1. Further fields that are not known are passed
// over, so that a later addition does not stop a consumer.
func ParseHeader(value string) (Header, error) {
	var h Header
	rest := value
	for i, name := range headerFields {
		var field string
		field, rest, _ = strings.Cut(rest, " ")
		v, ok := strings.CutPrefix(field, name)
		if !ok {
			return Header{}, fmt.Errorf("header %q: want %s next", value, name)
		}
		if err := h.set(i, v); err != nil {
			return Header{}, fmt.Errorf("header %q: %s%s: %w", value, name, v, err)
		}
	}
	if err := h.Counter.parse(rest); err != nil {
		return Header{}, fmt.Errorf("header %q: %w", value, err)
	}
	return h, nil
}

// AppendHeaderValue appends an event id or a key as it stands in the header.
func AppendHeaderValue(b []byte, value string) []byte { return appendEscaped(b, value, &passHeader) }

// HeaderID returns the event id of a header's value as it stands there, which tells cut ones apart too.
func HeaderID(value string) string { return headerField(value, " id=") }

// HeaderKey returns the key likewise.
func HeaderKey(value string) string { return headerField(value, " key=") }

func headerField(value, name string) string {
	_, rest, _ := strings.Cut(value, name)
	field, _, _ := strings.Cut(rest, " ")
	return field
}

var headerFields = [...]string{"v=", "lsn=", "i=", "n=", "of=", "due=", "thru=", "pull=", "tl=", "sort=",
	"id=", "key="}

func (h *Header) set(field int, v string) (err error) {
	var u uint64
	switch headerFields[field] {
	case "v=":
		if v != "1" {
			return fmt.Errorf("unknown version")
		}
	case "lsn=":
		h.Pos.LSN, err = ParseLSN(v)
	case "i=":
		u, err = strconv.ParseUint(v, 10, 32)
		h.Pos.Index = uint32(u)
	case "n=":
		u, err = strconv.ParseUint(v, 10, 63)
		h.N = int(u)
	case "of=":
		u, err = strconv.ParseUint(v, 10, 63)
		h.Of = int(u)
	case "due=":
		h.Due, err = ParseLSN(v)
	case "thru=":
		h.Thru, err = ParseLSN(v)
	case "pull=":
		u, err = strconv.ParseUint(v, 10, 63)
		h.Pull = int(u)
	case "tl=":
		u, err = strconv.ParseUint(v, 10, 32)
		h.Timeline = uint32(u)
	case "sort=":
		h.Sort, err = sortOf(v)
	case "id=":
		h.ID, _ = unescape(v)
	case "key=":
		h.Key, _ = unescape(v)
	}
	return err
}

// HeaderIDSum returns the first half of the SHA-256 of the event id as it was before it was written into a
// header's value: of a cut one the header has it.
func HeaderIDSum(value string) (sum [16]byte) {
	id := HeaderID(value)
	raw, ok := unescape(id)
	if !ok {
		if _, cut, _ := strings.Cut(id, "=~"); hex.DecodedLen(len(cut)) == len(sum) {
			if _, err := hex.Decode(sum[:], []byte(cut)); err == nil {
				return sum
			}
		}
	}
	full := sha256.Sum256([]byte(raw))
	copy(sum[:], full[:])
	return sum
}
