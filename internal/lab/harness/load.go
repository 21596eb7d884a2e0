package harness

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
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
)

// Load writes traces through several connections in small transactions that commit out of order. It outlives
// restarts of the server.
type Load struct {
	Ops       []recording.Op
	total     int
	Written   atomic.Int64
	rate      int // operations per second, about; 0: as fast as it goes
	start     time.Time
	next      atomic.Int64
	Ending    atomic.Bool // no further transaction is begun
	group     sync.WaitGroup
	Failure   atomic.Value
	cancelled context.CancelFunc
}

// RecordedOps returns the operations of all traces, interleaved, at most n.
func RecordedOps(t *testing.T, n int) []recording.Op {
	t.Helper()
	var lists [][]recording.Op
	total := 0
	for _, name := range recording.Names() {
		ops, err := recording.Load(name)
		Must(t, err)
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

// StartLoad begins to write.
func StartLoad(t *testing.T, url string, ops []recording.Op, connections, rate int, seed uint64) *Load {
	t.Helper()
	return (&Load{Ops: ops, total: len(ops), rate: rate}).begin(t, url, connections, seed)
}

// StartEndlessLoad begins to write, until it is told to end: the operations again and again, each time on
// other documents.
func StartEndlessLoad(t *testing.T, url string, ops []recording.Op, connections, rate int,
	seed uint64) *Load {
	t.Helper()
	return (&Load{Ops: ops, total: math.MaxInt, rate: rate}).begin(t, url, connections, seed)
}

func (l *Load) begin(t *testing.T, url string, connections int, seed uint64) *Load {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l.start, l.cancelled = time.Now(), cancel
	t.Cleanup(cancel)
	for c := range connections {
		rnd := rand.New(rand.NewPCG(seed, uint64(c)))
		l.group.Go(func() {
			if err := l.write(ctx, url, rnd); err != nil && ctx.Err() == nil {
				l.Failure.Store(err)
			}
		})
	}
	return l
}

// Wait waits for the end of the writing.
func (l *Load) Wait(t *testing.T) {
	t.Helper()
	l.group.Wait()
	if err, _ := l.Failure.Load().(error); err != nil {
		t.Fatalf("write: %v", err)
	}
}

// Some returns the operations from..to-1.
func (l *Load) Some(from, to int) []recording.Op {
	if to <= len(l.Ops) {
		return l.Ops[from:to]
	}
	all := make([]recording.Op, 0, to-from)
	for i := from; i < to; i++ {
		op := l.Ops[i%len(l.Ops)]
		if round := i / len(l.Ops); round > 0 {
			op.Doc = fmt.Sprintf("%s (%d)", op.Doc, round)
		}
		all = append(all, op)
	}
	return all
}

// noPartition is the SQLSTATE of a row for which the table has no partition.
const noPartition = "23514"

func (l *Load) write(ctx context.Context, url string, rnd *rand.Rand) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { conn.Close(context.WithoutCancel(ctx)) }() //nolint:errcheck // every commit was answered
	for {
		n := 1 + rnd.IntN(5)
		from := int(l.next.Add(int64(n))) - n
		if from >= l.total || l.Ending.Load() {
			return nil
		}
		to := min(from+n, l.total)
		ops := l.Some(from, to)
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
			// The server went away: whether the transaction was committed is to be seen in the table, when it
			// is back.
			var done bool
			if conn, done, err = l.resolve(ctx, url, conn, &ops[0]); err != nil {
				return err
			}
			if done {
				break
			}
		}
		l.Written.Add(int64(to - from))
		if l.rate > 0 {
			if d := time.Until(l.start.Add(time.Duration(to) * time.Second / time.Duration(l.rate))); d > 0 {
				time.Sleep(d) // the pace of the load, nothing waits for it
			}
		}
	}
}

