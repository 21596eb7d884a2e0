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
// dawdles or stalls, and commits: so transactions commit in another order than the operations were made in.
// One of them may be rolled back.
type writers struct {
	url    string
	ops    []recording.Op
	n      int
	rate   int
	load   Load
	screen *screen

	mu           sync.Mutex
	next         int // operation
	transactions int

	committed []atomic.Int64 // by operation: when its commit returned, Unix nanoseconds
	done      atomic.Int64
}

const (
	maxBatch = 4                    // operations in a transaction
	dawdle   = 4 * time.Millisecond // at most, before a commit

	stallEvery = 200 // transactions, for 30 to 300 ms
	lost       = 0.6 // of the trace is written: a transaction is rolled back
)

// typed are the operations, in the order in which they are written, with the counters that they get.
func (l *Load) typed() (ops []recording.Op, err error) {
	if ops, err = l.operations(); err == nil && l.Spans {
		for i := range ops {
			ops[i].Counter = ops[i].Clock
		}
	}
	return ops, err
}

func (l *Load) operations() (ops []recording.Op, err error) {
	if l.Notes == 0 {
		return recorded()
	}
	trace, err := recording.Load(recording.FriendsForever)
	if err != nil {
		return nil, err
	}
	for at := range len(trace) / l.Notes / l.InARow {
		for note := range l.Notes {
			for _, op := range trace[at*l.InARow : (at+1)*l.InARow] {
				op.Doc = fmt.Sprintf("note%d", note+1)
				ops = append(ops, op)
			}
		}
	}
	return ops, nil
}

// recorded are the three recordings, written at the same time from beginning to end.
func recorded() (all []recording.Op, err error) {
	var traces [][]recording.Op
	for _, name := range recording.Names() {
		trace, err := recording.Load(name)
		if err != nil {
			return nil, err
		}
		traces = append(traces, trace)
	}
	const parts = 1 << 13
	for at := range parts {
		for _, t := range traces {
			all = append(all, t[len(t)*at/parts:len(t)*(at+1)/parts]...)
		}
	}
	return all, nil
}

func newWriters(url string, ops []recording.Op, o *Options, s *screen) *writers {
	return &writers{url: url, ops: ops, n: o.Writers, rate: o.Rate, load: o.Load, screen: s,
		committed: make([]atomic.Int64, len(ops))}
}

// commits is how many of the operations are committed in the end.
func (w *writers) commits() int {
	if w.load.Rollback {
		return len(w.ops) - 1
	}
	return len(w.ops)
}

func (w *writers) run(ctx context.Context) error {
	start := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	for range w.n {
		g.Go(func() error { return w.writer(ctx, start) })
	}
	return g.Wait()
}

func (w *writers) writer(ctx context.Context, start time.Time) error {
	conn, err := pgx.Connect(ctx, w.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // every transaction's commit was answered
	for {
		t := w.take()
		if t.from == t.to || ctx.Err() != nil {
			return ctx.Err()
		}
		if err := w.write(ctx, conn, t); err != nil {
			return err
		}
		// The pace is kept by when an operation is due, not by pauses, which would add up.
		if err := sleep(ctx,
			time.Until(start.Add(time.Duration(t.to)*time.Second/time.Duration(w.rate)))); err != nil {
			return err
		}
	}
}

// transaction is what a connection writes next.
type transaction struct {
	from, to int           // operations
	pause    time.Duration // before it ends
	aborts   bool
}

func (w *writers) take() transaction {
	w.mu.Lock()
	defer w.mu.Unlock()
	never := len(w.ops)
	if w.load.Rollback {
		never = int(lost * float64(len(w.ops)))
	}
	t := transaction{from: w.next, to: min(w.next+1+rand.IntN(maxBatch), len(w.ops)), pause: rand.N(dawdle)}
	w.transactions++
	switch {
	case t.from == never && w.load.Rollback:
		t.to, t.aborts = never+1, true
	case t.from < never:
		t.to = min(t.to, never)
	}
	switch {
	case w.transactions%w.load.Every == w.load.Every/2:
		t.pause = w.load.Stall
	case w.transactions%stallEvery == stallEvery/2:
		t.pause = 30*time.Millisecond + rand.N(270*time.Millisecond)
	}
	w.next = t.to
	return t
}

func (w *writers) write(ctx context.Context, conn *pgx.Conn, t transaction) error {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	for i := t.from; i < t.to; i++ {
		if err := w.insert(ctx, tx, &w.ops[i]); err != nil {
			return fmt.Errorf("insert operation %d: %w", w.ops[i].T, err)
		}
	}
	if err := sleep(ctx, t.pause); err != nil {
		return err
	}
	if t.aborts {
		op := &w.ops[t.from]
		w.screen.event("ROLLBACK: %s never gets operation %d of %s", op.Doc, op.Counter, op.Actor)
		err = tx.Rollback(ctx)
	} else {
		err = tx.Commit(ctx)
	}
	now := time.Now().UnixNano()
	for i := t.from; i < t.to; i++ {
		w.committed[i].Store(now)
	}
	w.done.Add(int64(t.to - t.from))
	return err
}

func (w *writers) insert(ctx context.Context, tx pgx.Tx, op *recording.Op) error {
	columns, values := "doc_id, actor_id, counter, payload", "$1, $2, $3, $4"
	row := []any{op.Doc, op.Actor, op.Counter, string(op.Payload)}
	if w.load.Spans {
		n, err := op.Span()
		if err != nil {
			return err
		}
		columns, values, row = columns+", "+span, values+", $5", append(row, n)
	}
	_, err := tx.Exec(ctx, "INSERT INTO "+table+" ("+columns+") VALUES ("+values+")", row...)
	return err
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
