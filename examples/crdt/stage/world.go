package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// patience is how long something may take without a sign of progress.
const patience = 3 * time.Minute

// options say what to run.
type options struct {
	outflow string // the streamer's binary
	crdt    string // the example's
	yjs     string // folder of the CRDT library; "": the page has no editor
	listen  string // address of the service; "": a free port
	stage   string // address of the stage's buttons; "": none
}

// world is everything that runs: two servers, Outflow, the service and its consumers, and the polling relays
// beside it.
type world struct {
	options
	dir     string
	pg      *pgserver.Server
	nats    *natsserver.Process
	pgURL   string
	env     []string
	pool    *pgxpool.Pool
	nc      *nats.Conn
	js      jetstream.JetStream
	one     sync.Mutex // a disturbance at a time
	service *child
	theirs  []*child // the relays and what reads from them
	ours    []*child // Outflow, the service and the consumers
}

// start starts everything and returns when the service answers. The caller closes the world, also after an
// error.
func (w *world) start(ctx context.Context) (err error) {
	if w.dir, err = os.MkdirTemp("", "outflow-crdt-"); err != nil {
		return err
	}
	// PostgreSQL refuses root, so it may run as another user, who must be able to enter.
	if err := os.Chmod(w.dir, 0o755); err != nil { //nolint:gosec // what is secret in it has its own mode
		return err
	}
	// What is thrown away needs no fsync.
	w.pg, err = pgserver.Start(ctx,
		pgserver.Options{Dir: w.file("postgres"), Settings: map[string]string{"fsync": "off"}})
	if err != nil {
		return err
	}
	if w.pgURL, err = w.pg.CreateDatabase(ctx, "crdt"); err != nil {
		return err
	}
	if w.nats, err = natsserver.StartProcess(natsserver.Options{Dir: w.file("nats")}); err != nil {
		return err
	}
	if w.pool, err = pgxpool.New(ctx, w.pgURL); err != nil {
		return err
	}
	if w.nc, err = nats.Connect(w.nats.URL(), nats.Timeout(patience), nats.MaxReconnects(-1),
		nats.ReconnectWait(50*time.Millisecond)); err != nil {
		return err
	}
	if w.js, err = jetstream.New(w.nc); err != nil {
		return err
	}
	if err := w.prepare(ctx); err != nil {
		return err
	}
	for _, c := range w.children() {
		if err := c.start(); err != nil {
			return err
		}
	}
	return w.answers(ctx)
}

// prepare makes what the programs need and says how each is started.
func (w *world) prepare(ctx context.Context) error {
	listen, err := freeAddress()
	if err != nil {
		return err
	}
	if w.listen == "" {
		if w.listen, err = freeAddress(); err != nil {
			return err
		}
	}
	for _, v := range os.Environ() { // nothing of the caller's own settings gets in
		if !strings.HasPrefix(v, "OUTFLOW_") && !strings.HasPrefix(v, "PG") {
			w.env = append(w.env, v)
		}
	}
	w.env = append(w.env, "DATABASE_URL="+w.pgURL, "NATS_URL="+w.nats.URL(), "OUTFLOW_LISTEN="+listen,
		// Commit order, as the service gives it: only an author's own operations could be out of order, and
		// here they are not.
		"OUTFLOW_REORDER_SORT=commit", "OUTFLOW_SINK_DURABLE_AFTER=1s")
	for _, command := range [][]string{{w.crdt, "setup"}, {w.outflow, "init"}} {
		if out, err := process.Again(ctx, func() *exec.Cmd {
			return w.command(ctx, command...)
		}); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(command, " "), err, out)
		}
	}
	w.service = w.child("service", w.crdt, "serve", "-listen", w.listen, "-yjs", w.yjs, "-stage", w.stage)
	w.ours = []*child{w.child("outflow", w.outflow, "run"), w.service,
		w.child("consumers", w.crdt, "project")}
	w.theirs = []*child{w.child("relay-1", w.crdt, "relay"), w.child("relay-2", w.crdt, "relay"),
		w.child("relayed", w.crdt, "relayed")}
	return nil
}

func (w *world) child(name string, args ...string) *child {
	return &child{name: name, args: args, env: append(w.env[:len(w.env):len(w.env)], "PGAPPNAME="+name),
		log: w.file(name + ".log")}
}

func (w *world) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = w.env
	return cmd
}

func (w *world) children() []*child { return append(append([]*child{}, w.theirs...), w.ours...) }

func (w *world) file(name string) string { return filepath.Join(w.dir, name) }

func (w *world) url() string { return "http://" + w.listen }

// answers waits until the service does.
func (w *world) answers(ctx context.Context) error {
	return until(ctx, "the service answers", func() error {
		resp, err := http.Get(w.url() + "/healthz")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return nil
	})
}

// close ends everything and removes it.
func (w *world) close() error {
	var errs []error
	for _, c := range w.children() {
		errs = append(errs, c.end(syscall.SIGKILL))
	}
	if w.nc != nil {
		w.nc.Close()
	}
	if w.pool != nil {
		w.pool.Close()
	}
	if w.nats != nil && w.nats.Running() {
		errs = append(errs, w.nats.Kill())
	}
	if w.pg != nil {
		errs = append(errs, w.pg.Remove())
	}
	if w.dir != "" {
		errs = append(errs, os.RemoveAll(w.dir))
	}
	return errors.Join(errs...)
}

// logs returns how each program's log ends, for an error's sake.
func (w *world) logs() string {
	var all strings.Builder
	for _, c := range w.children() {
		b, err := os.ReadFile(c.log)
		if err != nil {
			continue
		}
		fmt.Fprintf(&all, "--- %s\n%s\n", c.name, b[max(0, len(b)-2000):])
	}
	return all.String()
}

// until waits until check returns nil: a minute at most without any change of what it says, and five in all.
func until(ctx context.Context, what string, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 5*patience)
	defer cancel()
	said, since := "", time.Now()
	for {
		err := check()
		if err == nil {
			return nil
		}
		if err.Error() != said {
			said, since = err.Error(), time.Now()
		}
		if time.Since(since) > patience || !wait(ctx, 20*time.Millisecond) {
			return fmt.Errorf("waited in vain for this: %s: %w", what, err)
		}
	}
}

func freeAddress() (string, error) {
	port, err := freeport.Port()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), err
}
