package progress

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
)

// WAL is the unit of what is counted in bytes of WAL.
const WAL = "of WAL"

// window is over how long a rate is measured: what stands still has none soon.
const window = 15 * time.Second

// Figures say how far something has come.
type Figures struct {
	Done, Of  int64   // of Of; 0: nobody knows how many there are
	PerSecond float64 // of late; 0: it stands still, or has just begun
	Left      time.Duration
	LeftKnown bool
}

// Task is a part of the work that is shown while it lasts. Where one is done within another, the outer one is
// shown. A nil one does nothing.
type Task struct {
	line *Line
	text func(now time.Time) string // nil: it counts

	what, unit string
	of         int64
	done       atomic.Int64
	samples    []sample // the oldest first; the line's
}

// sample is how far a task was at a time.
type sample struct {
	at   time.Time
	done int64
}

// Count begins a task that counts: of what, in which unit, how many there are; 0 if nobody knows.
func Count(ctx context.Context, what, unit string, of int64) *Task {
	return From(ctx).begin(&Task{what: what, unit: unit, of: of})
}

// Show begins a task that is shown as text says at each moment. The function is called from other goroutines,
// and must not use the line.
func Show(ctx context.Context, text func(now time.Time) string) *Task {
	return From(ctx).begin(&Task{text: text})
}

// Until begins a task that is over at a time: what is followed by how long that still takes, and by then.
func Until(ctx context.Context, what string, at time.Time, then string) *Task {
	return Show(ctx, func(now time.Time) string {
		return fmt.Sprintf("%s: %s %s", what, units.Duration(ceil(at.Sub(now))), then)
	})
}

// ceil rounds up to seconds: a countdown ends at one.
func ceil(d time.Duration) time.Duration {
	return max(d+time.Second-1, time.Second).Truncate(time.Second)
}

func (l *Line) begin(t *Task) *Task {
	if l == nil {
		return nil
	}
	t.line = l
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tasks = append(l.tasks, t)
	return t
}

// Set says how far it has come. It is cheap: call it for each row.
func (t *Task) Set(done int64) {
	if t != nil {
		t.done.Store(done)
	}
}

// Add says that so many more are done.
func (t *Task) Add(n int64) {
	if t != nil {
		t.done.Add(n)
	}
}

// End ends it.
func (t *Task) End() {
	if t == nil {
		return
	}
	t.line.mu.Lock()
	defer t.line.mu.Unlock()
	t.line.tasks = slices.DeleteFunc(t.line.tasks, func(o *Task) bool { return o == t })
}

// sample takes note of how far it is, once a second, from when the first one is done: before that a server
// may sort.
func (t *Task) sample(now time.Time) {
	done, n := t.done.Load(), len(t.samples)
	if t.text != nil || n == 0 && done == 0 || n > 0 && now.Sub(t.samples[n-1].at) < time.Second {
		return
	}
	t.samples = append(t.samples, sample{now, done})
	for len(t.samples) > 1 && now.Sub(t.samples[1].at) >= window {
		t.samples = t.samples[1:]
	}
}

func (t *Task) figures(now time.Time) *Figures {
	f := &Figures{Done: t.done.Load(), Of: t.of}
	if n := len(t.samples); n > 1 {
		first, last := t.samples[0], t.samples[n-1]
		f.PerSecond = max(float64(last.done-first.done), 0) / last.at.Sub(first.at).Seconds()
	}
	if f.PerSecond > 0 && f.Of > 0 {
		f.LeftKnown = true
		f.Left = time.Duration(float64(max(f.Of-f.Done, 0)) / f.PerSecond * float64(time.Second))
	}
	return f
}

func (t *Task) update(now time.Time) Update {
	if t.text != nil {
		return Update{Text: t.text(now)}
	}
	f := t.figures(now)
	s, count, rate := t.what+": ", units.Count[int64], units.Rate
	if t.unit == WAL {
		count = func(n int64) string { return units.Size(uint64(max(n, 0))) }
		rate = func(n float64) string { return units.Size(uint64(n)) }
	}
	s += count(f.Done)
	if f.Of > 0 {
		s += " of " + count(f.Of)
	}
	s += " " + t.unit
	if f.Of > 0 {
		s += fmt.Sprintf(" (%d %%)", min(100*f.Done/f.Of, 100))
	}
	if len(t.samples) > 1 {
		s += ", " + rate(f.PerSecond) + " a second"
	}
	if f.LeftKnown {
		s += ", " + seconds(f.Left) + " left"
	}
	return Update{Text: s, Figures: f}
}
