package demo

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/lab/recording"
)

// writers write a trace through several connections. Each takes the next few operations, inserts them,
// dawdles, and commits: so transactions commit in another order than the operations were made in.
type writers struct {
	url  string
	ops  []recording.Op
	n    int
	rate int

	next      atomic.Int64
	committed []atomic.Int64 // by operation: when its commit returned, Unix nanoseconds
	done      atomic.Int64

	mu    sync.Mutex
	begun map[int]time.Time // transactions under way, by their first operation
	freed *sync.Cond
}

const (
	maxBatch = 4                    // operations in a transaction
	dawdle   = 4 * time.Millisecond // at most, before a commit
	// No operation is handed out while a transaction is older than this: commits that are further apart than
	// the horizon would come in the order of their commits, as they should, and the demo is about the others.
	spread = 8 * time.Millisecond
)

func newWriters(url string, ops []recording.Op, n, rate int) *writers {
	w := &writers{url: url, ops: ops, n: n, rate: rate, committed: make([]atomic.Int64, len(ops)),
		begun: map[int]time.Time{}}
	w.freed = sync.NewCond(&w.mu)
	return w
}

func (w *writers) run(ctx context.Context) error {
	start := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	stop := context.AfterFunc(ctx, w.freed.Broadcast)
	defer stop()
	for range w.n {
		g.Go(func() error { return w.write(ctx, start) })
	}
	return g.Wait()
}

func (w *writers) write(ctx context.Context, start time.Time) error {
	conn, err := pgx.Connect(ctx, w.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // every transaction's commit was answered
	for {
		from, to, ok := w.take(ctx)
		if !ok {
			return ctx.Err()
		}
		if err := w.transaction(ctx, conn, from, to); err != nil {
			return err
		}
		w.give(from, to)
		// The pace is kept by when an operation is due, not by pauses, which would add up.
		if err := sleep(ctx,
			time.Until(start.Add(time.Duration(to)*time.Second/time.Duration(w.rate)))); err != nil {
			return err
		}
	}
}

// take hands out the next operations.
func (w *writers) take(ctx context.Context) (from, to int, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.oldest() > spread && ctx.Err() == nil {
		w.freed.Wait()
	}
	from = int(w.next.Load())
	if from == len(w.ops) || ctx.Err() != nil {
		return 0, 0, false
	}
	to = min(from+1+rand.IntN(maxBatch), len(w.ops))
	w.next.Store(int64(to))
	w.begun[from] = time.Now()
	return from, to, true
}

// oldest is the age of the oldest transaction under way.
func (w *writers) oldest() (age time.Duration) {
	for _, t := range w.begun {
		age = max(age, time.Since(t))
	}
	return age
}

func (w *writers) give(from, to int) {
	now := time.Now().UnixNano()
	for i := from; i < to; i++ {
		w.committed[i].Store(now)
	}
	w.done.Add(int64(to - from))
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.begun, from)
	w.freed.Broadcast()
}

func (w *writers) transaction(ctx context.Context, conn *pgx.Conn, from, to int) error {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	for _, op := range w.ops[from:to] {
		_, err := tx.Exec(ctx, "INSERT INTO "+table+
			" (doc_id, actor_id, counter, payload) VALUES ($1, $2, $3, $4)",
			op.Doc, op.Actor, op.Counter, string(op.Payload))
		if err != nil {
			return fmt.Errorf("insert operation %d: %w", op.T, err)
		}
	}
	if err := sleep(ctx, rand.N(dawdle)); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// wait waits until a share of the trace has been committed.
func (w *writers) wait(ctx context.Context, share float64) error {
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for float64(w.done.Load()) < share*float64(len(w.ops)) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-poll.C:
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
