package natsserver

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// Process is a NATS server in a process of its own, at the same port and folder for life. Its methods may be
// called from any goroutine.
type Process struct {
	options Options
	user    *url.Userinfo

	mu    sync.Mutex
	child *process.Process // the last one that was started
}

var errNotRunning = errors.New("the NATS server does not run")

// StartProcess starts this program once more as a NATS server (see Child) and returns when it accepts
// connections. It ends with this process, on Linux also after kill -9.
func StartProcess(o Options) (*Process, error) {
	if o.Tune != nil {
		return nil, errors.New("a function can't be passed to another process: Options.Tune must be nil")
	}
	user := o.user()
	given := o.Port
	for try := 1; ; try++ {
		if given == 0 {
			var err error
			if o.Port, err = freeport.Port(); err != nil {
				return nil, err
			}
		}
		p := &Process{options: o, user: user}
		err := p.Start()
		if err == nil {
			return p, nil
		}
		if given != 0 || try == portTries || !strings.Contains(err.Error(), syscall.EADDRINUSE.Error()) {
			return nil, err
		}
	}
}

// URL returns the address for clients, with the password, also while the server is down.
func (p *Process) URL() string {
	u := url.URL{Scheme: "nats", User: p.user, Host: "127.0.0.1:" + strconv.Itoa(p.options.Port)}
	return u.String()
}

// Port returns the port on 127.0.0.1 for clients.
func (p *Process) Port() int { return p.options.Port }

// Dir returns the folder with JetStream's files.
func (p *Process) Dir() string { return p.options.Dir }

// PID returns the process id of the present or last child, 0 if there was none.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child == nil {
		return 0
	}
	return p.child.PID()
}

// Running tells whether the child has not ended; one that is paused, or does not accept connections yet,
// runs.
func (p *Process) Running() bool { return p.running() != nil }

// Start starts the server, which must not run, and returns when it accepts connections; an error if it ends
// before, for example because it was killed meanwhile.
func (p *Process) Start() error {
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
	// Its end tells the child that we have gone. Wait closes it.
	if _, err := cmd.StdinPipe(); err != nil {
		return err
	}
	// Not StdoutPipe: Wait, which runs from the start, would close it under the reader.
	stdout, childStdout, err := os.Pipe()
	if err != nil {
		return err
	}
	defer stdout.Close()
	cmd.Stdout = childStdout
	child, err := p.begin(cmd)
	_ = childStdout.Close()
	if err != nil {
		return err
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if strings.TrimSpace(line) != readyLine {
		_ = child.Kill()
		return fmt.Errorf("the NATS server process did not start (does the program call natsserver.Child "+
			"first?): %q, %w\n%s",
			line, err, stderr.String())
	}
	return nil
}

func (p *Process) begin(cmd *exec.Cmd) (*process.Process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child != nil && p.child.Running() {
		return nil, errors.New("the NATS server runs already")
	}
	child, err := process.Start(cmd, syscall.SIGKILL)
	if err != nil {
		return nil, err
	}
	p.child = child
	return child, nil
}

// Stop ends the server cleanly (SIGTERM), also while it is paused, and waits for its end.
func (p *Process) Stop() error {
	return p.with(func(child *process.Process) error {
		if err := child.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		// it may have ended by then
		if err := child.Resume(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
		return child.Wait()
	})
}

// Kill ends the server with kill -9, also while it is paused, and waits for its end.
func (p *Process) Kill() error { return p.with((*process.Process).Kill) }

// Pause freezes the server with SIGSTOP: its connections stay open and silent. It returns when nothing in it
// runs any more.
func (p *Process) Pause() error { return p.with((*process.Process).Pause) }

// Resume lets a paused server go on.
func (p *Process) Resume() error { return p.with((*process.Process).Resume) }

// running returns the child, nil if it has ended.
func (p *Process) running() *process.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child == nil || !p.child.Running() {
		return nil
	}
	return p.child
}

func (p *Process) with(do func(*process.Process) error) error {
	child := p.running()
	if child == nil {
		return errNotRunning
	}
	return do(child)
}
