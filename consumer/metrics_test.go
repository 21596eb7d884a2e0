package consumer

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Two consumers of a process, or one that is made again, share a registry.
func TestConsumersShareARegistry(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	var all []*metrics
	for _, name := range []string{"orders", "stock", "orders"} {
		m, err := newMetrics(reg, name, 2)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	for _, m := range all {
		m.got(1)
		m.attempted(1, nil)
		m.attempted(1, &PanicError{Value: "x"})
		m.attempted(0, errors.New("x"))
		m.transaction(1, []*Event{{Time: time.Now()}, {Time: time.Now().Add(time.Hour), Replayed: true}},
			time.Millisecond)
		m.passed(0)
		m.parked(causeBehind)
		m.released(releaseSkip)
		m.session(true)
		m.documents(3)
		m.dropped("moved")
		m.gap(5)
		m.inFlight(4, 400)
		m.read(12)
		m.done(10)
		m.behind(12, 10, time.Now().Add(-time.Hour))
	}
	all[1].behind(9, 10, time.Time{})
	if got := gather(t, reg); got["outflow_consumer_lag_messages consumer=stock"] != 0 {
		t.Errorf("a lag of %v", got["outflow_consumer_lag_messages consumer=stock"])
	}
	all[1].session(false)
	got := gather(t, reg)
	for name, want := range map[string]float64{
		`events_total consumer=orders partition=1`: 2, `events_total consumer=stock partition=1`: 1,
		`events_total consumer=stock partition=0`:    0,
		`attempts_total consumer=orders partition=1`: 4, `failures_total consumer=orders partition=1`: 2,
		`panics_total consumer=orders partition=1`: 2, `panics_total consumer=orders partition=0`: 0,
		`failures_total consumer=stock partition=0`: 1,
		`effects_total consumer=orders partition=1`: 4, `replayed_total consumer=orders partition=1`: 2,
		`transactions_total consumer=stock partition=1`: 1, `passed_over_total consumer=stock partition=0`: 1,
		`parked_total cause=behind consumer=orders`: 2, `parked_total cause=poison consumer=orders`: 0,
		`released_total consumer=stock how=skip`: 1,
		`parked_documents consumer=orders`:       3, `sessions_total consumer=orders`: 2,
		`sessions_dropped_total consumer=stock reason=moved`: 1,
		`lease_held consumer=orders`:                         1, `lease_held consumer=stock`: 0,
		`gap_messages_total consumer=stock`:  5,
		`in_flight_messages consumer=orders`: 4, `in_flight_bytes consumer=orders`: 400,
		`read_sequence consumer=orders`: 12,
		`done_sequence consumer=orders`: 10, `lag_messages consumer=orders`: 2,
		`batch_events consumer=orders`: 2, `commit_seconds consumer=orders`: 2,
		`latency_seconds consumer=orders`: 4,
	} {
		if v, ok := got["outflow_consumer_"+name]; !ok || v != want {
			t.Errorf("%s is %v (there: %v), want %v", name, v, ok, want)
		}
	}
	for _, name := range []string{"lag_messages", "lag_seconds", "in_flight_messages", "done_sequence",
		"parked_documents"} {
		if v, there := got["outflow_consumer_"+name+" consumer=stock"]; there {
			t.Errorf("%s of an instance that is not active is %v", name, v)
		}
	}
	if v := got["outflow_consumer_lag_seconds consumer=orders"]; v < 3600 {
		t.Errorf("lag of %v seconds", v)
	}
	reg.MustRegister(prometheus.NewCounter(prometheus.CounterOpts{Name: "other"}))
	other := prometheus.NewRegistry()
	other.MustRegister(prometheus.NewCounter(prometheus.CounterOpts{Name: "outflow_consumer_events_total"}))
	if _, err := newMetrics(other, "orders", 1); err == nil {
		t.Error("a name that is taken by something else")
	}
}

// gather returns all values by name and labels; of a histogram, the number of observations.
func gather(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			words := []string{f.GetName()}
			for _, l := range m.GetLabel() {
				words = append(words, l.GetName()+"="+l.GetValue())
			}
			all[strings.Join(words, " ")] = m.GetCounter().GetValue() + m.GetGauge().GetValue() +
				float64(m.GetHistogram().GetSampleCount())
		}
	}
	return all
}
