package stage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/internal/lab/process"
)

// Actor is a program that was started, and may be killed and started again.
type Actor struct {
	Name string

	stage  *Stage
	binary string
	args   []string
	child  *process.Process
	logged int64 // bytes of its log when it was started
}

// endedError says that a program has ended that should run.
type endedError struct{ text string }

func (e *endedError) Error() string { return e.text }

// Start starts a program with the addresses in its environment; its output goes to a file.
func (s *Stage) Start(name, binary string, args ...string) (*Actor, error) {
	a := &Actor{Name: name, stage: s, binary: binary, args: args}
	s.actors = append(s.actors, a)
	return a, a.Again()
}

// Again starts it once more, after its end.
func (a *Actor) Again() error {
	log, err := os.OpenFile(a.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own handle
	info, err := log.Stat()
	if err != nil {
		return err
	}
	a.logged = info.Size()
	cmd := exec.Command(a.binary, a.args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = a.stage.env(), log, log
	if a.child, err = process.Start(cmd, syscall.SIGKILL); err != nil {
		return fmt.Errorf("start %s: %w", a.Name, err)
	}
	return nil
}

// Kill ends it with kill -9.
func (a *Actor) Kill() error {
	if !a.child.Running() {
		return a.failure()
	}
	return a.child.Kill()
}

// Stop asks it to end, which it must do with exit code 0. One that was asked before it could take a signal,
// and before it said anything, may end by that.
func (a *Actor) Stop(ctx context.Context) error {
	if err := a.child.Signal(syscall.SIGTERM); err != nil {
		return a.failure()
	}
	select {
	case <-a.child.Done():
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(patience):
		return fmt.Errorf("%s does not stop; its log ends with:\n%s", a.Name, a.tail())
	}
	if err := a.child.Wait(); err != nil && !(ended(err, syscall.SIGTERM) && a.silent()) {
		return a.failure()
	}
	return nil
}

// ended reports whether a program was ended by a signal.
func ended(err error, by syscall.Signal) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == by
}

// silent reports whether it has said nothing since it was started.
func (a *Actor) silent() bool {
	info, err := os.Stat(a.log())
	return err == nil && info.Size() == a.logged
}

// Wait waits for the end of a program that ends by itself, with exit code 0.
func (a *Actor) Wait(ctx context.Context) error {
	select {
	case <-a.child.Done():
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(2 * patience):
		return fmt.Errorf("%s does not end; its log ends with:\n%s", a.Name, a.tail())
	}
	if a.child.Wait() != nil {
		return a.failure()
	}
	return nil
}

// alive makes a check of the program end early if the program has ended.
func (a *Actor) alive(check func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if !a.child.Running() {
			return a.failure()
		}
		return check(ctx)
	}
}

// failure says how a program ended that should run.
func (a *Actor) failure() error {
	return &endedError{fmt.Sprintf("%s ended (%v); its log ends with:\n%s", a.Name, a.child.Wait(), a.tail())}
}

// end ends it, however it goes.
func (a *Actor) end() error {
	if a.child == nil || !a.child.Running() {
		return nil
	}
	if err := a.child.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-a.child.Done():
		return nil
	case <-time.After(patience / 4):
		return a.child.Kill()
	}
}

func (a *Actor) log() string { return filepath.Join(a.stage.dir, a.Name+".log") }

// tail is the end of its log.
func (a *Actor) tail() string {
	f, err := os.Open(a.log())
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	const most = 4096
	if info, err := f.Stat(); err == nil && info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	return string(b)
}
