package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sync/errgroup"
)

// load writes traces through several connections that commit out of order. It outlives restarts of the
// server: what became of a transaction whose commit was not answered is seen in the table.
type load struct {
	w     *harness
	rate  int
	limit int // rows; 0: none

	committed   atomic.Int64 // rows and messages
	messages    atomic.Int64 // of them
	connections atomic.Int64 // that were asked for
	rolled      atomic.Int64 // rows that were rolled back
	large       atomic.Int64 // transactions of largeRows
	faster      atomic.Int64 // so many times more than the rate
	wanted      chan struct{}
	done        atomic.Bool

	mu    sync.Mutex
	ops   *operations
	taken int
	due   time.Time // when the next row is to be written
}

const (
	largeRows  = 20_000
	largeFirst = 3 * time.Second // after the beginning
	largeEvery = 45 * time.Second
	behind     = 2 * time.Second // what the load does not make up for: the server was away
	reconnect  = 20 * time.Millisecond
)

func newLoad(w *harness) (*load, error) {
	ops, err := newOperations()
	if err == nil {
		ops.gaps, ops.spans = w.o.Mode == modeGap, w.shape.columns.Span != ""
	}
	return &load{w: w, rate: w.o.Rate, limit: w.o.Operations, ops: ops, wanted: make(chan struct{}, 1)}, err
}

// run writes until stop is called, or the limit is reached.
func (l *load) run(ctx context.Context) error {
	l.due = time.Now()
	g, all := errgroup.WithContext(ctx)
	for n := range l.w.o.Writers {
		r := rand.New(rand.NewPCG(l.w.o.Seed, 1<<33+uint64(n)))
		g.Go(func() error { return l.write(all, r, l.pick) })
	}
	g.Go(func() error { return l.write(all, rand.New(rand.NewPCG(l.w.o.Seed, 1<<34)), l.pickLarge) })
	err := g.Wait()
	switch { // by the caller's context: the group's has ended with the first error
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return fmt.Errorf("write: %w", err)
	case l.committed.Load() == 0:
		return errors.New("write: nothing was committed")
	}
	return nil
}

// stop lets the transactions under way end.
func (l *load) stop() { l.done.Store(true) }

// spill asks for a transaction that is larger than outflow's buffer, soon.
func (l *load) spill() {
	select {
	case l.wanted <- struct{}{}:
	default: // one is wanted already
	}
}

// hurry makes the load write so many times more, or less again.
func (l *load) hurry(times int64) { l.faster.Add(times) }

// take hands out n operations when they are due; ok is false at the end.
func (l *load) take(ctx context.Context, n int) (ops []operation, ok bool) {
	l.mu.Lock()
	if l.done.Load() || l.limit > 0 && l.taken >= l.limit {
		l.mu.Unlock()
		return nil, false
	}
	if l.limit > 0 {
		n = min(n, l.limit-l.taken)
	}
	now := time.Now()
	if now.Sub(l.due) > behind {
		l.due = now.Add(-behind)
	}
	wait := l.due.Sub(now)
	if n < largeRows { // a large transaction comes on top
		l.due = l.due.Add(time.Duration(n) * time.Second / time.Duration(int64(l.rate)*(1+l.faster.Load())))
	}
	l.taken += n
	ops = l.ops.next(n)
	for i := range ops { // the first of a transaction is a row: the table then says whether it was committed
		ops[i].message = l.w.o.Source == sourceBoth && i%2 == 1
	}
	l.mu.Unlock()
	return ops, pause(ctx, max(0, wait)) == nil
}

// pick chooses the next small transaction.
func (l *load) pick(ctx context.Context, r *rand.Rand) (transaction, []operation, bool) {
	s := shapes[0]
	n := r.IntN(totalWeight)
	for _, s = range shapes {
		if n -= s.weight; n < 0 {
			break
		}
	}
	ops, ok := l.take(ctx, s.least+r.IntN(s.most-s.least+1))
	return s.write, ops, ok
}

