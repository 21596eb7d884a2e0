package torture

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/internal/lab/failpoint"
	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// instance is one `outflow run`. Its methods are for one goroutine at a time, but state and running.
type instance struct {
	v      *victim
	n      int
	listen string
	log    string // file
	env    []string

	mu       sync.Mutex
	settings string           // ordering settings, as environment
	child    *process.Process // nil: never started
	end      *ending          // of the child
	starts   int
	logged   int64 // the length of its log when the child began
}

const (
	stateTimeout = 500 * time.Millisecond
	// stop_timeout is 10 s; what comes on top is for a machine that is busy.
	termLimit = 30 * time.Second
)

func newInstance(v *victim, n int, pgURL, natsURL string, replicas int) (*instance, error) {
	port, err := freeport.Port()
	if err != nil {
		return nil, err
	}
	spill, err := v.spillDir()
	if err != nil {
		return nil, err
	}
	i := &instance{v: v, n: n, listen: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		settings: environOf(v.w.shape.settings)}
	i.log = v.w.file(fmt.Sprintf("%s-%c.log", v.slot, 'a'+n))
	i.env = append(environ(),
		"OUTFLOW_POSTGRES_URL="+pgURL, "OUTFLOW_NATS_URL="+natsURL, "OUTFLOW_SLOT="+v.slot,
		"OUTFLOW_PUBLICATION="+v.slot,
		"OUTFLOW_STREAM="+v.stream, "OUTFLOW_SOURCE="+v.w.o.Source, "OUTFLOW_TABLE="+v.w.table,
		"OUTFLOW_SUBJECT="+v.w.name+".{doc_id}", "OUTFLOW_LISTEN="+i.listen,
		"OUTFLOW_SINK_DURABLE_AFTER="+durableAfter.String(), "OUTFLOW_REORDER_MAX_BYTES="+
			strconv.Itoa(maxBytes),
		"OUTFLOW_REORDER_SPILL_DIR="+spill, "OUTFLOW_INIT_REPLICAS="+strconv.Itoa(replicas))
	if column := v.w.shape.columns.Span; column != "" {
		i.env = append(i.env, "OUTFLOW_COLUMNS_SPAN="+column)
	}
	return i, nil
}

func (i *instance) String() string { return fmt.Sprintf("%d%c", i.v.n+1, 'a'+i.n) }

func (i *instance) command(ctx context.Context, name string, extra ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, i.v.w.o.Binary, name)
	cmd.Env = append(append(i.env[:len(i.env):len(i.env)], strings.Fields(i.settings)...), extra...)
	return cmd
}

// start starts it with further environment.
func (i *instance) start(extra ...string) error {
	out, err := os.OpenFile(i.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close() // the child has its own handle
	i.mu.Lock()
	defer i.mu.Unlock()
	i.starts++
	fmt.Fprintf(out, "--- start %d %s\n", i.starts, strings.Join(extra, " "))
	if info, err := out.Stat(); err == nil {
		i.logged = info.Size()
	}
	cmd := i.command(context.Background(), "run", extra...)
	cmd.Stdout, cmd.Stderr = out, out
	child, err := process.Start(cmd, syscall.SIGKILL)
	if err != nil {
		return fmt.Errorf("start outflow: %w", err)
	}
	i.child, i.end = child, &ending{}
	// It may come to its point before start returns.
	i.end.byPoint.Store(slices.ContainsFunc(extra, endsItself))
	go i.guard(child, i.end)
	return nil
}

// endsItself reports whether environment makes outflow end itself: some of the points do otherwise.
func endsItself(v string) bool {
	name, point := strings.CutPrefix(v, pointEnv)
	return point && !strings.HasPrefix(name, failpoint.SpillFull) && !strings.HasPrefix(name, failpoint.Clock)
}

// ending says which end of a child is expected.
type ending struct {
	ours    atomic.Bool // any: it is our doing
	byPoint atomic.Bool // by kill -9: it does that to itself
}

// guard waits for the end, which must be no surprise.
func (i *instance) guard(child *process.Process, end *ending) {
	if err := child.Wait(); !end.ours.Load() && !(end.byPoint.Load() && endedBy(err, syscall.SIGKILL)) {
		i.v.w.fail("outflow %v ended by itself: %v; its log ends with:\n%s", i, exitText(err), i.tail())
	}
}

// expectEnd says that the end that comes is our doing.
func (i *instance) expectEnd() *process.Process {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.child != nil {
		i.end.ours.Store(true)
	}
	return i.child
}

func (i *instance) running() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.child != nil && i.child.Running()
}

// kill ends it with kill -9, if it runs.
func (i *instance) kill() {
	if child := i.expectEnd(); child != nil && child.Running() {
		_ = child.Kill() // it may just have ended
	}
}

// term ends it with SIGTERM; the exit code must be 0.
func (i *instance) term() {
	child := i.expectEnd()
	if child == nil || !child.Running() {
		return
	}
	_ = child.Resume()
	_ = child.Signal(syscall.SIGTERM) // it may just have ended
	select {
	case <-child.Done():
		if err := child.Wait(); err != nil && !i.tooEarly(err) {
			i.v.w.fail("outflow %v was stopped with SIGTERM and ended otherwise than cleanly: %v; its log "+
				"ends with:\n%s", i, exitText(err), i.tail())
		}
	case <-time.After(termLimit):
		i.v.w.fail("outflow %v was stopped with SIGTERM and did not end within %v; its log ends with:\n%s", i,
			termLimit, i.tail())
		_ = child.Kill()
	}
}

// tooEarly tells whether a process ended by SIGTERM itself, because it had only just begun and handled no
// signals yet: it has logged nothing. By the time that went by nobody could tell, on a machine that stands
// still.
func (i *instance) tooEarly(err error) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	info, statErr := os.Stat(i.log)
	return endedBy(err, syscall.SIGTERM) && statErr == nil && info.Size() == i.logged
}

// endedBy tells whether a process was ended by a signal.
func endedBy(err error, signal syscall.Signal) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == signal
}

func (i *instance) pause() error { return ignoreGone(i.expectAlive().Pause()) }

func (i *instance) resume() error { return ignoreGone(i.expectAlive().Resume()) }

func (i *instance) expectAlive() *process.Process {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.child
}

// state is what its page says of it, "" if it does not answer.
func (i *instance) state(ctx context.Context) string {
	if !i.running() {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+i.listen+"/readyz", nil)
	if err != nil {
		return ""
	}
	req.Close = true // no connection is kept for a process that may be killed
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return ""
	}
	state, _, _ := strings.Cut(string(body), " for ")
	return state
}

func exitText(err error) string {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return "exit code 0"
	case errors.As(err, &exit) && exit.Exited():
		return fmt.Sprintf("exit code %d", exit.ExitCode())
	}
	return err.Error()
}

// tail is the end of its log.
func (i *instance) tail() string {
	const most = 3000
	b, err := os.ReadFile(i.log)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b[max(0, len(b)-most):]))
}
