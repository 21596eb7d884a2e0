package progress

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// screen is a terminal: it shows what a person sees.
type screen struct {
	mu      sync.Mutex
	columns atomic.Int32
	lines   []string // the last one is where the cursor is
	column  int
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lines == nil {
		s.lines = []string{""}
	}
	for text := string(p); text != ""; {
		line := &s.lines[len(s.lines)-1]
		switch {
		case text[0] == '\r':
			s.column, text = 0, text[1:]
		case text[0] == '\n':
			s.lines, s.column, text = append(s.lines, ""), 0, text[1:]
		case strings.HasPrefix(text, "\x1b[K"):
			*line, text = (*line)[:s.column], text[3:]
		default:
			*line = (*line)[:s.column] + text[:1] + (*line)[min(s.column+1, len(*line)):]
			s.column, text = s.column+1, text[1:]
		}
	}
	return len(p), nil
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.lines, "\n")
}

func (s *screen) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines, s.column = nil, 0
}

// onScreen runs do, in a bubble with its own clock, with a line on a terminal that is both outputs.
func onScreen(t *testing.T, do func(t *testing.T, ctx context.Context, l *Line, s *screen)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &screen{}
		s.columns.Store(60)
		columns := func() int { return int(s.columns.Load()) }
		l := New(Config{Stdout: s, Stderr: s, Shared: true, Width: columns})
		l.Start("outflow test")
		do(t, With(t.Context(), l), l, s)
		l.Close()
		if got := s.String(); got != "" && !strings.HasSuffix(got, "\n") {
			t.Errorf("the terminal is left with %q", got)
		}
	})
}

// elsewhere runs do with a line where there is no terminal. What is printed is printed with the time.
func elsewhere(t *testing.T, do func(t *testing.T, ctx context.Context, l *Line, said *screen)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		said := &screen{}
		begun := time.Now()
		l := New(Config{Stdout: io.Discard, Stderr: said})
		l.SetPrint(func(u Update) {
			fmt.Fprintf(l.Stderr(), "%v %s\n", time.Since(begun).Round(time.Second), u.Text)
		})
		l.Start("outflow test")
		do(t, With(t.Context(), l), l, said)
		l.Close()
	})
}

// pass lets time pass, and all that happens in it.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func wants(t *testing.T, got fmt.Stringer, want string) {
	t.Helper()
	if got.String() != want {
		t.Errorf("there stands\n%s\nwant\n%s", got, want)
	}
}

func TestATaskIsOneLineThatMoves(t *testing.T) {
	t.Parallel()
	onScreen(t, func(t *testing.T, ctx context.Context, _ *Line, s *screen) {
		task := Count(ctx, "publishing", "rows", 1000)
		pass(time.Second)
		wants(t, s, "publishing: 0 of 1,000 rows (0 %)")
		for n := range 10 {
			task.Set(int64(n+1) * 25)
			pass(time.Second)
		}
		wants(t, s, "publishing: 250 of 1,000 rows (25 %), 25 a second, 30 s ...")
		s.columns.Store(80)
		pass(tick)
		wants(t, s, "publishing: 250 of 1,000 rows (25 %), 23 a second, 33 s left")
		task.End()
		pass(tick)
		wants(t, s, "")
	})
}

// What is printed meanwhile comes above the line, and nothing of either is lost.
func TestOutputComesAboveTheLine(t *testing.T) {
	t.Parallel()
	onScreen(t, func(t *testing.T, ctx context.Context, l *Line, s *screen) {
		task := Count(ctx, "reading", "messages", 0)
		task.Set(7)
		pass(tick)
		wants(t, s, "reading: 7 messages")
		fmt.Fprintln(l.Stdout(), "a result")
		wants(t, s, "a result\n")
		pass(tick)
		wants(t, s, "a result\nreading: 7 messages")
		Step(ctx, "slot %s: made", "x")
		fmt.Fprint(l.Stderr(), "a line of ")
		pass(time.Second)
		wants(t, s, "a result\nslot x: made\na line of ")
		fmt.Fprint(l.Stderr(), "the log\n")
		pass(tick)
		wants(t, s, "a result\nslot x: made\na line of the log\nreading: 7 messages, 0 a second")
	})
}

