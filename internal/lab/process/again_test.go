//go:build unix

package process

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestACommandRunsAgainAfterATimeout(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, script string // $1 is a file that has a line of each run
		limit        time.Duration
		runs, code   int
	}{
		{"at once", `echo made`, time.Hour, 1, 0},
		{"after two time-outs", `test $n -eq 3 || { echo "nats: timeout" >&2; exit 1; }`, time.Hour, 3, 0},
		{"after a lost connection", `test $n -eq 2 || { echo "read tcp: connection reset by peer"; exit 1; }`,
			time.Hour, 2, 0},
		{"never", `echo "context deadline exceeded"; exit 1`, 0, 1, 1},
		{"something else is wrong", `echo "no such file"; exit 1`, time.Hour, 1, 1},
		{"a fault", `echo "the slot waits: timeout"; exit 3`, time.Hour, 1, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file, runs := filepath.Join(t.TempDir(), "runs"), 0
			out, err := again(t.Context(), func() *exec.Cmd {
				runs++
				return exec.Command("sh", "-c", `echo run >>"$1"; n=$(wc -l <"$1"); `+c.script, "sh", file)
			}, c.limit)
			code := 0
			if err != nil {
				exit, ok := err.(*exec.ExitError) //nolint:errorlint // nothing wraps it
				if !ok {
					t.Fatal(err)
				}
				code = exit.ExitCode()
			}
			if runs != c.runs || code != c.code || code == 0 && strings.Contains(string(out), "timeout") {
				t.Errorf("%d runs, exit code %d, output %q; want %d runs, exit code %d", runs, code, out,
					c.runs, c.code)
			}
		})
	}
}
