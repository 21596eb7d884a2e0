package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
)

// binary is the built program.
var binary string

// signalMode makes this test binary the program that TestASecondSignalEndsAStopThatHangs sends signals to.
const signalMode = "OUTFLOW_TEST_SIGNALS"

// panicMode makes it one that panics, in a way that the value names.
const panicMode = "OUTFLOW_TEST_PANIC"

func TestMain(m *testing.M) {
	if os.Getenv(signalMode) != "" {
		waitForSignals()
	}
	if mode := os.Getenv(panicMode); mode != "" {
		panicAsRun(mode)
	}
	os.Exit(withBinary(m))
}

func withBinary(m *testing.M) int {
	if binary = os.Getenv("OUTFLOW_TEST_BINARY"); binary != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "outflow")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "outflow")
	const this = "github.com/outflowhq/outflow/cmd/internal/cli"
	build := exec.Command("go", "build", "-ldflags", "-X "+this+".version=v1.2.3 -X "+this+".commit=abc1234",
		"-o", binary, "../../outflow")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// result is what a run of the program left.
type result struct {
	stdout, stderr string
	code           int
}

// slow finds what a command says of itself on a machine that stands still.
var slow = regexp.MustCompile(`(?m)^outflow.* is still at work \(.*\)\n`)

func outflow(t *testing.T, environ []string, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(binary, args...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, environ...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{stdout.String(), slow.ReplaceAllString(stderr.String(), ""), cmd.ProcessState.ExitCode()}
}

func TestTheVersionIsPrintedOnOneLine(t *testing.T) {
	t.Parallel()
	want := regexp.MustCompile(`^outflow \S+( commit \S+)? go\S+ \w+/\w+\n$`)
	for _, arg := range []string{"version", "--version"} {
		r := outflow(t, nil, arg)
		if r.code != 0 || r.stderr != "" || !want.MatchString(r.stdout) {
			t.Errorf("%s: %+v", arg, r)
		}
		if os.Getenv("OUTFLOW_TEST_BINARY") == "" &&
			!strings.HasPrefix(r.stdout, "outflow v1.2.3 commit abc1234 ") {
			t.Errorf("%s: %s, want what the linker set", arg, r.stdout)
		}
	}
}

func TestConfigShowsEachValueAndItsOrigin(t *testing.T) {
	t.Parallel()
	sample := "../../../docs/samples/partitioned.yaml"
	r := outflow(t, []string{"OUTFLOW_STREAM=ENV", "OUTFLOW_NATS_TOKEN=s3cr3t", "PGPASSWORD=s3cr3t"},
		"config", "--config", sample, "--reorder.horizon", "50ms", "--sink.msg_id")
	if r.code != 0 || r.stderr != "" {
		t.Fatalf("%+v", r)
	}
	for _, line := range []string{
		"  url: \"postgres://outflow@127.0.0.1:5432/app\"  # file " + sample + ":",
		"stream: ENV  # environment OUTFLOW_STREAM\n",
		"  horizon: 50ms  # flag --reorder.horizon\n",
		"  msg_id: true  # flag --sink.msg_id\n",
		"  durable_after: 150s  # default\n",
		"  token: \"***\"  # environment OUTFLOW_NATS_TOKEN\n",
	} {
		if !strings.Contains(r.stdout, line) {
			t.Errorf("%q is not in\n%s", line, r.stdout)
		}
	}
	if strings.Contains(r.stdout, "s3cr3t") {
		t.Errorf("a secret is in\n%s", r.stdout)
	}
}

func TestErrorsAreSaidOnStandardError(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "outflow.yaml")
	if err := os.WriteFile(file, []byte("stream: A\nreorder:\n  horizn: 20ms\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name          string
		environ, args []string
		want          string // all of standard error before the line that names the code
	}{
		{"unknown command", nil, []string{"begin"},
			"outflow: there is no command \"begin\"\nsee outflow --help\n"},
		{"nearly a command", nil, []string{"verson"},
			"outflow: there is no command \"verson\". The nearest is version\nsee outflow --help\n"},
		{"unknown flag", nil, []string{"config", "--horizon", "1s"},
			"outflow: unknown flag: --horizon. The nearest is --reorder.horizon\nsee outflow " +
				"config --help\n"},
		{"nearly a command's own flag", nil, []string{"init", "--dryrun"},
			"outflow: unknown flag: --dryrun. The nearest is --dry-run\nsee outflow init --help\n"},
		{"flag that is near to none", nil, []string{"run", "--watch"},
			"outflow: unknown flag: --watch\nsee outflow run --help\n"},
		{"unknown variable that is near to none", []string{"OUTFLOW_WATCH=1s"}, []string{"config"},
			"outflow: environment OUTFLOW_WATCH: there is no such setting. `outflow help settings` lists " +
				"all.\n"},
		{"dry run and snapshot", nil, []string{"init", "--dry-run", "--snapshot"},
			"outflow: --dry-run goes with none of --print, --snapshot, --sql-api and --json. " +
				"Give it alone.\n"},
		{"unknown flag of a command without settings", nil, []string{"version", "--json"},
			"outflow: unknown flag: --json\nsee outflow version --help\n"},
		{"flag without value", nil, []string{"config", "--stream"},
			"outflow: flag needs an argument: --stream\nsee outflow config --help\n"},
		{"argument", nil, []string{"config", "x"},
			"outflow: unknown command \"x\" for \"outflow config\"\nsee outflow config --help\n"},
		{"completion of nothing", nil, []string{"completion", "elvish"},
			"outflow: there is no command \"elvish\"\nsee outflow completion --help\n"},
		{"help of nothing", nil, []string{"help", "nothing"},
			"outflow: there is no command or topic \"nothing\"\nsee outflow help --help\n"},
		{"unknown key", nil, []string{"config", "--config", file},
			"outflow: " + file +
				":3: reorder.horizn: there is no such key. The nearest is reorder.horizon.\n"},
		{"unknown variable", []string{"OUTFLOW_HORIZON=1s"}, []string{"config"},
			"outflow: environment OUTFLOW_HORIZON: there is no such setting. The nearest is " +
				"OUTFLOW_REORDER_HORIZON.\n"},
		{"impossible", nil, []string{"config", "--init.replicas=6"},
			"outflow: init.replicas = \"6\" (flag --init.replicas) is not possible. Give a number from 1 " +
				"to 5.\n"},
		{"several", []string{"OUTFLOW_SLOT=A"}, []string{"config", "--stream", "A.B"},
			"outflow: 2 problems in the configuration:\n" +
				"  slot = \"A\" (environment OUTFLOW_SLOT) is not possible. Give 1 to 63 characters of a-z " +
				"0-9 _.\n" +
				"  stream = \"A.B\" (flag --stream) is not possible. Give 1 to 244 characters of A-Z a-z " +
				"0-9 _ -.\n`outflow config --stream=A.B` prints every setting with where its value " +
				"came from.\n"},
		{"print and snapshot", nil, []string{"init", "--print", "--snapshot"},
			"outflow: --print changes nothing, and goes with neither --snapshot nor --json. Give it alone, " +
				"or with --sql-api.\n"},
		{"no sequence", nil, []string{"replay", "--seq", "x"},
			"outflow: --seq: \"x\": not a sequence: they begin at 1. Write from..to; one of them may be " +
				"left out\n"},
		{"range that ends first", nil, []string{"replay", "--seq", "9..2"},
			"outflow: --seq \"9..2\": the range ends before it begins. Write from..to, the smaller one " +
				"first\n"},
		{"no file", nil, []string{"config", "--config", "none.yaml"},
			"outflow: config (flag --config): open none.yaml: no such file or directory. Name a file that " +
				"can be read.\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := outflow(t, tt.environ, tt.args...)
			said := regexp.MustCompile("(?m)^code .*\n").ReplaceAllString(r.stderr, "")
			if r.code != 2 || r.stdout != "" || said != tt.want {
				t.Errorf("code %d, stdout %q, stderr\n%s\nwant 2 and\n%s", r.code, r.stdout, r.stderr,
					tt.want)
			}
		})
	}
}

