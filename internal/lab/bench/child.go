package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/internal/lab/process"
)

// childEnv, if it is set, makes this program one of the roles. It does not begin with OUTFLOW_: that is for
// settings.
const childEnv = "_OUTFLOW_BENCH"

// task is what a child does.
type task struct {
	Role     string
	Postgres string // URL
	NATS     string // URL
	Stream   string
	Subject  string // without the document
	Slot     string // also the publication
	Table    string

	Rows    int           // to publish
	Docs    int           // to write for
	Payload int           // bytes, about
	Rate    int           // commits a second
	Writers int           // connections
	Warm    time.Duration // written before what counts
	For     time.Duration // how long it counts
}

// roles are what a child can be. A role calls ready when it can begin, and then does its task until ctx ends
// or it is done; what it returns is printed as JSON.
var roles = map[string]func(ctx context.Context, t task, ready func() error) (any, error){
	publisherName: publish,
	relayName:     poll,
	writersRole:   write,
}

const readyLine = "ready"

// Child makes this process a contender or the writers, if it was started as one, and never returns then. A
// program that calls Run calls it first in main.
func Child() {
	spec, ok := os.LookupEnv(childEnv)
	if !ok {
		return
	}
	if err := beChild(spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func beChild(spec string) error {
	var t task
	if err := json.Unmarshal([]byte(spec), &t); err != nil {
		return fmt.Errorf("%s: %w", childEnv, err)
	}
	role, ok := roles[t.Role]
	if !ok {
		return fmt.Errorf("%s: there is no role %q", childEnv, t.Role)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	in := bufio.NewReader(os.Stdin)
	result, err := role(ctx, t, func() error {
		fmt.Println(readyLine)
		if _, err := in.ReadString('\n'); err != nil {
			return err // the parent has gone
		}
		go func() {
			_, _ = io.Copy(io.Discard, in) // its end is the end of the task
			stop()
		}()
		return nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w", t.Role, err)
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// child is this program once more, in a role.
type child struct {
	*process.Process
	role   string
	stdin  io.WriteCloser
	stdout *bufio.Reader
	pipe   *os.File
	stderr *tail
}

// startChild starts a child and returns when it is ready to begin.
func (w *harness) startChild(ctx context.Context, t task) (*child, error) {
	t.Postgres, t.NATS = w.pgURL, w.broker.url
	spec, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(w.o.Binary)
	cmd.Env = append(environ(), childEnv+"="+string(spec))
	c := &child{role: t.Role, stderr: &tail{}}
	cmd.Stderr = c.stderr
	if c.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	// Not StdoutPipe: Wait, which runs from the start, would close it under the reader.
	var childStdout *os.File
	if c.pipe, childStdout, err = os.Pipe(); err != nil {
		return nil, err
	}
	cmd.Stdout = childStdout
	c.Process, err = process.Start(cmd, syscall.SIGKILL)
	_ = childStdout.Close()
	if err != nil {
		return nil, errors.Join(err, c.pipe.Close())
	}
	c.stdout = bufio.NewReader(c.pipe)
	line, err := c.readLine(ctx)
	if err != nil || strings.TrimSpace(line) != readyLine {
		c.kill()
		return nil, fmt.Errorf("%s did not start: %q %w\n%s", t.Role, line, err, c.stderr)
	}
	return c, nil
}

// begin lets it do its task.
func (c *child) begin() error {
	_, err := io.WriteString(c.stdin, "go\n")
	return err
}

// end tells it that the task is over and reads the result, if v is not nil.
func (c *child) end(ctx context.Context, v any) error {
	if err := c.stdin.Close(); err != nil {
		return err
	}
	return c.result(ctx, v)
}

// result waits for the end of a task that ends by itself.
func (c *child) result(ctx context.Context, v any) error {
	defer c.kill()
	line, err := c.readLine(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", c.role, err, c.stderr)
	}
	if v == nil {
		return nil
	}
	return json.Unmarshal([]byte(line), v)
}

// readLine reads a line; the end of ctx ends the child.
func (c *child) readLine(ctx context.Context) (string, error) {
	defer context.AfterFunc(ctx, func() { _ = c.Signal(syscall.SIGKILL) })()
	line, err := c.stdout.ReadString('\n')
	if ctx.Err() != nil {
		return line, context.Cause(ctx)
	}
	return line, err
}

// died says why it does not run any more, nil if it does.
func (c *child) died() error {
	if c.Running() {
		return nil
	}
	return fmt.Errorf("%s ended: %w\n%s", c.role, c.Wait(), c.stderr)
}

// kill ends it, if it still runs.
func (c *child) kill() {
	if c.Running() {
		_ = c.Process.Kill() // it may just have ended
	}
	_ = c.stdin.Close()
	_ = c.pipe.Close()
}

// environ is the caller's environment without what belongs to outflow or PostgreSQL.
func environ() (kept []string) {
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "OUTFLOW_") && !strings.HasPrefix(v, "PG") &&
			!strings.HasPrefix(v, "DATABASE_URL=") && !strings.HasPrefix(v, "NATS_") {
			kept = append(kept, v)
		}
	}
	return kept
}

// tail keeps the end of what is written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const tailBytes = 8 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if len(t.b) > 2*tailBytes {
		t.b = append(t.b[:0], t.b[len(t.b)-tailBytes:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.b[max(0, len(t.b)-tailBytes):]))
}
