package status

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

// Style says how a report is printed.
type Style struct {
	Colour bool
	Width  int // of the terminal: longer lines are cut; 0: they are not
}

// The colours of the levels in a terminal.
var colours = map[overview.Level]string{overview.Good: "32", overview.Warning: "33", overview.Bad: "31"}

// Print prints the report for people: names and values.
func (r *Report) Print(w io.Writer, style Style) error {
	p := &printer{style: style}
	v := &r.Verdict
	p.line("health", "%s %s", p.shape(v.Level), r.Health)
	p.more("cause", v.Cause)
	p.more("", v.Detail)
	p.more("data", v.Effect)
	p.more("to do", v.Do)
	if v.Code != "" {
		p.more("", "outflow explain "+v.Code)
	}
	if e := r.LastEnd; e != nil {
		r.printEnd(p, e, time.Now())
	}
	p.line("", "")
	p.line("at", "%v", r.Where)
	switch r.Source {
	case string(relay.FromMessage):
		p.line("source", "logical messages (%s)", outbox.EventPrefix)
	case string(relay.FromBoth):
		p.line("table", "%s, and logical messages (%s)", r.Table, outbox.EventPrefix)
	default:
		p.line("table", "%s", r.Table)
	}
	p.more("shard", r.Shard)
	for _, part := range r.Parts() {
		p.part(&part, map[string]string{"Slot": r.Slot.Name, "Stream": r.Stream.Name}[part.Name])
	}
	for i := range r.Consumers {
		c := &r.Consumers[i]
		level, word := overview.ConsumerLevel(c)
		if c.Readers > 0 { // package consumer acknowledges nothing
			p.line("", "%s %s: %s, %s not read, read by %d", p.shape(level), printable(c.Name), word,
				units.Count(c.Pending), c.Readers)
			continue
		}
		p.line("", "%s %s: %s, %s pending, %s to be acknowledged", p.shape(level), printable(c.Name), word,
			units.Count(c.Pending), units.Count(c.AckPending))
	}
	if r.Stream.Loss != "" {
		p.line("loss", "%s", r.Stream.Loss)
	}
	if len(r.Stream.DurablesAffected) > 0 {
		p.line("", "durable consumers that may have had more: %s",
			printable(strings.Join(r.Stream.DurablesAffected, ", ")))
	}
	p.line("", "")
	for _, at := range r.Positions() {
		switch {
		case at.LSN == 0:
			p.line(strings.ToLower(at.Name[:1])+at.Name[1:], "not known")
		case at.Behind != "":
			p.line(strings.ToLower(at.Name[:1])+at.Name[1:], "%v, %s before the end", at.LSN, at.Behind)
		default:
			p.line(strings.ToLower(at.Name[:1])+at.Name[1:], "%v", at.LSN)
		}
	}
	if c := r.Checkpoint; c != nil {
		p.line("recorded", "%v = sequence %d, stored %v", c.Due, c.Seq, r.Recorded.Format(time.RFC3339))
		p.line("settings", "%v", c.Settings)
		if n := len(c.Holds); n > 0 {
			wait := "sequences wait"
			if n == 1 {
				wait = "sequence waits"
			}
			p.line("gaps", "%s %s for missing counters, and WAL is kept from %v on", units.Count(n), wait,
				c.Start())
			for i := range r.Gaps {
				r.printGap(p, &r.Gaps[i], time.Now())
			}
		}
		if r.Postgres.WALEnd != 0 {
			p.line("lag", "%s of WAL behind the recorded checkpoint", units.Size(r.LagBytes))
		}
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}

// printEnd prints at what a process has stopped publishing: it waits there, or it has ended.
func (r *Report) printEnd(p *printer, e *checkpoint.End, now time.Time) {
	process := fmt.Sprintf("pid %d on %s", e.PID, e.Host)
	switch held, since := r.held(now); {
	case held != nil:
		p.line("held", "%s, by %s, for %s, since %s", e.Code, process, units.Duration(since),
			held.Since.Format(time.RFC3339))
		p.more("", fmt.Sprintf("it runs, and tries again every %v; last at %s", r.again(),
			e.At.Format(time.RFC3339)))
	case e.Held:
		p.line("last end", "%s held %s, and has not tried again since %s", process, e.Code,
			e.At.Format(time.RFC3339))
	default:
		p.line("last end", "%s: %s ended with exit code %d: %s", e.At.Format(time.RFC3339), process, e.Exit,
			e.Code)
	}
	p.more("", e.Message)
}

// printGap prints what a sequence waits for: somebody looks for the operation that did not commit.
func (r *Report) printGap(p *printer, g *pipeline.Gap, now time.Time) {
	of, wait := "", "events wait"
	if g.Actor != "" {
		of = ", actor " + g.Actor
	}
	if g.Waiting == 1 {
		wait = "event waits"
	}
	p.more("", printable(fmt.Sprintf("document %s%s: %s missing, %s %s, for %s, since %s", g.Doc, of,
		g.Missing, units.Count(g.Waiting), wait, units.Duration(now.Sub(g.Since)),
		g.Since.Format(time.RFC3339))))
}

// Line is the report in one line, for a log.
func (r *Report) Line() string {
	v := &r.Verdict
	text := fmt.Sprintf("%s %s %s", time.Now().UTC().Format(time.RFC3339), v.Level.Shape(), r.Health)
	for _, part := range r.Parts() {
		text += fmt.Sprintf(" · %s %s", part.Name, part.Word)
		if len(part.Figures) > 0 {
			text += ", " + part.Figures[0].Name + " " + part.Figures[0].Value
		}
	}
	return text
}

type printer struct {
	style Style
	b     strings.Builder
}

// nameWidth is how wide the column of names is.
const nameWidth = 12

func (p *printer) line(name, format string, args ...any) {
	text := strings.TrimRight(fmt.Sprintf("%-*s ", nameWidth-1, name)+fmt.Sprintf(format, args...), " ")
	if w := p.style.Width; w > 0 && utf8.RuneCountInString(text) > w && !strings.Contains(text, "\x1b") {
		text = string([]rune(text)[:w-1]) + "…"
	}
	p.b.WriteString(text + "\n")
}

// printable makes harmless on a terminal what others chose, such as a consumer's name.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
}

// more prints a line if there is something to say.
func (p *printer) more(name, text string) {
	if text != "" {
		p.line(name, "%s", text)
	}
}

func (p *printer) shape(l overview.Level) string {
	if c := colours[l]; p.style.Colour && c != "" {
		return "\x1b[" + c + "m" + l.Shape() + "\x1b[0m"
	}
	return l.Shape()
}

func (p *printer) part(part *overview.Part, name string) {
	text := part.Word
	if name != "" {
		text = name + ": " + text
	}
	if part.Old != "" {
		text += " (" + part.Old + ")"
	}
	p.line(strings.ToLower(part.Name), "%s %s", p.shape(part.Level), text)
	var figures []string
	for _, f := range part.Figures {
		figure := f.Name + " " + f.Value
		if f.Of != "" {
			figure += " of " + f.Of
		}
		figures = append(figures, figure)
	}
	p.more("", strings.Join(figures, " · "))
}
