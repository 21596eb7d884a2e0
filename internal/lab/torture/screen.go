package torture

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// screen prints what happens; safe for concurrent use.
type screen struct {
	mu    sync.Mutex
	o     *Options
	out   io.Writer
	begun time.Time
}

func newScreen(o *Options) *screen {
	s := &screen{o: o, out: o.Out}
	if o.JSON {
		s.out = o.Log
	}
	return s
}

func (s *screen) line(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, format+"\n", args...)
}

func (s *screen) head(o *Options, shape *shape, kinds []chosen, plan []Entry) {
	until := fmt.Sprintf("for %v", o.Duration)
	if o.Kills > 0 {
		until = fmt.Sprintf("until %d kills of outflow", o.Kills)
	}
	s.line("seed      %d", o.Seed)
	s.line("attack    %s: %d faults of %d kinds on %d victims with %d replicas, %s",
		until, len(plan), len(kinds), shape.victims, shape.replicas, textOf(shape))
	var out []string
	for _, f := range all {
		if !f.possible(shape) {
			out = append(out, f.name)
		}
	}
	if len(out) > 0 {
		s.line("left out  not possible here: %s", strings.Join(out, ", "))
	}
}

// plan prints the schedule as it would be carried out.
func (s *screen) plan(plan []Entry) {
	if s.o.JSON {
		_ = json.NewEncoder(s.o.Out).Encode(plan) // a reader that went away is no failure of ours
		return
	}
	for i := range plan {
		s.entry(plan[i].At, &plan[i])
	}
}

func (s *screen) entry(at time.Duration, e *Entry) {
	s.line("%8.3f s  %-3s %-18s %s", at.Seconds(), e.who(), e.Fault, e.Params)
}

func (s *screen) outflows(w *harness) {
	for _, v := range w.everybody() {
		who := fmt.Sprintf("victim %d", v.n+1)
		if v == w.twin {
			who = "the twin"
		}
		s.line("outflow   %s: slot %s, %d instances, %d NATS servers, status page http://%s/",
			who, v.slot, len(v.instances), len(v.nats.urls), v.instances[0].listen)
	}
}

func (s *screen) begin(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun = at
	fmt.Fprintf(s.out, "\n%10s  %-3s %-18s %s\n", "time", "who", "fault", "")
}

func (s *screen) injected(e *Entry) { s.entry(time.Since(s.begun), e) }

func (s *screen) note(e *Entry, format string, args ...any) {
	s.line("%8.3f s  %-3s %-18s ... %s", time.Since(s.begun).Seconds(), e.who(), e.Fault,
		fmt.Sprintf(format, args...))
}

func (s *screen) event(format string, args ...any) {
	s.line("%8.3f s  ───── %s", time.Since(s.begun).Seconds(), fmt.Sprintf(format, args...))
}

// report prints what was found.
func (s *screen) report(r *Report) {
	if s.o.JSON {
		enc := json.NewEncoder(s.o.Out)
		enc.SetIndent("", "  ")
		_ = enc.Encode(r) // a reader that went away is no failure of ours
	}
	ms := func(d time.Duration) string { return d.Round(time.Millisecond).String() }
	s.line("\n%-20s %8s %10s %12s %12s", "fault", "times", "events", "median", "max")
	for _, t := range r.Faults {
		note := ""
		if t.Missed > 0 {
			note += fmt.Sprintf("   %d more found nothing to strike at", t.Missed)
		}
		if t.Unrecovered > 0 {
			note += fmt.Sprintf("   %d not recovered from within %v", t.Unrecovered, recoverLimit)
		}
		s.line("%-20s %8d %10d %12s %12s%s", t.Fault, t.Injected, t.Events, ms(t.Median), ms(t.Max), note)
	}
	s.line("recovery: from the end of the fault until all that was committed by then was in the stream, " +
		"other faults going on meanwhile")
	s.line("\nended hard or made to step down: outflow %d, PostgreSQL %d, NATS %d, leaders %d. Left out "+
		"for want of time: %d", r.Kills.Outflow, r.Kills.Postgres, r.Kills.NATS, r.Kills.Leaders, r.LeftOut)
	s.line("outflow away while much was written: %d times", r.Backlogs)
	s.line("caught up %v after the end of the attack; %v in all", ms(r.CatchUp), r.Took.Round(time.Second))
	if r.Failure != "" {
		s.line("\nFAILED: %s", r.Failure)
	}
	if len(r.Streams) > 0 {
		s.verdict(r)
	}
	if r.Good {
		s.line("\nEverything is there, exactly once, in the order of the WAL, byte for byte. Seed %d", r.Seed)
	} else {
		s.line("\nNOT as promised. Seed %d", r.Seed)
	}
}

func (s *screen) verdict(r *Report) {
	s.line("\nverdict, from an independent reading of the WAL and from the table: %d rows and %d messages "+
		"committed in %d transactions (%d larger than the buffer), %d rows rolled back, %d ticks, %d "+
		"changes of settings", r.Rows, r.Messages, r.Transactions, r.Large, r.RolledBack, r.Ticks, r.Changes)
	if r.Table != "" {
		s.line("  WAL and table differ: %s", r.Table)
	}
	s.line("  %-28s %9s %8s %8s %8s %8s %8s %8s %8s  %s",
		"stream", "published", "missing", "repeated", "changed", "header", "order", "aborted", "foreign",
		"twin")
	for i := range r.Streams {
		t := &r.Streams[i]
		s.line("  %-28s %9d %8d %8d %8d %8d %8d %8d %8d  %s",
			t.Name, t.Published, t.Missing, t.Repeated, t.Changed, t.Header, t.OutOfOrder, t.Aborted,
			t.Foreign, t.Twin)
		if t.First != "" {
			s.line("    first: %s", t.First)
		}
	}
}
