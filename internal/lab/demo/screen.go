package demo

import (
	"fmt"
	"io"
	"net/url"
	"sync"
	"time"

	"github.com/outflowhq/outflow/internal/lab/oracle"
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
	showFirst = 12
	showEvery = 500
)

func newScreen(out io.Writer, all bool) *screen { return &screen{out: out, all: all} }

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

func (s *screen) verdict(v oracle.Verdict, f figures) {
	s.line("\nverdict, computed by a separate reader from table and stream")
	row := func(name string, value any, note string, args ...any) {
		s.line("  %-14s %12v   %s", name, value, fmt.Sprintf(note, args...))
	}
	row("written", v.Written, "rows in the table")
	row("published", v.Published, "messages in the stream")
	row("missing", v.Missing, "")
	row("repeated", v.Repeated, "")
	row("changed", v.Changed+v.Foreign, "")
	if v.Timed || v.OutOfOrder == 0 {
		row("out of order", v.OutOfOrder-v.Late, "against seq_key, for each actor of the document; %d had "+
			"been committed out of order", f.inversions)
	} else {
		row("behind", v.OutOfOrder, "after a higher one; without track_commit_timestamp nobody can tell "+
			"whether they were committed that late")
	}
	if v.Late > 0 {
		row("late", v.Late, "reached the WAL when the window of a higher one had closed, on a machine that "+
			"was busy: they come after it")
	}
	row("latency p50", quantile(f.undisturbed, .5),
		"commit's return to consumer, outflow alive; the horizon (20 ms) is in it")
	row("latency p99", quantile(f.undisturbed, .99), "%v with the second in which outflow was dead",
		quantile(f.all, .99))
	row("rate", fmt.Sprintf("%.0f/s", float64(f.n)/f.took.Seconds()), "%d events in %v, at the writers' pace",
		f.n, f.took.Round(10*time.Millisecond))
	if v.First != "" {
		s.line("  first fault: %s", v.First)
	}
	switch {
	case !v.OK():
		s.line("\nNOT as promised.")
	case v.OutOfOrder > v.Late && !v.Timed:
		s.line("\nEverything is there, exactly once.")
	case v.OutOfOrder > v.Late:
		s.line("\nNOT in order.")
	default:
		s.line("\nEverything is there, exactly once, in order.")
	}
}

// connections says how to look around. The passwords of servers of our own are of use for that and as
// short-lived as these.
func (s *screen) connections(d *demo) {
	postgres := d.pgURL
	if u, err := url.Parse(postgres); d.pg == nil && err == nil {
		postgres = u.Redacted()
	}
	s.line(`
Left running until Ctrl-C:
  postgres   psql '%s'
  nats       nats -s %s sub 'outbox.>' --stream %s --all
  outflow    http://%s/  (metrics, healthz, readyz), log in %s`, postgres, d.nats.URL(), stream, d.streamer.listen, d.streamer.log)
}
