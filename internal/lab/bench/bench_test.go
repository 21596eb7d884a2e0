package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

func TestAFigureHasMedianAndRange(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		values            []float64
		median, low, high float64
	}{
		{[]float64{7}, 7, 7, 7},
		{[]float64{9, 1}, 5, 1, 9},
		{[]float64{3, 1, 2}, 2, 1, 3},
		{[]float64{100, 1, 2, 3}, 2.5, 1, 100},
	} {
		before := slices.Clone(c.values)
		got := figure(c.values)
		if got.Median != c.median || got.Low != c.low || got.High != c.high {
			t.Errorf("figure(%v) = %+v", before, got)
		}
		if !slices.Equal(c.values, before) {
			t.Errorf("the order of %v is lost: %v", before, c.values)
		}
	}
}

// TestRatioIsTakenWithinATurn: a machine that is ten times slower in one turn changes no ratio.
func TestRatioIsTakenWithinATurn(t *testing.T) {
	t.Parallel()
	turns := []turn{
		{"a": {eventRate: 200}, "b": {eventRate: 100}},
		{"a": {eventRate: 30}, "b": {eventRate: 10}},
		{"a": {eventRate: 250}, "b": {eventRate: 100}},
		{"a": {eventRate: 250}}, // nothing to compare with
	}
	got, ok := ratio(turns, eventRate, "a", "b")
	if !ok || got.Median != 2.5 || got.Low != 2 || got.High != 3 || len(got.Values) != 3 {
		t.Errorf("ratio %+v, %v", got, ok)
	}
	if _, ok := ratio(turns, eventRate, "a", "c"); ok {
		t.Error("a ratio to who took no part")
	}
}

func TestAPercentileIsOneOfTheValues(t *testing.T) {
	t.Parallel()
	var d []time.Duration
	for i := range 1000 {
		d = append(d, time.Duration(i+1))
	}
	for share, want := range map[float64]time.Duration{0: 1, 0.5: 500, 0.99: 990, 0.999: 999, 1: 1000} {
		if got := percentile(d, share); got != want {
			t.Errorf("percentile(%v) = %d, want %d", share, got, want)
		}
	}
	if got := percentile(d[:1], 0.99); got != 1 {
		t.Errorf("of a single value: %d", got)
	}
}

func TestThousandsAreSeparatedByCommas(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{0: "0", 999.4: "999", 999.5: "1,000", 1234567: "1,234,567"} {
		if got := thousands(v); got != want {
			t.Errorf("thousands(%v) = %s, want %s", v, got, want)
		}
	}
}

func TestThePlanHasTheChosenCases(t *testing.T) {
	t.Parallel()
	o := func(change func(*Options)) *Options {
		o := &Options{Rows: 1000, Repetitions: 1, Payload: 200}
		change(o)
		return o
	}
	names := func(o *Options) (all []string) {
		cases, err := o.plan()
		must.Succeed(t, err)
		for _, c := range cases {
			if c.Kind == drain && (c.Rows < 1 || c.PerTx > c.Rows || c.Rows%c.PerTx != 0) {
				t.Errorf("%s: %d rows, %d in a transaction", c.title(), c.Rows, c.PerTx)
			}
			if len(all) == 0 || all[len(all)-1] != c.Name {
				all = append(all, c.Name)
			}
		}
		return all
	}
	if got := names(o(func(*Options) {})); !slices.Equal(got, Default) {
		t.Errorf("by default %v", got)
	}
	if got := names(o(func(o *Options) { o.Full, o.Cases = true, []string{"drain"} })); !slices.Equal(got,
		Names) {
		t.Errorf("with --full %v", got)
	}
	if got := names(o(func(o *Options) { o.Cases = []string{"shape", "latency"} })); !slices.Equal(got,
		[]string{"latency", "shape"}) {
		t.Errorf("the named ones: %v", got)
	}
	d := time.Second
	cases, err := o(func(o *Options) { o.Cases, o.Horizon = []string{"drain", "latency"}, &d }).plan()
	must.Succeed(t, err)
	for _, c := range cases {
		if c.Horizon != d || c.Kind == latency && !slices.Equal(c.Horizons, []time.Duration{d}) {
			t.Errorf("%s: horizon %v, %v", c.title(), c.Horizon, c.Horizons)
		}
	}
	if _, err := o(func(o *Options) { o.Cases = []string{"x"} }).plan(); outbox.ClassOf(err) != outbox.Usage {
		t.Errorf("an unknown case: %v", err)
	}
}

