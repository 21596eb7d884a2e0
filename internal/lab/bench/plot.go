package bench

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
)

const (
	plotWidth, plotHeight = 640, 360
	plotLeft, plotRight   = 80, 150 // margins; the names stand on the right
	plotTop, plotBottom   = 40, 50
)

// colours of the contenders, which people who see few of them can tell apart.
var colours = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"}

// plot draws events/s of all contenders over the points of a sweep: medians as lines, with the lowest and the highest as whiskers.
func plot(name string, points []*CaseReport) []byte {
	top := 0.0
	for _, p := range points {
		for _, c := range p.Contenders {
			top = max(top, c.Figures[eventRate].High)
		}
	}
	top = roundUp(top)
	x := func(i int) float64 {
		return plotLeft + (float64(i)+0.5)*(plotWidth-plotLeft-plotRight)/float64(len(points))
	}
	y := func(v float64) float64 { return plotHeight - plotBottom - v/top*(plotHeight-plotTop-plotBottom) }

	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", plotWidth, plotHeight)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", plotWidth, plotHeight)
	label(&b, plotLeft, 22, "start", "events/s of a backlog by "+name)
	for i := range 5 {
		v := top * float64(i) / 4
		fmt.Fprintf(&b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#ddd"/>`+"\n", plotLeft, y(v), plotWidth-plotRight, y(v))
		label(&b, plotLeft-8, y(v)+4, "end", thousands(v))
	}
	for i, p := range points {
		label(&b, x(i), plotHeight-plotBottom+20, "middle", p.Point)
	}
	names := map[string]bool{}
	for _, p := range points {
		for _, c := range p.Contenders {
			if !names[c.Name] {
				series(&b, len(names), c.Name, points, x, y)
				names[c.Name] = true
			}
		}
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// series draws the n-th contender.
func series(b *bytes.Buffer, n int, name string, points []*CaseReport, x func(int) float64, y func(float64) float64) {
	colour := colours[n%len(colours)]
	var line []byte
	for i, p := range points {
		c := p.contender(name)
		if c == nil {
			continue
		}
		f, ok := c.Figures[eventRate]
		if !ok {
			continue
		}
		at := x(i) + float64(n-2)*3 // so that whiskers do not lie on each other
		line = fmt.Appendf(line, "%.1f,%.1f ", at, y(f.Median))
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>`+"\n", at, y(f.Low), at, y(f.High), colour)
		fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", at, y(f.Median), colour)
	}
	fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5"/>`+"\n", bytes.TrimSpace(line), colour)
	row := plotTop + 18*float64(n)
	fmt.Fprintf(b, `<rect x="%d" y="%.1f" width="10" height="10" fill="%s"/>`+"\n", plotWidth-plotRight+12, row, colour)
	label(b, plotWidth-plotRight+28, row+9, "start", name)
}

func label(b *bytes.Buffer, x, y float64, anchor, text string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s">`, x, y, anchor)
	_ = xml.EscapeText(b, []byte(text)) // a buffer takes everything
	b.WriteString("</text>\n")
}

// roundUp returns the next number of the form 1, 2, 4, 5 or 8 times a power of ten.
func roundUp(v float64) float64 {
	if v <= 0 {
		return 1
	}
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, by := range []float64{1, 2, 4, 5, 8} {
		if by*unit >= v {
			return by * unit
		}
	}
	return 10 * unit
}