// What the sink knows about subjects is said with all the rest.
func TestSubjectsThatTheSinkRefusesAreUsageErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		args []string
		want string // part of standard error
	}{
		{[]string{"--subject", "{doc_id}"}, "subject"},
		{[]string{"--subject", "_outflow.{doc_id}"}, "subject"},
		{[]string{"--sink.on_poison", "dead_letter", "--sink.dead_letter_subject", "outbox.a"},
			"sink.dead_letter_subject"},
	} {
		r := outflow(t, nil, append([]string{"config"}, tt.args...)...)
		if r.code != 2 || !strings.Contains(r.stderr, tt.want) {
			t.Errorf("%v: code %d, %s", tt.args, r.code, r.stderr)
		}
	}
	for _, sample := range []string{"crdt", "topic", "partitioned"} {
		if r := outflow(t, nil, "config", "--config", "../../../docs/samples/"+sample+".yaml"); r.code != 0 {
			t.Errorf("%s: code %d, %s", sample, r.code, r.stderr)
		}
	}
}

func TestHelpShowsCommandsAndTopics(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		args       []string
		with, sans string
	}{
		{nil, "\n  config ", "--stream"},
		{[]string{"--help"}, "\n  config ", "--stream"},
		{[]string{"help"}, "Topics:\n  settings ", "--stream"},
		{[]string{"config", "--help"}, "outflow help settings", "--stream"},
		{[]string{"help", "config"}, "  -h, --help          help for config", "--stream"},
		{[]string{"help", "settings"}, "--stream string", "--config file"},
	} {
		r := outflow(t, nil, tt.args...)
		if r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, tt.with) ||
			strings.Contains(r.stdout, tt.sans) {
			t.Errorf("%v: want %q and not %q: %+v", tt.args, tt.with, tt.sans, r)
		}
	}
}

