package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// Outflow is one installation of the program: a slot, a stream, and the process, if it runs.
type Outflow struct {
	T       testing.TB
	Env     []string
	Slot    string
	Stream  string
	Listen  string
	Process *process.Process
	Log     *Log
	logged  int         // bytes of the log from before the child
	ending  atomic.Bool // the test ends the child, or waits for its end
}

// outflows holds the installations of all tests that run: what a test waits for doesn't come when one of its
// own has ended.
var outflows sync.Map

// New returns an installation between a database and a NATS server. Settings are further NAME=value, without
// OUTFLOW_.
func New(t testing.TB, pgURL, natsURL, slot string, settings ...string) *Outflow {
	t.Helper()
	port, err := freeport.Port()
	Must(t, err)
	o := &Outflow{T: t, Slot: slot, Stream: "OUTBOX",
		Listen: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), Log: &Log{}}
	o.Env = []string{
		"PATH=" + os.Getenv("PATH"), "TMPDIR=" + t.TempDir(),
		"OUTFLOW_POSTGRES_URL=" + pgURL, "OUTFLOW_NATS_URL=" + natsURL, "OUTFLOW_SLOT=" + slot,
		"OUTFLOW_PUBLICATION=" + slot, "OUTFLOW_LISTEN=" + o.Listen, "OUTFLOW_SINK_DURABLE_AFTER=1s",
	}
	for _, name := range []string{"GOCOVERDIR", "GORACE"} { // of a binary that was built with -cover or -race
		if value := os.Getenv(name); value != "" {
			o.Env = append(o.Env, name+"="+value)
		}
	}
	o.Set(settings...)
	outflows.Store(o, nil)
	t.Cleanup(func() {
		outflows.Delete(o)
		o.Kill()
		if t.Failed() {
			t.Logf("log of %s:\n%s", slot, o.Log.Tail(6000))
		}
	})
	return o
}

// Set adds settings, over those there are.
func (o *Outflow) Set(settings ...string) {
	for _, s := range settings {
		o.Env = append(o.Env, "OUTFLOW_"+s)
	}
}

// Init runs outflow init, which must succeed.
func (o *Outflow) Init() {
	o.T.Helper()
	o.MustRun("init")
}

// Start starts outflow run.
func (o *Outflow) Start() {
	o.T.Helper()
	cmd := exec.Command(Program(o.Env), "run")
	cmd.Env, cmd.Stdout, cmd.Stderr = o.Env, o.Log, o.Log
	o.logged = o.Log.size()
	child, err := process.Start(cmd, syscall.SIGKILL)
	Must(o.T, err)
	o.Process = child
	o.ending.Store(false)
}

// Said is what outflow run has logged since it was started last.
func (o *Outflow) Said() string { return o.Log.String()[o.logged:] }

func (o *Outflow) lastLine() string {
	lines := strings.Split(strings.TrimSpace(o.Said()), "\n")
	n := len(lines) - 1 // behind it are the servers, and where its code is explained
	for n > 0 && (strings.HasPrefix(lines[n], "at ") || strings.HasPrefix(lines[n], "code ")) {
		n--
	}
	return lines[n]
}

// Kill ends it with kill -9, if it runs.
func (o *Outflow) Kill() {
	o.ending.Store(true)
	if o.Process != nil && o.Process.Running() {
		_ = o.Process.Kill() // it may just have ended
	}
}

// Stop ends it with SIGTERM and returns its exit code. A signal that comes before the program can take it is
// a kill: it is sent when the program has said something.
func (o *Outflow) Stop() int {
	o.T.Helper()
	Eventually(o.T, "outflow run says that it starts", func() error {
		if o.Log.size() == o.logged && o.Process.Running() {
			return errors.New("nothing")
		}
		return nil
	})
	if err := o.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		o.T.Fatal(err)
	}
	return o.Wait()
}

// Wait waits for the end and returns the exit code.
func (o *Outflow) Wait() int {
	o.T.Helper()
	o.ending.Store(true)
	Eventually(o.T, "outflow run ends", func() error {
		if o.Process.Running() {
			return fmt.Errorf("it runs, and has logged %d bytes", o.Log.size())
		}
		return nil
	})
	var exit *exec.ExitError
	switch err := o.Process.Wait(); {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	default:
		o.T.Fatal(err)
		return -1
	}
}

// Get asks one of its pages.
func (o *Outflow) Get(path string) (status int, body string) {
	o.T.Helper()
	ctx, cancel := context.WithTimeout(o.T.Context(), AskTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+o.Listen+path, nil)
	Must(o.T, err)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, b.String()
}
