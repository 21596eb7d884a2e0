package config

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/outflowhq/outflow/outbox"
)

// value is a field of a Config as text.
type value interface {
	set(string) error // errWant if the setting's own description of what it takes says it all
	text() string     // canonical
	kind() string     // for the usage line of the flag
}

var errWant = errors.New("not a value of this setting")

// textValue is a string without control characters that ok accepts.
type textValue struct {
	p  *string
	ok func(string) bool
}

func (v textValue) set(s string) error {
	if !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
		return errors.New("it holds a control character or is not UTF-8")
	}
	if v.ok != nil && !v.ok(s) {
		return errWant
	}
	*v.p = s
	return nil
}
func (v textValue) text() string { return *v.p }
func (v textValue) kind() string { return "string" }

// listValue is a list of texts that ok accepts, separated by commas.
type listValue struct {
	p  *[]string
	ok func(string) bool
}

func (v listValue) set(s string) error {
	var all []string
	for one := range strings.SplitSeq(s, ",") {
		if one = strings.TrimSpace(one); s != "" && !v.ok(one) {
			return errWant
		} else if s != "" {
			all = append(all, one)
		}
	}
	*v.p = all
	return nil
}
func (v listValue) text() string { return strings.Join(*v.p, ",") }
func (v listValue) kind() string { return "list" }

// columnValue is the name of a column; where it came from is recorded by Load.
type columnValue struct {
	p        *Column
	required bool
}

func (v columnValue) set(s string) error {
	if s == "" && !v.required {
		v.p.Name = ""
		return nil
	}
	return textValue{&v.p.Name, identifier}.set(s)
}
func (v columnValue) text() string { return v.p.Name }
func (v columnValue) kind() string { return "column" }

type boolValue struct{ p *bool }

func (v boolValue) set(s string) error {
	switch s {
	case "true":
		*v.p = true
	case "false":
		*v.p = false
	default:
		return errWant
	}
	return nil
}
func (v boolValue) text() string { return strconv.FormatBool(*v.p) }
func (v boolValue) kind() string { return "bool" }

type intValue struct {
	p        *int
	min, max int
}

func (v intValue) set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil || n < v.min || n > v.max {
		return errWant
	}
	*v.p = n
	return nil
}
func (v intValue) text() string { return strconv.Itoa(*v.p) }
func (v intValue) kind() string { return "int" }

type durationValue struct {
	p        *time.Duration
	min, max time.Duration
	unit     time.Duration // a multiple of it; 0: any
}

func (v durationValue) set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil {
		if _, numErr := strconv.ParseFloat(s, 64); numErr == nil {
			return errors.New("a duration needs a unit: ns, us, ms, s, m or h")
		}
		return errWant
	}
	if d < v.min || d > v.max || v.unit > 0 && d%v.unit != 0 {
		return errWant
	}
	*v.p = d
	return nil
}
func (v durationValue) text() string { return formatDuration(*v.p) }
func (v durationValue) kind() string { return "duration" }

// formatDuration prints a whole number of the largest unit that gives one: 150s, not 2m30s.
func formatDuration(d time.Duration) string {
	if d == 0 {
		return "0s"
	}
	for _, u := range []struct {
		size time.Duration
		name string
	}{{time.Hour, "h"}, {time.Minute, "m"}, {time.Second, "s"}, {time.Millisecond, "ms"},
		{time.Microsecond, "us"}} {
		if d%u.size == 0 {
			return strconv.FormatInt(int64(d/u.size), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(d), 10) + "ns"
}

// sizeValue is a number of bytes.
type sizeValue[T int | int64] struct {
	p        *T
	min, max int64
}

func (v sizeValue[T]) set(s string) error {
	n, ok := parseSize(s)
	if !ok || n < v.min || n > v.max || int64(T(n)) != n {
		return errWant
	}
	*v.p = T(n)
	return nil
}
func (v sizeValue[T]) text() string { return formatSize(int64(*v.p)) }
func (v sizeValue[T]) kind() string { return "size" }

var sizeUnits = []struct {
	name string
	size int64
}{
	{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
	{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"KB", 1e3}, {"B", 1},
}

// parseSize reads a whole number of bytes, or of a unit in any case of letters.
func parseSize(s string) (int64, bool) {
	digits := strings.TrimRight(s, "BKMGTIbkmgti")
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil {
		return 0, false
	}
	unit := int64(1)
	if name := s[len(digits):]; name != "" {
		unit = 0
		for _, u := range sizeUnits {
			if strings.EqualFold(name, u.name) {
				unit = u.size
			}
		}
	}
	if unit == 0 || int64(n) > math.MaxInt64/unit {
		return 0, false
	}
	return int64(n) * unit, true
}

// formatSize prints a whole number of the largest unit that gives one, in bytes if there is none.
func formatSize(n int64) string {
	for _, u := range sizeUnits {
		if n != 0 && u.size > 1 && n%u.size == 0 {
			return strconv.FormatInt(n/u.size, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

// choiceValue is one of a few words.
type choiceValue struct {
	p  *string
	of []string
}

func (v choiceValue) set(s string) error {
	for _, c := range v.of {
		if s == c {
			*v.p = s
			return nil
		}
	}
	return errWant
}
func (v choiceValue) text() string { return *v.p }
func (v choiceValue) kind() string { return strings.Join(v.of, "|") }

// parsedValue is one of a type that has a text form of its own.
type parsedValue[T fmt.Stringer] struct {
	p     *T
	parse func(string) (T, error)
	form  string
}

func (v parsedValue[T]) set(s string) error {
	parsed, err := v.parse(s)
	if err != nil {
		return errWant
	}
	*v.p = parsed
	return nil
}
func (v parsedValue[T]) text() string { return (*v.p).String() }
func (v parsedValue[T]) kind() string { return v.form }

// parseSort reads the sorts of a window; gap mode is not one of them, see reorder.mode.
func parseSort(s string) (outbox.Sort, error) {
	sort, err := outbox.ParseSort(s)
	if sort == outbox.ByGap {
		err = errWant
	}
	return sort, err
}

type levelValue struct{ p *slog.Level }

var levels = map[string]slog.Level{
	"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
}

func (v levelValue) set(s string) error {
	l, ok := levels[s]
	if !ok {
		return errWant
	}
	*v.p = l
	return nil
}
func (v levelValue) text() string { return strings.ToLower(v.p.String()) }
func (v levelValue) kind() string { return "debug|info|warn|error" }
