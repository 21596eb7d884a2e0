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

// Metric reads a value from /metrics.
func Metric(tb testing.TB, o *Outflow, name string) float64 {
	tb.Helper()
	var body string
	Eventually(tb, "metrics", func() error {
		code := 0
		if code, body = o.Get("/metrics"); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	for line := range strings.Lines(body) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			Must(tb, err)
			return v
		}
	}
	tb.Fatalf("no metric %s", name)
	return 0
}
