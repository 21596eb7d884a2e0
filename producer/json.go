package producer

import (
	"fmt"
	"unicode/utf8"
)

// maxDepth is how deep a JSON text may be nested. PostgreSQL's own limit follows from max_stack_depth and is not known here: with the
// default of 2 MB it lies above 13,000.
const maxDepth = 1000

// checkJSON says what PostgreSQL would not take about a JSON text, "" if nothing. Both types want a text of RFC 8259 in valid UTF-8; jsonb
// refuses, beside that, what it cannot hold: \u0000, half a surrogate pair, a number beyond numeric.
//
// size is how long the text is when PostgreSQL prints it: of json the text itself; of jsonb at most that, for keys that occur twice in
// an object count twice here. [jsonbSize] is exact.
func checkJSON(text []byte, jsonb bool) (size int, problem string) {
	return checkJSONWithin(text, jsonb, maxDepth)
}

// checkJSONWithin is checkJSON with another limit of depth.
func checkJSONWithin(text []byte, jsonb bool, depth int) (size int, problem string) {
	if !utf8.Valid(text) {
		return 0, fmt.Sprintf("not valid UTF-8 at byte %d", invalidUTF8(text))
	}
	w := walker{text: text, jsonb: jsonb, most: depth}
	size = w.document()
	if w.problem != "" {
		return 0, fmt.Sprintf("%s at byte %d", w.problem, w.at)
	}
	if !jsonb {
		size = len(text)
	}
	return size, ""
}

// jsonbSize is the length of a valid text as jsonb prints it: of a key that occurs twice, the last value alone.
func jsonbSize(text []byte) int {
	w := walker{text: text, jsonb: true, distinct: true, most: maxDepth}
	return w.document()
}

// walker reads a JSON text once. After the first problem it stays where it is.
type walker struct {
	text     []byte
	at       int
	depth    int
	most     int // of depth
	jsonb    bool
	distinct bool // count a key's last value alone
	problem  string
	key      []byte // the last string, without its escapes; only if distinct
}

func (w *walker) fail(problem string) int {
	if w.problem == "" {
		w.problem = problem
	}
	return 0
}

// next skips white space and returns the byte there, 0 at the end.
func (w *walker) next() byte {
	for ; w.at < len(w.text); w.at++ {
		switch c := w.text[w.at]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c
		}
	}
	return 0
}

func (w *walker) document() int {
	size := w.value()
	if w.problem == "" && (w.next() != 0 || w.at < len(w.text)) {
		return w.fail("something follows the value")
	}
	return size
}

// value reads one value and returns its size as jsonb prints it.
func (w *walker) value() int {
	switch c := w.next(); {
	case c == '{':
		return w.object()
	case c == '[':
		return w.array()
	case c == '"':
		return w.str()
	case c == '-' || c >= '0' && c <= '9':
		return w.number()
	case c == 't':
		return w.word("true")
	case c == 'f':
		return w.word("false")
	case c == 'n':
		return w.word("null")
	case w.at == len(w.text):
		return w.fail("a value is missing")
	}
	return w.fail("no value begins so")
}

func (w *walker) word(word string) int {
	if len(w.text)-w.at < len(word) || string(w.text[w.at:w.at+len(word)]) != word {
		return w.fail("no value begins so")
	}
	w.at += len(word)
	return len(word)
}

// enter steps over a bracket; false if that is one too many.
func (w *walker) enter() bool {
	if w.depth++; w.depth > w.most {
		w.fail(fmt.Sprintf("nested deeper than %d", w.most))
		return false
	}
	w.at++
	return true
}

func (w *walker) array() int {
	if !w.enter() {
		return 0
	}
	size := len("[]")
	if w.next() == ']' {
		w.leave()
		return size
	}
	for {
		size += w.value()
		if w.problem != "" {
			return 0
		}
		switch w.next() {
		case ',':
			w.at++
			size += len(", ")
		case ']':
			w.leave()
			return size
		default:
			return w.fail("want , or ]")
		}
	}
}

func (w *walker) leave() { w.depth--; w.at++ }

func (w *walker) object() int {
	if !w.enter() {
		return 0
	}
	size := len("{}")
	if w.next() == '}' {
		w.leave()
		return size
	}
	var seen map[string]int // size of each pair
	if w.distinct {
		seen = map[string]int{}
	}
	for {
		if w.next() != '"' {
			return w.fail("want a key in double quotes")
		}
		pair := w.str() + len(": ")
		key := string(w.key)
		if w.problem == "" && w.next() != ':' {
			return w.fail("want a colon")
		}
		w.at++
		pair += w.value()
		if w.problem != "" {
			return 0
		}
		if w.distinct {
			if old, twice := seen[key]; twice {
				size -= old + len(", ")
			}
			seen[key] = pair
		}
		size += pair
		switch w.next() {
		case ',':
			w.at++
			size += len(", ")
		case '}':
			w.leave()
			return size
		default:
			return w.fail("want , or }")
		}
	}
}
