package archive

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

// Message is a message of the stream.
type Message struct {
	Seq     uint64
	Time    time.Time // when the stream stored it
	Subject string
	Header  nats.Header
	Data    []byte

	erased string // the request by which it was erased; of the rest there is only Seq then
}

// Hash is a SHA-256; in JSON it is in hexadecimal.
type Hash [sha256.Size]byte

// String returns it in hexadecimal.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// MarshalText makes it hexadecimal.
func (h Hash) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h[:]), nil }

// UnmarshalText reads hexadecimal of exactly its length.
func (h *Hash) UnmarshalText(text []byte) error {
	if len(text) != 2*len(h) {
		return fmt.Errorf("a hash has %d characters, not %d", 2*len(h), len(text))
	}
	_, err := hex.Decode(h[:], text)
	return err
}

// Hash is over the raw values: what the message says, and not how the line writes it.
func (m *Message) Hash() (h Hash) {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 512), m.Seq)
	b = binary.BigEndian.AppendUint64(b, uint64(m.Time.UnixNano()))
	b = appendBytes(b, m.Subject)
	block := headerBlock(m.Header)
	b = appendBytes(b, block)
	b = binary.BigEndian.AppendUint64(b, uint64(len(m.Data)))
	sum := sha256.New()
	sum.Write(b)
	sum.Write(m.Data)
	sum.Sum(h[:0])
	return h
}

func appendBytes(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint64(b, uint64(len(s))), s...)
}

// headerBlock is the header as nats.go sends it, without the first line: names in their order as bytes. This
// is also how Outflow writes its messages.
func headerBlock(h nats.Header) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(h)) {
		for _, v := range h[name] {
			b.WriteString(name)
			b.WriteString(": ")
			b.WriteString(v)
			b.WriteString("\r\n")
		}
	}
	return b.String()
}

// isText reports whether a header is UTF-8.
func isText(h nats.Header) bool {
	isNot := func(s string) bool { return !utf8.ValidString(s) }
	for name, values := range h {
		if isNot(name) || slices.ContainsFunc(values, isNot) {
			return false
		}
	}
	return true
}

func parseHeaderBlock(block string) (nats.Header, error) {
	h := nats.Header{}
	for block != "" {
		line, rest, ended := strings.Cut(block, "\r\n")
		name, v, ok := strings.Cut(line, ": ")
		if !ok || !ended {
			return nil, errors.New("a header without a value")
		}
		h[name] = append(h[name], v)
		block = rest
	}
	return h, nil
}

// line is a message as it is written. Data and header are text where they are UTF-8, which any tool shows,
// otherwise base64.
type line struct {
	Seq         uint64      `json:"seq"`
	Time        time.Time   `json:"time"`
	Subject     string      `json:"subject"`
	Headers     nats.Header `json:"headers,omitempty"`
	HeadersRaw  []byte      `json:"headers_base64,omitempty"`
	Data        *string     `json:"data,omitempty"`
	DataRaw     []byte      `json:"data_base64,omitempty"`
	MessageHash *Hash       `json:"h,omitempty"`      // in version 1, and where Erased is
	Erased      string      `json:"erased,omitempty"` // see erasedLine
}

// erasedLine is what is left of a message that was erased: the hash that it had, by which the segment's root
// and the chain hold as before.
type erasedLine struct {
	Seq         uint64 `json:"seq"`
	Erased      string `json:"erased"` // the request
	MessageHash Hash   `json:"h"`
}

// maxLine is the longest line. NATS has messages of 64 MiB at most, of which each byte may take six.
const maxLine = 400 << 20

// appendLine appends the message's line to b, with its end, in the form that segments of a version have, and
// returns its hash.
func appendLine(b *bytes.Buffer, m *Message, version int) (Hash, error) {
	l, h := line{Seq: m.Seq, Time: m.Time.UTC(), Subject: m.Subject}, m.Hash()
	if version == 1 {
		l.MessageHash = &h
	}
	if !utf8.ValidString(m.Subject) {
		return Hash{}, fmt.Errorf("message %d: its subject is not UTF-8", m.Seq)
	}
	if isText(m.Header) {
		l.Headers = m.Header
	} else {
		l.HeadersRaw = []byte(headerBlock(m.Header))
	}
	if utf8.Valid(m.Data) {
		s := string(m.Data)
		l.Data = &s
	} else {
		l.DataRaw = m.Data
	}
	return h, encodeLine(b, &l)
}

func encodeLine(b *bytes.Buffer, line any) error {
	e := json.NewEncoder(b)
	e.SetEscapeHTML(false)
	return e.Encode(line)
}

// parseLine reads a line without its end, of whatever version, and returns the message's hash, which a line
// that has one must agree with.
func parseLine(text []byte) (*Message, Hash, error) {
	var l line
	if err := json.Unmarshal(text, &l); err != nil {
		return nil, Hash{}, fmt.Errorf("a line that can't be read: %w", err)
	}
	if l.Erased != "" {
		if l.MessageHash == nil {
			return nil, Hash{}, fmt.Errorf("the line of message %d is erased, and has no hash", l.Seq)
		}
		if l.Subject != "" || l.Data != nil || l.DataRaw != nil || l.Headers != nil || l.HeadersRaw != nil {
			return nil, Hash{}, fmt.Errorf("the line of message %d is erased, and has content", l.Seq)
		}
		return &Message{Seq: l.Seq, erased: l.Erased}, *l.MessageHash, nil
	}
	for name, values := range l.Headers {
		if len(values) == 0 {
			return nil, Hash{}, fmt.Errorf("the line of message %d: header %q has no value", l.Seq, name)
		}
	}
	m := &Message{Seq: l.Seq, Time: l.Time, Subject: l.Subject, Header: l.Headers, Data: l.DataRaw}
	if l.Data != nil {
		m.Data = []byte(*l.Data)
	}
	if l.HeadersRaw != nil {
		var err error
		if m.Header, err = parseHeaderBlock(string(l.HeadersRaw)); err != nil {
			return nil, Hash{}, fmt.Errorf("the line of message %d: %w", l.Seq, err)
		}
	}
	h := m.Hash()
	if l.MessageHash != nil && h != *l.MessageHash {
		return nil, Hash{}, fmt.Errorf("the line of message %d does not have its hash", l.Seq)
	}
	return m, h, nil
}

// eventHeader is the first value of the header [outbox.HeaderName] in a line that encodeLine wrote, "" if it
// has none. To decode the line takes many times as long. Within a string of JSON each quote has a backslash
// before it, so what is looked for is a name, and nothing but a header has that one.
func eventHeader(text []byte) (string, error) {
	for _, before := range []string{"{", ","} {
		_, rest, found := bytes.Cut(text, []byte(before+`"`+outbox.HeaderName+`":["`))
		if !found {
			continue
		}
		value, _, found := bytes.Cut(rest, []byte{'"'})
		if found && bytes.IndexByte(value, '\\') < 0 { // else it has a quote in it, or another character
			return string(value), nil
		}
	}
	msg, _, err := parseLine(text) // it may have its headers in base64
	if err != nil {
		return "", err
	}
	return msg.Header.Get(outbox.HeaderName), nil
}
