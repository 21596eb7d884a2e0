package harness

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// Life is what an outflow says of its sessions: how many it began, and how often one went on after NATS had
// failed.
type Life struct{ Sessions, Resumptions float64 }

func (o *Outflow) Life() Life {
	o.T.Helper()
	return Life{Metric(o.T, o, "outflow_sessions_total"), Metric(o.T, o, "outflow_resumptions_total")}
}

// Metric reads a value from /metrics: the sum of the series that have the name and, in any order, the labels.
func Metric(tb testing.TB, o *Outflow, name string) float64 {
	tb.Helper()
	sum, ok := o.Series(name)
	if !ok {
		tb.Fatalf("no metric %s", name)
	}
	return sum
}

// Series is Metric for one that there may be none of.
func (o *Outflow) Series(name string) (sum float64, ok bool) {
	o.T.Helper()
	var body string
	Eventually(o.T, "metrics", func() error {
		code := 0
		if code, body = o.Get("/metrics"); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	name, labels, _ := strings.Cut(strings.TrimSuffix(name, "}"), "{")
	for line := range strings.Lines(body) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		got, have, labelled := strings.Cut(series, "{")
		if !labelled {
			got, value, _ = strings.Cut(series, " ")
		}
		if got != name || !hasAll(have, labels) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		Must(o.T, err)
		sum, ok = sum+v, true
	}
	return sum, ok
}

func hasAll(have, labels string) bool {
	for label := range strings.SplitSeq(labels, ",") {
		if !strings.Contains(have, label) {
			return false
		}
	}
	return true
}