func TestCompletionKnowsCommandsAndSettings(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if r := outflow(t, nil, "completion", shell); r.code != 0 || r.stderr != "" || len(r.stdout) < 1000 {
			t.Errorf("%s: %+v", shell, r)
		}
	}
	for want, args := range map[string][]string{
		"seq_key\ncommit\n:4\n":       {"config", "--reorder.sort", ""},
		"--reorder.horizon\t":         {"config", "--reorder.ho"},
		"yaml\nyml\n:8\n":             {"config", "--config", ""},
		"settings\tAll settings":      {"help", ""},
		"version\tPrint the version,": {"ver"},
	} {
		if r := outflow(t, nil, append([]string{"__complete"}, args...)...); !strings.Contains(r.stdout,
			want) {
			t.Errorf("%v: %q, want %q", args, r.stdout, want)
		}
	}
}

// TestAnArchiveOfNothingIsListed: it is no error, and a person sees that there is nothing yet.
func TestAnArchiveOfNothingIsListed(t *testing.T) {
	t.Parallel()
	args := []string{"archive", "list", "--archive.url=file://" + t.TempDir(), "--stream=ORDERS"}
	if r := outflow(t, nil, args...); r.code != 0 || r.stderr != "" ||
		!strings.HasPrefix(r.stdout, "nothing of stream ORDERS is archived yet: a segment is made when") {
		t.Errorf("%+v", r)
	}
	if r := outflow(t, nil, "archive", "verify", args[2], args[3]); r.code != 3 ||
		!strings.Contains(r.stderr, "If nothing was archived yet, the first segment is made after") {
		t.Errorf("%+v", r)
	}
	if r := outflow(t, nil, append(args, "--json")...); r.code != 0 || r.stdout != "[]\n" {
		t.Errorf("%+v", r)
	}
}

// TestAWrongArchiveIsNotSuggestedAgain: what is said of it suggests no command that has it.
func TestAWrongArchiveIsNotSuggestedAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for at, code := range map[string]int{dir: 0, filepath.Join(dir, "none"): 3} {
		r := outflow(t, nil, "archive", "list", "--archive.url=file://"+at)
		if said := r.stdout + r.stderr; r.code != code || !strings.Contains(said, "of whoever archives") ||
			strings.Contains(said, "archive run --archive.url") {
			t.Errorf("%+v", r)
		}
	}
}

// TestAnErasureWithoutADocumentSaysWhatIsMissing, and where it is explained.
func TestAnErasureWithoutADocumentSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	if r := outflow(t, nil, "erase", "--request=r"); r.code != 2 ||
		!strings.Contains(r.stderr, "--doc is missing. `outflow erase --help` says") {
		t.Errorf("%+v", r)
	}
}

// Every command has an example, and none hides the hook of the root.
func TestEveryCommandHasAnExample(t *testing.T) {
	t.Parallel()
	a := &App{Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}
	for _, cmd := range a.Outflow().Commands() {
		if cmd.Runnable() && !cmd.HasSubCommands() && cmd.Name() != "help" && cmd.Example == "" {
			t.Errorf("%s has no example", cmd.Name())
		}
		if cmd.PersistentPreRun != nil || cmd.PersistentPreRunE != nil {
			t.Errorf("%s hides the root's hook, which tells usage errors from others", cmd.Name())
		}
	}
}

