package e2e

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// metric reads a value from /metrics.
func metric(tb testing.TB, o *outflow, name string) float64 {
	tb.Helper()
	var body string
	eventually(tb, "metrics", func() error {
		code := 0
		if code, body = o.get("/metrics"); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	for line := range strings.Lines(body) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				tb.Fatal(err)
			}
			return v
		}
	}
	tb.Fatalf("no metric %s", name)
	return 0
}

// counted waits until a counter has reached a value. What is read again, by another session, is counted again.
func (o *outflow) counted(name string, least float64) {
	o.t.Helper()
	eventually(o.t, name, func() error {
		if got := metric(o.t, o, name); got < least {
			return fmt.Errorf("%v, want %v", got, least)
		}
		return nil
	})
}
