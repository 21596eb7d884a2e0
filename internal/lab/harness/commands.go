package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/operate/drain"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Run runs a command to its end, again where it gave up because a server did not answer: it waits for
// seconds, and says so with exit code 1, or 3 where it could not connect. Any other code stands.
func (o *Outflow) Run(args ...string) (stdout, stderr string, code int) {
	o.T.Helper()
	return o.runUntil(func(string) bool { return false }, args...)
}

// runUntil is exec where a server that does not answer may be what is wanted: done tells.
func (o *Outflow) runUntil(done func(stderr string) bool, args ...string) (stdout, stderr string, code int) {
	o.T.Helper()
	said := ""
	for try := 1; ; try++ {
		stdout, stderr, code = o.runOnce(args...)
		if args[0] == "init" { // what one has made, the next one finds
			said += stdout
			stdout = said
		}
		if code != 1 && code != 3 || try == Tries || done(stderr) || !Unanswered(o.T, args, stderr) {
			return stdout, stderr, code
		}
	}
}

// silent is what a command says that gave up because a server did not answer.
var silent = regexp.MustCompile(
	`(?i)deadline exceeded|time-?out|timed out|no responders|no response|not? answer|connection to NATS is lost`)

// Unanswered tells whether a command may be run again: it gave up because a server did not answer, on a
// machine that was seen to stand still meanwhile. Each retry is a line that begins with "retry:", which the
// report of a test run counts.
func Unanswered(t testing.TB, command any, said string) bool {
	again := silent.MatchString(said) && await.StoodStill(2*time.Minute)
	if again {
		fmt.Fprintf(os.Stderr, "retry: %s: %v: %s\n", t.Name(), command, said)
	}
	return again
}

