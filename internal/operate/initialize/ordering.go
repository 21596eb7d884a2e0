package initialize

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/replication/catalog"
)

// minSteps is from how many counters that follow another one something is concluded.
const minSteps = 10

// noteOrdering says which ordering mode fits the table's counters, as far as a sample shows it.
func (s *setup) noteOrdering(ctx context.Context) error {
	if !s.dry {
		return nil // the dry run has said it
	}
	r := s.cfg.Reorder
	if s.layout.Mapping.Counter == "" {
		s.note("note: table %s has no counter (columns.counter), which gap mode needs: reorder.mode: %s "+
			"stays", s.cfg.Table, r.Mode)
		return nil
	}
	sample, spans := catalog.CounterSample{}, s.spans()
	if s.rows {
		var err error
		sample, err = s.pg.SampleCounters(ctx, s.layout.Table, s.layout.Mapping, spans,
			catalog.DefaultSampleLimits)
		if err != nil {
			return fmt.Errorf("look at the counters of table %s: %w", s.cfg.Table, err)
		}
	}
	p := propose(sample, spans, s.layout.Mapping.Span != "", r)
	s.note("note: %s", p.text(s.cfg.Table, r))
	return nil
}

// spans are the columns that may say how many counters an event takes: the one that is mapped, or the other
// integers.
func (s *setup) spans() (names []string) {
	m := s.layout.Mapping
	if m.Span != "" {
		return []string{m.Span}
	}
	for _, c := range s.layout.Table.Columns {
		switch c.TypeOID {
		case pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID:
			if c.Name != m.Counter {
				names = append(names, c.Name)
			}
		}
	}
	return names
}

// proposal is what a sample shows of the ordering mode.
type proposal struct {
	counters
	of  catalog.CounterSample
	fit fit
	set []string // what of the configuration would have to change for gap mode
}

// fit says whether gap mode fits.
type fit int

const (
	unknown fit = iota
	fits
	misfits
)

// propose judges a sample. With mapped, the only one of spans is columns.span.
func propose(sample catalog.CounterSample, spans []string, mapped bool, r config.Reorder) proposal {
	span := -1
	if mapped {
		span = 0
	}
	p := proposal{counters: count(sample.Rows, span), of: sample}
	if !mapped && p.holes > 0 {
		for i, name := range spans {
			if with := count(sample.Rows, i); with.fit() == fits {
				p.counters, p.set = with, append(p.set, "columns.span: "+name)
				break
			}
		}
	}
	p.fit = p.counters.fit()
	if r.Mode != config.ModeGap {
		p.set = append(p.set, "reorder.mode: gap")
	}
	if p.first == 0 && r.FirstCounter != 0 {
		p.set = append(p.set, "reorder.first_counter: 0")
	}
	return p
}

// text says it.
func (p *proposal) text(table string, r config.Reorder) string {
	figures := fmt.Sprintf("sampled %s%d rows of table %s: %d sequences, %s dense, %s",
		map[bool]string{true: "the newest "}[p.of.Cut], len(p.of.Rows), table, p.sequences, p.dense(),
		p.begin())
	switch {
	case p.fit == fits && len(p.set) == 0:
		return figures + ": reorder.mode: gap fits"
	case p.fit == fits:
		return fmt.Sprintf("%s: reorder.mode: gap fits. To choose it, set %s; where counters are made "+
			"under a "+
			"row lock, commit order does as well (docs/ordering.md)", figures, strings.Join(p.set, ", "))
	case p.fit == misfits:
		mode := map[bool]string{true: "gap does not fit", false: "horizon stays"}[r.Mode == config.ModeGap]
		return fmt.Sprintf("%s, %s: reorder.mode: %s. In gap mode %s (docs/ordering.md)", figures,
			strings.Join(p.flaws(), ", "), mode, p.cost(r))
	case p.of.Refused != "":
		figures = fmt.Sprintf("the counters of table %s could not be looked at (%s)", table, p.of.Refused)
	case len(p.of.Rows) == 0 && !p.of.Cut:
		figures = fmt.Sprintf("table %s has no rows", table)
	default:
		figures += ", too few that follow one another"
	}
	return fmt.Sprintf(
		"%s: nothing shows which ordering mode fits, reorder.mode: %s stays. If each document "+
			"and actor counts its events without gaps, reorder.mode: gap does (docs/ordering.md). "+
			"`outflow init --dry-run` looks again", figures, r.Mode)
}

