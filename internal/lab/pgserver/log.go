package pgserver

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

var errPortTaken = errors.New("the port is taken")

// heldError: what an earlier postmaster of the same folder left behind is still there.
type heldError struct{ err error }

func (e *heldError) Error() string { return e.err.Error() }

// startError says why a server ended while it started, by its log.
func startError(i Installation, log string) error {
	err := fmt.Errorf("%v did not start; its log ends:\n%s", i, tail(log))
	switch {
	case strings.Contains(log, "could not create any TCP/IP sockets"):
		return fmt.Errorf("%w: %w", errPortTaken, err)
	case strings.Contains(log, "is still in use") ||
		strings.Contains(log, `lock file "postmaster.pid" already exists`):
		return &heldError{err}
	}
	return err
}

func (s *Server) logSize() int64 {
	info, err := os.Stat(s.logPath())
	if err != nil {
		return 0
	}
	return info.Size()
}

func (s *Server) logSince(offset int64) string {
	b, err := os.ReadFile(s.logPath())
	if err != nil {
		return err.Error()
	}
	return string(b[min(offset, int64(len(b))):])
}

// tail returns the last lines of a log.
func tail(log string) string {
	lines := strings.Split(strings.TrimSpace(log), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}
