// Package stage is where an example plays: PostgreSQL and NATS on this machine for the moment, the programs
// of the example beside them, and nothing left behind. An application has no use for it.
package stage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// patience is how long a condition may take that should hold in a moment. After quiet without a line it is
// said what is waited for.
const (
	patience = 3 * time.Minute
	quiet    = time.Second
)

// Options say what stands on the stage.
type Options struct {
	Outflow string // the program outflow
	Config  string // its configuration: a file without addresses
	Schema  string // SQL that makes the tables of the example
	Archive bool   // there is one, in a folder
	Out     io.Writer
}

// Stage is the servers and whatever was started beside them.
type Stage struct {
	PostgresURL string
	NATSURL     string
	JS          jetstream.JetStream
	DB          *pgx.Conn // to prepare and to judge

	opt    Options
	dir    string
	listen string // outflow's
	pg     *pgserver.Server
	nats   *natsserver.Server
	conn   *nats.Conn
	actors []*Actor
	said   atomic.Int64 // when the last line was printed
}

// Raise starts the servers, makes the tables and runs outflow init.
func Raise(ctx context.Context, o Options) (s *Stage, err error) {
	s = &Stage{opt: o}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.dir, err = os.MkdirTemp("", "outflow-example-"); err != nil {
		return s, err
	}
	// PostgreSQL refuses root, so it may run as another user, who must be able to enter.
	if err = os.Chmod(s.dir, 0o755); err != nil { //nolint:gosec // what is secret in it has its own mode
		return s, err
	}
	for _, step := range []func(context.Context) error{s.postgres, s.jetStream, s.init} {
		if err = step(ctx); err != nil {
			return s, err
		}
	}
	return s, nil
}

func (s *Stage) postgres(ctx context.Context) (err error) {
	// What is thrown away needs no fsync.
	s.pg, err = pgserver.Start(ctx, pgserver.Options{Dir: filepath.Join(s.dir, "postgres"),
		Settings: map[string]string{"fsync": "off"}})
	if err != nil {
		return err
	}
	if s.PostgresURL, err = s.pg.CreateDatabase(ctx, "example"); err != nil {
		return err
	}
	s.Say("postgres  %v, for the moment", s.pg.Installation)
	if s.DB, err = pgx.Connect(ctx, s.PostgresURL); err != nil {
		return err
	}
	if _, err = s.DB.Exec(ctx, s.opt.Schema); err != nil {
		return fmt.Errorf("the example's tables: %w", err)
	}
	return nil
}

func (s *Stage) jetStream(context.Context) (err error) {
	if s.nats, err = natsserver.Start(natsserver.Options{Dir: filepath.Join(s.dir, "nats")}); err != nil {
		return fmt.Errorf("start nats: %w", err)
	}
	s.NATSURL = s.nats.URL()
	if s.conn, err = nats.Connect(s.NATSURL, nats.Timeout(patience)); err != nil {
		return err
	}
	s.Say("nats      JetStream %s, for the moment", s.conn.ConnectedServerVersion())
	s.JS, err = jetstream.New(s.conn, jetstream.WithDefaultTimeout(30*time.Second))
	return err
}

func (s *Stage) init(ctx context.Context) error {
	port, err := freeport.Port()
	if err != nil {
		return err
	}
	s.listen = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	_, err = s.Command(ctx, "init")
	return err
}

// Command runs a command of outflow to its end and returns what it printed.
func (s *Stage) Command(ctx context.Context, args ...string) (string, error) {
	return s.Run(ctx, s.opt.Outflow, args...)
}

// Run runs a program to its end and returns what it printed. One that gave a server up which was silent for a
// while is run again.
func (s *Stage) Run(ctx context.Context, binary string, args ...string) (string, error) {
	out, err := process.Again(ctx, func() *exec.Cmd {
		cmd := exec.CommandContext(ctx, binary, args...)
		cmd.Env = s.env()
		return cmd
	})
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", filepath.Base(binary), strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// env is what each program gets: the addresses, and nothing of the caller's own settings.
func (s *Stage) env() (env []string) {
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "OUTFLOW_") && !strings.HasPrefix(v, "PG") {
			env = append(env, v)
		}
	}
	if s.opt.Archive {
		env = append(env, "OUTFLOW_ARCHIVE_URL=file://"+filepath.Join(s.dir, "archive"))
	}
	return append(env, "DATABASE_URL="+s.PostgresURL, "NATS_URL="+s.NATSURL, "OUTFLOW_CONFIG="+s.opt.Config,
		"OUTFLOW_LISTEN="+s.listen,
		"OUTFLOW_SINK_DURABLE_AFTER=2s", "OUTFLOW_CONSUMER_DATABASE="+s.PostgresURL)
}

// Outflow starts outflow run and waits until it is ready.
func (s *Stage) Outflow(ctx context.Context) (*Actor, error) {
	a, err := s.Start("outflow", s.opt.Outflow, "run")
	if err != nil {
		return nil, err
	}
	return a, s.Until(ctx, "outflow is ready",
		a.alive(func(ctx context.Context) error { return answers(ctx, "http://"+s.listen+"/readyz") }))
}

// answers asks a page.
func answers(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return nil
}

// Until waits until check returns nil, and says now and then that it waits.
func (s *Stage) Until(ctx context.Context, what string, check func(context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var last error
	for {
		err := check(limited)
		if err == nil {
			return nil
		}
		if _, ended := errors.AsType[*endedError](err); ended {
			return fmt.Errorf("%s: %w", what, err)
		}
		if limited.Err() == nil || last == nil {
			last = err
		}
		if at := s.said.Load(); time.Since(time.Unix(0, at)) >= quiet &&
			s.said.CompareAndSwap(at, time.Now().UnixNano()) { // of several that wait one says so
			why := ": " + last.Error()
			if strings.Contains(why, "\n") { // all that a program has printed
				why = ""
			}
			s.Say("           until %s%s", what, why)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-limited.Done():
			return fmt.Errorf("%s: not within %v: %w\n%s", what, patience, last, s.logs())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Say prints a line.
func (s *Stage) Say(format string, args ...any) {
	s.said.Store(time.Now().UnixNano())
	fmt.Fprintf(s.opt.Out, format+"\n", args...)
}

// Close ends everything and removes it.
func (s *Stage) Close() error {
	var errs []error
	for i := len(s.actors) - 1; i >= 0; i-- {
		errs = append(errs, s.actors[i].end())
	}
	if s.DB != nil {
		_ = s.DB.Close(context.Background()) // its server is about to be removed
	}
	if s.conn != nil {
		s.conn.Close()
	}
	if s.nats != nil {
		s.nats.Shutdown()
	}
	if s.pg != nil {
		errs = append(errs, s.pg.Remove())
	}
	if s.dir != "" {
		errs = append(errs, os.RemoveAll(s.dir))
	}
	return errors.Join(errs...)
}

func (s *Stage) logs() string {
	var b strings.Builder
	for _, a := range s.actors {
		fmt.Fprintf(&b, "--- %s\n%s\n", a.Name, a.tail())
	}
	return b.String()
}
