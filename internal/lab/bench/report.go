package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"
)

// Report is what a run has measured. As JSON it is made to be compared with another one.
type Report struct {
	Version     string        `json:"version"`
	Begun       time.Time     `json:"begun"`
	Machine     string        `json:"machine"`
	PostgreSQL  string        `json:"postgresql"`
	NATS        string        `json:"nats"`
	Builds      []Build       `json:"builds,omitempty"`   // beside this one
	Settings    []Setting     `json:"settings,omitempty"` // of the outflows, where not the defaults
	Repetitions int           `json:"repetitions"`
	Left        []string      `json:"left_out,omitempty"` // what could not be measured, and why
	Cases       []*CaseReport `json:"cases"`
}

// CaseReport is what a case has measured.
type CaseReport struct {
	Case
	Title      string            `json:"title"`
	WALBytes   *Figure           `json:"wal_bytes_per_event,omitempty"` // of writing the backlog
	Contenders []ContenderReport `json:"contenders"`
}

// ContenderReport is what a contender has reached.
type ContenderReport struct {
	Name    string            `json:"name"`
	Figures map[metric]Figure `json:"figures"`
	// of its events/s to another contender's, turn by turn
	Ratios map[string]Figure `json:"ratios,omitempty"`
}

func newReport(o *Options) *Report {
	return &Report{
		Version: o.Version, Begun: time.Now().UTC().Truncate(time.Second), Machine: machine(),
		Builds: o.Builds, Settings: o.Settings, Repetitions: o.Repetitions, Cases: []*CaseReport{},
	}
}

func machine() string {
	text := fmt.Sprintf("%s, %s/%s, %s", count(runtime.NumCPU(), "CPU"), runtime.GOOS, runtime.GOARCH,
		runtime.Version())
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return text
	}
	for line := range strings.Lines(string(info)) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
			return text + ", " + strings.TrimSpace(value)
		}
	}
	return text
}

func newCaseReport(c *Case, names []string, turns []turn, wal []float64) *CaseReport {
	r := &CaseReport{Case: *c, Title: c.title()}
	if len(wal) > 0 {
		f := figure(wal)
		r.WALBytes = &f
	}
	for _, name := range names {
		one := ContenderReport{Name: name, Figures: summarize(turns, name)}
		for _, other := range names {
			if f, ok := ratio(turns, eventRate, name, other); ok && other != name && c.Kind != latency {
				if one.Ratios == nil {
					one.Ratios = map[string]Figure{}
				}
				one.Ratios[other] = f
			}
		}
		r.Contenders = append(r.Contenders, one)
	}
	return r
}

// WriteJSON writes the report.
func (r *Report) WriteJSON(to io.Writer) error {
	e := json.NewEncoder(to)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}
