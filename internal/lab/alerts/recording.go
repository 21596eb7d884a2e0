package alerts

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
)

// Step is the time between two scrapes when a recording is played.
//
// Rules wait for minutes and look back for hours, and to record an outage should not take as long. So it is
// played slower than it was recorded: each scrape as if it were a step after the one before, whatever the
// time between them was, one second as a rule. Timestamps are moved alike: what is 4 s old is a minute old
// when it is played, and a machine that stood still between two scrapes has lost no more than a step.
//
// What an instance does of itself, such as its attempts to connect, is slower by the same factor, and so are
// rates. What is measured in seconds, such as a latency, and what is counted stay as they are.
const Step = 15 * time.Second

// Recording is what Prometheus would have of an outage, in the notation of promtool.
type Recording struct {
	Marks  []Mark   // when something was done, in order
	Series []Series // those that the rules read
}

// Mark is a moment of a recording, by the clock of what is played.
type Mark struct {
	At   time.Duration
	What string
}

// Series is a series in the notation of promtool, a value each [Step].
type Series struct {
	Series string `json:"series"`
	Values string `json:"values"`
}

// Recordings is the folder of the recordings in the repository.
var Recordings = filepath.Join("internal", "lab", "alerts", "testdata")

// Read reads a recording.
func Read(path string) (r Recording, err error) {
	content, err := os.ReadFile(path)
	if err == nil {
		err = yaml.Unmarshal(content, &r)
	}
	return r, err
}

// Write writes it to a file, a line for each series.
func (r *Recording) Write(path string) error {
	var b strings.Builder
	b.WriteString("# Recorded by TestOutagesAreRecordedForTheAlerts of internal/lab/e2e/operate.\nmarks:\n")
	for _, m := range r.Marks {
		fmt.Fprintf(&b, "- {at: %v, what: %s}\n", m.At, quoted(m.What))
	}
	b.WriteString("series:\n")
	for _, s := range r.Series {
		fmt.Fprintf(&b, "- {series: %s, values: %s}\n", quoted(s.Series), quoted(s.Values))
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

func quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// readBy finds the series that an expression reads.
var readBy = regexp.MustCompile(`\b(?:outflow|process|go)_\w+`)

// Recorder makes a recording. It is for one goroutine.
type Recorder struct {
	reads  map[string]bool // the names of what is recorded
	marks  []Mark
	times  []time.Time
	values map[string][]float64 // by series; NaN where a scrape did not have it
}

// NewRecorder returns a recorder of the series that rules read.
func NewRecorder(rules []Rule) *Recorder {
	r := &Recorder{reads: map[string]bool{}, values: map[string][]float64{}}
	for _, rule := range rules {
		for _, name := range readBy.FindAllString(rule.Expr, -1) {
			r.reads[name] = true
		}
	}
	return r
}

// Mark notes that something is done before the next scrape.
func (r *Recorder) Mark(what string) {
	r.marks = append(r.marks, Mark{time.Duration(len(r.times)) * Step, what})
}

// Scrape adds what instances answered at a time, by the labels that Prometheus adds to it, such as
// job="outflow",instance="a". Who did not answer is left out.
func (r *Recorder) Scrape(at time.Time, pages map[string]string) error {
	r.times = append(r.times, at)
	for labels, page := range pages {
		for line := range strings.Lines(page) {
			line = strings.TrimSpace(line)
			space := strings.LastIndexByte(line, ' ')
			name, of, _ := strings.Cut(line[:max(0, space)], "{")
			if !r.reads[name] {
				continue
			}
			value, err := strconv.ParseFloat(line[space+1:], 64)
			if err != nil {
				return fmt.Errorf("%s: %w", line, err)
			}
			key := name + "{" + strings.TrimSuffix(labels+","+strings.TrimSuffix(of, "}"), ",") + "}"
			r.values[key] = append(r.fill(key, len(r.times)-1), value)
		}
	}
	return nil
}

// fill returns the values of a series, n of them.
func (r *Recorder) fill(key string, n int) []float64 {
	return append(r.values[key], slices.Repeat([]float64{math.NaN()}, n-len(r.values[key]))...)
}

// Recording returns what was recorded.
func (r *Recorder) Recording() Recording {
	r.Mark("the end")
	all := Recording{Marks: r.marks}
	for key := range r.values {
		values := r.fill(key, len(r.times))
		if name, _, _ := strings.Cut(key, "{"); strings.HasSuffix(name, "_timestamp_seconds") ||
			strings.HasSuffix(name, "_time_seconds") {
			for i, v := range values {
				values[i] = r.played(v)
			}
		}
		all.Series = append(all.Series, Series{key, notation(values)})
	}
	slices.SortFunc(all.Series, func(a, b Series) int { return strings.Compare(a.Series, b.Series) })
	return all
}

// played returns when a moment is played, in whole seconds from the begin, which may be before it.
func (r *Recorder) played(unix float64) float64 {
	if math.IsNaN(unix) {
		return unix
	}
	at := time.UnixMicro(int64(unix * 1e6))
	i, _ := slices.BinarySearchFunc(r.times, at, time.Time.Compare) // the first scrape that is not before it
	step := time.Second                                             // outside of the recording
	if i > 0 && i < len(r.times) {
		step = r.times[i].Sub(r.times[i-1])
	}
	i = min(i, len(r.times)-1)
	return math.Round((float64(i) - r.times[i].Sub(at).Seconds()/step.Seconds()) * Step.Seconds())
}

// notation writes values as promtool reads them: 7+2x3 are 7, 9, 11 and 13, _ is no value, and stale the end
// of a series, which Prometheus writes when a scrape does not have it any more.
func notation(values []float64) string {
	var all []string
	for i := 0; i < len(values); {
		n := 1 // values from i on that are one notation
		if v := values[i]; math.IsNaN(v) {
			for i+n < len(values) && math.IsNaN(values[i+n]) {
				n++
			}
			missing := n
			if i > 0 {
				all = append(all, "stale")
				missing--
			}
			if missing > 0 {
				all = append(all, fmt.Sprintf("_x%d", missing))
			}
		} else {
			for i+n < len(values) && values[i+n]-values[i+n-1] == values[i+1]-v {
				n++
			}
			if n == 2 && values[i+1] != v { // which would be no shorter
				n = 1
			}
			text := number(v)
			if n > 1 {
				if step := values[i+1] - v; step > 0 {
					text += "+" + number(step)
				} else if step < 0 {
					text += number(step)
				}
				text += fmt.Sprintf("x%d", n-1)
			}
			all = append(all, text)
		}
		i += n
	}
	return strings.Join(all, " ")
}

func number(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }
