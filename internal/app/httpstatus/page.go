package httpstatus

import (
	_ "embed"
	"html/template"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/pipeline"
)

//go:embed page.html
var pageHTML string

var page = sync.OnceValue(func() *template.Template {
	return template.Must(template.New("page").Funcs(template.FuncMap{"code": code}).Parse(pageHTML))
})

// code shows what stands between backticks as code.
func code(text string) template.HTML {
	var b strings.Builder
	for i, part := range strings.Split(text, "`") {
		part = template.HTMLEscapeString(part)
		if i%2 == 1 {
			part = "<code>" + part + "</code>"
		}
		b.WriteString(part)
	}
	return template.HTML(b.String())
}

// pageView is what the page shows, ready to print.
type pageView struct {
	*overview.Report
	Time      string
	For       string // since when the verdict holds
	Charts    []chart
	Instances []instance
	Readers   []reader
	// how old the list of them is; "" if it is of now
	ReadersOld string
	Gaps       []gap
	Log        []logged
	Uptime     string
}

// instance is one of those that share the slot.
type instance struct {
	Level overview.Level
	Role  string
	Name  string
	Since string
	This  bool
}

// reader is a durable consumer, or one of package consumer.
type reader struct {
	watch.Consumer
	Level                         overview.Level
	Word                          string
	Behind, Given, Again, LastAck string
}

type gap struct {
	pipeline.Gap
	For string // how long the oldest event has waited
}

type logged struct {
	event
	Shown overview.Level
	Clock string
}

func view(r *overview.Report, past *history, log *Events, now time.Time) *pageView {
	v := &pageView{Report: r, Time: now.UTC().Format(time.TimeOnly), Charts: charts(past.all(now), now),
		Uptime: r.Age(r.Outflow.Started)}
	if !r.Verdict.Since.IsZero() {
		v.For = r.Age(r.Verdict.Since)
	}
	v.Instances = instances(r)
	for i := range r.Consumers {
		c := &r.Consumers[i]
		level, word := overview.ConsumerLevel(c)
		row := reader{Consumer: *c, Level: level, Word: word, Behind: units.Count(c.Pending),
			Given: units.Count(c.AckPending), Again: units.Count(c.Redelivered), LastAck: "never"}
		if !c.LastAck.IsZero() {
			row.LastAck = r.Age(c.LastAck) + " ago"
		}
		v.Readers = append(v.Readers, row)
	}
	for _, p := range r.Parts() {
		if p.Name == "Consumers" {
			v.ReadersOld = p.Old
		}
	}
	for _, g := range r.Pipeline.Gaps {
		v.Gaps = append(v.Gaps, gap{g, r.Age(g.Since)})
	}
	for _, e := range log.newest() {
		e.Details = r.Outflow.Repeat.In(e.Details)
		v.Log = append(v.Log, logged{e, levelOf(e.Level), e.At.UTC().Format(time.TimeOnly)})
	}
	return v
}

func instances(r *overview.Report) []instance {
	s := r.Pipeline
	this := instance{Name: r.Outflow.Host, Since: r.Age(s.Since), This: true, Level: overview.Good,
		Role: "active"}
	switch {
	case s.State == pipeline.StateStandby:
		this.Role, this.Level = "standby", overview.Idle
	case !s.Ready(): // its state changes with each attempt
		this.Role, this.Level, this.Since = "not publishing", r.Verdict.Level, r.Age(s.ReadyChanged)
	}
	all, named := []instance{this}, s.Holds()
	for _, i := range r.Instances {
		other := instance{Name: i.Name, Since: r.Age(i.Since), Level: overview.Idle, Role: "standby"}
		switch {
		case r.Slot.Active && i.Name == r.Slot.Holder && !named:
			other.Level, other.Role, named = overview.Good, "active", true
		case i.Own:
			continue
		}
		all = append(all, other)
	}
	if r.Slot.Active && !named {
		all = append(all, instance{Level: overview.Good, Role: "active", Name: r.Slot.Holder})
	}
	return all
}

func levelOf(l slog.Level) overview.Level {
	switch {
	case l >= slog.LevelError:
		return overview.Bad
	case l >= slog.LevelWarn:
		return overview.Warning
	}
	return overview.Idle
}

func charts(all []sample, now time.Time) []chart {
	seconds := func(v float64) string { return units.Latency(time.Duration(v * float64(time.Second))) }
	lag := func(v float64) string {
		if v < 3 { // it is looked every two seconds
			return "under 3 s"
		}
		return units.Duration(time.Duration(v * float64(time.Second)))
	}
	bytes := func(v float64) string { return units.Size(uint64(max(v, 0))) }
	return []chart{
		draw("rate", "Events published a second", all, now, 1, units.Rate,
			series{"", func(s *sample) float64 { return s.rate }}),
		draw("latency", "Commit to acknowledgement", all, now, 0.001, seconds,
			series{"p50", func(s *sample) float64 { return s.half }},
			series{"p99", func(s *sample) float64 { return s.most }}),
		draw("lag", "Behind PostgreSQL", all, now, 5, lag,
			series{"", func(s *sample) float64 { return s.lag }}),
		draw("retained", "WAL kept for the slot", all, now, 1<<20, bytes,
			series{"", func(s *sample) float64 { return s.retained }}),
	}
}
