package producer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/outflowhq/outflow/internal/jsontext"
)

// checkJSON says what keeps a text from being JSON (RFC 8259, in UTF-8), "" if nothing does. It is part of a
// text in which depth arrays and objects are open.
func checkJSON(text []byte, depth int) (problem string) {
	if !utf8.Valid(text) {
		return fmt.Sprintf("not valid UTF-8 at byte %d", invalidUTF8(text))
	}
	s := jsontext.Scanner{Text: text, Depth: depth}
	s.Value()
	s.End()
	if s.Problem != "" {
		return fmt.Sprintf("%s, at byte %d", s.Problem, s.At)
	}
	return ""
}

// checkJSONB says what of a JSON text jsonb cannot hold: \u0000, half of a surrogate pair, a number beyond
// numeric. size is how long the text is at most when PostgreSQL prints it: a key that occurs twice in an
// object counts twice. [jsonbSize] is exact.
func checkJSONB(text []byte) (size int, problem string) {
	s := jsontext.Scanner{Text: text}
	for s.Space(); s.Off < len(text); s.Space() {
		start, n := s.Off, 0
		switch s.Peek() {
		case '{', '}', '[', ']':
			s.Off++
			n = 1
		case ',', ':':
			s.Off++
			n = 2 // with a space
		case '"':
			str := s.String()
			n, problem = stringSize(text[str.Start:str.End], str.Escaped)
		case 't', 'f', 'n':
			s.Scalar()
			n = s.Off - start
		default:
			s.Scalar()
			n, problem = numberSize(text[start:s.Off])
		}
		if problem != "" {
			return 0, fmt.Sprintf("%s, at byte %d", problem, start)
		}
		size += n
	}
	return size, ""
}

// stringSize is how long jsonb prints a string that stands between quotes in the text.
func stringSize(raw []byte, escaped bool) (size int, problem string) {
	size = len(`""`)
	if !escaped {
		return size + len(raw), ""
	}
	for len(raw) > 0 {
		c, n := jsontext.Char(raw)
		switch {
		case c == 0:
			return 0, `jsonb cannot hold \u0000`
		case utf16.IsSurrogate(c):
			return 0, "jsonb cannot hold half a surrogate pair"
		}
		size += printed(c)
		raw = raw[n:]
	}
	return size, ""
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

// The limits of PostgreSQL's numeric, in which jsonb keeps a number.
const (
	maxWhole    = 131072 // digits before the decimal point
	maxFraction = 16383  // digits after it, zeros too
	// of either sign, whatever the number is then; PostgreSQL 16 takes one more, of a zero
	maxExponent = 1<<30 - 2
)

// numberSize is how long jsonb prints a number: all digits, no exponent, as many decimals as were written.
func numberSize(number []byte) (size int, problem string) {
	exponent := 0
	if i := bytes.IndexAny(number, "eE"); i >= 0 {
		// beyond an int it is the largest or the smallest one
		exponent, _ = strconv.Atoi(string(number[i+1:]))
		exponent = max(-maxExponent-1, min(exponent, maxExponent+1))
		number = number[:i]
	}
	number, negative := bytes.CutPrefix(number, []byte("-"))
	whole, fraction, _ := bytes.Cut(number, []byte("."))
	leading := zeros(whole) // those before the first digit that counts
	if leading == len(whole) {
		leading += zeros(fraction)
	}
	before := len(whole) + exponent - leading // digits before the point; 0 or less: none counts
	if leading == len(whole)+len(fraction) {
		before, negative = 0, false
	}
	decimals := max(0, len(fraction)-exponent)
	if exponent > maxExponent || exponent < -maxExponent || decimals > maxFraction || before > maxWhole {
		return 0, "a number is beyond what jsonb can hold, 131,072 digits before the point and 16,383 " +
			"after it"
	}
	size = max(1, before)
	if negative {
		size++
	}
	if decimals > 0 {
		size += 1 + decimals
	}
	return size, ""
}

// zeros is how many zeros the digits begin with.
func zeros(digits []byte) int { return len(digits) - len(bytes.TrimLeft(digits, "0")) }

// jsonbSize is how long jsonb prints a text that it can hold: of a key that occurs twice, the last value
// alone.
func jsonbSize(text []byte) (size int, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return 0, err
	}
	return valueSize(v), nil
}

func valueSize(v any) (size int) {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			size += valueSize(key) + len(": ") + valueSize(value)
		}
		return size + len("{}") + len(", ")*max(0, len(v)-1)
	case []any:
		for _, value := range v {
			size += valueSize(value)
		}
		return size + len("[]") + len(", ")*max(0, len(v)-1)
	case json.Number:
		size, _ = numberSize([]byte(v))
		return size
	case string:
		for _, c := range v {
			size += printed(c)
		}
		return size + len(`""`)
	case bool:
		return len(strconv.FormatBool(v))
	}
	return len("null")
}
