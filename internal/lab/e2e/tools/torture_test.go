package tools

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// lab runs outflow-lab in a temporary directory of its own.
func lab(t *testing.T, tmp string, environ []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*harness.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Lab, args...)
	var out, errOut bytes.Buffer
	cmd.Env = append(append(os.Environ(), "TMPDIR="+tmp), environ...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// roomForServers is a temporary directory that PostgreSQL's own user may enter.
func roomForServers(t *testing.T) string {
	t.Helper()
	tmp, err := os.MkdirTemp("", "outflow-e2e-torture")
	harness.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(tmp) })
	harness.Must(t, os.Chmod(tmp, 0o755)) //nolint:gosec // the same
	return tmp
}

// TestOutflowSurvivesTheFaultsOfTorture is a short run of everything that one NATS server and one PostgreSQL
// can be made to do.
func TestOutflowSurvivesTheFaultsOfTorture(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	testTorture(t, "--duration", "10s")
}

// TestGapModeSurvivesTheFaultsOfTorture is the same in gap mode, with counters that never come.
func TestGapModeSurvivesTheFaultsOfTorture(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	testTorture(t, "--mode", "gap", "--duration", "6s", "--rate", "300")
}

func testTorture(t *testing.T, flags ...string) {
	t.Helper()
	tmp := roomForServers(t)
	out, log, code := lab(t, tmp, nil, append([]string{"torture", "--every", "800ms", "--faults",
		"all,-nats.away", "--source", "both", "--json"}, flags...)...)
	if code != 0 {
		t.Fatalf("exit code %d\n%s\n%s", code, log, out)
	}
	var r struct {
		Good     bool
		Rows     int
		Messages int
		Streams  []struct {
			Published int
			Twin      string
		}
		Faults []struct{ Strikes int }
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	strikes := 0
	for _, f := range r.Faults {
		strikes += f.Strikes
	}
	if !r.Good || r.Rows < 100 || r.Messages < 10 || len(r.Streams) != 3 || strikes < 1 {
		t.Errorf("%d rows, %d messages, %d streams, %d faults: not a plausible run\n%s", r.Rows, r.Messages,
			len(r.Streams), strikes, log)
	}
	for _, s := range r.Streams {
		if s.Published != r.Rows+r.Messages {
			t.Errorf("%d messages of %d rows", s.Published, r.Rows)
		}
	}
	if r.Streams[1].Twin != "equal" {
		t.Errorf("the first victim and its twin: %q", r.Streams[1].Twin)
	}
	left, err := os.ReadDir(tmp)
	harness.Must(t, err)
	if len(left) > 0 {
		t.Errorf("%s is left behind", left[0].Name())
	}
}

// TestOutflowSurvivesWhatStandsStillAndComesBack: what stands still and comes back, and an installation that
// leaves or is away, each at least once. The schedule ends after a number of faults, not after a time: on a
// slow machine none of them is left out.
func TestOutflowSurvivesWhatStandsStillAndComesBack(t *testing.T) {
	tier.OnlyLong(t, "the packages of outages and crashes stop and freeze each of them as well")
	t.Parallel()
	kinds := []string{"outflow.pause", "outflow.leave", "outflow.away", "postgres.pause", "nats.pause"}
	out, log, code := lab(t, roomForServers(t), nil, "torture", "--kills", "9", "--victims", "1", "--seed",
		"1", "--every", "1s",
		"--faults", strings.Replace(strings.Join(kinds, ","), "postgres.pause", "postgres.pause*4", 1),
		"--json")
	if code != 0 {
		t.Fatalf("exit code %d\n%s\n%s", code, log, out)
	}
	var r struct {
		Good     bool
		Rows     int
		Backlogs int
		Faults   []struct {
			Fault   string
			Strikes int
		}
	}
	harness.Must(t, json.Unmarshal([]byte(out), &r))
	struck := map[string]int{}
	for _, f := range r.Faults {
		struck[f.Fault] = f.Strikes
	}
	for _, kind := range kinds {
		if struck[kind] == 0 {
			t.Errorf("%s did not strike\n%s", kind, log)
		}
	}
	if !r.Good || r.Rows < 100 || r.Backlogs != struck["outflow.away"] {
		t.Errorf("%d rows, %d backlogs: not a plausible run\n%s", r.Rows, r.Backlogs, log)
	}
}

// TestTortureNoticesASpoiltStream: a stream that was spoilt behind outflow's back is a bad verdict, and what
// is kept is named.
func TestTortureNoticesASpoiltStream(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	for how, says := range map[string]string{
		"duplicate": `repeats`, "drop": `wrong place`, "abort": `no committed transaction`,
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			out, log, code := lab(t, roomForServers(t), []string{"OUTFLOW_TORTURE_SABOTAGE=" + how},
				"torture", "--duration", "2s", "--faults", "outflow.kill", "--victims", "1", "--seed", "5")
			if code != 4 {
				t.Errorf("exit code %d\n%s", code, log)
			}
			for _, want := range []string{`first: .*` + says, `DIFFERENT`, `NOT as promised. Seed 5`,
				`kept: .*outflow-torture`} {
				if !regexp.MustCompile(want).MatchString(out) {
					t.Errorf("it does not say %s:\n%s", want, out)
				}
			}
		})
	}
}

func TestTheScheduleOfTortureIsAFunctionOfTheSeed(t *testing.T) {
	t.Parallel()
	dry := func(seed string) string {
		out, log, code := lab(t, t.TempDir(), nil, "torture", "--dry-run", "--duration", "5m", "--seed", seed)
		if code != 0 || strings.Count(out, "outflow.kill") < 20 {
			t.Fatalf("exit code %d\n%s%s", code, log, out)
		}
		return out
	}
	first := dry("42")
	if dry("42") != first || dry("43") == first {
		t.Error("the schedule is not a function of the seed")
	}
	if _, log, code := lab(t, t.TempDir(), nil, "torture", "--faults", "nats.kil"); code != 2 ||
		!strings.Contains(log, "nats.kil") {
		t.Errorf("exit code %d: %s", code, log)
	}
}
