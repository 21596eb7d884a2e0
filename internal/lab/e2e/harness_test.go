package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// A machine that tests may stand still, as a whole or any process of it, for seconds and at any moment. No test takes that for an answer.
const (
	patience   = await.Limit      // how long a test waits for what must come
	askTimeout = 20 * time.Second // one question to a server: one that was killed meanwhile never answers
	tries      = 5                // of a command that says that a server does not answer
)

// outflow is one installation of the program: a slot, a stream, and the process, if it runs.
type outflow struct {
	t      testing.TB
	env    []string
	slot   string
	stream string
	listen string
	child  *process.Process
	log    *syncBuffer
	said   int         // bytes of the log from before the child
	ending atomic.Bool // the test ends the child, or waits for its end
}

// running holds the installations of all tests that run: what a test waits for doesn't come when one of its own has ended.
var running sync.Map

// newOutflow returns an installation between a database and a NATS server. Settings are further NAME=value, without OUTFLOW_.
func newOutflow(t testing.TB, pgURL, natsURL, slot string, settings ...string) *outflow {
	t.Helper()
	port, err := freeport.Port()
	if err != nil {
		t.Fatal(err)
	}
	o := &outflow{t: t, slot: slot, stream: "OUTBOX", listen: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), log: &syncBuffer{}}
	o.env = []string{
		"PATH=" + os.Getenv("PATH"), "TMPDIR=" + t.TempDir(),
		"OUTFLOW_POSTGRES_URL=" + pgURL, "OUTFLOW_NATS_URL=" + natsURL, "OUTFLOW_SLOT=" + slot, "OUTFLOW_PUBLICATION=" + slot,
		"OUTFLOW_LISTEN=" + o.listen, "OUTFLOW_SINK_DURABLE_AFTER=1s",
	}
	o.set(settings...)
	running.Store(o, nil)
	t.Cleanup(func() {
		running.Delete(o)
		o.kill()
		if t.Failed() {
			t.Logf("log of %s:\n%s", slot, o.log.tail(6000))
		}
	})
	return o
}

// set adds settings, over those there are.
func (o *outflow) set(settings ...string) {
	for _, s := range settings {
		o.env = append(o.env, "OUTFLOW_"+s)
	}
}

// exec runs a command to its end, again where it gave up because a server did not answer: it waits for seconds, and says so with exit
// code 1, or 3 where it could not connect. Any other code stands.
func (o *outflow) exec(args ...string) (stdout, stderr string, code int) {
	o.t.Helper()
	return o.execUntil(func(string) bool { return false }, args...)
}

// execUntil is exec where a server that does not answer may be what is wanted: done tells.
func (o *outflow) execUntil(done func(stderr string) bool, args ...string) (stdout, stderr string, code int) {
	o.t.Helper()
	said := ""
	for try := 1; ; try++ {
		stdout, stderr, code = o.once(args...)
		if args[0] == "init" { // what one has made, the next one finds
			said += stdout
			stdout = said
		}
		if code != 1 && code != 3 || try == tries || done(stderr) || !unanswered(o.t, args, stderr) {
			return stdout, stderr, code
		}
	}
}

// silent is what a command says that gave up because a server did not answer.
var silent = regexp.MustCompile(`(?i)deadline exceeded|time-?out|timed out|no responders|no response|not answer|connection to NATS is lost`)

// unanswered tells whether a command may be run again: it gave up because a server did not answer, on a machine that was seen to stand
// still meanwhile. Each retry is a line that begins with "retry:", which the report of a test run counts.
func unanswered(t testing.TB, command any, said string) bool {
	again := silent.MatchString(said) && await.StoodStill(2*time.Minute)
	if again {
		fmt.Fprintf(os.Stderr, "retry: %s: %v: %s\n", t.Name(), command, said)
	}
	return again
}

