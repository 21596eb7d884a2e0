// Package pgserver finds PostgreSQL on this machine and runs servers of its own in folders of their own: for
// the tests, and for outflow-lab demo, torture and bench. A server listens on a loopback port that it keeps
// for life, asks for a password unless told otherwise, has wal_level=logical, and on Linux it ends when this
// process does. When this process is root, the server runs as another user, because PostgreSQL refuses root.
package pgserver

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/process"
)

const (
	startTimeout = 3 * time.Minute // crash recovery on a busy machine
	// a fast stop waits for walsenders until wal_sender_timeout, which is 60 s by default
	stopTimeout  = 3 * time.Minute
	pollInterval = 10 * time.Millisecond
	portTries    = 10
)

// Options say which server to start. The zero value starts the default installation in a temporary folder.
type Options struct {
	Installation Installation // zero: Find(0)
	// the server's alone: absent or empty, deleted by Remove. "": a temporary folder
	Dir      string
	Password string // of the superuser postgres. "": a random one
	// no password is asked for: whoever is on this machine is superuser. For tests
	Trust    bool
	Settings map[string]string // postgresql.conf settings, over the defaults of this package
}

// Server is a PostgreSQL server that this process owns. Its methods may be called from several goroutines,
// but starting and stopping are one at a time.
type Server struct {
	Installation Installation
	Dir          string // holds data, log and the socket
	Port         int    // on 127.0.0.1, the same for the life of the Server

	password string // "": anybody may log in as anybody
	runAs    *identity

	mu    sync.Mutex       // held while the server starts or stops
	child *process.Process // nil: never ready yet
}

// Start makes a database cluster and starts its server. It returns when the server accepts connections.
func Start(ctx context.Context, o Options) (*Server, error) {
	if o.Installation.Bin == "" {
		found, err := Find(0)
		if err != nil {
			return nil, err
		}
		o.Installation = found
	}
	runAs, err := unprivileged()
	if err != nil {
		return nil, err
	}
	if o.Password == "" && !o.Trust {
		o.Password = rand.Text()
	}
	s := &Server{Installation: o.Installation, Dir: o.Dir, password: o.Password, runAs: runAs}
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	err = s.initdb(ctx, o.Settings)
	for try := 1; err == nil; try++ {
		if s.Port, err = freeport.Port(); err != nil {
			break
		}
		err = s.Start(ctx)
		if !errors.Is(err, errPortTaken) || try == portTries {
			break
		}
		err = nil
	}
	if err != nil {
		s.Remove()
		return nil, err
	}
	return s, nil
}

// URL returns the address of a database for the superuser, over TCP.
func (s *Server) URL(database string) string {
	u := url.URL{
		Scheme: "postgres", User: url.User("postgres"), Host: "127.0.0.1:" + strconv.Itoa(s.Port), Path: "/" +
			database,
		RawQuery: "sslmode=disable",
	}
	if s.password != "" {
		u.User = url.UserPassword("postgres", s.password)
	}
	return u.String()
}

// CreateDatabase makes an empty database and returns its URL.
func (s *Server) CreateDatabase(ctx context.Context, name string) (string, error) {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return s.CreateDatabaseOn(ctx, conn, name)
}

// CreateDatabaseOn is CreateDatabase over a connection of the superuser's.
func (s *Server) CreateDatabaseOn(ctx context.Context, conn *pgx.Conn, name string) (string, error) {
	sql := "CREATE DATABASE " + pgx.Identifier{name}.Sanitize()
	if s.Installation.Major >= 15 {
		// The files are copied, as before 15. Otherwise all of the template's pages go into the WAL, which
		// each slot of the server reads.
		sql += " STRATEGY file_copy"
	}
	deadline := time.Now().Add(startTimeout)
	for {
		_, err := conn.Exec(ctx, sql)
		if err == nil {
			return s.URL(name), nil
		}
		// The server waits 5 s for an autovacuum worker to leave the template, which may stand still.
		if inUse, ok := errors.AsType[*pgconn.PgError](err); !ok || inUse.Code != "55006" ||
			ctx.Err() != nil || time.Now().After(deadline) {
			return "", fmt.Errorf("create database %s: %w", name, err)
		}
	}
}

