package maintain

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/outbox"
)

func failing(class outbox.Class, code string) error { return &outbox.Fault{Class: class, Code: code} }

// TestOnceRunsEachPartAndTellsTheWorst: a part that fails does not stop the others.
func TestOnceRunsEachPartAndTellsTheWorst(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		errs []error
		want string
	}{
		{[]error{nil, nil}, ""},
		{[]error{failing(outbox.Transient, "away"), nil}, "away"},
		{[]error{failing(outbox.Transient, "away"), failing(outbox.Gap, "gap")}, "gap"},
		{[]error{failing(outbox.Gap, "gap"), failing(outbox.Fatal, "fatal")}, "gap"},
	} {
		var parts []Part
		ran := 0
		for _, err := range c.errs {
			parts = append(parts, Part{Run: func(context.Context, *watch.Maintained) error {
				ran++
				return err
			}})
		}
		err := Once(t.Context(), Config{Parts: parts, Log: slog.New(slog.DiscardHandler)})
		got := ""
		if f := outbox.FaultOf(err); f != nil {
			got = f.Code
		}
		if got != c.want || ran != len(parts) {
			t.Errorf("%v: %d parts were run, %q, want %q", c.errs, ran, got, c.want)
		}
	}
}

// TestRoundsBeginAtEqualTimes however long a part takes.
func TestRoundsBeginAtEqualTimes(t *testing.T) {
	t.Parallel()
	const takes = 10 * time.Millisecond
	var ended time.Time
	c := &Config{Every: time.Hour, Log: slog.New(slog.DiscardHandler)}
	p := &state{Part: Part{Run: func(context.Context, *watch.Maintained) error {
		time.Sleep(takes)
		ended = time.Now()
		return nil
	}}}
	c.round(t.Context(), p)
	if late := p.due.Sub(ended.Add(c.Every - takes)); late > 0 {
		t.Errorf("the next round begins %v later", late)
	}
}

// TestAPartThatFailsIsTriedAgain: soon, with a pause that grows up to a bound, where it may pass; and what is
// the same is not said each time.
func TestAPartThatFailsIsTriedAgain(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	c := &Config{Every: time.Hour, Log: slog.New(slog.NewTextHandler(&log, nil))}
	var err error
	p := &state{Part: Part{Name: "archive", Run: func(context.Context, *watch.Maintained) error {
		return err
	}}}
	round := func(atLeast time.Duration) {
		t.Helper()
		before := time.Now()
		c.round(t.Context(), p)
		if in := p.due.Sub(before); in < atLeast {
			t.Errorf("it is tried again in %v, want %v at least", in, atLeast)
		}
	}
	round(time.Hour)
	err = errors.New("connection refused")
	for _, pause := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second} {
		round(pause)
		if p.pause != pause {
			t.Errorf("the pause is %v, not %v", p.pause, pause)
		}
	}
	for range 20 {
		round(time.Second)
	}
	if p.pause != time.Hour {
		t.Errorf("the pause is %v at last", p.pause)
	}
	err = failing(outbox.Gap, "archive_gap")
	round(time.Hour)
	err = nil
	round(time.Hour)
	said := log.String()
	if strings.Count(said, "level=ERROR") != 2 || strings.Count(said, " code=archive_gap ") != 1 ||
		strings.Count(said, "code=") != 1 || strings.Count(said, "works again") != 1 {
		t.Errorf("it said:\n%s", said)
	}
}
