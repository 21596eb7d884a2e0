// Package doctor is `outflow doctor`: it looks at the whole chain, from the configuration over PostgreSQL,
// the slot, the table and the publication to NATS, the stream, the checkpoint record, the consumers and this
// host, and says what is wrong or may become so. It changes nothing.
//
// What is read is read once, into [Facts], each source with a time limit of its own. The checks are functions
// of the facts. A fact that could not be read makes the checks that need it "not known", never "ok".
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
)

// Options say what is checked, and how.
type Options struct {
	Only, Skip []string      // prefixes of checks' names, up to a dot; without Only: all
	Timeout    time.Duration // of each source
	BeforeInit bool          // only what `outflow init` needs
	Deep       bool          // also what reads rows, or takes seconds
	Standby    string        // connection URL of a server that is to become the primary; "": none

	Log *slog.Logger
}

// Status is what a check came to.
type Status string

// The statuses, besides those of a finding's severity: note, warning, error and critical.
const (
	OK      Status = "ok"
	Unknown Status = "unknown" // what it needs could not be read
	Skipped Status = "skipped" // what it is about is not there, or another finding says why
)

// Result is what one check says. A check that finds several things has several. The JSON names are stable.
type Result struct {
	Check   string `json:"check"` // such as slot.headroom: the part before the dot is the subject
	Status  Status `json:"status"`
	Code    string `json:"code,omitempty"`    // of the finding, see outflow explain
	Title   string `json:"title,omitempty"`   // of the finding: what holds wherever it is found
	Message string `json:"message,omitempty"` // what was found here, or why it is not known
	Hint    string `json:"hint,omitempty"`
	Command string `json:"command,omitempty"` // to look closer, or to put it right
}

// Report is everything that was found.
type Report struct {
	At       time.Time `json:"at"`
	Postgres string    `json:"postgres,omitempty"` // host:port/database
	NATS     string    `json:"nats,omitempty"`     // the server that answered
	Slot     string    `json:"slot"`
	Stream   string    `json:"stream"`
	Standby  string    `json:"standby,omitempty"`
	Worst    Status    `json:"worst"`
	Results  []Result  `json:"results"`

	where wiring.Where
}

// The exit codes of outflow doctor.
const (
	exitUnknown  = 1
	exitError    = 3
	exitCritical = 4
)

// ExitCode is by the worst of the results; strict makes a warning an error. That not everything could be read
// is less than an error, and more than a warning.
func (r *Report) ExitCode(strict bool) int {
	switch {
	case r.has(statusOf(finding.Critical)):
		return exitCritical
	case r.has(statusOf(finding.Error)), strict && r.has(statusOf(finding.Warning)):
		return exitError
	case r.has(Unknown):
		return exitUnknown
	}
	return 0
}

func (r *Report) has(s Status) bool {
	return slices.ContainsFunc(r.Results, func(one Result) bool { return one.Status == s })
}

func statusOf(s finding.Severity) Status { return Status(s.String()) }

// badness sorts statuses, the worst last.
var badness = []Status{Skipped, OK, "note", "warning", Unknown, "error", "critical"}

// Run reads the facts and checks them. It returns an error only where the options are wrong.
func Run(ctx context.Context, cfg config.Config, o Options) (*Report, error) {
	for _, prefix := range append(slices.Clone(o.Only), o.Skip...) {
		if !slices.ContainsFunc(checks, func(c check) bool { return matches(c.name, prefix) }) {
			return nil, &outbox.Fault{
				Class: outbox.Usage, Code: "flags",
				Message: fmt.Sprintf("there is no check %q", prefix),
				Hint: "Subjects are " + strings.Join(subjectNames(), ", ") +
					"; or give the name of a check",
			}
		}
	}
	wanted := slices.DeleteFunc(slices.Clone(checks), func(c check) bool { return !o.wants(c) })
	f := read(ctx, cfg, o, sourcesOf(wanted))
	return report(f, wanted), nil
}

// wants reports whether a check is to be made.
func (o *Options) wants(c check) bool {
	named := func(prefix string) bool { return matches(c.name, prefix) }
	switch {
	case len(o.Only) > 0 && !slices.ContainsFunc(o.Only, named), slices.ContainsFunc(o.Skip, named):
		return false
	case o.BeforeInit && !c.beforeInit, c.deep && !o.Deep, c.subject() == "standby" && o.Standby == "":
		return false
	}
	return true
}

// matches reports whether a prefix names a check or its subject.
func matches(name, prefix string) bool {
	return name == prefix || strings.HasPrefix(name, strings.TrimSuffix(prefix, ".")+".")
}

// check is a row of the table.
type check struct {
	name  string   // subject.name
	needs []source // facts that it looks at

	beforeInit bool // init needs it, too
	deep       bool // only with --deep

	// about says whether what the check is about is there; nil: always
	about func(f *Facts) bool
	// run looks at the facts that it needs, which are there, and reports what it finds; nothing: all is well
	run func(f *Facts, r *reporter)
}

