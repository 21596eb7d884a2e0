package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sync/errgroup"
)

// load writes traces through several connections that commit out of order. It outlives restarts of the server: what became of a
// transaction whose commit was not answered is seen in the table.
type load struct {
	w     *world
	rate  int
	limit int // rows; 0: none

	committed atomic.Int64 // rows and messages
	messages  atomic.Int64 // of them
	rolled    atomic.Int64 // rows that were rolled back
	large     atomic.Int64 // transactions of largeRows
	wanted    chan struct{}
	done      atomic.Bool

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

func newLoad(w *world) (*load, error) {
	ops, err := newOperations()
	return &load{w: w, rate: w.o.Rate, limit: w.o.Operations, ops: ops, wanted: make(chan struct{}, 1)}, err
}

// run writes until stop is called, or the limit is reached.
func (l *load) run(ctx context.Context) error {
	l.due = time.Now()
	g, ctx := errgroup.WithContext(ctx)
	for n := range l.w.o.Writers {
		r := rand.New(rand.NewPCG(l.w.o.Seed, 1<<33+uint64(n)))
		g.Go(func() error { return l.write(ctx, r, l.pick) })
	}
	g.Go(func() error { return l.write(ctx, rand.New(rand.NewPCG(l.w.o.Seed, 1<<34)), l.pickLarge) })
	if err := g.Wait(); err != nil && ctx.Err() == nil {
		return fmt.Errorf("write: %w", err)
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
		l.due = l.due.Add(time.Duration(n) * time.Second / time.Duration(l.rate))
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
func (l *load) write(ctx context.Context, r *rand.Rand, pick func(context.Context, *rand.Rand) (transaction, []operation, bool)) error {
	conn, err := l.connect(ctx)
	if err != nil {
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
			if _, answer := errors.AsType[*pgconn.PgError](err); answer && !conn.IsClosed() || ctx.Err() != nil {
				return err // to a wrong statement
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

func (l *load) connect(ctx context.Context) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig(l.w.pgURL)
	if err != nil {
		return nil, err
	}
	cfg.RuntimeParams["application_name"] = l.w.name + "_load"
	return pgx.ConnectConfig(ctx, cfg)
}

// resolve connects again, for as long as it takes, and says whether an operation is in the table. Who could still commit it is gone:
// a server lets nobody in before the sessions of its earlier life have ended.
func (l *load) resolve(ctx context.Context, old *pgx.Conn, op *operation) (conn *pgx.Conn, there bool, err error) {
	old.Close(ctx) //nolint:errcheck // it is broken
	sql := "SELECT EXISTS (SELECT FROM " + pgx.Identifier{l.w.table}.Sanitize() + " WHERE doc_id = $1 AND actor_id = $2 AND counter = $3)"
	for {
		if conn, err = l.connect(ctx); err == nil {
			if err = conn.QueryRow(ctx, sql, op.doc, op.actor, op.counter).Scan(&there); err == nil {
				return conn, there, nil
			}
			conn.Close(ctx) //nolint:errcheck // it is broken
		}
		if err := pause(ctx, reconnect); err != nil {
			return old, false, err
		}
	}
}