func TestEachClassHasItsExitCode(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want int
	}{
		{nil, 0},
		{errors.New("odd"), 1},
		{&outbox.Fault{Class: outbox.Transient}, 1},
		{&outbox.Fault{Class: outbox.Usage}, 2},
		{fmt.Errorf("start: %w", &outbox.Fault{Class: outbox.Fatal}), 3},
		{&outbox.Fault{Class: outbox.Gap}, 4},
		{&outbox.Fault{Class: outbox.Poison}, 5},
	} {
		a := &App{Name: "outflow", Stderr: &bytes.Buffer{}, started: true}
		if got := a.report(t.Context(), nil, tt.err); got != tt.want {
			t.Errorf("%v: %d, want %d", tt.err, got, tt.want)
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("stopped by a signal (interrupt)"))
	var stderr bytes.Buffer
	a := &App{Name: "outflow", Stderr: &stderr, started: true}
	if got := a.report(ctx, nil, fmt.Errorf("read: %w", ctx.Err())); got != 1 ||
		stderr.String() != "outflow: stopped by a signal (interrupt)\n" {
		t.Errorf("%d, %q", got, stderr.String())
	}
}

// waitForSignals says when the first signal has canceled the context, and then hangs. Its log is JSON.
func waitForSignals() {
	a := &App{Name: "outflow", Stderr: os.Stderr}
	ctx, _, _ := interruptible(context.Background(), a.endAtOnce)
	a.log.Store(slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	fmt.Println("ready")
	<-ctx.Done()
	fmt.Println(context.Cause(ctx))
	select {}
}

// The first signal cancels the context, the second one ends a stop that hangs.
func TestASecondSignalEndsAStopThatHangs(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), signalMode+"=1")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for _, step := range []struct {
		want string
		send os.Signal
	}{
		{"ready", syscall.SIGTERM},
		{"stopped by a signal (terminated)", os.Interrupt},
	} {
		if !lines.Scan() || lines.Text() != step.want {
			t.Fatalf("%q, want %q; %v", lines.Text(), step.want, lines.Err())
		}
		if err := cmd.Process.Signal(step.send); err != nil {
			t.Fatal(err)
		}
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	var last struct {
		Msg  string
		Exit int
	}
	if !errors.As(err, &exit) || exit.ExitCode() != 1 ||
		json.Unmarshal(stderr.Bytes(), &last) != nil || last.Exit != 1 ||
		last.Msg != "stopped at once by a second signal (interrupt)" {
		t.Errorf("%v, %s", err, stderr.String())
	}
}

// TestConfiguredCommandsAreThoseThatRepeatOptions: a suggested command gets the options if it has them.
func TestConfiguredCommandsAreThoseThatRepeatOptions(t *testing.T) {
	t.Parallel()
	a := App{Name: "outflow"}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, c := range cmd.Commands() {
			walk(c)
		}
		line := cmd.CommandPath()
		repeats := finding.Options{"--config x"}.To(line) != line
		if has := cmd.Flags().Lookup("config") != nil; cmd.RunE != nil && !cmd.HasSubCommands() &&
			has != repeats {
			t.Errorf("%s: has --config: %v, repeats it: %v", line, has, repeats)
		}
	}
	walk(a.Outflow())
}

// panicAsRun panics as a command would, or a goroutine that it has started.
func panicAsRun(mode string) {
	os.Args = []string{"outflow", "panic"}
	Main(&App{Name: "outflow"}, func(a *App) *cobra.Command {
		panics := func(cmd *cobra.Command, _ []string) error {
			if strings.HasPrefix(mode, "json") {
				a.log.Store(slog.New(slog.NewJSONHandler(a.Stderr, nil)))
			}
			if strings.HasSuffix(mode, "goroutine") {
				defer runBeside(cmd.Context(), func(context.Context) { panic("of a test") })()
				select {}
			}
			panic("of a test")
		}
		return a.Root(&cobra.Command{}, &cobra.Command{Use: "panic", RunE: panics})
	})
}

// Go's own exit code for a panic is that of a wrong option.
func TestAPanicIsUnexpectedAndShowsItsStack(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"text", "text goroutine", "json", "json goroutine"} {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), panicMode+"="+mode)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 1 {
			t.Errorf("%s: %v, %s", mode, err, out)
		}
		stack := string(out)
		if strings.HasPrefix(mode, "json") {
			var last struct {
				Msg, Code, Hint, Stack string
				Exit                   int
			}
			if err := json.Unmarshal(out, &last); err != nil || last.Msg != "panic: of a test" ||
				last.Code != "panic" || last.Exit != 1 || last.Hint == "" {
				t.Errorf("%s: %v, %s", mode, err, out)
			}
			stack = last.Stack
		} else if !strings.Contains(stack, "\noutflow: panic: of a test. ") || !strings.HasSuffix(stack,
			"\ncode panic: see `outflow explain panic`\n") {
			t.Errorf("%s: %s", mode, out)
		}
		if !strings.Contains(stack, "cli.panicAsRun.") {
			t.Errorf("%s: no stack in %s", mode, out)
		}
	}
}
