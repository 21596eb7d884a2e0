//go:build unix

// Package process runs child processes that end with this one: on Linux also when this one is killed with
// kill -9. It also says what a process has used, where there is a /proc.
package process

import (
	"fmt"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// Process is a child that was started. Its methods may be called from any goroutine.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended and was waited for
	err  error         // what Wait said; read only after done

	pausing sync.Mutex
	paused  bool
}

// Start starts cmd in a process group of its own, so that the terminal's Ctrl-C is ours alone, and waits for
// it from then on. On Linux the child gets the signal death when this process ends.
func Start(cmd *exec.Cmd, death syscall.Signal) (*Process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = !cmd.SysProcAttr.Setsid // a session has a group of its own already
	dieWithParent(cmd.SysProcAttr, death)
	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// Linux counts the end of the thread that forked as the parent's: this goroutine keeps it until the
		// child has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// PID returns the process id, also after the end.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the child has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running tells whether the child has not ended yet; one that is paused runs.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Wait waits for the end and returns what exec.Cmd.Wait does: nil for exit code 0.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Signal sends a signal; os.ErrProcessDone says that the child had ended.
func (p *Process) Signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

// Pause freezes the child with SIGSTOP and returns when none of its threads runs any more: the signal alone
// only asks for that.
func (p *Process) Pause() error {
	p.pausing.Lock()
	defer p.pausing.Unlock()
	if p.paused {
		return nil
	}
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(p.PID(), &status, syscall.WUNTRACED, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return fmt.Errorf("pause process %d: %w", p.PID(), err)
		case status.Stopped():
			p.paused = true
			return nil
		default:
			return fmt.Errorf("pause process %d: it ended", p.PID())
		}
	}
}

// Resume lets a paused child go on.
func (p *Process) Resume() error {
	p.pausing.Lock()
	defer p.pausing.Unlock()
	p.paused = false
	return p.Signal(syscall.SIGCONT)
}

// Kill ends the child with kill -9 and waits for its end.
func (p *Process) Kill() error {
	err := p.Signal(syscall.SIGKILL)
	<-p.done
	return err
}