func TestWhatIsWaitedForIsNamedBeforeTwoSecondsAreOver(t *testing.T) {
	t.Parallel()
	onScreen(t, func(t *testing.T, ctx context.Context, _ *Line, s *screen) {
		over := Wait(ctx, "waiting for NATS at db:4222")
		also := Wait(ctx, "waiting for PostgreSQL")
		Wait(ctx, "waiting for NATS at db:4222")()
		pass(time.Second)
		wants(t, s, "")
		s.columns.Store(100)
		pass(time.Second - time.Millisecond)
		wants(t, s, "waiting for NATS at db:4222, waiting for PostgreSQL (2 s)")
		over()
		pass(3 * time.Second)
		wants(t, s, "waiting for PostgreSQL (5 s)")
		also()
		pass(tick)
		wants(t, s, "")
		pass(patience)
		wants(t, s, "outflow test is still at work (2 s)")
	})
}

func TestATaskSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	onScreen(t, func(t *testing.T, ctx context.Context, _ *Line, s *screen) {
		s.columns.Store(100)
		outer := Count(ctx, "replaying", "events", 10)
		inner := Count(ctx, "reading", "messages", 0)
		done := Wait(ctx, "waiting for NATS")
		pass(2 * time.Second)
		wants(t, s, "replaying: 0 of 10 events (0 %); waiting for NATS (2 s)")
		done()
		outer.End()
		pass(tick)
		wants(t, s, "reading: 0 messages")
		inner.End()
		left := Until(ctx, "waiting", time.Now().Add(74*time.Second), "until durable")
		pass(tick)
		wants(t, s, "waiting: 1 min 14 s until durable")
		pass(72 * time.Second)
		wants(t, s, "waiting: 2 s until durable")
		left.End()
	})
}

// A question stands at the end of a line, and the answer behind it.
func TestAQuestionIsLeftAlone(t *testing.T) {
	t.Parallel()
	onScreen(t, func(t *testing.T, ctx context.Context, l *Line, s *screen) {
		defer Wait(ctx, "waiting for NATS")()
		pass(3 * time.Second)
		resume := l.Pause()
		fmt.Fprint(l.Stdout(), "Set it back? [y/N] ")
		pass(time.Minute)
		wants(t, s, "Set it back? [y/N] ")
		fmt.Fprint(s, "y\n") // the terminal's echo
		resume()
		pass(2 * time.Second)
		wants(t, s, "Set it back? [y/N] y\nwaiting for NATS (1 min 5 s)")
	})
}

// Elsewhere a rate and a time are no line that moves: they come less and less often.
func TestPlainLinesComeFurtherAndFurtherApart(t *testing.T) {
	t.Parallel()
	elsewhere(t, func(t *testing.T, ctx context.Context, _ *Line, said *screen) {
		Step(ctx, "publishing 9,000 rows")
		task := Count(ctx, "publishing", "rows", 9000)
		for n := range 60 {
			task.Set(int64(n+1) * 10)
			pass(time.Second)
		}
		wants(t, said, `0s publishing 9,000 rows
2s publishing: 20 of 9,000 rows (0 %), 10 a second, 14 min 58 s left
5s publishing: 50 of 9,000 rows (0 %), 10 a second, 14 min 55 s left
11s publishing: 110 of 9,000 rows (1 %), 10 a second, 14 min 49 s left
23s publishing: 230 of 9,000 rows (2 %), 10 a second, 14 min 37 s left
47s publishing: 470 of 9,000 rows (5 %), 10 a second, 14 min 13 s left
`)
		said.reset()
		pass(3 * time.Hour)
		if n := strings.Count(said.String(), "\n"); n < 34 || n > 42 {
			t.Errorf("%d lines in three hours", n)
		}
		said.reset()
		Step(ctx, "reading them back")
		pass(2 * time.Second)
		if n := strings.Count(said.String(), "\n"); n != 2 {
			t.Errorf("a new part of the work begins with %s", said)
		}
	})
}

