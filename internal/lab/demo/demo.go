// Package demo is `outflow-lab demo`: servers for the moment, a real editing trace written by connections
// that commit out of order, the stream as a consumer sees it, the streamer killed on the way, and a verdict
// that a separate reader computes.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/relay"
)

// Options say what to show.
type Options struct {
	PostgresURL string // a server to use, with wal_level=logical; "": one for the moment
	Writers     int    // connections that write
	Rate        int    // events per second that are written, about
	All         bool   // show every message
	Keep        bool   // leave everything running until interrupted

	Binary string // the streamer
	Out    io.Writer
}

const (
	table  = "outbox"
	stream = "OUTBOX"

	killAt      = 0.4 // of the trace has been written
	killFor     = time.Second
	quietLimit  = 30 * time.Second // without a message although some are missing
	stopTimeout = 15 * time.Second
)

// demo is one run.
type demo struct {
	Options
	dir      string
	pg       *pgserver.Server // nil: somebody else's
	database string           // ours, on somebody else's
	pgURL    string
	nats     *natsserver.Server
	conn     *nats.Conn
	js       jetstream.JetStream
	streamer *streamer
	screen   *screen
}

// Run shows the demo. It returns whether the verdict is good.
func Run(ctx context.Context, o Options) (good bool, err error) {
	d := &demo{Options: o, screen: newScreen(o.Out, o.All)}
	if d.dir, err = os.MkdirTemp("", "outflow-demo-"); err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, d.cleanUp()) }()
	// PostgreSQL refuses root, so it may run as another user, who must be able to enter.
	if err := os.Chmod(d.dir, 0o755); err != nil { //nolint:gosec // what is secret in it has its own mode
		return false, err
	}
	if err := d.startServers(ctx); err != nil {
		return false, err
	}
	if err := d.init(ctx); err != nil {
		return false, err
	}
	good, err = d.play(ctx)
	if err == nil && o.Keep {
		d.screen.connections(d)
		<-ctx.Done()
		return good, nil
	}
	return good, err
}

func (d *demo) startServers(ctx context.Context) (err error) {
	if d.PostgresURL != "" {
		err = d.borrow(ctx)
	} else {
		err = d.ownServer(ctx)
	}
	if err != nil {
		return err
	}
	if d.nats, err = natsserver.Start(natsserver.Options{Dir: filepath.Join(d.dir, "nats")}); err != nil {
		return fmt.Errorf("start nats: %w", err)
	}
	if d.conn, err = nats.Connect(d.nats.URL(), nats.Timeout(time.Minute)); err != nil {
		return err
	}
	d.js, err = jetstream.New(d.conn, jetstream.WithDefaultTimeout(30*time.Second))
	d.screen.line("nats      JetStream %s, embedded, port %d", d.conn.ConnectedServerVersion(), d.nats.Port)
	return err
}

func (d *demo) ownServer(ctx context.Context) (err error) {
	// What is thrown away needs no fsync; a slow disk would only make commits later than the horizon.
	d.pg, err = pgserver.Start(ctx, pgserver.Options{Dir: filepath.Join(d.dir, "postgres"),
		Settings: map[string]string{"fsync": "off", "track_commit_timestamp": "on"}})
	if err != nil {
		return err
	}
	d.pgURL, err = d.pg.CreateDatabase(ctx, "demo")
	d.screen.line("postgres  %v, for the moment, port %d", d.pg.Installation, d.pg.Port)
	return err
}

// borrow makes a database of our own on a server that is somebody else's.
func (d *demo) borrow(ctx context.Context) error {
	cfg, err := pgx.ParseConfig(d.PostgresURL)
	if err != nil {
		return errors.New("the PostgreSQL URL cannot be read") // pgx would show it, with its password
	}
	database := fmt.Sprintf("outflow_demo_%d", os.Getpid())
	if err := execute(ctx, cfg, "CREATE DATABASE "+pgx.Identifier{database}.Sanitize()); err != nil {
		return fmt.Errorf("postgres.url: %w", err)
	}
	d.database = database
	d.pgURL, err = pgserver.InDatabase(d.PostgresURL, d.database)
	d.screen.line("postgres  %s:%d, database %s for the moment", cfg.Host, cfg.Port, d.database)
	if err != nil {
		return err
	}
	return d.noteTimestamps(ctx, cfg)
}

