package demo

import (
	"fmt"
	"io"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// screen prints lines; safe for concurrent use.
type screen struct {
	mu  sync.Mutex
	out io.Writer
	all bool // every message
}

// Of many messages these are shown: the first few, then one in so many.
const (
	showFirst = 8
	showEvery = 1000
)

func (s *screen) line(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, format+"\n", args...)
}

func (s *screen) event(format string, args ...any) {
	s.line("        ───── %s ─────", fmt.Sprintf(format, args...))
}

func (s *screen) head() {
	s.line("%7s  %-22s  %-24s  %-12s  %9s  %s", "number", "subject", "seq_key", "committed at", "latency",
		"operation")
}

func (s *screen) message(n int, subject string, h *outbox.Header, payload []byte, latency time.Duration) {
	if !s.all && n > showFirst && n%showEvery != 0 {
		return
	}
	s.line("%7d  %-22s  %-24s  %-12v  %6.1f ms  %s", n, subject, h.Key, h.Pos.LSN,
		float64(latency)/float64(time.Millisecond), short(string(payload)))
}

func short(text string) string {
	const most = 32
	if r := []rune(text); len(r) > most {
		return string(r[:most]) + "…"
	}
	return text
}

// verdict shows the table and returns whether all is as it ought to be.
func (s *screen) verdict(modes []*mode, load Load, took time.Duration) (good bool) {
	s.line("\nverdict: each stream beside what a separate reader makes of the WAL by the rules of its mode\n")
	row := func(name string, value func(m *mode) any, note string, args ...any) {
		line := fmt.Sprintf("  %-13s", name)
		for _, m := range modes {
			line += fmt.Sprintf(" %12v", value(m))
		}
		s.line("%s", strings.TrimRight(line+"   "+fmt.Sprintf(note, args...), " "))
	}
	at := func(q float64, of func(*mode) []time.Duration) func(*mode) any {
		return func(m *mode) any { return fmt.Sprintf("%.2f ms", quantile(of(m), q).Seconds()*1000) }
	}
	added := func(m *mode) []time.Duration { return m.added }
	inVain := func(m *mode) []time.Duration { return m.inVain }
	latency := func(m *mode) []time.Duration { return m.reader.undisturbed }
	row("", func(m *mode) any { return m.name }, "")
	row("committed", func(m *mode) any { return m.judgement.Events }, "events in the WAL")
	row("published", func(m *mode) any { return m.judgement.Published }, "messages in the stream")
	row("missing", func(m *mode) any { return m.judgement.Missing + m.judgement.Held }, "")
	row("repeated", func(m *mode) any { return m.judgement.Repeated }, "")
	row("changed", func(m *mode) any {
		return m.judgement.Changed + m.judgement.Header + m.judgement.Foreign + m.judgement.Aborted
	}, "")
	row("misplaced", func(m *mode) any { return m.judgement.OutOfOrder },
		"elsewhere than the mode's rule says")
	row("late", func(m *mode) any { return m.reader.late },
		"behind a later one of the same person in the same note")
	row("added p50", at(.5, added), "by ordering: from an event's commit to the one that let it go, in the "+
		"WAL")
	row("added p99", at(.99, added), "")
	note := ""
	if load.Rollback {
		note = fmt.Sprintf("gap mode waits reorder.bound (%v) for the counter that never comes", load.Bound)
	}
	row("added most", at(1, added), "%s", note)
	row("in vain p50", at(.5, inVain), "of that, after all before it of the same person in the same "+
		"note had committed")
	row("in vain p99", at(.99, inVain), "")
	row("in vain most", at(1, inVain), "")
	row("latency p50", at(.5, latency), "commit's return to consumer, while outflow was alive")
	row("latency p99", at(.99, latency), "")
	s.line("\n%.0f events/s for %v, at the writers' pace, through each", float64(modes[0].judgement.Events)/
		took.Seconds(), took.Round(10*time.Millisecond))
	good = true
	for _, m := range modes {
		if !m.judgement.OK() {
			s.line("%s: first fault: %s", m.name, m.judgement.First)
			good = false
		}
	}
	if good {
		s.line("Everything is there, exactly once, in the order of its mode.")
	} else {
		s.line("NOT as promised.")
	}
	return good
}

// connections says how to look around. The passwords of servers of our own are of use for that and as
// short-lived as these.
func (s *screen) connections(d *demo) {
	postgres := d.pgURL
	if u, err := url.Parse(postgres); d.pg == nil && err == nil {
		postgres = u.Redacted()
	}
	s.line("\nLeft running until Ctrl-C:\n  postgres   psql '%s'", postgres)
	for _, m := range d.modes {
		s.line("%s\n  nats       nats -s %s sub 'outbox.>' --stream %s --all\n"+
			"  outflow    http://%s/  (metrics, healthz, readyz), log in %s", m.name, m.nats.URL(), stream,
			m.streamer.listen, m.streamer.log)
	}
}