// resolve connects again, for as long as it takes, and says whether an operation is in the table. Who could
// still commit it is gone: a server lets nobody in before the sessions of its earlier life have ended.
func (l *Load) resolve(ctx context.Context, url string, old *pgx.Conn, op *recording.Op) (conn *pgx.Conn,
	done bool, err error) {
	old.Close(ctx) //nolint:errcheck // it is broken
	for {
		if conn, err = pgx.Connect(ctx, url); err == nil {
			err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM outbox WHERE doc_id = $1 AND actor_id = "+
				"$2 AND counter = $3)", op.Doc, op.Actor, op.Counter).Scan(&done)
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

func (l *Load) transaction(ctx context.Context, conn *pgx.Conn, ops []recording.Op, rnd *rand.Rand) error {
	batch := &pgx.Batch{}
	batch.Queue("BEGIN")
	for _, op := range ops {
		batch.Queue("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, $2, $3, $4)", op.Doc,
			op.Actor, op.Counter, string(op.Payload))
	}
	if rnd.IntN(8) == 0 { // what is rolled back must not appear
		batch.Queue("SAVEPOINT s")
		batch.Queue("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('rolled back', 'x', " +
			"1, '[]')")
		batch.Queue("ROLLBACK TO SAVEPOINT s")
	}
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, batch).Close()
}

func EmitAll(t *testing.T, conn *pgx.Conn, contents ...string) {
	t.Helper()
	for _, c := range contents {
		Exec(t, conn, EmitEvent, c)
	}
}

const EmitEvent = "SELECT pg_logical_emit_message(true, 'outflow.event', $1::text)"

// EventContent is the content of a message event.
func EventContent(doc, actor string, counter int, payload string) string {
	return fmt.Sprintf(`{"doc_id":%q,"actor_id":%q,"counter":%d,"id":"m-%s-%s-%d","payload":%s}`, doc, actor,
		counter, doc, actor, counter, payload)
}

// InsertNumbered inserts rows from..to of the default shape with one statement.
const InsertNumbered = `INSERT INTO outbox (doc_id, actor_id, counter, payload)
	SELECT 'doc' || n % 7, 'a', n, jsonb_build_object('n', n, 'text', repeat('x', 60))
	FROM generate_series($1::bigint, $2::bigint) n`

// PartitionedTable makes an outbox table with a list of partitions, of which a row of another table says
// which one is written to.
func PartitionedTable(t *testing.T) func(*pgx.Conn) {
	return func(conn *pgx.Conn) {
		t.Helper()
		Exec(t, conn, "CREATE TABLE turn (part int NOT NULL)")
		Exec(t, conn, "INSERT INTO turn VALUES (2)")
		Exec(t, conn, "CREATE FUNCTION turn() RETURNS int LANGUAGE sql VOLATILE AS 'SELECT part FROM turn'")
		Exec(t, conn, `CREATE TABLE outbox (part int NOT NULL DEFAULT turn(),
			id uuid DEFAULT gen_random_uuid(), doc_id text NOT NULL,
			actor_id text NOT NULL, counter bigint NOT NULL,
			seq_key text NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20,
			'0')) STORED,
			payload jsonb NOT NULL) PARTITION BY LIST (part)`)
		Exec(t, conn, "CREATE TABLE part_1 PARTITION OF outbox FOR VALUES IN (1)")
		Exec(t, conn, "CREATE TABLE part_2 PARTITION OF outbox FOR VALUES IN (2)")
	}
}

// StartWriters inserts rows until the function that it returns is called.
func StartWriters(t *testing.T, url string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	stopping := make(chan struct{})
	var wg sync.WaitGroup
	for w := range 2 {
		conn, err := pgx.Connect(ctx, url)
		Must(t, err)
		wg.Go(func() {
			defer conn.Close(context.Background()) //nolint:errcheck // the test is over
			for i := 0; ; i++ {
				_, err := conn.Exec(ctx, fmt.Sprintf("BEGIN; SET LOCAL synchronous_commit = %s; INSERT "+
					"INTO outbox (doc_id, actor_id, counter, payload) "+
					"SELECT 'w' || n %% 5, 'writer%d', %d + n, '{}' FROM generate_series(1, 3) n; COMMIT",
					[]string{"on", "off"}[i%2], w, 100_000+10*i))
				if err != nil {
					if ctx.Err() == nil {
						t.Error(err)
					}
					return
				}
				select {
				case <-stopping:
					return
				case <-time.After(20 * time.Millisecond): // a slow machine must not get more to do
				}
			}
		})
	}
	stop = sync.OnceFunc(func() { // the last ones are not cut off: the server might commit them later
		close(stopping)
		defer cancel()
		defer time.AfterFunc(Patience, cancel).Stop()
		wg.Wait()
	})
	return stop
}

// ReplayableStream is a stream of 12 events: documents a and b.*, by anna and bert in turns.
func ReplayableStream(t *testing.T, name string, settings ...string) (o *Outflow, conn *pgx.Conn,
	s jetstream.JetStream) {
	t.Helper()
	ns := natstest.Server(t)
	o, conn, _ = Install(t, pgtest.Server(t), ns.URL(), name,
		append([]string{"REORDER_HORIZON=0s", "HEADERS=By=actor_id"}, settings...)...)
	o.Init()
	o.Start()
	for i := 1; i <= 6; i++ {
		for _, doc := range []string{"a", "b.*"} {
			Exec(t, conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, $2, $3, $4)",
				doc,
				[]string{"anna", "bert"}[i%2], i, fmt.Sprintf(`{"n": %d, "big": 9007199254740993.10}`, i))
		}
	}
	s = JetStream(t, ns.URL())
	AwaitMessages(t, s, o.Stream, 12)
	o.MustStop(t)
	return o, conn, s
}

// GeneratedKey is the table that outflow init would make.
const GeneratedKey = `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
	doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
	seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20,
	'0')) STORED, payload jsonb NOT NULL)`
