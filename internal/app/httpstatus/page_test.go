package httpstatus

import (
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/pipeline"
)

func source() *Source {
	return &Source{
		Status:  func() pipeline.Status { return pipeline.Status{State: pipeline.StateRunning} },
		Reading: func() watch.Reading { return watch.Reading{} },
		Metrics: prometheus.NewRegistry(),
	}
}

// A browser with the page open asks every two seconds: it must not keep one of the few connections meanwhile.
func TestAnOpenPageHoldsNoConnection(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := Serve(l, "", *source())
	defer s.Close()
	for path, ends := range map[string]bool{"/": true, "/healthz": false} {
		resp, err := http.Get("http://" + l.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.Body.Close() != nil ||
			resp.Close != ends {
			t.Errorf("%s: the connection ends: %v, want %v, %v", path, resp.Close, ends, err)
		}
	}
}

func TestTheHistoryIsThatOfTheLastQuarterOfAnHour(t *testing.T) {
	t.Parallel()
	src, h := source(), new(history)
	registry := prometheus.NewRegistry()
	acked := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "outflow_commit_to_ack_seconds",
		Buckets: []float64{.001, .002, .004}})
	registry.MustRegister(acked)
	src.Metrics = registry
	for range 2000 { // long ago it was slow
		acked.Observe(.003)
	}
	begun := time.Now().Add(-2 * span)
	for i := range 2 * samples {
		for range 99 {
			acked.Observe(.0005)
		}
		acked.Observe(.003)
		h.take(src, begun.Add(time.Duration(i+1)*interval))
	}
	all := h.all(time.Now())
	if len(all) > samples || len(all) < samples-1 {
		t.Fatalf("%d samples, want %d", len(all), samples)
	}
	newest := all[len(all)-1]
	if newest.rate != 20 || newest.half > .001 || newest.most > .001 || newest.most < newest.half {
		t.Errorf("%+v", newest)
	}
	if q := quantile([]bucket{{1, 0}, {2, 4}, {math.Inf(1), 4}}, 0.25); q != 1.5 {
		t.Errorf("a quarter: %v", q)
	}
	if q := quantile([]bucket{{1, 0}, {2, 4}, {math.Inf(1), 4}}, 0.99); q != 2 {
		t.Errorf("beyond the last bucket: %v", q)
	}
}

// What was not measured is a gap in the line, and a time without publishing is behind it.
func TestAnOutageIsSeenInTheCurve(t *testing.T) {
	t.Parallel()
	now := time.Now()
	var all []sample
	for i, v := range []float64{1, 2, math.NaN(), 3, 4} {
		all = append(all, sample{at: now.Add(time.Duration(i-4) * interval), ready: i != 2, rate: v,
			retained: 100, safe: 100})
	}
	c := draw("retained", "x", all, now, 1, func(v float64) string { return fmt.Sprint(v) },
		series{"", func(s *sample) float64 { return s.rate }})
	if n := strings.Count(c.Lines[0].Path, "M"); n != 2 || strings.Count(c.Area, "Z") != 2 {
		t.Errorf("%d pieces: %s", n, c.Lines[0].Path)
	}
	if len(c.Outages) != 1 || c.Now != "4" || c.LimitText != "limit 200" || strings.Contains(c.Area, "NaN") {
		t.Errorf("%+v", c)
	}
}

func TestTheLastEventsOfTheLogAreKept(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	events := NewEvents(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	log := slog.New(events).With("component", "pipeline")
	for i := range 60 {
		log.Info("event", "n", i)
	}
	for range 3 {
		log.Warn(strings.Repeat("☃", 1000), "err", strings.Repeat("x", 1000))
	}
	log.Debug("detail")
	all := events.newest()
	if len(all) != eventsKept || all[0].Times != 3 || len(all[0].Text) > eventBytes+3 ||
		len(all[0].Details) > eventBytes+3 || all[1].Details != "n 59" {
		t.Errorf("%d events: %+v", len(all), all[:2])
	}
	if n := strings.Count(out.String(), "component=pipeline"); n != 64 {
		t.Errorf("%d lines were passed on", n)
	}
}

func TestThePageNamesTheOpenGaps(t *testing.T) {
	t.Parallel()
	now := time.Now()
	st := pipeline.Status{State: pipeline.StateRunning, OpenGaps: 1, Gaps: []pipeline.Gap{{Doc: "<note>",
		Actor: "alice", Missing: "7 to 9", Since: now.Add(-90 * time.Second), Waiting: 12}}}
	report := overview.New(&overview.Info{}, &st, &watch.Reading{}, now)
	shown := view(report, new(history), NewEvents(slog.DiscardHandler), now)
	var b strings.Builder
	if err := page().Execute(&b, shown); err != nil {
		t.Fatal(err)
	}
	want := `<td>&lt;note&gt;</td><td>alice</td><td>7 to 9</td><td class="n">12</td>` +
		`<td class="n">1 min 30 s</td>`
	if !strings.Contains(b.String(), want) {
		t.Errorf("no %s in\n%s", want, b.String())
	}
}
