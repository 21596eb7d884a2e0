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

	"github.com/outflowhq/outflow/internal/lab/tier"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestProcessIsWaitedFor(t *testing.T) {
	t.Parallel()
	p, err := Start(exec.Command("sh", "-c", "exit 3"), syscall.SIGKILL)
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	for range 3 { // twice in a row is once
		if err := p.Pause(); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	if !p.Running() {
		t.Error("a paused process counts as ended")
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	defer p.Kill()
	for range 200 {
		if err := p.Pause(); err != nil {
			t.Fatal(err)
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(stat), ") T ") {
			t.Fatalf("after Pause: %s", stat)
		}
		if err := p.Resume(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStartSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	if _, err := Start(exec.Command("/no/such/program"), syscall.SIGKILL); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}