// counters are what the rows of a sample show. What only the rows at its edges would show does not count.
type counters struct {
	sequences, flawed int
	steps             int   // counters that come after another one of their sequence
	holes, repeats    int   // of them: those that do not follow it; those that do not go beyond it
	nulls, foreign    int   // rows without a counter; with one that is no integer of 64 bits, or a bad span
	first             int64 // 0 or 1, the lowest that was seen; 2: neither
}

// taken are the counters that an event takes.
type taken struct {
	from, to int64
	edge     bool
}

// count counts with a column of Spans as the span; -1: each event takes one counter.
func count(rows []catalog.SampledRow, span int) counters {
	c := counters{first: 2}
	sequences := map[[2]int64][]taken{}
	for _, row := range rows {
		if row.Counter == nil {
			c.nulls++
			continue
		}
		r, ok := take(row, span)
		if !ok {
			c.foreign++
			continue
		}
		if r.from == 0 || r.from == 1 {
			c.first = min(c.first, r.from)
		}
		sequences[row.Sequence] = append(sequences[row.Sequence], r)
	}
	for _, all := range sequences {
		c.sequence(all)
	}
	return c
}

func take(row catalog.SampledRow, span int) (taken, bool) {
	from, err := strconv.ParseInt(*row.Counter, 10, 64)
	n := int64(1)
	if span >= 0 && row.Spans[span] != nil && err == nil {
		n, err = strconv.ParseInt(*row.Spans[span], 10, 64)
	}
	if err != nil || n < 1 || n > math.MaxUint32 || from > math.MaxInt64-n {
		return taken{}, false
	}
	return taken{from, from + n - 1, row.Edge}, true
}

// sequence counts from the lowest to the highest of its counters that are not at an edge. Those that are
// only fill.
func (c *counters) sequence(all []taken) {
	slices.SortFunc(all, func(a, b taken) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
	})
	inside := func(r taken) bool { return !r.edge }
	low := slices.IndexFunc(all, inside)
	if low < 0 {
		return
	}
	high := len(all) - 1
	for all[high].edge {
		high--
	}
	c.sequences++
	before, reached := c.holes+c.repeats, all[low].to
	for _, r := range all[low+1 : high+1] {
		c.steps++
		switch {
		case r.from <= reached:
			c.repeats++
		case r.from > reached+1:
			c.holes++
		}
		reached = max(reached, r.to)
	}
	if c.holes+c.repeats > before {
		c.flawed++
	}
}

func (c *counters) fit() fit {
	switch {
	case len(c.flaws()) > 0:
		return misfits
	case c.steps < minSteps:
		return unknown
	}
	return fits
}

func (c *counters) flaws() (found []string) {
	for _, f := range []struct {
		n    int
		what string
	}{
		{c.holes, "holes"}, {c.repeats, "repeats"}, {c.nulls, "rows without a counter"},
		{c.foreign, "counters or spans that cannot be counted with"},
	} {
		if f.n > 0 {
			found = append(found, fmt.Sprintf("%d %s", f.n, f.what))
		}
	}
	return found
}

// cost is what the flaws mean.
func (c *counters) cost(r config.Reorder) string {
	switch {
	case c.foreign > 0:
		return "such a row can't be published (sink.on_poison)"
	case c.holes > 0:
		return fmt.Sprintf(
			"each hole holds back what follows in its sequence for %v (reorder.bound), unless "+
				"the row was there and has been deleted", r.Bound)
	case c.repeats > 0:
		return "what repeats a counter comes late"
	default:
		return "such a row waits for nothing, and nothing waits for it"
	}
}

// dense is the share of sequences without holes and repeats, rounded down.
func (c *counters) dense() string {
	if c.sequences == 0 {
		return "none"
	}
	share := 1000 * (c.sequences - c.flawed) / c.sequences
	if share%10 == 0 {
		return fmt.Sprintf("%d %%", share/10)
	}
	return fmt.Sprintf("%d.%d %%", share/10, share%10)
}

func (c *counters) begin() string {
	if c.first > 1 {
		return "first counter not among them"
	}
	return fmt.Sprintf("first counter %d", c.first)
}