func TestPlainLinesSayWhatIsWaitedFor(t *testing.T) {
	t.Parallel()
	elsewhere(t, func(t *testing.T, ctx context.Context, l *Line, said *screen) {
		pass(time.Second)
		fmt.Fprintln(l.Stdout(), "a result") // for somebody else
		fmt.Fprintln(l.Stderr(), "a line of the log")
		pass(time.Second)
		wants(t, said, "a line of the log\n")
		said.reset()
		defer Wait(ctx, "waiting for PostgreSQL at db:5432")()
		pass(10 * time.Second)
		wants(t, said, `3s waiting for PostgreSQL at db:5432 (1 s)
6s waiting for PostgreSQL at db:5432 (4 s)
12s waiting for PostgreSQL at db:5432 (10 s)
`)
	})
}

func TestAServiceThatHasNothingToDoSaysNothing(t *testing.T) {
	t.Parallel()
	elsewhere(t, func(t *testing.T, ctx context.Context, l *Line, said *screen) {
		l.Serve(func(u Update) { fmt.Fprintln(said, u.Text) })
		pass(time.Hour)
		short := Wait(ctx, "waiting for PostgreSQL")
		pass(time.Second)
		short()
		wants(t, said, "")
		task := Count(ctx, "archiving", "messages", 10)
		pass(2 * time.Second)
		wants(t, said, "archiving: 0 of 10 messages (0 %)\n")
		task.End()
		pass(time.Hour)
		wants(t, said, "archiving: 0 of 10 messages (0 %)\n")
	})
}

func TestATaskThatStandsStillHasNoTimeLeft(t *testing.T) {
	t.Parallel()
	onScreen(t, func(t *testing.T, ctx context.Context, _ *Line, s *screen) {
		s.columns.Store(200)
		task := Count(ctx, "publishing", WAL, 10<<20)
		defer task.End()
		for n := range 5 {
			task.Set(int64(n+1) << 20)
			pass(time.Second)
		}
		wants(t, s, "publishing: 5.0 MiB of 10.0 MiB of WAL (50 %), 1.0 MiB a second, 5 s left")
		pass(20 * time.Second)
		wants(t, s, "publishing: 5.0 MiB of 10.0 MiB of WAL (50 %), 0 B a second")
	})
}

func TestTheLineFitsIntoTheTerminal(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text    string
		columns int
		want    string
	}{
		{"waiting", 80, "waiting"}, {"waiting", 8, "waiting"}, {"waiting", 7, "wai..."},
		{"waiting", 4, "..."}, {"waiting", 2, "."}, {"waiting", 1, ""}, {"waiting", 0, ""},
		{"ab\x1b[2Jc\n", 80, "ab?[2Jc?"},
		{"表表表表", 9, "表表表表"}, {"表表表表", 8, "表表..."}, {"", 80, ""},
	} {
		if got := fit(c.text, c.columns); got != c.want {
			t.Errorf("%q in %d columns: %q, want %q", c.text, c.columns, got, c.want)
		}
	}
}

func TestWithoutALineNothingIsShown(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	Step(ctx, "x")
	Wait(ctx, "x")()
	task := Count(ctx, "x", "x", 1)
	task.Set(1)
	task.Add(1)
	task.End()
	From(ctx).Pause()()
	From(ctx).Close()
}

// A line that is closed in the middle of all that leaves nothing behind, and what is printed afterwards goes
// through.
func TestAClosedLineLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	onScreen(t, func(t *testing.T, ctx context.Context, l *Line, s *screen) {
		Count(ctx, "reading", "rows", 0)
		Wait(ctx, "waiting")
		pass(3 * time.Second)
		l.Close()
		l.Close()
		wants(t, s, "")
		fmt.Fprintln(l.Stderr(), "outflow: stopped by a signal")
		pass(time.Minute)
		wants(t, s, "outflow: stopped by a signal\n")
	})
}
