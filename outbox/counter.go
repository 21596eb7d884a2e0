package outbox

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Counter says where an event stands in its sequence, for gap mode. Counters are dense: the first event of a
// sequence has the first counter, and each takes the one that follows its predecessor's last.
type Counter struct {
	Sequence uint64 // which sequence: see [SequenceOf]
	First    int64  // the event's counter; the first of them where it spans more than one
	Span     uint32 // how many counters it takes, 1 or more; 0: it has none, and the other fields say nothing
	Late     bool   // it came after a message of its sequence with a counter that is not below its own
}

// Last is the last counter that the event takes.
func (c Counter) Last() int64 { return c.First + int64(c.Span) - 1 }

// SequenceOf names a sequence by the first 8 bytes of the SHA-256 of the document's length (8 bytes,
// big-endian), the document and the actor, which is empty where there is none. It stands in messages and
// checkpoints, so it never changes. Two sequences with the same name would share what is remembered of them.
func SequenceOf(doc, actor string) uint64 {
	var room [192]byte
	b := binary.BigEndian.AppendUint64(room[:0], uint64(len(doc)))
	sum := sha256.Sum256(append(append(b, doc...), actor...))
	return binary.BigEndian.Uint64(sum[:8])
}

const sequenceDigits = 16

// AppendSequence appends a sequence's name as it stands in a header: 16 hexadecimal digits in lower case.
func AppendSequence(b []byte, sequence uint64) []byte {
	var raw [sequenceDigits / 2]byte
	binary.BigEndian.PutUint64(raw[:], sequence)
	return hex.AppendEncode(b, raw[:])
}

// ParseSequence reads what [AppendSequence] writes.
func ParseSequence(s string) (uint64, error) {
	if len(s) != sequenceDigits || strings.ToLower(s) != s {
		return 0, fmt.Errorf("sequence %q: want %d hexadecimal digits in lower case", s, sequenceDigits)
	}
	return strconv.ParseUint(s, 16, 64)
}

func (c Counter) append(b []byte) []byte {
	if c.Span == 0 {
		return b
	}
	b = AppendSequence(append(b, " q="...), c.Sequence)
	b = strconv.AppendInt(append(b, " c="...), c.First, 10)
	if c.Span != 1 {
		b = strconv.AppendUint(append(b, " span="...), uint64(c.Span), 10)
	}
	if c.Late {
		b = append(b, " late=1"...)
	}
	return b
}

// parse reads what append writes from the fields behind a header's key, and passes over others.
func (c *Counter) parse(fields string) error {
	var sequence, first, span, late string
	for fields != "" {
		var field string
		field, fields, _ = strings.Cut(fields, " ")
		switch name, v, _ := strings.Cut(field, "="); name {
		case "q":
			sequence = v
		case "c":
			first = v
		case "span":
			span = v
		case "late":
			late = v
		}
	}
	if sequence == "" {
		return nil
	}
	var err error
	if c.Sequence, err = ParseSequence(sequence); err != nil {
		return err
	}
	if c.First, err = strconv.ParseInt(first, 10, 64); err != nil {
		return fmt.Errorf("c=%s: %w", first, err)
	}
	c.Span = 1
	if span != "" {
		n, err := strconv.ParseUint(span, 10, 32)
		if err != nil || n == 0 {
			return fmt.Errorf("span=%s: want 1 to %d", span, uint32(math.MaxUint32))
		}
		c.Span = uint32(n)
	}
	if c.First > math.MaxInt64-int64(c.Span)+1 {
		return fmt.Errorf("c=%s span=%d: more than %d", first, c.Span, int64(math.MaxInt64))
	}
	c.Late = late == "1"
	return nil
}
