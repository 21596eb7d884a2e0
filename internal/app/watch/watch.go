package watch

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
)

// How often the two sides are read, and how long one reading may take, connecting included. A standby reads
// less often: nobody waits for its figures, and the active instance shows the same ones.
const (
	Interval        = 2 * time.Second
	StandbyInterval = 5 * time.Second

	timeLimit = 5 * time.Second
)

// Config says what to watch.
type Config struct {
	config.Config
	Logger *slog.Logger
	// Standby says whether this process waits for the slot; nil: it doesn't.
	Standby func() bool
	// Partitions reads the outbox's partitions; nil: it has none.
	Partitions func(context.Context, catalog.Querier) (Partitions, error)
	// Waits says at which code this process waits instead of publishing, "" if it does not; held: somebody
	// has the slot. status and doctor read it in PostgreSQL, also while NATS takes nothing. nil: nothing is
	// said.
	Waits func(held bool) string
	// Seen is told the end of WAL and the slot each time that they were read; nil: nobody is.
	Seen func(end outbox.LSN, slot relay.SlotState, read time.Time)
}

// Watcher reads both sides again and again, each in its own goroutine: one that is down doesn't delay the
// other. It holds at most one connection to each, and changes nothing.
type Watcher struct {
	cfg Config

	mu      sync.Mutex
	reading Reading
}

// New returns a watcher; it reads nothing before Run.
func New(cfg Config) *Watcher {
	if cfg.Standby == nil {
		cfg.Standby = func() bool { return false }
	}
	return &Watcher{cfg: cfg}
}

// Run reads until ctx ends, and has closed both connections when it returns.
func (w *Watcher) Run(ctx context.Context) {
	var sides sync.WaitGroup
	for _, s := range []side{&postgresSide{w: w}, &natsSide{w: w}} {
		sides.Go(func() {
			defer crash.Guard()
			w.repeat(ctx, s)
		})
	}
	sides.Wait()
}

// Reading returns what was last read. It is the caller's, except for its slices, which must not be changed.
func (w *Watcher) Reading() Reading {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.reading
}

// update changes the reading.
func (w *Watcher) update(f func(*Reading)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.reading)
}

// side is one of the two servers, over a connection that read opens if there is none.
type side interface {
	read(ctx context.Context) error
	failed(err error, now time.Time)
	close()
}

// Once reads both sides, each within its time limit, and closes the connections.
func (w *Watcher) Once(ctx context.Context) {
	var sides sync.WaitGroup
	for _, s := range []side{&postgresSide{w: w}, &natsSide{w: w, once: true}} {
		sides.Go(func() {
			defer crash.Guard()
			defer s.close()
			w.attempt(ctx, s)
		})
	}
	sides.Wait()
}

// repeat reads one side until ctx ends.
func (w *Watcher) repeat(ctx context.Context, s side) {
	defer s.close()
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		w.attempt(ctx, s)
		next.Reset(w.interval())
	}
}

// attempt reads one side once. A reading that failed closes the connection, and the next one opens another.
func (w *Watcher) attempt(ctx context.Context, s side) {
	limited, cancel := context.WithTimeout(ctx, timeLimit)
	defer cancel()
	if err := s.read(limited); err != nil && ctx.Err() == nil {
		s.failed(err, time.Now())
		s.close()
	}
}

func (w *Watcher) interval() time.Duration {
	if w.cfg.Standby() {
		return StandbyInterval
	}
	return Interval
}

// fresh says that the figures were read now.
func (r *Read) fresh(now time.Time) { *r = Read{At: now} }

// failed keeps the time at which the figures were read.
func (r *Read) failed(err error, now time.Time) {
	if r.FailingSince.IsZero() {
		r.FailingSince = now
	}
	r.Error = err.Error()
}