// runOnce runs a command to its end, once.
func (o *Outflow) runOnce(args ...string) (stdout, stderr string, code int) {
	o.T.Helper()
	ctx, cancel := context.WithTimeout(o.T.Context(), 2*Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, Program(o.Env), args...)
	var out, errOut bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = o.Env, &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		o.T.Fatal(err)
	}
	if ctx.Err() != nil {
		o.T.Fatalf("outflow %v did not end: %s", args, errOut.String())
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

var lsnRange = regexp.MustCompile(`LSN range ([0-9A-F]+/[0-9A-F]+) to ([0-9A-F]+/[0-9A-F]+)`)

// LSNRange reads the range from what outflow run said last.
func (o *Outflow) LSNRange() (from, to outbox.LSN) {
	o.T.Helper()
	found := lsnRange.FindStringSubmatch(o.lastLine())
	if found == nil {
		o.T.Fatalf("no LSN range in %s", o.lastLine())
	}
	var err error
	from, err = outbox.ParseLSN(found[1])
	Must(o.T, err)
	to, err = outbox.ParseLSN(found[2])
	Must(o.T, err)
	return from, to
}

// MustRun runs a command, which must succeed, and returns what it prints.
func (o *Outflow) MustRun(args ...string) (stdout string) {
	o.T.Helper()
	stdout, stderr, code := o.Run(args...)
	if code != 0 {
		o.T.Fatalf("outflow %v: exit code %d\n%s%s", args, code, stdout, stderr)
	}
	return stdout
}

// StatusReport is what outflow status says.
type StatusReport struct {
	Health     string
	Slot       struct{ Confirmed outbox.LSN }
	Checkpoint relay.Checkpoint `json:"place"`
	Stream     struct {
		Loss     string
		Affected []string `json:"durables_affected"`
	}
}

func (o *Outflow) Status() (r StatusReport) {
	o.T.Helper()
	Must(o.T, json.Unmarshal([]byte(o.MustRun("status", "--json")), &r))
	return r
}

// Drain runs outflow drain, which must succeed, and returns what it found.
func (o *Outflow) Drain() (r drain.Report) {
	o.T.Helper()
	Must(o.T, json.Unmarshal([]byte(o.MustRun("drain", "--json", "--timeout", Patience.String())), &r))
	if !r.Drained {
		o.T.Errorf("outflow drain: exit code 0, but %+v", r)
	}
	return r
}

// repairReport is what outflow repair --json prints, as far as tests look at it.
type repairReport struct {
	Fault, Mode, Command     string
	Notes                    []string
	Rows, Missing, Published int
	Erased                   int
	Repaired                 bool
	First, Last              struct {
		Doc string `json:"doc_id"`
		Key string `json:"seq_key"`
	}
}

// RunningRepair is an outflow repair --json that runs.
type RunningRepair struct {
	o           *Outflow
	args        []string
	cmd         *exec.Cmd
	out, stderr bytes.Buffer
}

func (o *Outflow) StartRepair(args ...string) *RunningRepair {
	o.T.Helper()
	r := &RunningRepair{o: o, args: args, cmd: exec.CommandContext(o.T.Context(), Program(o.Env),
		append([]string{"repair", "--json"}, args...)...)}
	r.cmd.Env, r.cmd.Stdout, r.cmd.Stderr = o.Env, &r.out, &r.stderr
	Must(o.T, r.cmd.Start())
	return r
}

// Wait waits for its end, and runs it again where it gave up because a server did not answer.
func (r *RunningRepair) Wait() (report repairReport, stderr string, code int) {
	r.o.T.Helper()
	for try := 1; ; try++ {
		var exit *exec.ExitError
		if err := r.cmd.Wait(); err != nil && !errors.As(err, &exit) {
			r.o.T.Fatal(err)
		}
		if r.cmd.ProcessState.ExitCode() != 1 || try == Tries ||
			!Unanswered(r.o.T, r.args, r.stderr.String()) {
			break
		}
		r = r.o.StartRepair(r.args...)
	}
	if r.out.Len() > 0 {
		if err := json.Unmarshal(r.out.Bytes(), &report); err != nil {
			r.o.T.Fatalf("outflow repair: %v: %s", err, r.out.String())
		}
	}
	return report, r.stderr.String(), r.cmd.ProcessState.ExitCode()
}

// Repair runs outflow repair with --json.
func (o *Outflow) Repair(args ...string) (r repairReport, stderr string, code int) {
	o.T.Helper()
	return o.StartRepair(args...).Wait()
}

// ReplayedEvent is a line that outflow replay prints.
type ReplayedEvent struct {
	Sequence uint64
	Subject  string
	Headers  map[string][]string
	Position string
	Document string
	ID       string
	Key      string
	Time     time.Time
	Data     json.RawMessage
	Base64   *string `json:"data_base64"`
}

// Replay runs outflow replay to standard output, which must succeed. One that retention has overtaken says
// so, and is run again.
func (o *Outflow) Replay(args ...string) []ReplayedEvent {
	o.T.Helper()
	var out string
	Eventually(o.T, fmt.Sprintf("outflow replay %v", args), func() error {
		var stderr string
		var code int
		out, stderr, code = o.Run(append([]string{"replay"}, args...)...)
		if code != 0 && !strings.Contains(stderr, "code replay_removed") {
			o.T.Fatalf("outflow replay %v: exit code %d\n%s", args, code, stderr)
		}
		if code != 0 {
			return errors.New(stderr)
		}
		return nil
	})
	var all []ReplayedEvent
	for l := range strings.Lines(out) {
		var r ReplayedEvent
		if err := json.Unmarshal([]byte(l), &r); err != nil {
			o.T.Fatalf("outflow replay %v: %v: %s", args, err, l)
		}
		all = append(all, r)
	}
	return all
}

// KillSnapshotAt takes the snapshot and kills it at a point.
func (f *Installation) KillSnapshotAt(t *testing.T, point string) {
	t.Helper()
	f.Set("FAILPOINT=" + point)
	defer func() { f.Env = f.Env[:len(f.Env)-1] }()
	if r, stderr, code, killed := f.Snapshot(); !killed {
		t.Errorf("%s: exit code %d, %+v\n%s", point, code, r, stderr)
	}
}

// CheckFrozen returns an error unless a process stands still as by kill -STOP.
func CheckFrozen(pid int) error {
	out, err := exec.Command("ps", "-o", "stat=", "-p", fmt.Sprint(pid)).Output()
	if err == nil && !strings.HasPrefix(string(out), "T") {
		err = fmt.Errorf("its state is %s", out)
	}
	return err
}

// SnapshotReport is what outflow init --snapshot --json prints, as far as tests look at it.
type SnapshotReport struct {
	At                             string
	Already, Published, Rows, Last int
	Order                          string
	Finished                       bool
}

// Snapshot runs outflow init --snapshot. killed: a failpoint, or somebody, has ended it.
// One that gave up because a server did not answer is run again.
func (o *Outflow) Snapshot() (r SnapshotReport, stderr string, code int, killed bool) {
	o.T.Helper()
	for try := 1; ; try++ {
		r, stderr, code, killed = o.snapshotOnce()
		if killed || code != 1 || try == Tries || !Unanswered(o.T, "init --snapshot", stderr) {
			return r, stderr, code, killed
		}
	}
}

func (o *Outflow) snapshotOnce() (r SnapshotReport, stderr string, code int, killed bool) {
	o.T.Helper()
	cmd := exec.CommandContext(o.T.Context(), Program(o.Env), "init", "--snapshot", "--json")
	var out, errOut strings.Builder
	cmd.Env, cmd.Stdout, cmd.Stderr = o.Env, &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		o.T.Fatal(err)
	}
	if exit != nil && exit.Sys().(syscall.WaitStatus).Signaled() {
		return r, errOut.String(), -1, true
	}
	if err := json.Unmarshal([]byte(out.String()), &r); err != nil && out.Len() > 0 {
		o.T.Fatalf("%v in %s", err, out.String())
	}
	return r, errOut.String(), cmd.ProcessState.ExitCode(), false
}

