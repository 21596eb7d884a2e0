package oracle

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Row is an inserted row as test_decoding prints it.
type Row []Column

// Column is one value, as PostgreSQL prints it; of a bytea the bytes.
type Column struct {
	Name  string
	Type  string // as format_type prints it
	Value string
	Null  bool
}

// Get returns the value of a column, "" if it is NULL; false if the row has no such column.
func (r Row) Get(name string) (Column, bool) {
	for _, c := range r {
		if c.Name == name {
			return c, true
		}
	}
	return Column{}, false
}

// Text returns the value of a column, "" if it is NULL or not there.
func (r Row) Text(name string) string {
	c, _ := r.Get(name)
	return c.Value
}

// parseRow reads what follows "INSERT:": " name[type]:value" for each column.
func parseRow(rest string) (row Row, err error) {
	whole := rest
	for rest != "" {
		var c Column
		if rest[0] != ' ' {
			return nil, fmt.Errorf("row %.200q: want a space at byte %d", whole, len(whole)-len(rest))
		}
		var ok bool
		if c.Name, rest, ok = identifier(rest[1:]); !ok || !strings.HasPrefix(rest, "[") {
			return nil, fmt.Errorf("row %.200q: want a column and its type at byte %d", whole,
				len(whole)-len(rest))
		}
		end := typeEnd(rest)
		if end < 0 {
			return nil, fmt.Errorf("row %.200q: a type without end at byte %d", whole, len(whole)-len(rest))
		}
		c.Type = rest[1:end]
		if rest, err = c.parse(rest[end+2:]); err != nil {
			return nil, fmt.Errorf("column %s: %w", c.Name, err)
		}
		row = append(row, c)
	}
	return row, nil
}

// identifier cuts a name that quote_identifier made off the front.
func identifier(s string) (name, rest string, ok bool) {
	if !strings.HasPrefix(s, `"`) {
		end := strings.IndexByte(s, '[')
		if end < 0 {
			return "", s, false
		}
		return s[:end], s[end:], true
	}
	return quoted(s, '"')
}

// quoted cuts a text in quotes, doubled within, off the front.
func quoted(s string, quote byte) (text, rest string, ok bool) {
	for end := 1; end < len(s); end++ {
		if s[end] != quote {
			continue
		}
		if end+1 < len(s) && s[end+1] == quote {
			end++
			continue
		}
		q := string(quote)
		return strings.ReplaceAll(s[1:end], q+q, q), s[end+1:], true
	}
	return "", s, false
}

// typeEnd returns where "]:" ends the type that s begins with, -1 if nowhere. A type's own name may be
// quoted.
func typeEnd(s string) int {
	inside := false
	for i := range len(s) - 1 {
		if s[i] == '"' {
			inside = !inside
		}
		if !inside && s[i] == ']' && s[i+1] == ':' {
			return i
		}
	}
	return -1
}

// parse reads the value.
func (c *Column) parse(s string) (rest string, err error) {
	bits := strings.HasPrefix(s, "B'")
	if bits {
		s = s[1:]
	}
	if strings.HasPrefix(s, "'") {
		var ok bool
		if c.Value, rest, ok = quoted(s, '\''); !ok {
			return "", fmt.Errorf("value %.100q: no end", s)
		}
		if c.Type == "bytea" {
			b, err := hex.DecodeString(strings.TrimPrefix(c.Value, `\x`))
			if err != nil || !strings.HasPrefix(c.Value, `\x`) {
				return "", fmt.Errorf("bytea %.100q: not in hex form", c.Value)
			}
			c.Value = string(b)
		}
		return rest, nil
	}
	end := strings.IndexByte(s, ' ')
	if end < 0 {
		end = len(s)
	}
	c.Value, rest = s[:end], s[end:]
	switch c.Value {
	case "":
		return "", fmt.Errorf("no value")
	case "null":
		c.Value, c.Null = "", true
	case "unchanged-toast-datum":
		return "", fmt.Errorf("left out of an insert")
	case "true", "false":
		c.Value = c.Value[:1] // as bool prints it
	}
	return rest, nil
}

// commitTime reads the time of "COMMIT (at 2026-01-02 03:04:05.678901+00)", in microseconds of Unix.
func commitTime(line string) (int64, error) {
	text := strings.TrimSuffix(strings.TrimPrefix(line, "COMMIT (at "), ")")
	t, err := time.Parse("2006-01-02 15:04:05.999999-07", text)
	if err != nil {
		return 0, fmt.Errorf("%q: %w", line, err)
	}
	return t.UnixMicro(), nil
}

// logical is a logical message.
type logical struct {
	transactional   bool
	prefix, content string
}

// parseLogical reads "message: transactional: 1 prefix: p, sz: 7 content:anything". A prefix may hold
// anything but NUL, so the size that agrees with what is left tells where it ends.
func parseLogical(line string) (m logical, err error) {
	rest, ok := strings.CutPrefix(line, "message: transactional: ")
	if !ok || len(rest) < 1 {
		return m, fmt.Errorf("logical message %.100q: unknown form", line)
	}
	m.transactional = rest[0] == '1'
	rest, ok = strings.CutPrefix(rest[1:], " prefix: ")
	for from := 0; ok; {
		at := strings.Index(rest[from:], ", sz: ")
		if at < 0 {
			break
		}
		at += from
		size, content, found := strings.Cut(rest[at+len(", sz: "):], " content:")
		if n, err := strconv.Atoi(size); found && err == nil && n == len(content) {
			m.prefix, m.content = rest[:at], content
			return m, nil
		}
		from = at + 1
	}
	return m, fmt.Errorf("logical message %.100q: unknown form", line)
}
