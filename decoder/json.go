package decoder

import (
	"fmt"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth is how far arrays and objects may lie within each other, the whole text counted.
const maxDepth = 1000

// span is a part of the text.
type span struct {
	start, end int
	set        bool
	escaped    bool // of a string: it has escapes
}

// scanner walks over JSON text (RFC 8259) that is valid UTF-8. It makes nothing of what it passes: so it takes no memory, whatever the
// text says. After the first thing that is wrong it stands at the end.
type scanner struct {
	b     []byte
	off   int
	depth int
	bad   string
}

func (s *scanner) fail(what string) {
	if s.bad == "" {
		s.bad = fmt.Sprintf("is not JSON as it should be, at byte %d of %d: %s", min(s.off, len(s.b)), len(s.b), what)
	}
	s.off = len(s.b)
}

// peek returns the next byte, 0 at the end.
func (s *scanner) peek() byte {
	if s.off < len(s.b) {
		return s.b[s.off]
	}
	return 0
}

func (s *scanner) space() {
	for s.off < len(s.b) {
		switch s.b[s.off] {
		case ' ', '\t', '\n', '\r':
			s.off++
		default:
			return
		}
	}
}

// object passes over an object and calls member with the name of each member: it has to pass over its value.
func (s *scanner) object(member func(name span)) {
	if s.depth++; s.depth > maxDepth {
		s.fail("too deep")
		return
	}
	s.off++
	if s.space(); s.peek() == '}' {
		s.off++
		s.depth--
		return
	}
	for s.bad == "" {
		name := s.name()
		if s.bad != "" {
			return
		}
		member(name)
		switch s.space(); s.peek() {
		case ',':
			s.off++
		case '}':
			s.off++
			s.depth--
			return
		default:
			s.fail("no comma and no brace after a member")
		}
	}
}

// name passes over the name of a member and its colon.
func (s *scanner) name() (name span) {
	if s.space(); s.peek() != '"' {
		s.fail("no name of a member")
		return name
	}
	name = s.str()
	if s.space(); s.peek() != ':' {
		s.fail("no colon after a name")
		return name
	}
	s.off++
	return name
}

// value passes over a value of any kind. It keeps the kinds of what it is within, and calls nothing that calls it again.
func (s *scanner) value() {
	var within [maxDepth]byte // the closing bracket of each
	base := s.depth
	for s.bad == "" {
		switch s.space(); s.peek() {
		case '{', '[':
			end := byte('}')
			if s.b[s.off] == '[' {
				end = ']'
			}
			if s.depth == maxDepth {
				s.fail("too deep")
				return
			}
			s.off++
			if s.space(); s.peek() != end {
				within[s.depth] = end
				s.depth++
				if end == '}' {
					s.name()
				}
				continue
			}
			s.off++
		case '"':
			s.str()
		default:
			s.scalar()
		}
		if s.behind(&within, base) {
			return
		}
	}
}

// behind goes on behind a value, to the next one; it reports whether that was the end of the outermost one.
func (s *scanner) behind(within *[maxDepth]byte, base int) (end bool) {
	for s.bad == "" {
		if s.depth == base {
			return true
		}
		s.space()
		closing := within[s.depth-1]
		switch c := s.peek(); {
		case c == closing:
			s.off++
			s.depth--
		case c == ',':
			s.off++
			if closing == '}' {
				s.name()
			}
			return false
		default:
			s.fail("no comma and no bracket after a value")
		}
	}
	return true
}

// scalar passes over a number, true, false or null.
func (s *scanner) scalar() {
	for _, word := range [...]string{"true", "false", "null"} {
		if len(s.b)-s.off >= len(word) && string(s.b[s.off:s.off+len(word)]) == word {
			s.off += len(word)
			return
		}
	}
	start := s.off
	if s.peek() == '-' {
		s.off++
	}
	if s.peek() == '0' {
		s.off++
	} else if !s.digits() {
		s.off = start
		s.fail("no value where one must be")
		return
	}
	if s.peek() == '.' {
		if s.off++; !s.digits() {
			s.fail("no digit after the point")
			return
		}
	}
	if c := s.peek(); c == 'e' || c == 'E' {
		s.off++
		if c := s.peek(); c == '+' || c == '-' {
			s.off++
		}
		if !s.digits() {
			s.fail("no digit in the exponent")
		}
	}
}

// digits passes over digits, and reports whether there was one.
func (s *scanner) digits() bool {
	start := s.off
	for s.off < len(s.b) && s.b[s.off] >= '0' && s.b[s.off] <= '9' {
		s.off++
	}
	return s.off > start
}

// str passes over a string.
func (s *scanner) str() (t span) {
	s.off++
	t = span{start: s.off, set: true}
	for s.off < len(s.b) {
		switch c := s.b[s.off]; {
		case c == '"':
			t.end = s.off
			s.off++
			return t
		case c < ' ':
			s.fail("a control character in a string")
		case c == '\\':
			t.escaped = true
			s.escape()
		default:
			s.off++
		}
	}
	s.fail("ends within a string")
	return t
}

func (s *scanner) escape() {
	if s.off+1 == len(s.b) {
		s.off++
		return
	}
	switch s.b[s.off+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.off += 2
	case 'u':
		if _, ok := hex4(s.b[s.off+2:]); !ok {
			s.fail(`no four hexadecimal digits after \u`)
			return
		}
		s.off += 6
	default:
		s.fail("an unknown escape in a string")
	}
}

// hex4 reads four hexadecimal digits.
func hex4(b []byte) (v rune, ok bool) {
	if len(b) < 4 {
		return 0, false
	}
	for _, c := range b[:4] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		v = v<<4 | rune(c)
	}
	return v, true
}

// next reads the next character of a string, between its quotes, that has been passed over before. size is what it takes.
func next(raw []byte) (c rune, size int) {
	if raw[0] != '\\' {
		return utf8.DecodeRune(raw)
	}
	switch raw[1] {
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	case 'u':
	default:
		return rune(raw[1]), 2
	}
	c, _ = hex4(raw[2:])
	if utf16.IsSurrogate(c) && len(raw) >= 12 && raw[6] == '\\' && raw[7] == 'u' {
		low, _ := hex4(raw[8:])
		if pair := utf16.DecodeRune(c, low); pair != utf8.RuneError {
			return pair, 12
		}
	}
	return c, 6
}

// readable reports whether a string holds only what PostgreSQL's text can.
func readable(raw []byte) bool {
	for len(raw) > 0 {
		c, size := next(raw)
		if c == 0 || utf16.IsSurrogate(c) {
			return false
		}
		raw = raw[size:]
	}
	return true
}

// appendUnquoted appends the value of a string, which never takes more than its text.
func appendUnquoted(to, raw []byte) []byte {
	for len(raw) > 0 {
		c, size := next(raw)
		to = utf8.AppendRune(to, c)
		raw = raw[size:]
	}
	return to
}
