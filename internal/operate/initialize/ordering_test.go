package initialize

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/replication/catalog"
)

// sampled reads a scripted table: rows, the oldest first, each a sequence and a counter, then the values of
// the columns that may be spans. A row in brackets is at an edge of the sample, and - is NULL.
func sampled(script string) (all []catalog.SampledRow) {
	for _, row := range strings.Fields(script) {
		bare := strings.Trim(row, "()")
		fields := strings.Split(bare[1:], "/")
		value := func(text string) *string {
			if text == "-" {
				return nil
			}
			return &text
		}
		r := catalog.SampledRow{Sequence: [2]int64{int64(bare[0])}, Counter: value(fields[0]),
			Edge: bare != row}
		for _, f := range fields[1:] {
			r.Spans = append(r.Spans, value(f))
		}
		all = append(all, r)
	}
	return all
}

// counting is a sequence of rows from one counter to another.
func counting(name string, from, to int) string {
	var b strings.Builder
	for n := from; n <= to; n++ {
		b.WriteString(name + strconv.Itoa(n) + " ")
	}
	return b.String()
}

func TestTheModeIsProposedThatTheCountersFit(t *testing.T) {
	t.Parallel()
	horizon := config.Reorder{Mode: config.ModeHorizon, FirstCounter: 1, Bound: 10 * time.Second}
	gap, zero := horizon, horizon
	gap.Mode, zero.FirstCounter = config.ModeGap, 0
	const mode, first = "reorder.mode: gap", "reorder.first_counter: 0"
	ten := counting("a", 1, 10)
	for name, c := range map[string]struct {
		rows   string
		cut    bool
		spans  []string
		mapped bool
		r      config.Reorder // the zero value: horizon
		want   fit
		dense  string
		set    []string
	}{
		"dense":              {rows: ten + "a11 b1 b2", want: fits, dense: "100 %", set: []string{mode}},
		"written as it came": {rows: "a11 " + ten, want: fits, dense: "100 %", set: []string{mode}},
		"from 0": {rows: "b0 " + ten + "a11", want: fits, dense: "100 %",
			set: []string{mode, first}},
		"from 0 as set": {rows: "b0 " + ten + "a11", r: zero, want: fits, dense: "100 %",
			set: []string{mode}},
		"gap mode": {rows: ten + "a11", r: gap, want: fits, dense: "100 %"},
		"the newest": {rows: counting("a", 70, 80), cut: true, want: fits, dense: "100 %",
			set: []string{mode}},
		"a hole":             {rows: ten + "a12 b1", want: misfits, dense: "50 %", set: []string{mode}},
		"a hole in gap mode": {rows: ten + "a12 b1", r: gap, want: misfits, dense: "50 %"},
		"a hole of many": {rows: "a1 a3 b1 c1 d1 e1 f1 g1", want: misfits, dense: "85.7 %",
			set: []string{mode}},
		"a repeat":   {rows: ten + "a10 b1", want: misfits, dense: "50 %", set: []string{mode}},
		"NULL":       {rows: ten + "a11 a-", want: misfits, dense: "100 %", set: []string{mode}},
		"no integer": {rows: ten + "a11 b1.5", want: misfits, dense: "100 %", set: []string{mode}},
		"too large": {rows: ten + "a11 b9223372036854775807", want: misfits, dense: "100 %",
			set: []string{mode}},
		"holes that end outside": {rows: "(a1) (b7) (b9) " + counting("a", 3, 13) + "(b10) (a15)",
			cut: true, want: fits, dense: "100 %", set: []string{mode}},
		"filled from outside": {rows: "(a3) a1 a2 " + counting("a", 4, 11) + "(a12) a13", want: fits,
			dense: "100 %",
			set:   []string{mode}},
		"spans": {rows: "a0/5 a5/2 a7/- " + spanned(8, 16), spans: []string{"len"}, mapped: true, want: fits,
			dense: "100 %", set: []string{mode, first}},
		"spans that nobody mapped": {rows: "a0/9/5 a5/9/2 " + strings.ReplaceAll(spanned(7, 16), "/", "/9/"),
			spans: []string{"size", "len"}, want: fits, dense: "100 %",
			set: []string{"columns.span: len", mode, first}},
		"a bad span": {rows: spanned(1, 11) + "a12/0", spans: []string{"len"}, mapped: true, want: misfits,
			dense: "100 %", set: []string{mode}},
		"empty":   {want: unknown, dense: "none", set: []string{mode}},
		"deleted": {cut: true, want: unknown, dense: "none", set: []string{mode}},
		"few that follow others": {rows: ten + "b1 c1 d1", want: unknown, dense: "100 %",
			set: []string{mode}},
	} {
		if c.r == (config.Reorder{}) {
			c.r = horizon
		}
		p := propose(catalog.CounterSample{Rows: sampled(c.rows), Cut: c.cut}, c.spans, c.mapped, c.r)
		if p.fit != c.want || p.dense() != c.dense || !slices.Equal(p.set, c.set) {
			t.Errorf("%s: %d, set %q: %s", name, p.fit, p.set, p.text("outbox", c.r))
		}
		if testing.Verbose() {
			t.Logf("%s: %s", name, p.text("outbox", c.r))
		}
	}
}

// spanned are events that take one counter each, with a column that says so.
func spanned(from, to int) (rows string) {
	return strings.ReplaceAll(counting("a", from, to), " ", "/1 ")
}
