// Package progress shows what a command is doing while it takes its time, so that none is silent for more
// than two seconds: how far it has come, how fast it is and how long the rest will take, or what it waits
// for.
//
// On a terminal that is one line, rewritten in place below what the command prints; elsewhere plain lines,
// further and further apart. It goes to standard error: results are what standard output is for.
//
// The line travels in the context, because what a command waits for is known far below it: where a
// connection is opened, or a row read. Without a line in the context all of this does nothing.
package progress

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/crash"
)

const (
	// patience is how long a command is silent, and waits without a word: less than two seconds, so that a
	// machine under load keeps those as well.
	patience = 1500 * time.Millisecond
	// tick is the time between two looks at what there is to show.
	tick = 200 * time.Millisecond
	// longest is the longest time between two plain lines. They begin with patience, and double.
	longest = 5 * time.Minute
	// maxWaits is how many of the things that are waited for at the same time are named.
	maxWaits = 4
)

// Config is what a line is made of.
type Config struct {
	Stdout, Stderr io.Writer
	Width          func() int // columns of the terminal that Stderr is; nil: it is none
	Shared         bool       // Stdout is that terminal, too
}

// Update is what is shown at a moment.
type Update struct {
	Text    string
	Figures *Figures // those that Text holds; nil: it holds none
}

// Line shows the progress of one command. It may be used from any goroutine.
type Line struct {
	width  func() int
	stdout *output
	stderr *output

	mu       sync.Mutex
	name     string // of the command; "": a service, see Serve
	print    func(Update)
	tasks    []*Task // the outermost first
	waits    []*wait // the oldest first
	paused   int
	shown    string        // on the terminal, "": nothing
	midline  bool          // what was printed there last does not end its line
	spoke    time.Time     // when something was printed there last
	interval time.Duration // to the next plain line

	stop chan struct{} // nil: it does not run
	over sync.WaitGroup
}

// New returns a line that shows nothing before Start.
func New(c Config) *Line {
	l := &Line{width: c.Width}
	l.stdout = &output{line: l, w: c.Stdout, here: c.Shared}
	l.stderr = &output{line: l, w: c.Stderr, here: true}
	l.print = func(u Update) { fmt.Fprintln(l.stderr, u.Text) }
	return l
}

// Stdout is standard output, to which nothing may be written otherwise while the line runs.
func (l *Line) Stdout() io.Writer { return l.stdout }

// Stderr is standard error, likewise.
func (l *Line) Stderr() io.Writer { return l.stderr }

// Start begins to show what the command of this name does, until Close.
func (l *Line) Start(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.name, l.spoke, l.interval = name, time.Now(), patience
	stop := make(chan struct{})
	l.stop = stop
	l.over.Go(func() {
		defer crash.Guard()
		ticks := time.NewTicker(tick)
		defer ticks.Stop()
		for {
			select {
			case <-stop:
				return
			case <-ticks.C:
				l.look(time.Now())
			}
		}
	})
}

// Stop takes the line away and leaves the terminal as if it had not been there. Further calls do nothing.
func (l *Line) Stop() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.erase(); l.stop != nil {
		close(l.stop)
		l.stop = nil
	}
}

// Close is Stop, and waits until nothing is printed any more.
func (l *Line) Close() {
	if l != nil {
		l.Stop()
		l.over.Wait()
	}
}

// SetPrint sets what prints steps and plain lines, where they are not just text on standard error. It may be
// called from any goroutine.
func (l *Line) SetPrint(print func(Update)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.print = print
}

// Serve is [Line.SetPrint] for a command that runs until it is stopped: while nothing is done or waited for
// it says nothing, as it has nothing to end.
func (l *Line) Serve(print func(Update)) {
	l.SetPrint(print)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.name = ""
}

// Pause shows nothing until resume is called: somebody is asked, or the command prints of itself.
func (l *Line) Pause() (resume func()) {
	if l == nil {
		return func() {}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.paused++
	l.erase()
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.paused--
		l.midline, l.spoke = false, time.Now() // whoever was asked has ended the line
	}
}

// Step prints a line that stays: that a part of the work begins, or what came of it.
func (l *Line) Step(format string, args ...any) {
	if l == nil {
		return
	}
	l.mu.Lock()
	print := l.print
	l.interval = patience
	l.mu.Unlock()
	print(Update{Text: fmt.Sprintf(format, args...)})
}

// look shows what there is to show.
func (l *Line) look(now time.Time) {
	if print, u := l.next(now); print != nil { // it writes through an output of the line
		print(u)
	}
}

