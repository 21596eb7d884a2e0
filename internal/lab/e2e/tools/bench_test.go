package tools

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// benchReport is what of outflow-lab bench's JSON the tests look at.
type benchReport struct {
	Version     string `json:"version"`
	Repetitions int    `json:"repetitions"`
	Cases       []struct {
		Name       string `json:"name"`
		Kind       string `json:"kind"`
		Rows       int    `json:"rows"`
		PerTx      int    `json:"rows_per_transaction"`
		Contenders []struct {
			Name    string                `json:"name"`
			Figures map[string]benchValue `json:"figures"`
			Ratios  map[string]benchValue `json:"ratios"`
		} `json:"contenders"`
	} `json:"cases"`
}

type benchValue struct {
	Median, Low, High float64
	Values            []float64
}

// TestABenchMeasuresEverythingAndLeavesNothing is a small run: who takes part, and that everything is
// measured and nothing is left. How fast is for no test to say.
func TestABenchMeasuresEverythingAndLeavesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	b := startWithServers(t, "bench", "--case", "drain", "--rows", "2000", "--repetitions", "1", "--json",
		"-", "--outflow", "before="+harness.Binary, "--settings", "before:reorder.max_events=1000")
	code := b.code()
	b.nothingLeft()
	screen := b.out.String()
	at := strings.Index(screen, "\n{\n")
	if code != 0 || at < 0 {
		t.Fatalf("exit code %d", code)
	}
	var r benchReport
	harness.Must(t, json.Unmarshal([]byte(screen[at:]), &r))
	if r.Version == "" || r.Repetitions != 1 || len(r.Cases) != 2 {
		t.Fatalf("version %q, %d repetitions, %d cases; want 1 and 2", r.Version, r.Repetitions, len(r.Cases))
	}
	for i, perTx := range []int{1, 100} {
		c := r.Cases[i]
		if c.Name != "drain" || c.Kind != "drain" || c.Rows != 2000 || c.PerTx != perTx {
			t.Errorf("case %d is %s (%s) of %d rows, %d a transaction", i, c.Name, c.Kind, c.Rows, c.PerTx)
		}
		var names []string
		for _, who := range c.Contenders {
			names = append(names, who.Name)
			for _, m := range []string{"events_per_second", "cpu_itself_us_per_event",
				"cpu_postgresql_us_per_event", "cpu_nats_us_per_event"} {
				if got, ok := who.Figures[m]; !ok || len(got.Values) != 1 || got.Low != got.High ||
					got.Median < 0 {
					t.Errorf("%s, %s: %+v", who.Name, m, got)
				}
			}
			if who.Figures["events_per_second"].Median <= 0 || len(who.Ratios) != len(c.Contenders)-1 {
				t.Errorf("%s: %v events/s, ratios %v", who.Name, who.Figures["events_per_second"], who.Ratios)
			}
		}
		all := strings.Join(names, " ")
		if withTool, without := "outflow before pg_recvlogical publisher relay",
			"outflow before publisher relay"; all != withTool && all != without {
			t.Errorf("the contenders are %s", all)
		}
	}
	for _, want := range []string{"drain, 1 row a transaction, 2000 rows",
		"drain, 100 rows a transaction, 2000 rows", "/ relay", "itself µs"} {
		if !strings.Contains(screen, want) {
			t.Errorf("the screen does not show %s", want)
		}
	}
}

// TestAnInterruptedBenchLeavesNothing: a signal while it starts, while a backlog is drained and while writers
// write leaves nothing.
func TestAnInterruptedBenchLeavesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		when string
	}{
		"starts":  {nil, "servers "},
		"drains":  {[]string{"--case", "drain", "--rows", "2000", "--repetitions", "1000"}, " events/s\n"},
		"follows": {[]string{"--case", "latency", "--repetitions", "1000"}, "latency, "},
	} {
		t.Run(name, func(t *testing.T) {
			b := startWithServers(t, append([]string{"bench"}, c.args...)...)
			harness.Eventually(t, "the screen shows "+c.when, func() error {
				if !strings.Contains(b.out.String(), c.when) {
					return fmt.Errorf("%s", b.out.Tail(500))
				}
				return nil
			})
			harness.Must(t, b.child.Signal(syscall.SIGINT))
			code := b.code()
			b.nothingLeft()
			last, err := lastLine(strings.NewReader(b.out.String()))
			harness.Must(t, err)
			if code != 1 || !strings.Contains(last, "stopped by a signal") {
				t.Errorf("exit code %d, and the last line is %q", code, last)
			}
		})
	}
}

func TestABenchNamesTheArgumentItRefuses(t *testing.T) {
	t.Parallel()
	for named, args := range map[string][]string{
		"drian":           {"--case", "drian"},
		"--repetitions 0": {"--repetitions", "0"},
		"relay":           {"--outflow", "relay=" + harness.Binary},
		"none":            {"--outflow", "v1=" + filepath.Join(t.TempDir(), "none")},
		"v1":              {"--settings", "v1:stream=X"},
		"setting=value":   {"--settings", "stream"},
	} {
		if _, stderr, code := lab(t, t.TempDir(), nil, append([]string{"bench"}, args...)...); code != 2 ||
			!strings.Contains(stderr, named) {
			t.Errorf("outflow-lab bench %v: exit code %d, want 2 and a name:\n%s", args, code, stderr)
		}
	}
}
