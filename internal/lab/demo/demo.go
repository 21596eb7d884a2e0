// Package demo is `outflow-lab demo`: servers for the moment, a real editing trace written by connections
// that commit out of order, published in each ordering mode at the same time, the streamers killed on the
// way, and a verdict that a separate reader computes from the WAL.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// Options say what to show.
type Options struct {
	PostgresURL string // a server to use, with wal_level=logical; "": one for the moment
	Writers     int    // connections that write
	Rate        int    // events per second that are written, about
	Load
	All  bool // show every message
	Keep bool // leave everything running until interrupted

	Binary string // the streamer
	Out    io.Writer
}

// Load says what is written, and how long gap mode waits.
type Load struct {
	Notes    int           // documents, each the beginning of a recorded one; 0: the three recordings, whole
	InARow   int           // operations of a note before the next note has some
	Stall    time.Duration // how long the longest stalls are
	Every    int           // one of so many transactions stalls that long
	Rollback bool          // one transaction is rolled back
	Spans    bool          // counters are clocks from 0 that advance by the characters of an operation
	Bound    time.Duration // reorder.bound
	Cold     time.Duration // reorder.cold
}

// MaxOps is how many operations notes times InARow can have: the recording has some more.
const MaxOps = 26_000

// DefaultLoad is the demo's. Each note is new to gap mode, and its first operation may stall too: cold is as
// long as bound.
var DefaultLoad = Load{Notes: 200, InARow: 4, Stall: time.Second, Every: 1000, Rollback: true,
	Bound: 3 * time.Second, Cold: 3 * time.Second}

const (
	table  = "outbox"
	span   = "span" // column, with Load.Spans
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
	modes    []*mode
	truth    *oracle.Reader // of the WAL; nil before its slot is made
	screen   *screen
}

// mode is one ordering mode: Outflow with a slot, and a NATS server.
type mode struct {
	name      string
	settings  oracle.Settings
	environ   []string
	nats      *natsserver.Server
	conn      *nats.Conn
	js        jetstream.JetStream
	streamer  *streamer
	began     oracle.LSN // where its slot begins
	reader    *reader
	judgement oracle.Judgement
	added     []time.Duration // what ordering added to the latency of each message, ascending
	inVain    []time.Duration // and how much of that no exact order needs, ascending
}

// newModes returns one for each mode. The last one's messages are shown.
func newModes(l Load) []*mode {
	commit, gap := oracle.DefaultSettings, oracle.DefaultSettings
	commit.Horizon, commit.Sort = 0, oracle.ByCommit
	gap.Horizon, gap.Sort, gap.Gap = 0, oracle.ByGap, oracle.DefaultGap
	gap.Gap.Bound, gap.Gap.Cold = l.Bound, l.Cold
	if l.Spans {
		gap.Gap.First = 0
	}
	return []*mode{
		{name: "commit order", settings: commit,
			environ: []string{"OUTFLOW_REORDER_HORIZON=0s", "OUTFLOW_REORDER_SORT=commit"}},
		{name: "horizon", settings: oracle.DefaultSettings},
		{name: "gap mode", settings: gap,
			environ: []string{"OUTFLOW_REORDER_MODE=gap", "OUTFLOW_REORDER_BOUND=" + l.Bound.String(),
				"OUTFLOW_REORDER_COLD=" + l.Cold.String(),
				fmt.Sprint("OUTFLOW_REORDER_FIRST_COUNTER=", gap.Gap.First)}},
	}
}

// Run shows the demo. It returns whether the verdict is good.
func Run(ctx context.Context, o Options) (good bool, err error) {
	d := &demo{Options: o, screen: &screen{out: o.Out, all: o.All}, modes: newModes(o.Load)}
	if d.dir, err = os.MkdirTemp("", "outflow-demo-"); err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, d.cleanUp()) }()
	// PostgreSQL refuses root, so it may run as another user, who must be able to enter.
	if err := os.Chmod(d.dir, 0o755); err != nil { //nolint:gosec // what is secret in it has its own mode
		return false, err
	}
	if d.PostgresURL != "" {
		err = d.borrow(ctx)
	} else {
		err = d.ownServer(ctx)
	}
	if err != nil {
		return false, err
	}
	for i, m := range d.modes {
		if err := d.open(ctx, m, i); err != nil {
			return false, err
		}
	}
	good, err = d.play(ctx)
	if err == nil && o.Keep {
		d.screen.connections(d)
		<-ctx.Done()
		return good, nil
	}
	return good, err
}

