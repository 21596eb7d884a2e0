package httpstatus

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// A chart is drawn in a box of this size; the browser stretches it.
const (
	chartWidth  = 300.0
	chartHeight = 72.0
)

// chart is a picture of the last span, drawn by the server: it needs no script.
type chart struct {
	ID, Title string
	Now, Most string // the newest value, and what the top line stands for
	Says      string // all of it in words, for who does not see it
	Lines     []line
	Area      string // path below the first line
	Limit     string // path of the limit; "" if it is not on the picture
	LimitText string
	Outages   []outage
}

type line struct{ Class, Path string }

// outage is a time in which nothing was published, and nothing stood by.
type outage struct{ X, Width float64 }

type series struct {
	name   string
	values func(*sample) float64
}

// draw makes a chart of one or two series. The top line stands for least or more: what is smaller is
// nothing to look at.
func draw(id, title string, all []sample, now time.Time, least float64, print func(float64) string,
	of ...series) chart {
	c := chart{ID: id, Title: title}
	x := func(at time.Time) float64 {
		return max(chartWidth*(1-now.Sub(at).Seconds()/span.Seconds()), 0)
	}
	top := 0.0
	for i := range all {
		for _, s := range of {
			if v := s.values(&all[i]); v > top {
				top = v
			}
		}
	}
	highest := top
	if id == "retained" {
		top = c.drawLimit(all, top, print)
	}
	top = max(top, least) * 1.08
	y := func(v float64) float64 { return chartHeight - v/top*(chartHeight-2) - 1 }
	var newest, says []string
	for i, s := range of {
		var path, area strings.Builder
		drawn, start, last := false, 0.0, 0.0
		fill := func() {
			if drawn {
				fmt.Fprintf(&area, "L%.1f %.0fL%.1f %.0fZ", last, chartHeight, start, chartHeight)
			}
		}
		current := math.NaN()
		for j := range all {
			v := s.values(&all[j])
			current = v
			if math.IsNaN(v) {
				fill()
				drawn = false
				continue
			}
			command, at := "L", x(all[j].at)
			if !drawn {
				command, start = "M", at
			}
			fmt.Fprintf(&path, "%s%.1f %.1f", command, at, y(v))
			fmt.Fprintf(&area, "%s%.1f %.1f", command, at, y(v))
			if !drawn { // a point of its own is seen too
				fmt.Fprintf(&path, "h.1")
			}
			drawn, last = true, at
		}
		fill()
		c.Lines = append(c.Lines, line{fmt.Sprintf("line%d", i+1), path.String()})
		if i == 0 {
			c.Area = area.String()
		}
		text := "–"
		if !math.IsNaN(current) {
			text = print(current)
		}
		if s.name != "" {
			text = s.name + " " + text
		}
		newest = append(newest, text)
	}
	c.Now = strings.Join(newest, " · ")
	c.Most = print(max(highest, least))
	says = append(says, title+": now "+c.Now+", at most "+print(highest)+" in the last 15 minutes")
	if c.LimitText != "" {
		says = append(says, c.LimitText)
	}
	c.Says = strings.Join(says, "; ")
	c.Outages = outages(all, x)
	return c
}

// drawLimit draws the slot's limit if that is near enough to be in the picture, and returns the top of it.
func (c *chart) drawLimit(all []sample, top float64, print func(float64) string) float64 {
	limit := math.NaN()
	for i := range all {
		if v := all[i].retained + all[i].safe; !math.IsNaN(v) {
			limit = v
		}
	}
	if math.IsNaN(limit) {
		return top
	}
	c.LimitText = "limit " + print(limit)
	if limit > 4*top {
		return top
	}
	top = max(top, limit)
	c.Limit = fmt.Sprintf("M0 %.1fH%.0f", chartHeight-limit/(top*1.08)*(chartHeight-2)-1, chartWidth)
	return top
}

func outages(all []sample, x func(time.Time) float64) []outage {
	var found []outage
	for i := 0; i < len(all); i++ {
		if all[i].ready {
			continue
		}
		from := i
		for i+1 < len(all) && !all[i+1].ready {
			i++
		}
		end := chartWidth
		if i+1 < len(all) {
			end = x(all[i+1].at)
		}
		start := x(all[from].at)
		found = append(found, outage{math.Round(start*10) / 10, math.Round(max(end-start, 1)*10) / 10})
	}
	return found
}