func TestARestartWaitsForAFullMemory(t *testing.T) {
	t.Parallel()
	for doc, want := range map[string]bool{
		`{"v":3}`:                            false, // nothing is published yet
		`{"places":[{"seq":20},{"seq":19}]}`: false,
		`{"places":[{"seq":19},{"seq":20}]}`: true, // no gap mode
		`{"places":[{"seq":20,"remembered":9,"settings":{"gap":{"memory":10}}}]}`:  false,
		`{"places":[{"seq":20,"remembered":10,"settings":{"gap":{"memory":10}}}]}`: true,
		`{"places":[{"seq":20,"remembered":20,"settings":{"gap":{"memory":99}}}]}`: true,
	} {
		if got, err := recorded([]byte(doc), 20); err != nil || got != want {
			t.Errorf("%s: %v, %v", doc, got, err)
		}
	}
	if _, err := recorded([]byte("damaged"), 20); err == nil {
		t.Error("what is no record")
	}
}

// made is a report as a sweep of two points makes it.
func made() *Report {
	r := &Report{Version: "v", Repetitions: 2}
	for i, point := range []string{"1 KB", "10 KB"} {
		c := &Case{Name: "payload", Kind: drain, Point: point, Rows: 1000, PerTx: 100}
		turns := []turn{
			{itself: {eventRate: 1000, cpuItself: 2.04, peakMemory: 31},
				relayName: {eventRate: 100, cpuItself: 9}},
			{itself: {eventRate: 1400 + float64(i), cpuItself: 2.06, peakMemory: 35},
				relayName: {eventRate: 200, cpuItself: 11}},
		}
		r.Cases = append(r.Cases, newCaseReport(c, []string{itself, relayName}, turns, []float64{400, 410}))
	}
	return r
}

func TestTheTableIsAlignedAndHasRatios(t *testing.T) {
	t.Parallel()
	const want = `payload 1 KB, 100 rows a transaction, 1000 rows  events/s             / relay  itself µs  peak MB
  outflow                                           1,200  8.50 (7.00..10.00)        2.0       33
  relay                                               150                           10.0        -
  writing the backlog took 405 bytes of WAL for each event
`
	if got := made().Cases[0].table(); got != want {
		t.Errorf("the table is\n%swant\n%s", got, want)
	}
}

func TestTheReportIsReadableAsJSON(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	must.Succeed(t, made().WriteJSON(&b))
	var back Report
	must.Succeed(t, json.Unmarshal(b.Bytes(), &back))
	c := back.Cases[1].Contenders[0]
	if c.Name != itself || c.Figures[eventRate].High != 1401 || c.Ratios[relayName].Low != 1401.0/200 ||
		back.Cases[1].WALBytes.Median != 405 {
		t.Errorf("read back: %+v", c)
	}
	for _, key := range []string{`"events_per_second"`, `"point": "10 KB"`, `"rows_per_transaction": 100`,
		`"ratios"`} {
		if !strings.Contains(b.String(), key) {
			t.Errorf("no %s", key)
		}
	}
}

func TestAMissingMessageIsAnError(t *testing.T) {
	t.Parallel()
	if err := complete(10, 10, 10); err != nil {
		t.Error(err)
	}
	for _, c := range []struct{ messages, last uint64 }{{9, 9}, {11, 11}, {9, 10}, {0, 0}} {
		if complete(c.messages, c.last, 10) == nil {
			t.Errorf("%d messages, the last at %d, pass for 10", c.messages, c.last)
		}
	}
}

func TestTheNumberOfAPayloadIsFound(t *testing.T) {
	t.Parallel()
	if n, err := number([]byte(`{"n": -1, "op": "x"}`)); n != -1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	for _, bad := range []string{``, `{"n": 1}`, `{"op": "x", "n": 1}`, `{"n": "1", "op": 2}`} {
		if n, err := number([]byte(bad)); err == nil {
			t.Errorf("%s is %d", bad, n)
		}
	}
}

func TestRefusedIsTriedOnce(t *testing.T) {
	t.Parallel()
	n := 0
	err := persist(t.Context(), func(context.Context) error { n++; return permanent{errors.New("no")} })
	if err == nil || n != 1 {
		t.Errorf("%d attempts, %v", n, err)
	}
	n = 0
	err = persist(t.Context(), func(context.Context) error {
		if n++; n < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if err != nil || n != 3 {
		t.Errorf("%d attempts, %v", n, err)
	}
}
