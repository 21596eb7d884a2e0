//go:build unix

package process

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// Peak returns the most memory that a running process had, in bytes. rusage would not do: there, a child
// begins with its parent's.
func Peak(pid int) (int64, bool) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, false
	}
	return parsePeak(status)
}

// parsePeak reads the line "VmHWM:   12345 kB" of /proc/PID/status.
func parsePeak(status []byte) (int64, bool) {
	for line := range bytes.Lines(status) {
		if value, ok := bytes.CutPrefix(line, []byte("VmHWM:")); ok {
			n, err := strconv.ParseInt(
				string(bytes.TrimSpace(bytes.TrimSuffix(bytes.TrimSpace(value), []byte("kB")))), 10, 64)
			return n << 10, err == nil
		}
	}
	return 0, false
}
