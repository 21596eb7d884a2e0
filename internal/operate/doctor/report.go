package doctor

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/outflowhq/outflow/internal/app/units"
)

// subjects are the headings of the report.
var subjects = map[string]string{
	"config": "Configuration", "postgres": "PostgreSQL", "slot": "Slot", "table": "Table",
	"publication": "Publication", "nats": "NATS", "stream": "Stream", "record": "Checkpoint record",
	"cluster": "Clusters", "maintain": "Maintain", "archive": "Archive", "consumers": "Consumers",
	"host": "This host", "process": "Process", "standby": "Standby",
}

// marks stand before the lines, so that the eye finds what is bad.
var marks = map[Status]string{OK: "ok", Unknown: "?", "note": "note", "warning": "WARN", "error": "ERROR",
	"critical": "CRIT"}

// Write prints the report for people.
func (r *Report) Write(w io.Writer) error {
	b := &strings.Builder{}
	subject, alike := "", 0
	for i := 0; i < len(r.Results); i++ {
		one := r.Results[i]
		if one.Status == Skipped {
			continue
		}
		name, check, _ := strings.Cut(one.Check, ".")
		if name != subject {
			if subject != "" {
				b.WriteByte('\n')
			}
			subject = name
			fmt.Fprintln(b, subjects[name])
		}
		// what is not known for one reason is one line
		for one.Status == Unknown && i+1 < len(r.Results) {
			next := r.Results[i+1]
			other, more, _ := strings.Cut(next.Check, ".")
			if next.Status != Skipped &&
				(next.Status != Unknown || other != name || next.Message != one.Message) {
				break
			}
			if next.Status == Unknown {
				check += ", " + more
			}
			i++
		}
		check = strings.ReplaceAll(check, "_", " ")
		if i > 0 && one.alike(&r.Results[i-1]) {
			alike++
		} else {
			alike = 0
		}
		if alike < fewNamed {
			writeOne(b, one, check)
		} else if i+1 == len(r.Results) || !one.alike(&r.Results[i+1]) {
			more := units.Of(alike-fewNamed+1, "more such finding")
			fold(b, fmt.Sprintf("  %-5s  ", marks[one.Status]),
				fmt.Sprintf("%s: %s [%s]; --json has all", check, more, one.Code))
		}
	}
	b.WriteByte('\n')
	fold(b, "", r.summary())
	_, err := io.WriteString(w, b.String())
	return err
}

// fewNamed is how many findings that differ only in what they are about are written out, each consumer's for
// example.
const fewNamed = 3

// alike reports whether two results are the same finding.
func (r *Result) alike(other *Result) bool {
	return r.Code != "" && r.Check == other.Check && r.Code == other.Code && r.Status == other.Status
}

func writeOne(b *strings.Builder, one Result, check string) {
	if one.Message != "" {
		check += ": "
	}
	fold(b, fmt.Sprintf("  %-5s  ", marks[one.Status]), check+line(one.Message))
	if one.Code == "" {
		return
	}
	if one.Hint != "" {
		fold(b, margin, line(one.Hint))
	}
	if one.Command != "" {
		b.WriteString(margin + "$ " + line(one.Command) + "\n") // to be copied
	}
	fold(b, margin, fmt.Sprintf("[%s] %s", one.Code, one.Title))
}

const (
	margin = "         "
	width  = 110
)

// fold writes a text in lines that fit a terminal. A command between backticks stays in one, to be copied.
func fold(b *strings.Builder, first, text string) {
	left := width - len(first)
	b.WriteString(first)
	for i, word := range words(text) {
		switch n := utf8.RuneCountInString(word) + 1; {
		case i == 0:
			left -= n
		case n > left:
			b.WriteString("\n" + margin)
			left = width - len(margin) - n
		default:
			b.WriteByte(' ')
			left -= n
		}
		b.WriteString(word)
	}
	b.WriteByte('\n')
}

// words splits a text at its spaces, but for those between backticks.
func words(text string) (all []string) {
	code := false
	for word := range strings.SplitSeq(text, " ") {
		if code {
			all[len(all)-1] += " " + word
		} else {
			all = append(all, word)
		}
		if strings.Count(word, "`")%2 == 1 {
			code = !code
		}
	}
	return all
}

// summary is the last line.
func (r *Report) summary() string {
	n, bad := map[Status]int{}, map[Status][]string{}
	for _, one := range r.Results {
		n[one.Status]++
		if !slices.Contains(bad[one.Status], one.Check) {
			bad[one.Status] = append(bad[one.Status], one.Check)
		}
	}
	var parts []string
	for _, s := range []Status{"critical", "error", "warning"} {
		if n[s] > 0 {
			many := fmt.Sprintf("%d critical", n[s])
			if s != "critical" {
				many = units.Of(n[s], string(s))
			}
			parts = append(parts, fmt.Sprintf("%s (%s)", many, strings.Join(bad[s], ", ")))
		}
	}
	if n["note"] > 0 {
		parts = append(parts, units.Of(n["note"], "note"))
	}
	parts = append(parts, fmt.Sprintf("%d ok", n[OK]))
	if n[Unknown] > 0 {
		parts = append(parts, fmt.Sprintf("%d not known", n[Unknown]))
	}
	return fmt.Sprintf("%v, slot %s, stream %s: %s", r.where, r.Slot, r.Stream, strings.Join(parts, ", "))
}

// line makes one line of a text that may hold what others chose: names of programs, of consumers, of
// documents.
func line(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, text)
}
