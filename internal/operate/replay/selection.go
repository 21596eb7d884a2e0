package replay

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/operate/args"
	"github.com/outflowhq/outflow/outbox"
)

// Selection says which events are replayed: those that meet every condition that is given.
type Selection struct {
	Docs   []string // one of these documents
	Actors []string // by one of these actors
	IDs    []string // with one of these event ids
	Filter string   // whose subject matches; "": all

	Key      Range[string]
	Position Range[outbox.Position]
	Time     Range[time.Time] // stored in the stream, or in the table's column
	Seq      Range[uint64]    // in the stream

	text [4]string // the ranges as they were given
}

// Range is a range with both its ends; nil is an open end.
type Range[T any] struct{ From, To *T }

// Given reports whether the range bounds anything.
func (r Range[T]) Given() bool { return r.From != nil || r.To != nil }

// Ranges are a selection's ranges as they stand on a command line: from..to, where either may be missing.
type Ranges struct{ Key, Position, Time, Seq string }

// SetRanges reads the ranges. Durations count back from now.
func (s *Selection) SetRanges(r Ranges, now time.Time) (err error) {
	s.text = [4]string{r.Key, r.Position, r.Time, r.Seq}
	if s.Key, err = parseRange("--key", r.Key, true, func(text string, _ bool) (string, error) {
		return text, nil
	}); err != nil {
		return err
	}
	s.Position, err = parseRange("--position", r.Position, true, func(text string, end bool) (outbox.Position,
		error) {
		if end {
			return args.LastPosition(text)
		}
		return args.FirstPosition(text)
	})
	if err != nil {
		return err
	}
	if s.Time, err = parseRange("--time", r.Time, false, func(text string, _ bool) (time.Time, error) {
		return args.Time(text, now)
	}); err != nil {
		return err
	}
	s.Seq, err = parseRange("--seq", r.Seq, true, func(text string, _ bool) (uint64, error) {
		n, err := strconv.ParseUint(text, 10, 63)
		if err != nil || n == 0 {
			return 0, errors.New("not a sequence: they begin at 1")
		}
		return n, nil
	})
	if err != nil {
		return err
	}
	return s.check()
}

// check refuses empty ranges.
func (s *Selection) check() error {
	empty := func(flag, text string) error {
		return usage("replay_range", fmt.Sprintf("%s %q: the range ends before it begins", flag, text),
			"Write from..to, the smaller one first")
	}
	switch {
	case s.Key.From != nil && s.Key.To != nil && *s.Key.To < *s.Key.From:
		return empty("--key", s.text[0])
	case s.Position.From != nil && s.Position.To != nil && s.Position.To.Compare(*s.Position.From) < 0:
		return empty("--position", s.text[1])
	case s.Time.From != nil && s.Time.To != nil && s.Time.To.Before(*s.Time.From):
		return empty("--time", s.text[2])
	case s.Seq.From != nil && s.Seq.To != nil && *s.Seq.To < *s.Seq.From:
		return empty("--seq", s.text[3])
	}
	if s.Filter != "" {
		if err := checkFilter(s.Filter); err != nil {
			return usage("replay_filter", fmt.Sprintf("--filter %q: %v", s.Filter, err),
				"Write a subject, with * for one token and > at the end for the rest")
		}
	}
	return nil
}

// hash tells selections apart, so that a replay is not continued with another one.
func (s *Selection) hash(more ...string) string {
	b, err := json.Marshal([]any{s.Docs, s.Actors, s.IDs, s.Filter, s.text, more})
	if err != nil {
		panic("replay: selection: " + err.Error()) // strings only
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:6])
}

// parseRange reads from..to. A single value is both ends, or, unless single, the beginning.
func parseRange[T any](flag, text string, single bool, parse func(text string, end bool) (T, error)) (
	r Range[T], err error) {
	if text == "" {
		return r, nil
	}
	from, to, isRange := strings.Cut(text, "..")
	if !isRange && single {
		to = from
	}
	if from == "" && to == "" {
		return r, usage("replay_range", fmt.Sprintf("%s %q: a range without ends", flag, text),
			"Write from..to; one of them may be left out")
	}
	read := func(text string, end bool) *T {
		if text == "" || err != nil {
			return nil
		}
		v, e := parse(text, end)
		if e != nil {
			err = usage("replay_range", fmt.Sprintf("%s: %q: %v", flag, text, e),
				"Write from..to; one of them may be left out")
			return nil
		}
		return &v
	}
	r.From, r.To = read(from, false), read(to, true)
	return r, err
}
