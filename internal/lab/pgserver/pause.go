package pgserver

import (
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Pause freezes the server: the postmaster first, so that it starts nothing more, then every process of its.
// Connections stay open, new ones are accepted by the kernel, and nothing is answered.
func (s *Server) Pause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.child == nil || !s.child.Running() {
		return errors.New("the server does not run")
	}
	if err := s.child.Pause(); err != nil {
		return err
	}
	// the signal alone only asks for it
	for deadline := time.Now().Add(stopTimeout); ; time.Sleep(pollInterval) {
		running, err := signalChildren(s.child.PID(), syscall.SIGSTOP)
		if err != nil || running == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes of %v do not stop", running, s.Installation)
		}
	}
}

// Resume lets a paused server go on. One that was not paused goes on as it did.
func (s *Server) Resume() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.child == nil || !s.child.Running() {
		return errors.New("the server does not run")
	}
	_, err := signalChildren(s.child.PID(), syscall.SIGCONT)
	return errors.Join(err, s.child.Resume())
}

// signalChildren sends a signal to the children of a process, which have none of their own, and returns how
// many of them were running.
func signalChildren(parent int, signal syscall.Signal) (running int, err error) {
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=,stat=").Output()
	if err != nil {
		return 0, fmt.Errorf("list the processes of PostgreSQL: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[1] != strconv.Itoa(parent) || fields[2][0] == 'Z' {
			continue
		}
		pid, err := strconv.Atoi(fields[0])
		if err != nil {
			return 0, err
		}
		if fields[2][0] != 'T' {
			running++
		}
		// it may just have ended
		if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return 0, fmt.Errorf("%v to process %d of PostgreSQL: %w", signal, pid, err)
		}
	}
	return running, nil
}
