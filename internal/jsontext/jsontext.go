// Package jsontext walks over JSON and reads its strings, for what comes with a logical message and for what
// a producer writes. Unlike encoding/json it tells half of a surrogate pair from U+FFFD, keeps the place of
// each value, and limits the depth itself. It takes no memory, whatever the text says.
package jsontext

import (
	"unicode/utf16"
	"unicode/utf8"
)

// MaxDepth is how deep arrays and objects may be nested, the outermost counted. PostgreSQL's own limit
// follows from max_stack_depth; with the default of 2 MB it lies above 13,000.
const MaxDepth = 1000

// Span is a part of the text; of a string, what lies between its quotes.
type Span struct {
	Start, End int
	Set        bool
	Escaped    bool // a string with escapes
}

// Scanner walks over JSON text (RFC 8259), which must be valid UTF-8. Text, Off and Depth may be set before
// the first call.
type Scanner struct {
	Text  []byte
	Off   int // of the next byte; at the end after the first problem
	Depth int // how many arrays and objects are open

	Problem string // the first thing that is wrong, "" if nothing is
	At      int    // where
}

// Fail stops the scanner: something is wrong here.
func (s *Scanner) Fail(problem string) {
	if s.Problem == "" {
		s.Problem, s.At = problem, min(s.Off, len(s.Text))
	}
	s.Off = len(s.Text)
}

// End makes sure that nothing follows.
func (s *Scanner) End() {
	if s.Space(); s.Problem == "" && s.Off < len(s.Text) {
		s.Fail("goes on after its end")
	}
}

// Peek returns the next byte, 0 at the end.
func (s *Scanner) Peek() byte {
	if s.Off < len(s.Text) {
		return s.Text[s.Off]
	}
	return 0
}

// Space passes over white space.
func (s *Scanner) Space() {
	for s.Off < len(s.Text) {
		switch s.Text[s.Off] {
		case ' ', '\t', '\n', '\r':
			s.Off++
		default:
			return
		}
	}
}

// Object passes over an object and calls member with the name of each member; member must pass over the
// value.
func (s *Scanner) Object(member func(name Span)) {
	if s.Depth++; s.Depth > MaxDepth {
		s.Fail("too deep")
		return
	}
	s.Off++
	if s.Space(); s.Peek() == '}' {
		s.Off++
		s.Depth--
		return
	}
	for s.Problem == "" {
		name := s.name()
		if s.Problem != "" {
			return
		}
		member(name)
		switch s.Space(); s.Peek() {
		case ',':
			s.Off++
		case '}':
			s.Off++
			s.Depth--
			return
		default:
			s.Fail("no comma and no brace after a member")
		}
	}
}

// name passes over the name of a member and its colon.
func (s *Scanner) name() (name Span) {
	if s.Space(); s.Peek() != '"' {
		s.Fail("no name of a member")
		return name
	}
	name = s.String()
	if s.Space(); s.Peek() != ':' {
		s.Fail("no colon after a name")
		return name
	}
	s.Off++
	return name
}

// Value passes over a value of any kind. It does not recurse: it notes the closing bracket of each array and
// object that is open.
func (s *Scanner) Value() {
	var within [MaxDepth]byte // the closing bracket of each
	base := s.Depth
	for s.Problem == "" {
		switch s.Space(); s.Peek() {
		case '{', '[':
			end := byte('}')
			if s.Text[s.Off] == '[' {
				end = ']'
			}
			if s.Depth == MaxDepth {
				s.Fail("too deep")
				return
			}
			s.Off++
			if s.Space(); s.Peek() != end {
				within[s.Depth] = end
				s.Depth++
				if end == '}' {
					s.name()
				}
				continue
			}
			s.Off++
		case '"':
			s.String()
		default:
			s.Scalar()
		}
		if s.behind(&within, base) {
			return
		}
	}
}

// behind goes on after a value, to the next one; it reports whether that was the end of the outermost one.
func (s *Scanner) behind(within *[MaxDepth]byte, base int) (end bool) {
	for s.Problem == "" {
		if s.Depth == base {
			return true
		}
		s.Space()
		closing := within[s.Depth-1]
		switch c := s.Peek(); {
		case c == closing:
			s.Off++
			s.Depth--
		case c == ',':
			s.Off++
			if closing == '}' {
				s.name()
			}
			return false
		default:
			s.Fail("no comma and no bracket after a value")
		}
	}
	return true
}

// Scalar passes over a number, true, false or null.
func (s *Scanner) Scalar() {
	for _, word := range [...]string{"true", "false", "null"} {
		if len(s.Text)-s.Off >= len(word) && string(s.Text[s.Off:s.Off+len(word)]) == word {
			s.Off += len(word)
			return
		}
	}
	start := s.Off
	if s.Peek() == '-' {
		s.Off++
	}
	if s.Peek() == '0' {
		s.Off++
	} else if !s.digits() {
		s.Off = start
		s.Fail("no value where one must be")
		return
	}
	if s.Peek() == '.' {
		if s.Off++; !s.digits() {
			s.Fail("no digit after the point")
			return
		}
	}
	if c := s.Peek(); c == 'e' || c == 'E' {
		s.Off++
		if c := s.Peek(); c == '+' || c == '-' {
			s.Off++
		}
		if !s.digits() {
			s.Fail("no digit in the exponent")
		}
	}
}

// digits passes over digits, and reports whether there was one.
func (s *Scanner) digits() bool {
	start := s.Off
	for s.Off < len(s.Text) && s.Text[s.Off] >= '0' && s.Text[s.Off] <= '9' {
		s.Off++
	}
	return s.Off > start
}

// String passes over a string.
func (s *Scanner) String() (t Span) {
	s.Off++
	t = Span{Start: s.Off, Set: true}
	for s.Off < len(s.Text) {
		switch c := s.Text[s.Off]; {
		case c == '"':
			t.End = s.Off
			s.Off++
			return t
		case c < ' ':
			s.Fail("a control character in a string")
		case c == '\\':
			t.Escaped = true
			s.escape()
		default:
			s.Off++
		}
	}
	s.Fail("ends within a string")
	return t
}

func (s *Scanner) escape() {
	if s.Off+1 == len(s.Text) {
		s.Off++
		return
	}
	switch s.Text[s.Off+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.Off += 2
	case 'u':
		if _, ok := hex4(s.Text[s.Off+2:]); !ok {
			s.Fail(`no four hexadecimal digits after \u`)
			return
		}
		s.Off += 6
	default:
		s.Fail("an unknown escape in a string")
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

// Char reads the next character of a string, between its quotes, that has been passed over before. size is
// what it takes.
func Char(raw []byte) (c rune, size int) {
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

// IsText reports whether a string holds only what PostgreSQL's text can.
func IsText(raw []byte) bool {
	for len(raw) > 0 {
		c, size := Char(raw)
		if c == 0 || utf16.IsSurrogate(c) {
			return false
		}
		raw = raw[size:]
	}
	return true
}

// AppendUnquoted appends the value of a string, which never takes more than its text.
func AppendUnquoted(to, raw []byte) []byte {
	for len(raw) > 0 {
		c, size := Char(raw)
		to = utf8.AppendRune(to, c)
		raw = raw[size:]
	}
	return to
}
