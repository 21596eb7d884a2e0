// Package traceparent reads the header traceparent of W3C Trace Context, with the standard library alone:
// package producer must not bring a tracing library into the services that use it.
package traceparent

import "encoding/hex"

// Name is the header's name, and State that of the header that may come with it.
const (
	Name  = "traceparent"
	State = "tracestate"
)

// MaxState is the greatest length of a tracestate that is passed on, in bytes: what everybody has to take.
const MaxState = 512

// Context is what a traceparent says: which trace, which span of it, and flags.
type Context struct {
	TraceID [16]byte // not all zero
	SpanID  [8]byte  // likewise
	Flags   byte
}

// Sampled reports whether the writer recorded its span.
func (c Context) Sampled() bool { return c.Flags&1 != 0 }

const length = len("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")

// Parse reads a traceparent. Of a version above 00 it reads what version 00 has, as the specification asks
// for; ok is false for what is not valid.
func Parse(s string) (c Context, ok bool) {
	var version, flags [1]byte
	if len(s) < length || s[2] != '-' || s[35] != '-' || s[52] != '-' || !lowerHex(version[:], s[:2]) ||
		!lowerHex(c.TraceID[:], s[3:35]) || !lowerHex(c.SpanID[:], s[36:52]) ||
		!lowerHex(flags[:], s[53:length]) {
		return Context{}, false
	}
	switch more := s[length:]; {
	case version[0] == 0xFF, version[0] == 0 && more != "", more != "" && more[0] != '-':
		return Context{}, false
	case c.TraceID == [16]byte{}, c.SpanID == [8]byte{}:
		return Context{}, false
	}
	c.Flags = flags[0]
	return c, true
}

// lowerHex decodes digits without capitals.
func lowerHex(to []byte, s string) bool {
	for i := range len(s) {
		if 'A' <= s[i] && s[i] <= 'F' {
			return false
		}
	}
	var room [32]byte
	_, err := hex.Decode(to, room[:copy(room[:], s)])
	return err == nil
}
