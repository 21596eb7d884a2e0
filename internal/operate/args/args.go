// Package args reads positions and times as an operator writes them on a command line.
package args

import (
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// TimeColumns are the usual names of the column that says when a row was written, the likeliest first.
var TimeColumns = []string{"created_at", "inserted_at", "occurred_at", "created", "inserted", "event_time"}

// FirstPosition reads LSN-i, or an LSN alone, which stands for the first position at it.
func FirstPosition(text string) (p outbox.Position, err error) {
	if strings.Contains(text, "-") {
		return p, p.UnmarshalText([]byte(text))
	}
	if p.LSN, err = outbox.ParseLSN(text); err != nil {
		return p, errors.New("neither X/X nor X/X-i")
	}
	return p, nil
}

// LastPosition reads LSN-i, or an LSN alone, which stands for the last position at it.
func LastPosition(text string) (outbox.Position, error) {
	p, err := FirstPosition(text)
	if err == nil && !strings.Contains(text, "-") {
		p.Index = ^uint32(0)
	}
	return p, err
}

// Time reads an RFC 3339 time, or how long ago it was, such as 90m or 7d.
func Time(text string, now time.Time) (time.Time, error) {
	if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
		return t, nil
	}
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.ParseUint(days, 10, 16); err == nil {
			return now.Add(-time.Duration(n) * 24 * time.Hour), nil
		}
	}
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return now.Add(-ago), nil
	}
	return time.Time{}, errors.New("neither a time such as 2026-01-31T12:00:00Z nor how long ago, such as " +
		"90m or 7d")
}
