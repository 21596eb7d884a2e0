package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/pgserver"
)

// harness is everything that runs: the servers, ours or given.
type harness struct {
	o    *Options
	dir  string
	name string // a prefix of all that is made on servers, which may be somebody else's

	pg        *pgserver.Server // nil: somebody else's
	pgURL     string           // of our database
	pgVersion string
	tables    bool    // are made
	broker    *broker // the present NATS; nil: none yet
}

func newHarness(o Options) (*harness, error) {
	w := &harness{o: &o, name: fmt.Sprintf("outflow_bench_%d", os.Getpid())}
	var err error
	if w.dir, err = os.MkdirTemp("", "outflow-bench-"); err != nil {
		return nil, err
	}
	// PostgreSQL refuses root, so it may run as another user, who must be able to enter.
	return w, os.Chmod(w.dir, 0o755) //nolint:gosec // what is secret in it has its own mode
}

func (w *harness) file(name string) string { return filepath.Join(w.dir, name) }

func (w *harness) line(format string, args ...any) { fmt.Fprintf(w.o.Out, format+"\n", args...) }

// ownSettings are those of our own PostgreSQL. What is thrown away needs no fsync, and a disk that is slow
// today would be all that is seen; where commits are timed one by one it is switched on. Checkpoints do not
// fall into a run.
var ownSettings = map[string]string{
	"fsync": "off", "shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "1h",
	"log_min_messages": "warning",
}

func (w *harness) startPostgres(ctx context.Context) (err error) {
	server := w.o.PostgresURL
	if server == "" {
		found, err := pgserver.Find(w.o.PGMajor)
		if err != nil {
			return err
		}
		w.pg, err = pgserver.Start(ctx, pgserver.Options{Dir: w.file("postgres"), Installation: found,
			Settings: ownSettings})
		if err != nil {
			return err
		}
		server = w.pg.URL("postgres")
	}
	cfg, err := pgx.ParseConfig(server)
	if err != nil {
		return errors.New("--postgres.url cannot be read") // pgx would show it, with its password
	}
	if w.pg == nil {
		if w.pgURL, err = pgserver.InDatabase(server, w.name); err != nil {
			return err
		}
	} else {
		w.pgURL = w.pg.URL(w.name)
	}
	if err := w.makeDatabase(ctx, cfg); err != nil {
		return fmt.Errorf("PostgreSQL: %w", err)
	}
	return nil
}

// makeDatabase makes our database. It is asked once: a given server that is not there will not be there the
// next moment.
func (w *harness) makeDatabase(ctx context.Context, cfg *pgx.ConnConfig) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the statement's answer counts
	var level string
	if err := conn.QueryRow(ctx,
		"SELECT current_setting('server_version'), current_setting('wal_level')").Scan(&w.pgVersion,
		&level); err != nil {
		return err
	}
	w.pgVersion, _, _ = strings.Cut(w.pgVersion, " ")
	if level != "logical" {
		return fmt.Errorf("it has wal_level=%s: set it to logical, and restart it", level)
	}
	_, err = conn.Exec(ctx, "CREATE DATABASE "+w.name)
	return err
}

// describe says in the report, and on the screen, what is measured on.
func (w *harness) describe(r *Report) {
	r.PostgreSQL = "PostgreSQL " + w.pgVersion + ", somebody else's"
	if w.pg != nil {
		r.PostgreSQL = "PostgreSQL " + w.pgVersion + ", our own, fsync=off but for latency"
	}
	r.NATS = "nats-server " + serverVersion + ", our own"
	if w.o.NATSURL != "" {
		r.NATS = "somebody else's NATS"
	}
	w.line("outflow   %s", r.Version)
	for _, b := range w.o.Builds {
		w.line("          beside %s: %s", b.Name, b.Path)
	}
	w.line("machine   %s", r.Machine)
	w.line("servers   %s; %s", r.PostgreSQL, r.NATS)
	if _, ok := w.recvLogical(); !ok {
		r.Left = append(r.Left, "pg_recvlogical is not installed: nothing is compared with it")
		w.line("          pg_recvlogical is not installed: nothing is compared with it")
	}
	w.line("          %d repetitions, in a rotating order; medians (lowest..highest), ratios within one "+
		"repetition", r.Repetitions)
}

// cannot says why a case is not possible here, "" if it is.
func (w *harness) cannot(c *Case) string {
	if w.o.NATSURL != "" && c.Sync {
		return "when a given NATS syncs is not ours to choose"
	}
	if w.o.NATSURL != "" && c.Replicas > 1 && w.broker.conn.ConnectedClusterName() == "" {
		return "the given NATS is no cluster"
	}
	return ""
}

// recvLogical returns the path of pg_recvlogical.
func (w *harness) recvLogical() (string, bool) {
	if w.pg != nil {
		return w.pg.Installation.Tool(recvLogicalName)
	}
	found, err := pgserver.Find(0)
	if err != nil {
		return "", false
	}
	return found.Tool(recvLogicalName)
}

// syncCommits switches fsync of our own server.
func (w *harness) syncCommits(ctx context.Context, on bool) error {
	if w.pg == nil {
		return nil
	}
	value := map[bool]string{false: "off", true: "on"}[on]
	return w.exec(ctx, "ALTER SYSTEM SET fsync = "+value, "SELECT pg_reload_conf()")
}

// close ends everything, and removes it unless it is to be kept.
func (w *harness) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var errs []error
	if w.broker != nil {
		errs = append(errs, w.broker.close(w.o.Keep))
	}
	switch {
	case w.pg == nil && w.pgURL != "":
		errs = append(errs, w.giveBack(ctx))
	case w.pg != nil && w.o.Keep:
		errs = append(errs, w.pg.Stop("fast"))
	case w.pg != nil:
		errs = append(errs, w.pg.Remove())
	}
	if w.o.Keep {
		w.line("kept: %s", w.dir)
	} else {
		errs = append(errs, os.RemoveAll(w.dir))
	}
	return errors.Join(errs...)
}

// giveBack drops slots and database on a server that is somebody else's.
func (w *harness) giveBack(ctx context.Context) error {
	err := persist(ctx, func(ctx context.Context) error { return w.dropSlots(ctx, literal(w.name)+"%") })
	return errors.Join(err, persist(ctx, func(ctx context.Context) error {
		conn, err := pgx.Connect(ctx, w.o.PostgresURL)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the statement's answer counts
		_, err = conn.Exec(ctx, "DROP DATABASE IF EXISTS "+w.name)
		return err
	}))
}

const (
	patience = 3 * time.Minute  // with a server that stands still
	attempt  = 30 * time.Second // of one question to it
	pause    = 200 * time.Millisecond
)

// permanent is an error that trying again does not cure.
type permanent struct{ error }

// persist tries again until it succeeds: a busy machine may stand still for seconds. It gives up after 3
// minutes, and with ctx.
func persist(ctx context.Context, do func(context.Context) error) error {
	begun := time.Now()
	for {
		once, cancel := context.WithTimeout(ctx, attempt)
		err := do(once)
		cancel()
		if err == nil {
			return nil
		}
		if _, ok := errors.AsType[permanent](err); ok || time.Since(begun) > patience {
			return err
		}
		if sleep(ctx, pause) != nil {
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