func (c *check) subject() string {
	subject, _, _ := strings.Cut(c.name, ".")
	return subject
}

// checks are all checks, in the order of the report.
var checks = slices.Concat(configChecks, postgresChecks, slotChecks, tableChecks, clusterChecks, natsChecks,
	streamChecks, recordChecks, consumerChecks, hostChecks, standbyChecks)

func subjectNames() (all []string) {
	for _, c := range checks {
		if s := c.subject(); !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	return all
}

func sourcesOf(checks []check) map[source]bool {
	all := map[source]bool{}
	for _, c := range checks {
		for _, s := range c.needs {
			all[s] = true
		}
	}
	return all
}

// report runs the checks over the facts.
func report(f *Facts, checks []check) *Report {
	rep := &Report{At: f.Now, Slot: f.Config.Slot, Stream: f.Config.Stream, Worst: Skipped,
		where: wiring.WhereIs(f.Config)}
	if f.Postgres != nil {
		rep.Postgres = f.Postgres.Where
	}
	if f.NATS != nil {
		rep.NATS = f.NATS.Server
	}
	if f.Standby != nil {
		rep.Standby = f.Standby.Where
	}
	said := map[string]bool{} // codes with messages: a finding that two checks come to is one
	for i := range checks {
		for _, one := range run(f, &checks[i]) {
			if key := one.Code + "\x00" + one.Message; one.Code == "" || !said[key] {
				said[key] = true
			} else {
				one = Result{Check: one.Check, Status: Skipped, Message: "said above: " + one.Code}
			}
			repeat := f.Config.Repeat
			one.Message, one.Hint, one.Command = repeat.In(one.Message), repeat.In(one.Hint),
				repeat.To(one.Command)
			rep.Results = append(rep.Results, one)
			if slices.Index(badness, one.Status) > slices.Index(badness, rep.Worst) {
				rep.Worst = one.Status
			}
		}
	}
	return rep
}

// run makes one check. A panic is the failure of that check alone.
func run(f *Facts, c *check) (results []Result) {
	r := &reporter{check: c.name}
	defer func() {
		if p := recover(); p != nil {
			results = []Result{{Check: c.name, Status: Unknown,
				Message: fmt.Sprintf("the check itself failed, which is a defect of outflow: %v", p)}}
		}
	}()
	for _, s := range c.needs {
		why, missing := f.why(s)
		if !missing {
			continue
		}
		if why.finding(s) && reportedBy[s] == c.name {
			r.fault(why.err)
			return r.results
		}
		one := Result{Check: c.name, Status: Unknown, Message: why.String()}
		root := cmp.Or(why.below, s)
		if at, _ := f.why(root); at.finding(root) && reportedBy[root] != "" { // which says why
			one.Message = fmt.Sprintf("needs %s, see %s", root, reportedBy[root])
			if !connections[root] { // it was read, and is wrong
				one.Status = Skipped
			}
		}
		return []Result{one}
	}
	if c.about != nil && !c.about(f) {
		return []Result{{Check: c.name, Status: Skipped}}
	}
	c.run(f, r)
	if len(r.results) == 0 {
		r.results = []Result{{Check: c.name, Status: OK, Message: r.detail}}
	}
	return r.results
}

// reporter collects what a check finds.
type reporter struct {
	check   string
	detail  string // said where all is well
	results []Result
}

// ok says what was found where all is well, in a few words.
func (r *reporter) ok(format string, args ...any) { r.detail = fmt.Sprintf(format, args...) }

// find reports a finding, as bad as the catalogue says.
func (r *reporter) find(code, format string, args ...any) *Result {
	return r.findAs(entry(code).Severity, code, format, args...)
}

// findAs is find with another severity: a threshold decides.
func (r *reporter) findAs(as finding.Severity, code, format string, args ...any) *Result {
	e := entry(code)
	r.results = append(r.results, Result{
		Check: r.check, Status: statusOf(as), Code: code, Title: e.Title, Hint: e.Hint,
		Message: fmt.Sprintf(format, args...),
	})
	return &r.results[len(r.results)-1]
}

// unknown says that something could not be read, and what would help.
func (r *reporter) unknown(format string, args ...any) {
	r.results = append(r.results, Result{Check: r.check, Status: Unknown,
		Message: fmt.Sprintf(format, args...)})
}

// fault reports what another part of outflow found, under its code. Its hint is about this case, so it comes
// before that of the catalogue.
func (r *reporter) fault(err error) {
	f := outbox.FaultOf(err)
	if f == nil {
		r.unknown("%v", err)
		return
	}
	said := *f
	said.Hint = ""
	found := r.find(f.Code, "%v", &said)
	if f.Hint != "" {
		found.Hint = f.Hint
	}
}

// entry is the catalogue's; a code that is not in it is an error without words of its own.
func entry(code string) finding.Finding {
	if e, ok := finding.Of(code); ok {
		return e
	}
	return finding.Finding{Severity: finding.Error}
}
