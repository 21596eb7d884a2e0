//go:build unix

package natstest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/loopback"
	"github.com/outflowhq/outflow/internal/natsserver"
	"github.com/outflowhq/outflow/internal/process"
)

const childEnv = "OUTFLOW_NATSTEST_CHILD" // set: be a server, with the options that it holds as JSON

// what Options can be handed to another process
type childOptions struct {
	Dir, Name  string
	Port       int
	MaxPayload int
	SyncAlways bool
}

// RunChild makes this process the NATS server of a ServerProcess, if it was started as one, and never returns then. A package
// that uses Process calls it first in its TestMain.
func RunChild() {
	spec, ok := os.LookupEnv(childEnv)
	if !ok {
		return
	}
	if err := serve(spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve runs until SIGTERM, or until the parent has gone and standard input ends.
func serve(spec string) error {
	var o childOptions
	if err := json.Unmarshal([]byte(spec), &o); err != nil {
		return fmt.Errorf("%s: %w", childEnv, err)
	}
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM)
	s, err := natsserver.Start(natsserver.Options{
		Dir: o.Dir, Name: o.Name, Port: o.Port, MaxPayload: o.MaxPayload, SyncAlways: o.SyncAlways,
	})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		terminate <- syscall.SIGTERM
	}()
	<-terminate
	s.Shutdown()
	return nil
}

// ServerProcess is a NATS server in a process of its own, always at the same port and folder. Its methods are for one goroutine
// at a time.
type ServerProcess struct {
	options childOptions

	mu    sync.Mutex
	child *process.Process // nil: never started
	stdin io.Closer        // its end tells the child that we have gone
}

// Process starts a server as a process of its own and removes it at the end of the test. Options may be left out; Tune is not
// for another process.
func Process(t testing.TB, options ...natsserver.Options) *ServerProcess {
	t.Helper()
	o := one(options)
	if o.Tune != nil {
		t.Fatal("natstest.Process can't pass Tune to another process")
	}
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	if o.Port == 0 {
		port, err := loopback.Port()
		if err != nil {
			t.Fatal(err)
		}
		o.Port = port
	}
	p := &ServerProcess{options: childOptions{o.Dir, o.Name, o.Port, o.MaxPayload, o.SyncAlways}}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() }) // an error says that it doesn't run
	return p
}

// URL returns the address for clients, also while the server is down.
func (p *ServerProcess) URL() string { return fmt.Sprintf("nats://127.0.0.1:%d", p.options.Port) }

// Dir returns the folder with JetStream's files.
func (p *ServerProcess) Dir() string { return p.options.Dir }

// Start starts the server again, after Stop or Kill, and returns when it accepts connections.
func (p *ServerProcess) Start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child != nil && p.child.Running() {
		return errors.New("the NATS server runs already")
	}
	spec, err := json.Marshal(p.options)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var stderr bytes.Buffer
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+string(spec))
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	// Not StdoutPipe: Wait, which runs from the start, would close it under the reader.
	stdout, childStdout, err := os.Pipe()
	if err != nil {
		return err
	}
	defer stdout.Close()
	cmd.Stdout = childStdout
	child, err := process.Start(cmd, syscall.SIGKILL)
	_ = childStdout.Close()
	if err != nil {
		return err
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if strings.TrimSpace(line) != "ready" {
		_ = child.Kill()
		return fmt.Errorf("the NATS server process did not start (does TestMain call natstest.RunChild?): %q, %w\n%s",
			line, err, stderr.String())
	}
	p.child, p.stdin = child, stdin
	return nil
}

// Stop ends the server cleanly (SIGTERM) and waits for its end.
func (p *ServerProcess) Stop() error {
	if err := p.send(syscall.SIGTERM); err != nil {
		return err
	}
	return p.child.Wait()
}

// Kill ends the server with kill -9, also while it is paused, and waits for its end.
func (p *ServerProcess) Kill() error {
	if err := p.send(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.child.Done()
	return nil
}

// Pause freezes the server with SIGSTOP: its connections stay open and silent. It returns when nothing in it runs any more.
func (p *ServerProcess) Pause() error { return p.with((*process.Process).Pause) }

// Resume lets a paused server go on.
func (p *ServerProcess) Resume() error { return p.with((*process.Process).Resume) }

func (p *ServerProcess) send(s syscall.Signal) error {
	return p.with(func(child *process.Process) error { return child.Signal(s) })
}

func (p *ServerProcess) with(do func(*process.Process) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child == nil || !p.child.Running() {
		return errors.New("the NATS server does not run")
	}
	return do(p.child)
}
