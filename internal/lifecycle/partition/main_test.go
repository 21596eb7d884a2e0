package partition

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// world is an outbox with a slot that the test lets confirm what it wants, and a stream that is a list.
type world struct {
	*outboxdb.DB
	cfg       Config
	o         Options
	out       Outside
	published map[string]bool // ids
	seen      Seen
	reads     []Period  // of the stream
	stored    time.Time // when its messages were; zero: whenever they are looked for
}

// day is when the tests' partitions begin: long ago, so that their ranges are over.
var day = time.Date(2024, 5, 1, 0, 0, 0, 0, time.UTC)

// newWorld makes an outbox that is partitioned by day, with so many partitions from day on.
func newWorld(t *testing.T, srv *pgserver.Server, partitions int) *world {
	t.Helper()
	w := &world{DB: outboxdb.New(t, srv), published: map[string]bool{}}
	w.Exec(`CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), doc_id text NOT NULL, actor_id text NOT NULL,
		counter bigint NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),
		PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at)`)
	for i := range partitions {
		lower := day.AddDate(0, 0, i)
		w.Exec(fmt.Sprintf("CREATE TABLE %s PARTITION OF outbox FOR VALUES FROM ('%s') TO ('%s')", old(i),
			lower.Format(time.DateOnly), lower.AddDate(0, 0, 1).Format(time.DateOnly)))
	}
	w.Exec("CREATE PUBLICATION " + w.Slot + " FOR TABLE outbox WITH (publish = 'insert', " +
		"publish_via_partition_root = true)")
	w.slot(w.Slot)
	created := time.Now().Truncate(time.Microsecond)
	w.out.Stream = Stream{Created: created, LastSeq: 100}
	w.seen.Stream = w.out.Stream
	w.cfg = Config{Table: "outbox", Slot: w.Slot, ID: "id", Ahead: 2, Every: 24 * time.Hour,
		LockTimeout: 200 * time.Millisecond, looked: time.Minute}
	w.o = Options{
		Outside: func(context.Context) (Outside, error) { return w.out, nil },
		Published: func(_ context.Context, in Period, add func([16]byte) error) (Seen, error) {
			w.reads = append(w.reads, in)
			if !w.stored.IsZero() && (w.stored.Before(in.Since) ||
				!in.Until.IsZero() && w.stored.After(in.Until)) {
				return w.seen, nil
			}
			for id := range w.published {
				sum := sha256.Sum256([]byte(id))
				if err := add([16]byte(sum[:16])); err != nil {
					return w.seen, err
				}
			}
			return w.seen, nil
		},
	}
	return w
}

// newSealed makes one of which the first partition has rows, and is sealed.
func newSealed(t *testing.T, partitions int) *world {
	t.Helper()
	w := newWorld(t, pgtest.Server(t), partitions)
	w.insert(0, 5, true)
	w.apply()
	return w
}

// old is the name of one of the first partitions.
func old(i int) string { return fmt.Sprintf("outbox_%d", i) }

// slot makes a slot. It goes with the test: its database could not be dropped before.
func (w *world) slot(name string) {
	w.T.Helper()
	w.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", name)
	w.T.Cleanup(func() {
		w.Exec("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = "+
			"$1", name)
	})
}

// insert writes rows into the range of a partition, and publishes them if they are to be.
func (w *world) insert(i, rows int, publish bool) {
	w.T.Helper()
	found, err := w.Conn.Query(outboxdb.Within(w.T), `INSERT INTO outbox (doc_id, actor_id, counter, payload,
			created_at) SELECT 'd', 'a', n, '{}', $1::timestamptz FROM generate_series(1, $2) n RETURNING id::text`,
		day.AddDate(0, 0, i).Add(time.Hour), rows)
	must.Succeed(w.T, err)
	ids, err := pgx.CollectRows(found, pgx.RowTo[string])
	must.Succeed(w.T, err)
	for _, id := range ids {
		w.published[id] = w.published[id] || publish
		if !publish {
			delete(w.published, id)
		}
	}
}

// confirm lets a slot confirm everything that is written.
func (w *world) confirm(slot string) {
	w.T.Helper()
	w.Exec("SELECT pg_logical_emit_message(true, 'x', 'x')")
	w.Exec("SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())", slot)
}

func (w *world) target() postgres.Target { return postgres.Target{URL: w.URL} }

// manager opens one. What was written by then is counted: a session may do that 10 s later, which would be in
// the middle of a run. PostgreSQL 14 has no such function.
func (w *world) manager() *Manager {
	w.T.Helper()
	if !strings.HasPrefix(w.Conn.PgConn().ParameterStatus("server_version"), "14.") {
		w.Exec("SELECT pg_stat_force_next_flush()")
	}
	m, err := Open(outboxdb.Within(w.T), w.target(), w.cfg, w.o)
	must.Succeed(w.T, err)
	w.T.Cleanup(m.Close)
	return m
}

// try runs apply once.
func (w *world) try() ([]Step, error) {
	w.T.Helper()
	m := w.manager()
	defer m.Close()
	return m.Apply(outboxdb.Within(w.T))
}

// apply runs apply once, which must succeed.
func (w *world) apply() []Step {
	w.T.Helper()
	steps, err := w.try()
	must.Succeed(w.T, err)
	return steps
}

func (w *world) plan() []Step {
	w.T.Helper()
	m := w.manager()
	defer m.Close()
	steps, err := m.Plan(outboxdb.Within(w.T))
	must.Succeed(w.T, err)
	return steps
}

// states are those in the table of states, by partition.
func (w *world) state(i int) string {
	w.T.Helper()
	return w.Text("SELECT coalesce((SELECT state FROM outflow_partitions WHERE name = $1), 'none')",
		quoted("public", old(i)))
}

func (w *world) want(i int, state State) {
	w.T.Helper()
	if got := w.state(i); got != string(state) {
		w.T.Fatalf("partition %d is %s, want %s", i, got, state)
	}
}

func (w *world) exists(i int) bool {
	w.T.Helper()
	return w.Text("SELECT (to_regclass($1) IS NOT NULL)::text", "public."+old(i)) == "true"
}

// of are the steps of a partition, in a line.
func of(steps []Step, i int) string {
	var all []string
	for _, s := range steps {
		if s.Partition == quoted("public", old(i)) {
			all = append(all, string(s.Action))
		}
	}
	return strings.Join(all, " ")
}

func why(steps []Step, i int) (last string) {
	for _, s := range steps {
		if s.Partition == quoted("public", old(i)) {
			last = s.Why
		}
	}
	return last
}

func wantWhy(t *testing.T, steps []Step, i int, says ...string) {
	t.Helper()
	for _, text := range says {
		if !strings.Contains(why(steps, i), text) {
			t.Errorf("of partition %d it says %q, not %q", i, why(steps, i), text)
		}
	}
}

func wantFault(t *testing.T, err error, class outbox.Class, code string) *outbox.Fault {
	t.Helper()
	return outboxdb.WantFault(t, err, class, code)
}
