package snapshot

import (
	"strings"
	"testing"
	"time"
)

func TestProgressIsReportedNowAndThen(t *testing.T) {
	t.Parallel()
	var told []RowProgress
	p := newReporter(1000, func(p RowProgress) { told = append(told, p) })
	for n := 1; n <= 3*checkEvery; n++ {
		p.row(n)
	}
	if len(told) != 0 {
		t.Errorf("told at once: %v", told)
	}
	p.said = p.said.Add(-progressEvery)
	p.begun = p.begun.Add(-progressEvery)
	p.row(4*checkEvery - 1)
	p.row(4 * checkEvery)
	p.row(5 * checkEvery)
	if len(told) != 1 || told[0].Done != 4*checkEvery || told[0].Of != 1000 {
		t.Fatalf("%v", told)
	}
	got := p.at(250, p.begun.Add(5*time.Second))
	if got.Rate != 50 || got.Remaining != 15*time.Second || got.Seconds != 15 ||
		!strings.Contains(got.String(), "250 of 1000 rows published (25 %), 50 a second, about 15s left") {
		t.Errorf("%+v %v", got, got)
	}
	(&reporter{of: 1}).row(checkEvery) // without a callback
}
