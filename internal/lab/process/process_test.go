//go:build unix

package process

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestProcessIsWaitedFor(t *testing.T) {
	t.Parallel()
	p, err := Start(exec.Command("sh", "-c", "exit 3"), syscall.SIGKILL)
	must.Succeed(t, err)
	exit, ok := errors.AsType[*exec.ExitError](p.Wait())
	if !ok || exit.ExitCode() != 3 {
		t.Errorf("Wait gave %v, want exit code 3", p.Wait())
	}
	if p.Running() {
		t.Error("it runs after its end")
	}
	if err := p.Kill(); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("Kill after the end gave %v", err)
	}
}

func TestKillEndsAPausedProcess(t *testing.T) {
	t.Parallel()
	p, err := Start(exec.Command("sleep", "600"), syscall.SIGKILL)
	must.Succeed(t, err)
	for range 3 { // twice in a row is once
		must.Succeed(t, p.Pause())
	}
	must.Succeed(t, p.Resume())
	must.Succeed(t, p.Pause())
	if !p.Running() {
		t.Error("a paused process counts as ended")
	}
	must.Succeed(t, p.Kill())
	if p.Running() {
		t.Error("it runs after kill -9")
	}
}

func TestPauseWaitsUntilTheProcessHasStopped(t *testing.T) {
	if runtime.GOOS != "linux" {
		tier.Missing(t, "linux", "it reads /proc")
	}
	t.Parallel()
	p, err := Start(exec.Command("sh", "-c", "while :; do :; done"), syscall.SIGKILL)
	must.Succeed(t, err)
	defer p.Kill()
	for range 200 {
		must.Succeed(t, p.Pause())
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
		must.Succeed(t, err)
		if !strings.Contains(string(stat), ") T ") {
			t.Fatalf("after Pause: %s", stat)
		}
		must.Succeed(t, p.Resume())
	}
}

func TestStartSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	if _, err := Start(exec.Command("/no/such/program"), syscall.SIGKILL); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}
