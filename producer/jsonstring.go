package producer

import (
	"unicode/utf16"
	"unicode/utf8"
)

// str reads a string and returns its size as jsonb prints it: escaped where it must be, everything else as it is.
func (w *walker) str() int {
	size := len(`""`)
	w.key = w.key[:0]
	for w.at++; w.at < len(w.text); {
		switch c := w.text[w.at]; {
		case c == '"':
			w.at++
			return size
		case c < ' ':
			return w.fail("a control character stands in a string unescaped")
		case c == '\\':
			r, ok := w.escape()
			if !ok {
				return 0
			}
			size += printed(r)
			w.keep(r)
		default:
			size++
			w.at++
			if w.distinct {
				w.key = append(w.key, c)
			}
		}
	}
	return w.fail("a string has no end")
}

func (w *walker) keep(r rune) {
	if w.distinct {
		w.key = utf8.AppendRune(w.key, r)
	}
}

// printed is how many bytes jsonb prints for a character of a string.
func printed(r rune) int {
	switch r {
	case '"', '\\', '\b', '\f', '\n', '\r', '\t':
		return 2
	}
	if r < ' ' {
		return len(`\u0000`)
	}
	return utf8.RuneLen(r)
}

// escape reads an escape. In json, which keeps the text, half a surrogate pair passes: it counts as U+FFFD.
func (w *walker) escape() (r rune, ok bool) {
	w.at++
	if w.at == len(w.text) {
		w.fail("a string has no end")
		return 0, false
	}
	switch c := w.text[w.at]; c {
	case '"', '\\', '/':
		r = rune(c)
	case 'b':
		r = '\b'
	case 'f':
		r = '\f'
	case 'n':
		r = '\n'
	case 'r':
		r = '\r'
	case 't':
		r = '\t'
	case 'u':
		return w.unicode()
	default:
		w.fail("there is no such escape")
		return 0, false
	}
	w.at++
	return r, true
}

// unicode reads what follows \u, and the other half of a surrogate pair.
func (w *walker) unicode() (r rune, ok bool) {
	if r, ok = w.hex(); !ok {
		return 0, false
	}
	if !w.jsonb {
		if utf16.IsSurrogate(r) {
			r = utf8.RuneError
		}
		return r, true
	}
	if r == 0 {
		w.fail(`jsonb cannot hold \u0000, just before`)
		return 0, false
	}
	if !utf16.IsSurrogate(r) {
		return r, true
	}
	if w.at+1 < len(w.text) && w.text[w.at] == '\\' && w.text[w.at+1] == 'u' {
		w.at++
		low, ok := w.hex()
		if !ok {
			return 0, false
		}
		if pair := utf16.DecodeRune(r, low); pair != utf8.RuneError {
			return pair, true
		}
	}
	w.fail("jsonb cannot hold half a surrogate pair, just before")
	return 0, false
}

// hex reads the four digits behind the u at w.at.
func (w *walker) hex() (r rune, ok bool) {
	for range 4 {
		w.at++
		c := byte(0)
		if w.at < len(w.text) {
			c = w.text[w.at]
		}
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			w.fail(`want four hexadecimal digits after \u`)
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	w.at++
	return r, true
}
