// Package finding is the catalogue of everything that Outflow can find wrong, each under one code: what it
// means, how bad it is, and the way out. The same code is in the message of a command that fails, in logs,
// metrics, doctor's report and docs/troubleshooting.md, which is made from this catalogue.
package finding

//go:generate go test ../../cmd/internal/cli -run TestTroubleshootingIsTheCatalogue -count=1 -update

import (
	"slices"
	"strings"

	"github.com/outflowhq/outflow/outbox"
)

// Severity says how bad a finding is.
type Severity uint8

// The severities.
const (
	Note     Severity = iota // nothing to do
	Warning                  // a risk: look at it in working hours
	Error                    // something will fail, or does already, and nothing is lost
	Critical                 // publishing has stopped, or something is lost or about to be
)

func (s Severity) String() string {
	return [...]string{"note", "warning", "error", "critical"}[s]
}

// Finding is an entry of the catalogue. The message of an occurrence names the server, object and value; the
// entry says what holds for all of them.
type Finding struct {
	Code     string // short and stable, for example "slot_missing"
	Severity Severity
	Title    string // one line of plain text without a period: what was found
	Hint     string // one or two sentences: the way out
	Runbook  string // Markdown, may be empty: how to tell what happened, and what to do step by step

	// Classes are those of the faults that have this code: they decide the exit code of a command. None: no
	// command ends with it, only doctor finds it.
	Classes []outbox.Class
}

// Subject is what several findings are about.
type Subject struct {
	Name     string
	Findings []Finding

	// safe: publishing that stops at a fatal finding of it has lost nothing. Elsewhere rows may have been
	// left out, or what was published may be gone.
	safe bool
}

// Subjects returns the whole catalogue, in a fixed order.
func Subjects() []Subject {
	return []Subject{
		{"PostgreSQL", postgres, true},
		{"The replication slot", slot, false},
		{"The table and its publication", table, false},
		{"NATS", nats, true},
		{"The stream", stream, false},
		{"The checkpoint record", record, false},
		{"Order and memory", order, true},
		{"A row that cannot be published", row, true},
		{"Consumers", consumers, false},
		{"The process and its host", process, true},
		{"Commands", commands, false},
		{"Settings and command lines", settings, true},
	}
}

// All returns every finding, in the order of [Subjects].
func All() []Finding {
	var all []Finding
	for _, s := range Subjects() {
		all = append(all, s.Findings...)
	}
	return all
}

// Of returns the finding with a code.
func Of(code string) (Finding, bool) {
	_, f, ok := find(code)
	return f, ok
}

// MayLose reports whether events may be missing from the stream where publishing has stopped at a code.
func MayLose(code string) bool {
	s, f, _ := find(code)
	has := func(c outbox.Class) bool { return slices.Contains(f.Classes, c) }
	return has(outbox.Gap) || has(outbox.Fatal) && !has(outbox.Transient) && !s.safe
}

func find(code string) (Subject, Finding, bool) {
	for _, s := range Subjects() {
		for _, f := range s.Findings {
			if f.Code == code {
				return s, f, true
			}
		}
	}
	return Subject{}, Finding{}, false
}

// The classes of most entries.
var (
	transient = []outbox.Class{outbox.Transient}
	usage     = []outbox.Class{outbox.Usage}
	fatal     = []outbox.Class{outbox.Fatal}
	gap       = []outbox.Class{outbox.Gap}
	poison    = []outbox.Class{outbox.Poison}
	fatalGap  = []outbox.Class{outbox.Fatal, outbox.Gap}

	usageFatal = []outbox.Class{outbox.Usage, outbox.Fatal}
)

// Message is what an error says to an operator: with the catalogue's hint where its fault has none.
func Message(err error) string {
	said := strings.TrimRight(err.Error(), "\n")
	fault := outbox.FaultOf(err)
	if fault == nil || fault.Hint != "" {
		return said
	}
	f, ok := Of(fault.Code)
	switch {
	case !ok:
		return said
	case strings.Contains(said, "\n"):
		return said + "\n" + f.Hint
	}
	return strings.TrimSuffix(said, ".") + ". " + f.Hint
}
