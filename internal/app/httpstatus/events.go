package httpstatus

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// What the page shows of the log at most.
const (
	eventsKept = 50
	eventBytes = 400 // of an event's text
)

// Events keeps the last lines of a log for the page. It passes every record on.
type Events struct {
	next slog.Handler
	kept *ring
}

// event is a line of the log. Repeats of the line before are counted.
type event struct {
	At      time.Time
	Level   slog.Level
	Text    string
	Details string
	Times   int
}

type ring struct {
	mu     sync.Mutex
	events [eventsKept]event
	n      int
}

// NewEvents returns a handler for [slog.New] that passes records on to next.
func NewEvents(next slog.Handler) *Events { return &Events{next, new(ring)} }

// Enabled implements slog.Handler.
func (e *Events) Enabled(ctx context.Context, l slog.Level) bool { return e.next.Enabled(ctx, l) }

// WithAttrs implements slog.Handler. What is on every line, such as the slot, is not kept.
func (e *Events) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &Events{e.next.WithAttrs(attrs), e.kept}
}

// WithGroup implements slog.Handler.
func (e *Events) WithGroup(name string) slog.Handler { return &Events{e.next.WithGroup(name), e.kept} }

// Handle implements slog.Handler.
func (e *Events) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo { // what is below would push the rest out
		var b strings.Builder
		r.Attrs(func(a slog.Attr) bool {
			value := fmt.Sprint(a.Value.Resolve())
			if value == "" {
				return true
			}
			if b.Len() > 0 {
				b.WriteString(" · ")
			}
			b.WriteString(a.Key + " " + value)
			return b.Len() < eventBytes
		})
		e.kept.add(event{At: r.Time, Level: r.Level, Text: clip(r.Message), Details: clip(b.String()),
			Times: 1})
	}
	return e.next.Handle(ctx, r)
}

func clip(text string) string {
	if len(text) <= eventBytes {
		return strings.Clone(text)
	}
	return strings.ToValidUTF8(text[:eventBytes], "") + "…"
}

func (r *ring) add(e event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n > 0 {
		last := &r.events[(r.n-1)%eventsKept]
		if last.Level == e.Level && last.Text == e.Text && last.Details == e.Details {
			last.At = e.At
			last.Times++
			return
		}
	}
	r.events[r.n%eventsKept] = e
	r.n++
}

// newest returns the events, newest first.
func (e *Events) newest() []event {
	if e == nil {
		return nil
	}
	e.kept.mu.Lock()
	defer e.kept.mu.Unlock()
	var all []event
	for i := e.kept.n - 1; i >= max(e.kept.n-eventsKept, 0); i-- {
		all = append(all, e.kept.events[i%eventsKept])
	}
	return all
}