// MustSnapshot takes the snapshot, which must come to its end.
func (o *Outflow) MustSnapshot() SnapshotReport {
	o.T.Helper()
	r, stderr, code, _ := o.Snapshot()
	if code != 0 || !r.Finished {
		o.T.Fatalf("outflow init --snapshot: exit code %d, %+v\n%s", code, r, stderr)
	}
	return r
}

// MustFail runs a command that must end with an exit code and say certain things on standard error.
func (o *Outflow) MustFail(code int, args []string, says ...string) {
	o.T.Helper()
	wanted := func(stderr string) bool {
		return (code == 1 || code == 3) &&
			!slices.ContainsFunc(says, func(s string) bool { return !strings.Contains(stderr, s) })
	}
	out, errOut, got := o.runUntil(wanted, args...)
	if got != code {
		o.T.Errorf("outflow %v: exit code %d, want %d\n%s%s", args, got, code, out, errOut)
	}
	o.MustContain(fmt.Sprintf("outflow %v", args), errOut, says...)
}

// MustStop ends it with SIGTERM: the exit code must be 0.
func (o *Outflow) MustStop(t testing.TB) {
	t.Helper()
	if code := o.Stop(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
}

// MustEnd waits for the end of outflow run, which must have an exit code and say certain things last.
func (o *Outflow) MustEnd(code int, says ...string) {
	o.T.Helper()
	if got := o.Wait(); got != code {
		o.T.Errorf("outflow run: exit code %d, want %d", got, code)
	}
	o.MustContain("outflow run", o.lastLine(), says...)
}

// MustEndInGap waits for the end of outflow run, which must be a gap of a code with a range. Where no repair
// accepts it, outflow status says which.
func (o *Outflow) MustEndInGap(code string) {
	o.T.Helper()
	o.MustEnd(4)
	if code != "record_corrupt" { // it would have held where the range begins
		o.LSNRange()
	}
	if code == "slot_plugin" || code == "slot_database" {
		o.AwaitHealth(code)
		return
	}
	o.mustBeGap("outflow run", o.lastLine(), code)
}

// MustFailInGap runs a command, which must end with a gap of a code.
func (o *Outflow) MustFailInGap(code string, args ...string) {
	o.T.Helper()
	_, stderr, got := o.Run(args...)
	if got != 4 {
		o.T.Errorf("outflow %v: exit code %d, want 4", args, got)
	}
	o.mustBeGap(fmt.Sprintf("outflow %v", args), stderr, code)
}

// mustBeGap finds the code of a gap in what a program said: as what a repair has to accept.
func (o *Outflow) mustBeGap(who, said, code string) {
	o.T.Helper()
	if !regexp.MustCompile("outflow repair --accept " + code + `\b`).MatchString(said) {
		o.T.Errorf("%s does not end with the code %s:\n%s", who, code, said)
	}
}

func (o *Outflow) MustContain(who, text string, says ...string) {
	o.T.Helper()
	for _, s := range says {
		if !strings.Contains(text, s) {
			o.T.Errorf("%s does not say %q:\n%s", who, s, text)
		}
	}
}
