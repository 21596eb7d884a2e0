package cli

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// startedSlowly starts the program, which says on standard error what it initializes, and returns when it
// takes SIGHUP. It can't go on to main meanwhile: the pipe is too small for all that it says.
func startedSlowly(t *testing.T, args ...string) (cmd *exec.Cmd, rest io.Reader) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	const setPipeSize = 1031 // F_SETPIPE_SZ
	if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, w.Fd(), setPipeSize, 4096); errno != 0 {
		t.Fatal(errno)
	}
	cmd = exec.CommandContext(t.Context(), binary, args...)
	cmd.Env = []string{"GODEBUG=inittrace=1"}
	cmd.Stderr = w
	err = cmd.Start()
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReaderSize(r, 64)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(line, "init ") && strings.Contains(line, "/cmd/internal/hangup ") {
			return cmd, lines
		}
	}
}

// A service manager may send SIGHUP to a process that it has just started. A command that somebody started in
// a terminal ends when the terminal is closed, as it does at SIGINT.
func TestAHangupFromTheStartEndsCommandsButNotRun(t *testing.T) {
	t.Parallel()
	away := []string{"--postgres.url", "postgres://127.0.0.1:1/none", "--nats.url", "nats://127.0.0.1:1",
		"--listen", ""}
	for command, says := range map[string]string{
		"run":   `msg="outflow started"`,
		"drain": "stopped by a signal (hangup)",
	} {
		cmd, said := startedSlowly(t, append([]string{command}, away...)...)
		if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		lines, found := bufio.NewScanner(said), false
		for lines.Scan() {
			if strings.Contains(lines.Text(), says) {
				found = true
				_ = cmd.Process.Signal(syscall.SIGTERM) // it may end already
			}
		}
		err := cmd.Wait()
		if status := cmd.ProcessState.Sys().(syscall.WaitStatus); !found || status.Signaled() {
			t.Errorf("%s: %v; %q found: %t", command, err, says, found)
		}
	}
}
