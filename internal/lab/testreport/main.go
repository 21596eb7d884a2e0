// Command testreport reads what go test -json prints, from files or pipes, all at the same time:
// testreport <(go test -json ./sink) <(go test -json ./decoder). It prints a line for each package, and at
// the end what else a run has to say: what was skipped and why, the slowest tests, the retries and
// standstills, and in the last place all that the tests printed which failed. It exits with 1 if one did.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// event is one line of go test -json; see go doc test2json.
type event struct {
	Action     string
	Package    string
	ImportPath string // of a build
	Test       string
	Elapsed    float64
	Output     string
}

func (e event) name() string {
	return strings.TrimSuffix(strings.TrimPrefix(cmp.Or(e.Package, e.ImportPath), module)+" "+e.Test, " ")
}

const module = "github.com/outflowhq/outflow/"

// slowest is how many tests are listed with their times.
const slowest = 10

type timed struct {
	name string
	took float64
}

// report is what was seen so far.
type report struct {
	mu      sync.Mutex                  // of what follows, and of the output
	output  map[string]*strings.Builder // by name, of tests and packages that haven't passed
	failed  []string
	skipped map[string][]string // names by reason
	times   []timed
	marks   map[string][]string // the lines that begin with a word of marked
	cpu     map[string]string   // by package, of its tests and of what they started; internal/lab/pgtest
	passed  int
}

// marked lines are printed by tests: internal/lab/await and the end-to-end tests say what they mean.
var marked = regexp.MustCompile(`^(postgres|seeds|retry|standstill|cpu): (.*)`)

// reason is what a skipped test said last.
var reason = regexp.MustCompile(`^ +\S+\.go:\d+: (.*)`)

func main() {
	r := newReport()
	var g errgroup.Group
	for _, name := range os.Args[1:] {
		g.Go(func() error {
			in, err := os.Open(name)
			if err != nil {
				return err
			}
			defer in.Close()
			return r.read(in, os.Stdout)
		})
	}
	if err := g.Wait(); err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		os.Exit(1)
	}
	r.print(os.Stdout)
	if len(r.failed) > 0 {
		os.Exit(1)
	}
}

func newReport() *report {
	return &report{output: map[string]*strings.Builder{}, skipped: map[string][]string{},
		marks: map[string][]string{}, cpu: map[string]string{}}
}

// read reads all events and prints a line for each package that ends, and for each test that fails.
func (r *report) read(in io.Reader, out io.Writer) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			return nil
		}
		if err != nil && err != io.EOF {
			return err
		}
		r.line(line, out)
	}
}

func (r *report) line(line []byte, out io.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e event
	if json.Unmarshal(line, &e) != nil { // what the go command says beside the tests
		fmt.Fprintf(out, "%s", line)
		return
	}
	r.take(e, out)
}

func (r *report) take(e event, out io.Writer) {
	name := e.name()
	switch e.Action {
	case "output", "build-output":
		if r.output[name] == nil {
			r.output[name] = &strings.Builder{}
		}
		r.output[name].WriteString(e.Output)
		if m := marked.FindStringSubmatch(e.Output); m != nil && m[1] == "cpu" {
			r.cpu[e.Package] = m[2]
		} else if m != nil {
			r.marks[m[1]] = append(r.marks[m[1]], m[2])
		}
	case "pass":
		if e.Test != "" {
			r.passed++
		}
		delete(r.output, name)
	case "skip":
		why := "no tests"
		if e.Test != "" {
			why = r.reason(name)
		}
		r.skipped[why] = append(r.skipped[why], name)
		delete(r.output, name)
	case "fail", "build-fail":
		if e.Test == "" { // a test that ran when the process ended has no result, but often the reason
			for _, open := range slices.Sorted(maps.Keys(r.output)) {
				if strings.HasPrefix(open, name+" ") && !slices.Contains(r.failed, open) {
					r.failed = append(r.failed, open)
					fmt.Fprintf(out, "FAIL  %s did not end\n", open)
				}
			}
		}
		r.failed = append(r.failed, name)
		if e.Test != "" {
			fmt.Fprintf(out, "FAIL  %s\n", name)
		}
	}
	switch e.Action {
	case "pass", "skip", "fail":
		if e.Test == "" && e.Action != "skip" { // of a package: it has no tests
			line := fmt.Sprintf("%-4s  %-45s %7.1f s", e.Action, name, e.Elapsed)
			if cpu := r.cpu[e.Package]; cpu != "" {
				line += fmt.Sprintf("%10s of CPU", cpu)
			}
			fmt.Fprintln(out, line)
		} else if e.Test != "" && !strings.Contains(e.Test, "/") {
			r.times = append(r.times, timed{name, e.Elapsed})
		}
	}
}

// reason returns why a test was skipped, which is the last thing that it said.
func (r *report) reason(name string) string {
	why := "it does not say why"
	if said := r.output[name]; said != nil {
		for line := range strings.Lines(said.String()) {
			if m := reason.FindStringSubmatch(line); m != nil {
				why = strings.TrimSpace(m[1])
			}
		}
	}
	return why
}

func (r *report) print(out io.Writer) {
	delete(r.skipped, "no tests")
	fmt.Fprintf(out, "\n== skipped\n")
	for _, why := range slices.Sorted(maps.Keys(r.skipped)) {
		names := r.skipped[why]
		fmt.Fprintf(out, "%s: %s", why, names[0])
		if more := len(names) - 1; more > 0 {
			fmt.Fprintf(out, " and %d more", more)
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "\n== the slowest tests\n")
	slices.SortStableFunc(r.times, func(a, b timed) int { return cmp.Compare(b.took, a.took) })
	for _, t := range r.times[:min(slowest, len(r.times))] {
		fmt.Fprintf(out, "%6.1f s  %s\n", t.took, t.name)
	}
	fmt.Fprintln(out)
	for _, kind := range []string{"postgres", "seeds", "retry", "standstill"} {
		slices.Sort(r.marks[kind])
		for _, said := range slices.Compact(slices.Clone(r.marks[kind])) {
			fmt.Fprintf(out, "%s: %s\n", kind, said)
		}
	}
	skipped := 0
	for _, names := range r.skipped {
		skipped += len(names)
	}
	if len(r.failed) > 0 {
		fmt.Fprintf(out, "\n== failed\n")
	}
	for _, name := range r.failed {
		fmt.Fprintf(out, "--- %s\n", name)
		if said := r.output[name]; said != nil {
			fmt.Fprintln(out, strings.TrimRight(said.String(), "\n"))
		}
	}
	fmt.Fprintf(out, "\ncommands run again: %d; standstills of the machine: %d; all tests together: %v\n",
		len(r.marks["retry"]), len(r.marks["standstill"]),
		time.Duration(r.total()*float64(time.Second)).Round(time.Second))
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", r.passed, len(r.failed), skipped)
}

// total is the time of all tests, in seconds; tests that run at the same time count each.
func (r *report) total() (sum float64) {
	for _, t := range r.times {
		sum += t.took
	}
	return sum
}