// open starts a mode's NATS and Outflow.
func (d *demo) open(ctx context.Context, m *mode, i int) (err error) {
	if m.nats, err = natsserver.Start(
		natsserver.Options{Dir: filepath.Join(d.dir, fmt.Sprint("nats", i))}); err != nil {
		return fmt.Errorf("start nats: %w", err)
	}
	if m.conn, err = nats.Connect(m.nats.URL(), nats.Timeout(time.Minute)); err != nil {
		return err
	}
	if m.js, err = jetstream.New(m.conn, jetstream.WithDefaultTimeout(30*time.Second)); err != nil {
		return err
	}
	m.streamer = newStreamer(d, m, i)
	out, err := process.Again(ctx, func() *exec.Cmd { return m.streamer.command(ctx, "init") })
	if err != nil {
		return fmt.Errorf("outflow init: %w\n%s", err, out)
	}
	err = d.withConn(ctx, func(conn *pgx.Conn) error {
		// Outflow has confirmed nothing yet: the slot is where the first checkpoint is.
		var at string
		err := conn.QueryRow(ctx, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots "+
			"WHERE slot_name = $1", m.streamer.slot).Scan(&at)
		if err == nil {
			m.began, err = oracle.ParseLSN(at)
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := m.streamer.start(); err != nil {
		return err
	}
	d.screen.line("outflow   %s: pid %d, status page http://%s/, JetStream %s embedded, port %d", m.name,
		m.streamer.pid(), m.streamer.listen, m.conn.ConnectedServerVersion(), m.nats.Port)
	return nil
}

func (d *demo) ownServer(ctx context.Context) (err error) {
	// What is thrown away needs no fsync; a slow disk would only make commits later than the horizon.
	d.pg, err = pgserver.Start(ctx, pgserver.Options{Dir: filepath.Join(d.dir, "postgres"),
		Settings: map[string]string{"fsync": "off"}})
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
	return err
}

// play writes the trace, shows what arrives, kills the streamers once, and gives the verdict.
func (d *demo) play(ctx context.Context) (good bool, err error) {
	ops, err := d.typed()
	if err != nil {
		return false, err
	}
	source := oracle.Source{Slot: d.slot("truth"), Columns: oracle.DefaultColumns}
	if d.Spans {
		source.Columns.Span = span
	}
	truth := oracle.NewReader(source)
	if err := d.withConn(ctx, func(conn *pgx.Conn) error {
		return oracle.CreateSlot(ctx, conn, d.slot("truth"))
	}); err != nil {
		return false, err
	}
	d.truth = truth
	w := newWriters(d.pgURL, ops, &d.Options, d.screen)
	d.screen.line("\n%s: %d operations, by %d connections that commit\nout of order, some after a stall%s. "+
		"What a consumer of gap mode's stream sees:\n", d.subject(), len(ops), d.Writers, d.never())
	d.screen.head()

	begun := time.Now()
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return w.run(gctx) })
	g.Go(func() error { return d.disturb(gctx, w) })
	for i, m := range d.modes {
		m.reader = newReader(m, w, d.screen, i == len(d.modes)-1)
	}
	for _, m := range d.modes {
		g.Go(func() error { return m.reader.run(gctx, w.commits(), d.Bound+quietLimit) })
	}
	if err := g.Wait(); err != nil {
		for _, m := range d.modes {
			err = errors.Join(err, m.streamer.failure())
		}
		return false, err
	}
	took := time.Since(begun)
	if err := d.judge(ctx); err != nil {
		return false, err
	}
	return d.screen.verdict(d.modes, d.Load, took), nil
}

// subject says what is written.
func (l *Load) subject() string {
	if l.Notes == 0 {
		return "Three recorded documents"
	}
	return fmt.Sprintf("%d notes, each as two people once wrote one at the same time", l.Notes)
}

func (l *Load) never() string {
	if l.Rollback {
		return ", and one never"
	}
	return ""
}

// disturb kills the streamers in the middle and starts them again.
func (d *demo) disturb(ctx context.Context, w *writers) error {
	if err := w.wait(ctx, killAt); err != nil {
		return err
	}
	for _, m := range d.modes {
		m.reader.mark(true)
		if err := m.streamer.kill(); err != nil {
			return err
		}
	}
	d.screen.event("kill -9: outflow is dead in all modes, the writers go on")
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(killFor):
	}
	for _, m := range d.modes {
		if err := m.streamer.start(); err != nil {
			return err
		}
		m.reader.mark(false)
	}
	d.screen.event("outflow started again")
	return nil
}

// judge compares each stream with what the WAL makes by the rules of its mode.
func (d *demo) judge(ctx context.Context) error {
	if err := d.withConn(ctx, func(conn *pgx.Conn) error { return d.truth.Read(ctx, conn) }); err != nil {
		return err
	}
	timeline, err := oracle.Timelines(ctx, d.pgURL)
	if err != nil {
		return err
	}
	for _, m := range d.modes {
		slices.Sort(m.reader.undisturbed)
		m.judgement, err = oracle.Judge(ctx, m.js, stream, d.truth.Truth(),
			oracle.Config{Slot: m.streamer.slot,
				Start: m.began, Settings: m.settings, Timeline: timeline})
		if err == nil {
			m.added, m.inVain, err = m.reader.added(d.truth.Truth())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// slot is the name of a slot of ours.
func (d *demo) slot(of string) string { return fmt.Sprintf("outflow_demo_%d_%s", os.Getpid(), of) }

func (d *demo) withConn(ctx context.Context, do func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, d.pgURL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // what was done was answered
	return do(conn)
}

// cleanUp leaves nothing behind.
func (d *demo) cleanUp() error {
	var errs []error
	for _, m := range d.modes {
		if m.streamer != nil {
			errs = append(errs, m.streamer.stop())
		}
		if m.conn != nil {
			m.conn.Close()
		}
		if m.nats != nil {
			m.nats.Shutdown()
		}
	}
	if d.pg != nil {
		errs = append(errs, d.pg.Remove())
	}
	if d.database != "" {
		errs = append(errs, d.giveBack())
	}
	return errors.Join(append(errs, os.RemoveAll(d.dir))...)
}

// giveBack drops slots and database from a server that is somebody else's.
func (d *demo) giveBack() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	theirs, err := pgx.ParseConfig(d.PostgresURL)
	if err != nil {
		return err
	}
	err = d.withConn(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "+
			"WHERE starts_with(slot_name, $1)", d.slot(""))
		return err
	})
	return errors.Join(err, execute(ctx, theirs, "DROP DATABASE IF EXISTS "+
		pgx.Identifier{d.database}.Sanitize()))
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