// once runs a command to its end, once.
func (o *outflow) once(args ...string) (stdout, stderr string, code int) {
	o.t.Helper()
	ctx, cancel := context.WithTimeout(o.t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(o.env), args...)
	var out, errOut bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = o.env, &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		o.t.Fatal(err)
	}
	if ctx.Err() != nil {
		o.t.Fatalf("outflow %v did not end: %s", args, errOut.String())
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// init runs outflow init, which must succeed.
func (o *outflow) init() {
	o.t.Helper()
	if out, errOut, code := o.exec("init"); code != 0 {
		o.t.Fatalf("outflow init: exit code %d\n%s%s", code, out, errOut)
	}
}

// start starts outflow run.
func (o *outflow) start() {
	o.t.Helper()
	cmd := exec.Command(program(o.env), "run")
	cmd.Env, cmd.Stdout, cmd.Stderr = o.env, o.log, o.log
	o.said = o.log.size()
	child, err := process.Start(cmd, syscall.SIGKILL)
	if err != nil {
		o.t.Fatal(err)
	}
	o.child = child
	o.ending.Store(false)
}

// kill ends it with kill -9, if it runs.
func (o *outflow) kill() {
	o.ending.Store(true)
	if o.child != nil && o.child.Running() {
		_ = o.child.Kill() // it may just have ended
	}
}

// term ends it with SIGTERM and returns its exit code. A signal that comes before the program can take it is a kill: it is sent when the
// program has said something.
func (o *outflow) term() int {
	o.t.Helper()
	eventually(o.t, "outflow run says that it starts", func() error {
		if o.log.size() == o.said && o.child.Running() {
			return errors.New("nothing")
		}
		return nil
	})
	if err := o.child.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		o.t.Fatal(err)
	}
	return o.wait()
}

// wait waits for the end and returns the exit code.
func (o *outflow) wait() int {
	o.t.Helper()
	o.ending.Store(true)
	eventually(o.t, "outflow run ends", func() error {
		if o.child.Running() {
			return fmt.Errorf("it runs, and has logged %d bytes", o.log.size())
		}
		return nil
	})
	var exit *exec.ExitError
	switch err := o.child.Wait(); {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	default:
		o.t.Fatal(err)
		return -1
	}
}

// get asks one of its pages.
func (o *outflow) get(path string) (status int, body string) {
	o.t.Helper()
	ctx, cancel := context.WithTimeout(o.t.Context(), askTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+o.listen+path, nil)
	if err != nil {
		o.t.Fatal(err)
	}
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

// ready waits until /readyz says so.
func (o *outflow) ready() {
	o.t.Helper()
	eventually(o.t, "ready", func() error {
		if code, body := o.get("/readyz"); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
}

// eventually waits until check returns nil, while what the test has started runs.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	await.Until(t, what, check, func() (err error) {
		for key := range running.Range {
			o := key.(*outflow)
			within := strings.HasPrefix(o.t.Name()+"/", t.Name()+"/") || strings.HasPrefix(t.Name()+"/", o.t.Name()+"/")
			if within && !o.ending.Load() && o.child != nil && !o.child.Running() {
				err = fmt.Errorf("outflow run of %s has ended: %v", o.slot, o.child.Wait())
			}
		}
		return err
	})
}

// js connects to JetStream.
func js(t testing.TB, url string) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url, nats.Timeout(askTimeout), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(askTimeout))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// db connects to PostgreSQL.
func db(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) }) //nolint:errcheck // the test is over
	return conn
}

// mustExec executes SQL, and waits for what is still in use: a slot, a database.
func mustExec(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	eventually(t, sql, func() error {
		_, err := conn.Exec(t.Context(), sql, args...)
		if err != nil && !inUse(err) {
			t.Fatalf("%s: %v", sql, err)
		}
		return err
	})
}

// awaitMessages waits until the stream has had n messages.
func awaitMessages(t testing.TB, js jetstream.JetStream, stream string, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d messages", n), func() error {
		s, err := js.Stream(t.Context(), stream)
		if err != nil {
			return err
		}
		if got := s.CachedInfo().State.LastSeq; got < uint64(n) {
			return fmt.Errorf("%d messages", got)
		}
		return nil
	})
}

// messages reads the whole stream.
func messages(t testing.TB, js jetstream.JetStream, stream string) []*oracle.Message {
	t.Helper()
	var all []*oracle.Message
	if err := oracle.Read(t.Context(), js, stream, func(m *oracle.Message) error { all = append(all, m); return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}

// syncBuffer is a log that may be written and read at the same time.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *syncBuffer) size() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Len()
}

// Reset forgets what was written.
func (s *syncBuffer) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b.Reset()
}

func (s *syncBuffer) tail(n int) string {
	text := s.String()
	return strings.TrimLeft(text[max(0, len(text)-n):], "\n")
}
