package tools

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// demo is a run of outflow-lab demo, or another command that starts servers, with a temporary directory of
// its own.
type demo struct {
	t     *testing.T
	tmp   string
	child *process.Process
	out   *harness.Log
}

func startDemo(t *testing.T, args ...string) *demo {
	t.Helper()
	return startWithServers(t, append([]string{"demo"}, args...)...)
}

func startWithServers(t *testing.T, args ...string) *demo {
	t.Helper()
	// Not t.TempDir: PostgreSQL may run as another user, who has to get in.
	tmp, err := os.MkdirTemp("", "outflow-e2e-demo")
	harness.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(tmp) })
	harness.Must(t, os.Chmod(tmp, 0o755)) //nolint:gosec // the same
	d := &demo{t: t, tmp: tmp, out: &harness.Log{}}
	cmd := exec.Command(harness.Lab, args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	cmd.Stdout, cmd.Stderr = d.out, d.out
	d.child, err = process.Start(cmd, syscall.SIGTERM)
	harness.Must(t, err)
	t.Cleanup(func() {
		if d.child.Running() {
			_ = d.child.Signal(syscall.SIGTERM)
			<-d.child.Done()
		}
		if t.Failed() {
			t.Logf("screen:\n%s", d.out.Tail(8000))
		}
	})
	return d
}

// code waits for the end.
func (d *demo) code() int {
	d.t.Helper()
	select {
	case <-d.child.Done():
	case <-time.After(2 * harness.Patience):
		d.t.Fatal("it does not end")
	}
	var exit *exec.ExitError
	if err := d.child.Wait(); errors.As(err, &exit) {
		return exit.ExitCode()
	} else if err != nil {
		d.t.Fatal(err)
	}
	return 0
}

// nothingLeft makes sure that no file, and no process with our temporary directory, is left.
func (d *demo) nothingLeft() {
	d.t.Helper()
	files, err := os.ReadDir(d.tmp)
	harness.Must(d.t, err)
	for _, f := range files {
		d.t.Errorf("%s is left behind", f.Name())
	}
	environs, err := filepath.Glob("/proc/[0-9]*/environ")
	harness.Must(d.t, err)
	for _, name := range environs {
		env, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended, or is another user's
		}
		if bytes.Contains(env, []byte(d.tmp)) {
			line, _ := os.ReadFile(filepath.Join(filepath.Dir(name), "cmdline")) // for the message
			d.t.Errorf("process %s is left behind: %q", filepath.Base(filepath.Dir(name)), line)
		}
	}
}

func TestTheDemoShowsItsVerdictAndLeavesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	d := startDemo(t, "--rate", "8000", "--bound", "20s", "--cold", "20s")
	code := d.code()
	d.nothingLeft()
	screen := d.out.String()
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	for _, want := range []string{
		`ROLLBACK`, `kill -9`, `started again`, `commit order +horizon +gap mode`,
		`committed( +25599){3}`, `published( +25599){3}`, `missing( +0){3}\b`, `repeated( +0){3}\b`,
		`misplaced( +0){3}\b`, `late +\d+ +\d+ +0\b`, `added p50( +[\d.]+ ms){3}`,
		`in vain p99( +[\d.]+ ms){2} +0.00 ms`,
		`latency p99( +[\d.]+ ms){3}`,
		`[\d.]+ events/s`,
	} {
		if !regexp.MustCompile(want).MatchString(screen) {
			t.Errorf("the screen does not show %s", want)
		}
	}
}

func TestAnInterruptedDemoLeavesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	for _, when := range []string{"postgres ", "outbox."} { // while it starts; while it shows messages
		t.Run(strings.TrimSpace(when), func(t *testing.T) {
			d := startDemo(t)
			harness.Eventually(t, "the screen shows "+when, func() error {
				if !strings.Contains(d.out.String(), when) {
					return fmt.Errorf("%s", d.out.Tail(500))
				}
				return nil
			})
			harness.Must(t, d.child.Signal(syscall.SIGINT))
			code := d.code()
			d.nothingLeft()
			last, err := lastLine(strings.NewReader(d.out.String()))
			harness.Must(t, err)
			if code == 0 || strings.Contains(last, "panic") || strings.Contains(last, "context canceled") {
				t.Errorf("exit code %d, and the last line is %q", code, last)
			}
		})
	}
}

func lastLine(r io.Reader) (last string, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if text := strings.TrimSpace(lines.Text()); text != "" {
			last = text
		}
	}
	return last, lines.Err()
}
