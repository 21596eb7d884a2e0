package pgtest

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// sweep deletes the temporary folders of servers whose test binary was killed before it could.
func sweep() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), "outflow-pg-*-*")) // the only error is a bad pattern
	for _, dir := range dirs {
		pid, err := strconv.Atoi(strings.Split(filepath.Base(dir), "-")[2])
		if err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			// another user's, or being deleted by another run: not ours to complain about
			_ = os.RemoveAll(dir)
		}
	}
}
