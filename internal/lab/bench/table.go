package bench

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// column is one of a table's.
type column struct {
	head string
	cell func(c *ContenderReport) string
}

// table is a case for the eye: medians, and the lowest and the highest where they say how far a median can be
// trusted.
func (r *CaseReport) table() string {
	columns := []column{{r.Title, func(c *ContenderReport) string { return "  " + c.Name }}}
	switch r.Kind {
	case drain:
		columns = append(columns, of(eventRate, "events/s", whole))
		columns = append(columns, r.ratios()...)
	case latency:
		columns = append(columns, of(streamP50, "to the stream, ms: p50", spread("%.3f", "")),
			of(streamP99, "p99", spread("%.3f", "")), of(streamP999, "p99.9", spread("%.2f", "")),
			of(consumerP50, "to a consumer: p50", spread("%.3f", "")),
			of(consumerP99, "p99", spread("%.3f", "")), of(consumer999, "p99.9", spread("%.2f", "")))
	case restart:
		columns = append(columns, of(restartTime, "from kill -9 to the first new message, ms",
			spread("%.0f", "")))
	}
	columns = append(columns,
		of(cpuPostgres, "PostgreSQL µs", decimal("%.1f")), of(cpuNATS, "NATS µs", decimal("%.1f")),
		of(cpuItself, "itself µs", decimal("%.1f")),
		of(peakMemory, "peak MB", decimal("%.0f")), of(walBytes, "WAL B/event", decimal("%.1f")))
	text := layout(columns, r.Contenders)
	if r.WALBytes != nil {
		text += fmt.Sprintf("  writing the backlog took %.0f bytes of WAL for each event\n",
			r.WALBytes.Median)
	}
	return text
}

// ratios are the columns "/ other", for every contender but this build of outflow.
func (r *CaseReport) ratios() (all []column) {
	for _, other := range r.Contenders {
		if other.Name == itself {
			continue
		}
		all = append(all, column{"/ " + other.Name, func(c *ContenderReport) string {
			f, ok := c.Ratios[other.Name]
			if !ok {
				return ""
			}
			return spread("%.2f", "")(f)
		}})
	}
	return all
}

// of is the column of a metric.
func of(m metric, head string, show func(Figure) string) column {
	return column{head, func(c *ContenderReport) string {
		f, ok := c.Figures[m]
		if !ok {
			return "-"
		}
		return show(f)
	}}
}

func whole(f Figure) string { return thousands(f.Median) }

func decimal(format string) func(Figure) string {
	return func(f Figure) string { return fmt.Sprintf(format, f.Median) }
}

// spread shows the lowest and the highest beside the median, where there are several.
func spread(format, unit string) func(Figure) string {
	return func(f Figure) string {
		text := fmt.Sprintf(format+unit, f.Median)
		if len(f.Values) > 1 {
			text += fmt.Sprintf(" ("+format+".."+format+")", f.Low, f.High)
		}
		return text
	}
}

// layout sets columns: the first to the left, the others to the right. A column that says nothing is left
// out.
func layout(columns []column, rows []ContenderReport) string {
	var lines = make([]strings.Builder, len(rows)+1)
	for i, col := range columns {
		cells := []string{col.head}
		says := i == 0
		for j := range rows {
			cell := col.cell(&rows[j])
			says = says || cell != "" && cell != "-"
			cells = append(cells, cell)
		}
		if !says {
			continue
		}
		width := 0
		for _, cell := range cells {
			width = max(width, utf8.RuneCountInString(cell))
		}
		for j, cell := range cells {
			fill := strings.Repeat(" ", width-utf8.RuneCountInString(cell))
			if i == 0 {
				lines[j].WriteString(cell + fill)
			} else {
				lines[j].WriteString("  " + fill + cell)
			}
		}
	}
	var b strings.Builder
	for i := range lines {
		b.WriteString(strings.TrimRight(lines[i].String(), " ") + "\n")
	}
	return b.String()
}