// pickLarge waits until a large transaction is due or wanted.
func (l *load) pickLarge(ctx context.Context, _ *rand.Rand) (transaction, []operation, bool) {
	wait := largeEvery
	if l.large.Load() == 0 {
		wait = largeFirst
	}
	for waited := time.Duration(0); waited < wait; waited += pollInterval {
		select {
		case <-l.wanted:
			waited = wait
		default:
		}
		if l.done.Load() || pause(ctx, pollInterval) != nil {
			return nil, nil, false
		}
	}
	ops, ok := l.take(ctx, largeRows)
	if ok {
		l.large.Add(1)
	}
	return copyIn, ops, ok
}

// write is one connection's life.
func (l *load) write(ctx context.Context, r *rand.Rand, pick func(context.Context, *rand.Rand) (transaction,
	[]operation, bool)) error {
	conn, err := l.connectAgain(ctx, l.done.Load)
	if err != nil || conn == nil {
		return err
	}
	defer func() { conn.Close(context.WithoutCancel(ctx)) }() //nolint:errcheck // every commit was answered
	for {
		do, ops, ok := pick(ctx, r)
		if !ok {
			return ctx.Err()
		}
		for {
			rolled, err := do(ctx, conn, l.w.table, ops, r)
			l.rolled.Add(int64(rolled))
			if err == nil {
				break
			}
			if wrong(err) || ctx.Err() != nil {
				return err
			}
			var there bool
			if conn, there, err = l.resolve(ctx, conn, &ops[0]); err != nil {
				return err
			}
			if there {
				break
			}
		}
		l.committed.Add(int64(len(ops)))
		for i := range ops {
			if ops[i].message {
				l.messages.Add(1)
			}
		}
	}
}

// wrong reports whether the server has refused a statement for good, which no further attempt changes.
func wrong(err error) bool {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	return ok && len(refused.Code) == 5 && slices.Contains([]string{"0A", "22", "23", "28", "3D", "3F", "42"},
		refused.Code[:2])
}

// connect connects under a name that no other session has.
func (l *load) connect(ctx context.Context) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig(l.w.pgURL)
	if err != nil {
		return nil, err
	}
	cfg.RuntimeParams["application_name"] = fmt.Sprintf("%s_load_%d", l.w.name, l.connections.Add(1))
	return pgx.ConnectConfig(ctx, cfg)
}

// connectAgain connects, for as long as it takes, unless nobody wants it any more: then there is no
// connection.
func (l *load) connectAgain(ctx context.Context, over func() bool) (*pgx.Conn, error) {
	for !over() {
		conn, err := l.connect(ctx)
		if err == nil || wrong(err) {
			return conn, err
		}
		if err := pause(ctx, reconnect); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// resolve connects again, for as long as it takes, and says whether an operation is in the table. Who could
// still commit it is ended before that.
func (l *load) resolve(ctx context.Context, old *pgx.Conn, op *operation) (conn *pgx.Conn, there bool,
	err error) {
	name := old.Config().RuntimeParams["application_name"]
	closing, cancel := context.WithTimeout(ctx, time.Second)
	old.Close(closing) //nolint:errcheck // it is broken
	cancel()
	for {
		if conn, err = l.connectAgain(ctx, never); err != nil {
			return old, false, err
		}
		if there, err = l.committedBy(ctx, conn, name, op); err == nil {
			return conn, there, nil
		}
		conn.Close(ctx) //nolint:errcheck // it is broken
		if wrong(err) {
			return old, false, err
		}
		if err := pause(ctx, reconnect); err != nil {
			return old, false, err
		}
	}
}

func never() bool { return false }

// committedBy waits until the session of a name has ended, and says whether an operation is in the table.
func (l *load) committedBy(ctx context.Context, conn *pgx.Conn, name string, op *operation) (there bool,
	err error) {
	for left := 1; left > 0; {
		if err := conn.QueryRow(ctx, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE "+
			"application_name = $1", name).Scan(&left); err != nil {
			return false, err
		}
		if left > 0 && pause(ctx, reconnect) != nil {
			return false, ctx.Err()
		}
	}
	sql := "SELECT EXISTS (SELECT FROM " + quoted(l.w.table) +
		" WHERE doc_id = $1 AND actor_id = $2 AND counter = $3)"
	err = conn.QueryRow(ctx, sql, op.doc, op.actor, op.counter).Scan(&there)
	return there, err
}
