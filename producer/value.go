package producer

import (
	"database/sql/driver"
	"encoding"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// value is a column's value as text.
type value struct {
	text string
	null bool
}

// plain makes text of a Go value. binary says that it was bytes, which a bytea column takes as they are.
func plain(v any) (val value, binary bool, err error) {
	switch v := v.(type) {
	case nil:
		return value{null: true}, false, nil
	case string:
		return value{text: v}, false, nil
	case json.RawMessage:
		return value{text: string(v), null: v == nil}, false, nil
	case []byte:
		return value{text: string(v), null: v == nil}, v != nil, nil
	case time.Time:
		// old offsets have seconds
		return value{text: v.Format("2006-01-02 15:04:05.999999999Z07:00:00")}, false, nil
	}
	r := reflect.ValueOf(v)
	if r.Kind() == reflect.Pointer && r.IsNil() {
		return value{null: true}, false, nil
	}
	switch v := v.(type) {
	case *time.Time: // its MarshalText leaves the offset's seconds out
		return plain(*v)
	case driver.Valuer:
		inner, err := v.Value()
		if err != nil {
			return value{}, false, err
		}
		if _, again := inner.(driver.Valuer); again {
			return value{}, false, fmt.Errorf("its Value method returns a %T", inner)
		}
		return plain(inner)
	case encoding.TextMarshaler:
		b, err := v.MarshalText()
		return value{text: string(b)}, false, err
	}
	switch r.Kind() {
	case reflect.Pointer:
		return plain(r.Elem().Interface())
	case reflect.String:
		return value{text: r.String()}, false, nil
	case reflect.Bool:
		return value{text: strconv.FormatBool(r.Bool())}, false, nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return value{text: strconv.FormatInt(r.Int(), 10)}, false, nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return value{text: strconv.FormatUint(r.Uint(), 10)}, false, nil
	case reflect.Float32:
		return value{text: strconv.FormatFloat(r.Float(), 'g', -1, 32)}, false, nil
	case reflect.Float64:
		return value{text: strconv.FormatFloat(r.Float(), 'g', -1, 64)}, false, nil
	case reflect.Slice:
		if r.Type().Elem().Kind() == reflect.Uint8 {
			return value{text: string(r.Bytes()), null: r.IsNil()}, !r.IsNil(), nil
		}
	}
	return value{}, false, fmt.Errorf("a %T is no text", v)
}

// finding is what is wrong with a value, and what to do.
type finding struct{ problem, hint string }

// check says what PostgreSQL would not take of a text for a column, as far as it can be known here.
func (c *column) check(s string) *finding {
	if i := strings.IndexByte(s, 0); i >= 0 {
		return &finding{fmt.Sprintf("it has a byte 0, at %d", i),
			"PostgreSQL holds it in bytea only: take it out, or encode the value"}
	}
	if !utf8.ValidString(s) {
		return &finding{fmt.Sprintf("not valid UTF-8 at byte %d", invalidUTF8(s)),
			"Give text in UTF-8; bytes need a column of type bytea"}
	}
	if c.length > 0 && utf8.RuneCountInString(s) > c.length {
		return &finding{fmt.Sprintf("longer than the %d characters of column %q", c.length, c.name),
			"Shorten it, or make the column wider"}
	}
	switch bits := map[kind]int{int2: 16, int4: 32, int8: 64}[c.kind]; {
	case bits > 0:
		if _, err := strconv.ParseInt(s, 10, bits); err != nil {
			return &finding{fmt.Sprintf("not a whole number of %d bits, which column %q holds", bits, c.name),
				"Give one, in digits"}
		}
	case c.kind == uuid && !isUUID(s):
		return &finding{fmt.Sprintf("not a UUID, which column %q holds", c.name),
			"Give 32 hexadecimal digits, as 8-4-4-4-12"}
	}
	return nil
}

// isUUID reports whether PostgreSQL takes the text for a uuid in the usual form, or without the hyphens.
func isUUID(s string) bool {
	if len(s) == 36 {
		if s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
			return false
		}
		s = s[:8] + s[9:13] + s[14:18] + s[19:23] + s[24:]
	}
	_, err := hex.DecodeString(s)
	return len(s) == 32 && err == nil
}

// checkJSON is check for a column of JSON. size is how long PostgreSQL prints the text: exactly if that is
// above limit, else at most.
func (c *column) checkJSON(b []byte, limit int) (size int, f *finding) {
	size = len(b)
	problem := checkJSON(b, 0)
	if problem == "" && c.kind == documentB {
		size, problem = checkJSONB(b)
	}
	if problem != "" {
		return 0, &finding{
			"not what a column of type " + c.typ + " takes: " + problem,
			"Give a JSON text, such as json.Marshal returns",
		}
	}
	if c.kind == documentB && size > limit {
		if exact, err := jsonbSize(b); err == nil {
			size = exact
		}
	}
	return size, nil
}

// add checks a value of a further column and appends it to the parameter.
func (c *column) add(l *list, v any) *finding {
	val, binary, err := plain(v)
	switch {
	case err != nil:
		return &finding{err.Error(), "Give a string, or something that has a text"}
	case val.null:
		l.null()
		return nil
	case c.kind == bytea && !binary:
		return &finding{fmt.Sprintf("text, for the bytes of column %q", c.name), "Give a []byte"}
	case c.kind == bytea:
		l.add(`\x` + hex.EncodeToString([]byte(val.text)))
		return nil
	case c.kind.json():
		if _, f := c.checkJSON([]byte(val.text), 1<<30); f != nil {
			return f
		}
	}
	if f := c.check(val.text); f != nil {
		return f
	}
	l.add(val.text)
	return nil
}

func invalidUTF8[T string | []byte](s T) int {
	for i, r := range string(s) {
		if r == utf8.RuneError {
			if _, size := utf8.DecodeRuneInString(string(s[i:])); size == 1 {
				return i
			}
		}
	}
	return len(s)
}
