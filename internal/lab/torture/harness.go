package torture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/pgserver"
)

// harness is everything that runs: servers, outflows, load.
type harness struct {
	o      *Options
	shape  *shape
	screen *screen
	dir    string
	name   string // of what is made on servers of somebody else, and a prefix of slots
	table  string

	pg      *pgserver.Server // nil: somebody else's
	pgURL   string
	clock   *clock // nil: PostgreSQL's clock is the machine's
	truth   *truth
	load    *load
	victims []*victim
	twin    *victim

	backlogs atomic.Int64 // how often an installation was away

	mu      sync.Mutex
	failure error // the first that ends the attack: something ended by itself that should not
	broken  context.CancelCauseFunc
}

func newHarness(o *Options, s *shape, p *screen) (*harness, error) {
	w := &harness{o: o, shape: s, screen: p, name: fmt.Sprintf("outflow_torture_%d", os.Getpid()),
		table: "outbox"}
	if !s.ownPostgres {
		w.table = w.name
	}
	var err error
	if w.dir, err = os.MkdirTemp("", "outflow-torture-"); err != nil {
		return nil, err
	}
	// PostgreSQL refuses root, so it may run as another user, who must be able to enter.
	return w, os.Chmod(w.dir, 0o755) //nolint:gosec // what is secret in it has its own mode
}

func (w *harness) file(name string) string { return filepath.Join(w.dir, name) }

// start starts servers and outflows and returns when all publish.
func (w *harness) start(ctx context.Context) (err error) {
	if err := w.startPostgres(ctx); err != nil {
		return err
	}
	for n := range w.o.Victims {
		v, err := newVictim(ctx, w, n)
		if v != nil {
			w.victims = append(w.victims, v)
		}
		if err != nil {
			return err
		}
	}
	if w.twin, err = newTwin(ctx, w); err != nil {
		return err
	}
	if err := w.victims[0].init(ctx); err != nil { // makes the table
		return err
	}
	// Nothing is in the table yet, so the truth is whole, and the slots that are made now begin before the
	// first row.
	if w.truth, err = newTruth(ctx, w); err != nil {
		return err
	}
	for _, v := range append(w.victims[1:len(w.victims):len(w.victims)], w.twin) {
		if err := v.init(ctx); err != nil {
			return err
		}
	}
	for _, v := range w.everybody() {
		if err := v.start(); err != nil {
			return err
		}
	}
	for _, v := range w.everybody() {
		if !await(ctx, catchUpLimit, func() bool { return v.holder(ctx) != nil }) {
			return fmt.Errorf("%s does not get ready; its log ends with:\n%s", v.slot, v.instances[0].tail())
		}
	}
	w.screen.outflows(w)
	return ctx.Err()
}

func (w *harness) everybody() []*victim {
	return append(w.victims[:len(w.victims):len(w.victims)], w.twin)
}

func (w *harness) startPostgres(ctx context.Context) (err error) {
	if !w.shape.ownPostgres {
		w.pgURL = w.o.PostgresURL
		if _, err := pgx.ParseConfig(w.pgURL); err != nil {
			return errors.New("--postgres.url cannot be read") // pgx would show it, with its password
		}
		w.screen.line("postgres  somebody else's: only our own walsenders are harmed; table %s, slots and "+
			"publications %s_*, removed at the end", w.table, w.name)
		return nil
	}
	found, err := pgserver.Find(w.o.PGMajor)
	if err != nil {
		return err
	}
	if w.shape.clock != "" {
		if w.clock, err = newClock(w.file("clock"), w.shape.clock, found); err != nil {
			return err
		}
		found = w.clock.installation
	}
	// What is thrown away needs no fsync: no fault here takes the machine's memory.
	w.pg, err = pgserver.Start(ctx, pgserver.Options{Dir: w.file("postgres"), Installation: found,
		Settings: map[string]string{
			"fsync": "off", "track_commit_timestamp": "on",
			"wal_sender_timeout": fmt.Sprintf("%dms", walSenderTimeout.Milliseconds()),
			"max_wal_size":       "256MB", "shared_buffers": "64MB", "autovacuum_naptime": "10s",
		}})
	if err != nil {
		return err
	}
	w.pgURL, err = w.pg.CreateDatabase(ctx, "torture")
	w.screen.line("postgres  %s, our own, %s", w.pg.Installation.Version, w.pgURL)
	return err
}

// query runs a statement on a connection of its own; scan may be nil.
func (w *harness) query(ctx context.Context, scan []any, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, w.pgURL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the statement's answer counts
	if scan == nil {
		_, err = conn.Exec(ctx, sql, args...)
		return err
	}
	return conn.QueryRow(ctx, sql, args...).Scan(scan...)
}

// surely runs a statement as query does, until the server answers: it may stand still for a moment, or be
// starting.
func (w *harness) surely(ctx context.Context, scan []any, sql string, args ...any) (err error) {
	await(ctx, catchUpLimit, func() bool {
		err = w.query(ctx, scan, sql, args...)
		return err == nil || wrong(err) || errors.Is(err, pgx.ErrNoRows)
	})
	return err
}

// dropSlot drops a slot that may be in use: whoever uses it is ended.
func (w *harness) dropSlot(ctx context.Context, slot string) (err error) {
	await(ctx, catchUpLimit, func() bool {
		if err = w.query(ctx, nil, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "+
			"WHERE slot_name = $1", slot); err != nil {
			// the next attempt says
			_ = w.query(ctx, nil, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE "+
				"slot_name = $1", slot)
		}
		return err == nil
	})
	return err
}

// askTimeout limits a question to a server that is up.
const askTimeout = 10 * time.Second

// fail ends the attack: what happened must not happen.
func (w *harness) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failure == nil {
		w.failure = fmt.Errorf(format, args...)
		if w.broken != nil {
			w.broken(w.failure)
		}
	}
}

func (w *harness) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failure
}

// close ends everything, and removes it unless it is to be kept.
func (w *harness) close(keep bool) error {
	var errs []error
	for _, v := range w.victims {
		errs = append(errs, v.close())
	}
	if w.twin != nil {
		errs = append(errs, w.twin.close())
	}
	if !w.shape.ownPostgres {
		errs = append(errs, w.giveBack())
	}
	switch {
	case w.pg == nil:
	case keep:
		errs = append(errs, w.pg.Stop("fast"))
	default:
		errs = append(errs, w.pg.Remove())
	}
	if !keep {
		errs = append(errs, os.RemoveAll(w.dir))
	}
	return errors.Join(errs...)
}

// giveBack removes what was made on servers of somebody else. Streams are removed by their victims.
func (w *harness) giveBack() error {
	ctx, cancel := context.WithTimeout(context.Background(), catchUpLimit)
	defer cancel()
	var errs []error
	if w.truth != nil {
		errs = append(errs, w.dropSlot(ctx, w.truth.slot))
	}
	for _, v := range append(w.victims, w.twin) {
		if v == nil {
			continue
		}
		errs = append(errs, w.dropSlot(ctx, v.slot), w.surely(ctx, nil, "DROP PUBLICATION IF EXISTS "+
			pgx.Identifier{v.slot}.Sanitize()))
	}
	return errors.Join(append(errs,
		w.surely(ctx, nil, "DROP TABLE IF EXISTS "+pgx.Identifier{w.table}.Sanitize()))...)
}

// environ is the caller's environment without what belongs to outflow or PostgreSQL.
func environ() (kept []string) {
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "OUTFLOW_") && !strings.HasPrefix(v, "TMPDIR=") {
			kept = append(kept, v)
		}
	}
	return kept
}