func (d *demo) init(ctx context.Context) error {
	d.streamer = newStreamer(d)
	out, err := process.Again(ctx, func() *exec.Cmd { return d.streamer.command(ctx, "init") })
	if err != nil {
		return fmt.Errorf("outflow init: %w\n%s", err, out)
	}
	if err := d.streamer.start(); err != nil {
		return err
	}
	d.screen.line("outflow   pid %d, status page http://%s/", d.streamer.pid(), d.streamer.listen)
	return nil
}

// play writes the trace, shows what arrives, kills the streamer once, and gives the verdict.
func (d *demo) play(ctx context.Context) (good bool, err error) {
	ops, err := recording.Load(recording.FriendsForever)
	if err != nil {
		return false, err
	}
	w := newWriters(d.pgURL, ops, d.Writers, d.Rate)
	r := newReader(d.js, w, d.screen)
	d.screen.line("\n%d operations of two people who write one note at the same time, by %d connections "+
		"that commit out of order;\n"+
		"what a consumer of the stream sees:\n", len(ops), d.Writers)
	d.screen.head()

	begun := time.Now()
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return w.run(gctx) })
	g.Go(func() error { return d.disturb(gctx, w, r) })
	g.Go(func() error { return r.run(gctx, len(ops)) })
	if err := g.Wait(); err != nil {
		return false, errors.Join(err, d.streamer.failure())
	}
	took := time.Since(begun)
	v, err := d.verdict(ctx)
	if err != nil {
		return false, err
	}
	d.screen.verdict(v, r.figures(took))
	return v.OK() && (v.OutOfOrder == v.Late || !v.Timed), nil
}

// disturb kills the streamer in the middle and starts it again.
func (d *demo) disturb(ctx context.Context, w *writers, r *reader) error {
	if err := w.wait(ctx, killAt); err != nil {
		return err
	}
	pid := d.streamer.pid()
	r.mark(true)
	if err := d.streamer.kill(); err != nil {
		return err
	}
	d.screen.event("kill -9 %d: outflow is dead, the writers go on", pid)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(killFor):
	}
	if err := d.streamer.start(); err != nil {
		return err
	}
	d.screen.event("outflow started again, pid %d", d.streamer.pid())
	r.mark(false)
	return nil
}

// verdict compares table and stream over connections of its own.
func (d *demo) verdict(ctx context.Context) (oracle.Verdict, error) {
	conn, err := pgx.Connect(ctx, d.pgURL)
	if err != nil {
		return oracle.Verdict{}, err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // it has only read
	return oracle.Compare(ctx, conn, table, d.js, stream, relay.DefaultHorizon)
}

// cleanUp leaves nothing behind.
func (d *demo) cleanUp() error {
	var errs []error
	if d.streamer != nil {
		errs = append(errs, d.streamer.stop())
	}
	if d.conn != nil {
		d.conn.Close()
	}
	if d.nats != nil {
		d.nats.Shutdown()
	}
	if d.pg != nil {
		errs = append(errs, d.pg.Remove())
	}
	if d.database != "" {
		errs = append(errs, d.giveBack())
	}
	return errors.Join(append(errs, os.RemoveAll(d.dir))...)
}

// giveBack drops slot and database from a server that is somebody else's.
func (d *demo) giveBack() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	ours, err := pgx.ParseConfig(d.pgURL)
	if err != nil {
		return err
	}
	theirs, err := pgx.ParseConfig(d.PostgresURL)
	if err != nil {
		return err
	}
	if d.streamer != nil {
		drop := "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '" +
			d.streamer.slot + "'"
		err = execute(ctx, ours, drop)
	}
	return errors.Join(err, execute(ctx, theirs, "DROP DATABASE IF EXISTS "+
		pgx.Identifier{d.database}.Sanitize()))
}

// noteTimestamps says so where the verdict can't tell what was late: the reader takes commit times from
// PostgreSQL.
func (d *demo) noteTimestamps(ctx context.Context, cfg *pgx.ConnConfig) error {
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("postgres.url: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the answer counts
	var track string
	if err := conn.QueryRow(ctx, "SHOW track_commit_timestamp").Scan(&track); err != nil {
		return fmt.Errorf("postgres.url: %w", err)
	}
	if track != "on" {
		d.screen.line("          its track_commit_timestamp is off: the verdict cannot tell what was " +
			"committed too late to be put in order")
	}
	return nil
}

func execute(ctx context.Context, cfg *pgx.ConnConfig, sql string) error {
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the statement's answer counts
	_, err = conn.Exec(ctx, sql)
	return err
}
