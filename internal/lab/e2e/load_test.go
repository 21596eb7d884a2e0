package e2e

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/lab/recording"
)

// load writes traces through several connections in small transactions that commit out of order. It outlives restarts of the server.
type load struct {
	ops       []recording.Op
	total     int
	written   atomic.Int64
	rate      int // operations per second, about; 0: as fast as it goes
	start     time.Time
	next      atomic.Int64
	ending    atomic.Bool // no further transaction is begun
	group     sync.WaitGroup
	failure   atomic.Value
	cancelled context.CancelFunc
}

// traces returns the operations of all traces, interleaved, at most n.
func traces(t *testing.T, n int) []recording.Op {
	t.Helper()
	var lists [][]recording.Op
	total := 0
	for _, name := range recording.Names() {
		ops, err := recording.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		lists = append(lists, ops)
		total += len(ops)
	}
	all := make([]recording.Op, 0, total)
	taken := make([]int, len(lists))
	for len(all) < min(n, total) {
		best := -1 // the one that is furthest behind
		for i, l := range lists {
			if taken[i] < len(l) && (best < 0 || taken[i]*len(lists[best]) < taken[best]*len(l)) {
				best = i
			}
		}
		all = append(all, lists[best][taken[best]])
		taken[best]++
	}
	return all
}

// startLoad begins to write.
func startLoad(t *testing.T, url string, ops []recording.Op, connections, rate int, seed uint64) *load {
	t.Helper()
	return (&load{ops: ops, total: len(ops), rate: rate}).begin(t, url, connections, seed)
}

// startEndlessLoad begins to write, until it is told to end: the operations again and again, each time on other documents.
func startEndlessLoad(t *testing.T, url string, ops []recording.Op, connections, rate int, seed uint64) *load {
	t.Helper()
	return (&load{ops: ops, total: math.MaxInt, rate: rate}).begin(t, url, connections, seed)
}

func (l *load) begin(t *testing.T, url string, connections int, seed uint64) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l.start, l.cancelled = time.Now(), cancel
	t.Cleanup(cancel)
	for c := range connections {
		rnd := rand.New(rand.NewPCG(seed, uint64(c)))
		l.group.Go(func() {
			if err := l.write(ctx, url, rnd); err != nil && ctx.Err() == nil {
				l.failure.Store(err)
			}
		})
	}
	return l
}

// wait waits for the end of the writing.
func (l *load) wait(t *testing.T) {
	t.Helper()
	l.group.Wait()
	if err, _ := l.failure.Load().(error); err != nil {
		t.Fatalf("write: %v", err)
	}
}

// some returns the operations from..to-1.
func (l *load) some(from, to int) []recording.Op {
	if to <= len(l.ops) {
		return l.ops[from:to]
	}
	all := make([]recording.Op, 0, to-from)
	for i := from; i < to; i++ {
		op := l.ops[i%len(l.ops)]
		if round := i / len(l.ops); round > 0 {
			op.Doc = fmt.Sprintf("%s (%d)", op.Doc, round)
		}
		all = append(all, op)
	}
	return all
}

// noPartition is the SQLSTATE of a row for which the table has no partition.
const noPartition = "23514"

func (l *load) write(ctx context.Context, url string, rnd *rand.Rand) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { conn.Close(context.WithoutCancel(ctx)) }() //nolint:errcheck // every commit was answered
	for {
		n := 1 + rnd.IntN(5)
		from := int(l.next.Add(int64(n))) - n
		if from >= l.total || l.ending.Load() {
			return nil
		}
		to := min(from+n, l.total)
		ops := l.some(from, to)
		for {
			err := l.transaction(ctx, conn, ops, rnd)
			if err == nil {
				break
			}
			refused, ok := errors.AsType[*pgconn.PgError](err)
			if ok && refused.Code == noPartition { // it is being attached: nothing was written
				if _, err := conn.Exec(ctx, "ROLLBACK"); err != nil {
					return err
				}
				continue
			}
			if ok && !conn.IsClosed() {
				return err // the server's answer to a wrong statement
			}
			// The server went away: whether the transaction was committed is to be seen in the table, when it is back.
			var done bool
			if conn, done, err = l.resolve(ctx, url, conn, &ops[0]); err != nil {
				return err
			}
			if done {
				break
			}
		}
		l.written.Add(int64(to - from))
		if l.rate > 0 {
			if d := time.Until(l.start.Add(time.Duration(to) * time.Second / time.Duration(l.rate))); d > 0 {
				time.Sleep(d) // the pace of the load, nothing waits for it
			}
		}
	}
}

// resolve connects again, for as long as it takes, and says whether an operation is in the table. Who could still commit it is gone:
// a server lets nobody in before the sessions of its earlier life have ended.
func (l *load) resolve(ctx context.Context, url string, old *pgx.Conn, op *recording.Op) (conn *pgx.Conn, done bool, err error) {
	old.Close(ctx) //nolint:errcheck // it is broken
	for {
		if conn, err = pgx.Connect(ctx, url); err == nil {
			err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM outbox WHERE doc_id = $1 AND actor_id = $2 AND counter = $3)",
				op.Doc, op.Actor, op.Counter).Scan(&done)
			if err == nil {
				return conn, done, nil
			}
			conn.Close(ctx) //nolint:errcheck // it is broken
		}
		select {
		case <-ctx.Done():
			return old, false, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (l *load) transaction(ctx context.Context, conn *pgx.Conn, ops []recording.Op, rnd *rand.Rand) error {
	batch := &pgx.Batch{}
	batch.Queue("BEGIN")
	for _, op := range ops {
		batch.Queue("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, $2, $3, $4)", op.Doc, op.Actor, op.Counter, string(op.Payload))
	}
	if rnd.IntN(8) == 0 { // what is rolled back must not appear
		batch.Queue("SAVEPOINT s")
		batch.Queue("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('rolled back', 'x', 1, '[]')")
		batch.Queue("ROLLBACK TO SAVEPOINT s")
	}
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, batch).Close()
}
