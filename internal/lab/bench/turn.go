package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"
)

// contenders returns who takes part in a case.
func (w *harness) contenders(c *Case) (all []contender) {
	builds := append([]Build{{itself, w.o.Binary}}, w.o.Builds...)
	if c.Kind == latency {
		for _, h := range c.Horizons {
			for _, b := range builds {
				all = append(all, &streamer{w: w, build: b, horizon: &h, label: b.Name + ", horizon " +
					h.String()})
			}
		}
		return append(all, &poller{w: w})
	}
	for _, b := range builds {
		all = append(all, &streamer{w: w, build: b})
	}
	if c.Kind == restart {
		return all
	}
	if path, ok := w.recvLogical(); ok {
		all = append(all, &recvLogical{w: w, path: path})
	}
	return append(all, &publisher{w: w}, &poller{w: w})
}

// measure repeats a case and returns its report.
func (w *harness) measure(ctx context.Context, c *Case) (*CaseReport, error) {
	w.line("\n%s", c.title())
	if err := w.useBroker(ctx, c); err != nil {
		return nil, err
	}
	if err := w.makeTables(ctx, c); err != nil {
		return nil, err
	}
	if err := w.syncCommits(ctx, c.Kind == latency); err != nil {
		return nil, err
	}
	var turns []turn
	var names []string
	for _, p := range w.contenders(c) {
		names = append(names, p.name())
	}
	var wal []float64
	for n := range w.o.Repetitions {
		t, b, err := w.turn(ctx, c, n)
		if err != nil {
			return nil, err
		}
		turns = append(turns, t)
		if b.wal > 0 {
			wal = append(wal, b.wal)
		}
	}
	return newCaseReport(c, names, turns, wal), nil
}

// turn is one repetition. Each begins with another contender.
func (w *harness) turn(ctx context.Context, c *Case, n int) (t turn, b backlog, err error) {
	all := w.contenders(c)
	defer func() {
		cleaning, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		for _, p := range all {
			err = errors.Join(err, p.cleanUp(cleaning))
		}
	}()
	if err := w.emptyTables(ctx); err != nil {
		return nil, b, err
	}
	if c.Kind != latency {
		// All slots begin before the first row.
		for _, p := range all {
			if err := p.prepare(ctx, c); err != nil {
				return nil, b, fmt.Errorf("%s: %w", p.name(), err)
			}
		}
		if b, err = w.fill(ctx, c); err != nil {
			return nil, b, err
		}
	}
	t = turn{}
	for i := range all {
		p := all[(i+n)%len(all)]
		var got sample
		switch c.Kind {
		case drain:
			got, err = p.(drainer).drain(ctx, c, b)
		case latency:
			got, err = w.follow(ctx, c, p.(follower))
		case restart:
			got, err = p.(*streamer).restart(ctx, c)
		}
		if err != nil {
			return nil, b, fmt.Errorf("%s: %w", p.name(), err)
		}
		t[p.name()] = got
		w.line("  %d/%d %-24s %s", n+1, w.o.Repetitions, p.name(), got.line(c.Kind))
	}
	return t, b, nil
}

// line is a run in a line.
func (s sample) line(k kind) string {
	if k == latency {
		return fmt.Sprintf("to the stream %.3f ms (p50), %.3f ms (p99); to a consumer %.3f and %.3f ms",
			s[streamP50], s[streamP99], s[consumerP50], s[consumerP99])
	}
	if k == restart {
		return fmt.Sprintf("%.0f ms", s[restartTime])
	}
	return thousands(s[eventRate]) + " events/s"
}

// thousands writes a number with separators.
func thousands(v float64) string {
	text := strconv.FormatInt(int64(v+0.5), 10)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