// next draws the line of a terminal. Elsewhere it returns the next plain line, when that is due, and what
// prints it.
func (l *Line) next(now time.Time) (print func(Update), u Update) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.tasks {
		t.sample(now)
	}
	switch {
	case l.stop == nil || l.paused > 0:
	case l.name == "" && len(l.tasks) == 0 && len(l.waits) == 0:
		l.erase()
		l.spoke = now
	case l.width != nil && l.midline: // it would overwrite what stands there
	case l.width != nil:
		l.draw(fit(l.update(now).Text, l.width()))
		if len(l.tasks) > 0 || len(l.waits) > 0 && l.shown != "" { // that is a word
			l.spoke = now
		}
	case now.Sub(l.spoke) >= l.interval:
		print, u = l.print, l.update(now)
		l.spoke, l.interval = now, min(2*l.interval, longest)
	}
	return print, u
}

// update is what can be said at a moment: how far the work has come, then what has been waited for for a
// while. Text is empty if there is nothing to say yet.
func (l *Line) update(now time.Time) (u Update) {
	var parts []string
	if len(l.tasks) > 0 {
		if u = l.tasks[0].update(now); u.Text != "" {
			parts = append(parts, u.Text)
		}
	}
	silent := now.Sub(l.spoke)
	least := patience
	if len(parts) == 0 && silent >= patience {
		least = 0 // a wait that has just begun says more than that it is still at work
	}
	if waits, since := l.waiting(now, least); len(waits) > 0 {
		parts = append(parts, fmt.Sprintf("%s (%s)", strings.Join(waits, ", "), seconds(now.Sub(since))))
	}
	if len(parts) == 0 && silent >= patience && l.name != "" {
		parts = append(parts, fmt.Sprintf("%s is still at work (%s)", l.name, seconds(silent)))
	}
	u.Text = strings.Join(parts, "; ")
	return u
}

func seconds(d time.Duration) string { return units.Duration(d.Round(time.Second)) }

// waiting names what has been waited for for at least so long, each once, and since when the first one.
func (l *Line) waiting(now time.Time, least time.Duration) (all []string, since time.Time) {
	for _, w := range l.waits {
		if now.Sub(w.since) < least || len(all) == maxWaits || slices.Contains(all, w.what) {
			continue
		}
		if len(all) == 0 {
			since = w.since
		}
		all = append(all, w.what)
	}
	return all, since
}

const blank = "\r\x1b[K" // to the beginning of the line, and what stands there away

func (l *Line) draw(text string) {
	switch {
	case text == l.shown:
	case text == "":
		l.erase()
	default:
		fmt.Fprint(l.stderr.w, "\r"+text+"\x1b[K")
		l.shown = text
	}
}

func (l *Line) erase() {
	if l.shown != "" {
		fmt.Fprint(l.stderr.w, blank)
		l.shown = ""
	}
}

// wait is something that is waited for.
type wait struct {
	what  string
	since time.Time
}

// Wait notes that what is waited for, in words such as "waiting for NATS at db:4222", until done is called.
// It is shown if that takes a while.
func (l *Line) Wait(what string) (done func()) {
	if l == nil {
		return func() {}
	}
	w := &wait{what, time.Now()}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waits = append(l.waits, w)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.waits = slices.DeleteFunc(l.waits, func(o *wait) bool { return o == w })
	}
}

// output is one of the command's outputs.
type output struct {
	line *Line
	w    io.Writer
	here bool // whoever sees the line sees it as well
}

// Write takes the line off the terminal first. It comes back below what was written.
func (o *output) Write(p []byte) (int, error) {
	l := o.line
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.here && len(p) > 0 {
		l.erase()
		l.midline, l.spoke = p[len(p)-1] != '\n', time.Now()
	}
	return o.w.Write(p)
}

// Unwrap is what it writes to.
func (o *output) Unwrap() io.Writer { return o.w }

type key struct{}

// With returns a context in which what is done shows itself on l.
func With(ctx context.Context, l *Line) context.Context { return context.WithValue(ctx, key{}, l) }

// From returns the line of a context; nil if it has none, on which everything does nothing.
func From(ctx context.Context) *Line {
	l, _ := ctx.Value(key{}).(*Line)
	return l
}

// Step is [Line.Step] of the context's line.
func Step(ctx context.Context, format string, args ...any) { From(ctx).Step(format, args...) }

// Wait is [Line.Wait] of the context's line.
func Wait(ctx context.Context, what string) (done func()) { return From(ctx).Wait(what) }