func (s *Server) exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, sql)
	return err
}

// Start starts the server again in its folder and on its port, after Stop or Kill. What a killed server left
// behind may hold the folder for another 1.5 s: Start tries again for as long as ctx allows, three minutes at
// most. A server that runs is left as it is.
func (s *Server) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.child != nil && s.child.Running() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		err := s.startOnce(ctx)
		_, comesBack := errors.AsType[*heldError](err)
		if errors.Is(err, errPortTaken) && s.hasRun() {
			comesBack = true // another process's for a moment: the port stays the server's
		}
		if !comesBack {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(10 * pollInterval):
		}
	}
}

// startOnce makes one attempt: it returns when the server is ready, or has ended, or ctx has.
func (s *Server) startOnce(ctx context.Context) error {
	before := s.logSize()
	c, err := s.spawn()
	if err != nil {
		return s.explain(err)
	}
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		select {
		case <-c.Done():
			return startError(s.Installation, s.logSince(before))
		case <-ctx.Done():
			_ = c.Kill()
			return fmt.Errorf("start %v: %w; its log ends:\n%s", s.Installation, ctx.Err(),
				tail(s.logSince(before)))
		case <-ticker.C:
			if s.ready(c.PID()) {
				s.child = c
				return nil
			}
		}
	}
}

// spawn starts the postmaster. If this process dies, the server shuts down at once.
func (s *Server) spawn() (*process.Process, error) {
	log, err := os.OpenFile(s.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := s.command(context.Background(), "postgres", "-D", s.data(), "-p", strconv.Itoa(s.Port))
	cmd.Stdout, cmd.Stderr = log, log
	return process.Start(cmd, syscall.SIGQUIT)
}

// ready reads what the postmaster says of itself in postmaster.pid, as pg_ctl does: its pid in line 1, its
// state in line 8.
func (s *Server) ready(pid int) bool {
	b, err := os.ReadFile(filepath.Join(s.data(), "postmaster.pid"))
	if err != nil {
		return false
	}
	lines := strings.Split(string(b), "\n")
	if len(lines) < 8 || lines[0] != strconv.Itoa(pid) {
		return false
	}
	state := strings.TrimSpace(lines[7])
	return state == "ready" || state == "standby"
}

// hasRun tells whether the server was ever ready, and clients may know its port.
func (s *Server) hasRun() bool { return s.child != nil }

// PID returns the postmaster's process id, 0 when the server doesn't run.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.child == nil || !s.child.Running() {
		return 0
	}
	return s.child.PID()
}

// Stop stops the server: smart waits for all clients to leave, fast ends their sessions, immediate leaves
// crash recovery to the next start. It returns when the server has ended, or with an error after three
// minutes. A server that doesn't run is not an error.
func (s *Server) Stop(mode string) error {
	signal, ok := map[string]syscall.Signal{"smart": syscall.SIGTERM, "fast": syscall.SIGINT,
		"immediate": syscall.SIGQUIT}[mode]
	if !ok {
		return fmt.Errorf("stop mode %q: want smart, fast or immediate", mode)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.child == nil || !s.child.Running() {
		return nil
	}
	if err := s.child.Signal(signal); err != nil {
		return fmt.Errorf("stop %v: %w", s.Installation, err)
	}
	select {
	case <-s.child.Done():
		return nil
	case <-time.After(stopTimeout):
		return fmt.Errorf("%v did not stop (%s) within %v", s.Installation, mode, stopTimeout)
	}
}

// Kill ends the postmaster with kill -9, as a crash would. Its children notice and leave within about 1.5 s.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.child == nil || !s.child.Running() {
		return errors.New("the server does not run")
	}
	return s.child.Kill()
}

// Remove stops the server at once and deletes its folder.
func (s *Server) Remove() error {
	err := s.Stop("immediate")
	// A killed server's children may still be writing.
	for range 6000 {
		if removed := os.RemoveAll(s.Dir); removed == nil {
			return err
		}
		time.Sleep(pollInterval)
	}
	return errors.Join(err, os.RemoveAll(s.Dir))
}

// Log returns what the server has logged so far.
func (s *Server) Log() string { return s.logSince(0) }
