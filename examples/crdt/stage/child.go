package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/internal/lab/process"
)

const (
	restartAfter = 200 * time.Millisecond // as a supervisor does
	stopLimit    = 20 * time.Second
)

// child is a program that is started again whenever it ends, as in production.
type child struct {
	name string
	args []string
	env  []string
	log  string // file

	mu      sync.Mutex
	proc    *process.Process
	stopped bool
	done    chan struct{} // closed when nobody starts it any more
}

// start starts the program and from then on keeps it running.
func (c *child) start() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stopped, c.done = false, make(chan struct{})
	if err := c.spawn(); err != nil {
		return err
	}
	go c.keep(c.proc, c.done)
	return nil
}

func (c *child) spawn() error {
	out, err := os.OpenFile(c.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close() // the child has its own handle
	cmd := exec.Command(c.args[0], c.args[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = c.env, out, out
	if c.proc, err = process.Start(cmd, syscall.SIGKILL); err != nil {
		return fmt.Errorf("start %s: %w", c.name, err)
	}
	return nil
}

func (c *child) keep(p *process.Process, done chan struct{}) {
	defer close(done)
	for {
		<-p.Done()
		time.Sleep(restartAfter)
		c.mu.Lock()
		if c.stopped || c.spawn() != nil {
			c.mu.Unlock()
			return
		}
		p = c.proc
		c.mu.Unlock()
	}
}

// end ends it with a signal and waits until nobody starts it any more. One that does not heed SIGTERM is
// killed.
func (c *child) end(s syscall.Signal) error {
	c.mu.Lock()
	if c.proc == nil {
		c.mu.Unlock()
		return nil
	}
	c.stopped = true
	p, done := c.proc, c.done
	c.mu.Unlock()
	if err := p.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end %s: %w", c.name, err)
	}
	select {
	case <-p.Done():
	case <-time.After(stopLimit):
		_ = p.Signal(syscall.SIGQUIT) // its log says then where it stood
		time.Sleep(restartAfter)
		_ = p.Kill() // it may just have ended
	}
	<-done
	return nil
}
