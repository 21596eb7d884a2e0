package outbox

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// The limits of an encoded token, in bytes: a longer one is cut to the first cutToken and ends in a hash of
// the raw value.
const (
	maxToken = 200
	cutToken = 128
)

// passSubject and passHeader say which bytes stand for themselves.
var passSubject, passHeader [256]bool

func init() {
	for c := range 256 {
		passHeader[c] = c > ' ' && c < 0x7F && c != '='
		passSubject[c] = c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '_' ||
			c == '-'
	}
}

// AppendToken appends value encoded as one token of a subject: [A-Za-z0-9_-] pass, every other byte becomes
// =XX, the empty value is "=". The encoding is injective, and reversible up to the cut of values whose
// encoded form is longer than 200 bytes.
func AppendToken(b []byte, value string) []byte {
	if value == "" {
		return append(b, '=')
	}
	return appendEscaped(b, value, &passSubject)
}

// ParseToken reverses AppendToken. The token of a value that was cut comes back as it is: no other value has
// it, so that it can stand for the value. ok is false where AppendToken makes this token of no value.
func ParseToken(token string) (value string, ok bool) {
	if token == "=" {
		return "", true
	}
	if kept, sum, cut := strings.Cut(token, "=~"); cut {
		raw, ok := unescape(kept)
		whole := ok && len(kept) <= cutToken && len(kept) > cutToken-3 && encodes(raw, kept)
		return token, whole && len(sum) == 32 && strings.Trim(sum, "0123456789abcdef") == ""
	}
	value, ok = unescape(token)
	return value, ok && encodes(value, token)
}

// encodes reports whether token is the encoding of value: escapes are upper case, and only what may not pass
// is escaped.
func encodes(value, token string) bool { return string(AppendToken(nil, value)) == token }

// appendEscaped appends value, each byte that may not pass as =XX, and cuts it when it gets too long.
func appendEscaped(b []byte, value string, pass *[256]bool) []byte {
	const digits = "0123456789ABCDEF"
	plain := 0
	for plain < len(value) && pass[value[plain]] {
		plain++
	}
	if plain == len(value) && plain <= maxToken {
		return append(b, value...)
	}
	plain = min(plain, cutToken)
	start, cut := len(b), -1
	b = append(b, value[:plain]...)
	for i := plain; i < len(value); i++ {
		c := value[i]
		size := 1
		if !pass[c] {
			size = 3
		}
		if cut < 0 && len(b)-start+size > cutToken {
			cut = len(b)
		}
		if len(b)-start+size > maxToken {
			sum := sha256.Sum256([]byte(value))
			return hex.AppendEncode(append(b[:cut], "=~"...), sum[:16])
		}
		if pass[c] {
			b = append(b, c)
		} else {
			b = append(b, '=', digits[c>>4], digits[c&0xF])
		}
	}
	return b
}

// ParseHeaderValue reverses [AppendHeaderValue]. ok is false where the text is not an encoding, or was cut:
// the value is the text then.
func ParseHeaderValue(text string) (value string, ok bool) { return unescape(text) }

// unescape reverses appendEscaped. What was cut stays as it is: ok is false then, and where s is not an
// encoding.
func unescape(s string) (value string, ok bool) {
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '=' {
			b = append(b, s[i])
			continue
		}
		if i+2 >= len(s) {
			return s, false
		}
		hi, lo := unhex(s[i+1]), unhex(s[i+2])
		if hi < 0 || lo < 0 {
			return s, false
		}
		b = append(b, byte(hi<<4|lo))
		i += 2
	}
	return string(b), true
}

func unhex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}
