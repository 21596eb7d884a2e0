package limits

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
)

// memoryBound is the formula of docs/guarantees.md, section Memory.
func memoryBound(maxBytes, maxEvents int64) int64 {
	held := maxBytes + 376*min(maxEvents, maxBytes/64)
	return held + held/8 + 64*harness.MiB
}

// bounded is an installation with an outbox of plain columns: with no index and no default a row costs the
// server little.
type bounded struct {
	*harness.Outflow
	conn *pgx.Conn
	js   jetstream.JetStream
	nats *natstest.ServerProcess
	dir  string // the spill folder

	maxBytes, maxEvents int64
}

func newBounded(t *testing.T, key string, maxBytes, maxEvents int64, settings ...string) *bounded {
	t.Helper()
	harness.SkipIfShort(t)
	if !tier.Long() {
		t.Parallel()
	}
	pg := pgtest.Own(t, 0, "shared_buffers=256MB", "max_wal_size=16GB", "autovacuum=off")
	url, err := pg.CreateDatabase(t.Context(), "bounds")
	harness.Must(t, err)
	b := &bounded{conn: harness.Connect(t, url), nats: natstest.Process(t), dir: t.TempDir(),
		maxBytes: maxBytes, maxEvents: maxEvents}
	b.Outflow = harness.New(t, url, b.nats.URL(), "bounds", append([]string{"REORDER_SPILL_DIR=" + b.dir,
		fmt.Sprintf("REORDER_MAX_BYTES=%d", maxBytes), fmt.Sprintf("REORDER_MAX_EVENTS=%d", maxEvents)},
		settings...)...)
	b.js = harness.JetStream(t, b.nats.URL())
	harness.Exec(t, b.conn, "CREATE TABLE outbox (id bigint, doc_id text NOT NULL, actor_id text NOT NULL, "+
		"counter bigint NOT NULL, payload text NOT NULL"+key+")")
	b.Init()
	return b
}

// await waits until the stream has had n messages, for as long as that takes while it moves.
func (b *bounded) await(n int) {
	b.T.Helper()
	// the server decodes and sends a large transaction for minutes
	quiet := time.Duration(harness.Sized(20, 1)) * harness.Patience
	last, since := uint64(0), time.Now()
	for {
		s, err := b.js.Stream(b.T.Context(), b.Stream)
		if err == nil {
			got := s.CachedInfo().State.LastSeq
			if got >= uint64(n) {
				return
			}
			if got != last {
				last, since = got, time.Now()
			}
		}
		if time.Since(since) > quiet || !b.Process.Running() {
			b.T.Fatalf("no message since %v: %d of %d, %v", time.Since(since), last, n, err)
		}
		time.Sleep(20 * time.Millisecond) // until it is asked again
	}
}

// check ends outflow and compares what it took up with the bound.
func (b *bounded) check(name string, f *harness.Footprint, spillBound int64) {
	b.T.Helper()
	cpu := harness.Metric(b.T, b.Outflow, "process_cpu_seconds_total")
	b.MustStop(b.T)
	memory, spill := f.Peaks()
	bound := memoryBound(b.maxBytes, b.maxEvents)
	b.T.Logf("%s, max_bytes %d MiB, max_events %d: peak %d MiB resident (bound %d), %d MiB of scratch "+
		"files (bound %d), %.1f s of CPU",
		name, b.maxBytes/harness.MiB, b.maxEvents, memory/harness.MiB, bound/harness.MiB, spill/harness.MiB,
		spillBound/harness.MiB, cpu)
	if memory > bound {
		b.T.Errorf("%d MiB resident, want at most %d", memory/harness.MiB, bound/harness.MiB)
	}
	if spill > spillBound {
		b.T.Errorf("%d MiB of scratch files, want at most %d", spill/harness.MiB, spillBound/harness.MiB)
	}
	b.nothingLeft()
	if f.Named != "" {
		b.T.Errorf("a scratch file had a name: %s", f.Named)
	}
}

// nothingLeft looks into the spill folder.
func (b *bounded) nothingLeft() {
	b.T.Helper()
	if left, err := os.ReadDir(b.dir); err != nil || len(left) != 0 {
		b.T.Errorf("left in the spill folder: %v, %v", left, err)
	}
}

// each reads the whole stream and checks that the rows with the ids 1 to n are there once each.
func (b *bounded) each(n int, f func(m *oracle.Message, id int)) {
	b.T.Helper()
	seen := make([]bool, n+1)
	count := 0
	err := oracle.Read(b.T.Context(), b.js, b.Stream, func(m *oracle.Message) error {
		id, err := strconv.Atoi(m.Outflow.ID)
		if err != nil || id < 1 || id > n || seen[id] {
			return fmt.Errorf("message %d: id %s is not that of a row, or came twice", m.Seq, m.Outflow.ID)
		}
		seen[id] = true
		count++
		if f != nil {
			f(m, id)
		}
		return nil
	})
	harness.Must(b.T, err)
	if count != n {
		b.T.Errorf("%d messages, want %d", count, n)
	}
}

// TestOneLargeTransactionKeepsMemoryBounded: a transaction far beyond the buffer, with every row out of
// order.
func TestOneLargeTransactionKeepsMemoryBounded(t *testing.T) {
	for _, c := range []struct {
		sort        string
		maxBytes    int64
		payload     int
		long, small int
	}{
		{"seq_key", 64 * harness.MiB, 100, 10_000_000, 0}, // its small form would hardly exceed the buffer
		{"seq_key", 8 * harness.MiB, 100, 10_000_000, 200_000},
		// so much that a heap of twice what is live would be too large
		{"seq_key", 128 * harness.MiB, 1000, 1_000_000, 250_000},
		{"commit", 64 * harness.MiB, 100, 10_000_000, 0},
		{"commit", 8 * harness.MiB, 100, 2_000_000, 100_000},
	} {
		rows := harness.Sized(c.long, c.small)
		if rows == 0 {
			continue
		}
		t.Run(fmt.Sprintf("sort=%s,max_bytes=%dMiB", c.sort, c.maxBytes/harness.MiB), func(t *testing.T) {
			b := newBounded(t, "", c.maxBytes, 65536, "REORDER_SORT="+c.sort)
			b.oneTransaction(rows, c.payload)
			b.Start()
			f := b.Watch(t)
			b.await(rows)
			b.check(fmt.Sprintf("one transaction of %d rows of %d bytes, sort %s", rows, c.payload, c.sort),
				f, spillBound(rows, c.payload+50, c.sort))
			last := map[string]string{}
			b.each(rows, func(m *oracle.Message, id int) {
				if last[m.Subject] > m.Outflow.Key {
					t.Fatalf("message %d: key %s after %s on %s", m.Seq, m.Outflow.Key, last[m.Subject],
						m.Subject)
				}
				last[m.Subject] = m.Outflow.Key
			})
		})
	}
}

// spillBound is the formula of docs/guarantees.md, section Disk.
func spillBound(rows, values int, sort string) int64 {
	copies := 2
	if sort == "commit" {
		copies = 3
	}
	return int64(rows) * int64(values+48) * int64(copies)
}

// TestManyDocumentsKeepMemoryBounded: a great number of documents, held all at the same time, and spread over
// windows.
func TestManyDocumentsKeepMemoryBounded(t *testing.T) {
	docs := harness.Sized(1_000_000, 100_000)
	fill := func(b *bounded) {
		harness.Exec(t, b.conn, `CREATE PROCEDURE fill(docs int) LANGUAGE plpgsql AS $$
			BEGIN
				FOR t IN 0 .. docs / 100 - 1 LOOP
					INSERT INTO outbox SELECT t * 100 + n, 'document-' || t * 100 + n, 'a', 1, repeat('x',
					100) FROM generate_series(1, 100) n;
					COMMIT;
				END LOOP;
			END $$`)
		harness.Exec(t, b.conn, fmt.Sprintf("CALL fill(%d)", docs))
	}
	t.Run("held at once", func(t *testing.T) {
		b := newBounded(t, "", 256*harness.MiB, int64(docs), "REORDER_HORIZON=24h")
		fill(b)
		b.Start()
		f := b.Watch(t)
		harness.Eventually(t, "all documents held", func() error {
			if harness.Metric(t, b.Outflow, "outflow_held_events") != float64(docs) {
				return errors.New(b.Log.Tail(300))
			}
			return nil
		})
		// One more, and as many as are above the limit leave.
		harness.Exec(t, b.conn, "INSERT INTO outbox VALUES ($1, 'document', 'b', 1, 'x')", docs+1)
		b.await(100)
		b.check(fmt.Sprintf("%d documents held", docs), f, 0)
		// Without a horizon everything is due at once.
		b.Set("REORDER_HORIZON=0s")
		b.Start()
		f = b.Watch(t)
		b.await(docs + 1)
		b.check(fmt.Sprintf("%d documents in a window", docs), f, 0)
		b.each(docs+1, nil)
	})
	for _, mode := range []string{"horizon", "gap"} { // gap mode remembers the newest 16,384
		t.Run("over windows of "+mode, func(t *testing.T) {
			b := newBounded(t, "", 64*harness.MiB, 65536, "REORDER_MODE="+mode)
			fill(b)
			b.Start()
			f := b.Watch(t)
			b.await(docs)
			b.check(fmt.Sprintf("%d documents over windows of %s", docs, mode), f, 0)
			b.each(docs, nil)
		})
	}
}

// TestAnOutageOfNATSKeepsMemoryBounded: what is written while NATS is away waits in PostgreSQL, not here.
func TestAnOutageOfNATSKeepsMemoryBounded(t *testing.T) {
	rows := harness.Sized(5_000_000, 200_000)
	b := newBounded(t, "", 64*harness.MiB, 65536)
	harness.Exec(t, b.conn, `CREATE PROCEDURE fill(rows int) LANGUAGE plpgsql AS $$
		DECLARE done int := 0; size int;
		BEGIN
			WHILE done < rows LOOP
				size := least(100 + done / 7 % 901, rows - done);
				INSERT INTO outbox SELECT done + n, 'doc' || n % 500, 'actor' || n % 7, done + n, repeat('x',
				100) FROM generate_series(1, size) n;
				COMMIT;
				done := done + size;
			END LOOP;
		END $$`)
	b.Start()
	b.AwaitReady()
	f := b.Watch(t)
	harness.Must(t, b.nats.Kill())
	harness.Exec(t, b.conn, fmt.Sprintf("CALL fill(%d)", rows))
	harness.Must(t, b.nats.Start())
	b.await(rows)
	b.check(fmt.Sprintf("outage with %d rows", rows), f, 0)
	b.each(rows, nil)
}

// TestTinyEventsKeepMemoryBounded: events that weigh many times what they count, each of a document of its
// own.
func TestTinyEventsKeepMemoryBounded(t *testing.T) {
	rows, maxBytes, maxEvents := harness.Sized(3_000_000, 300_000), int64(harness.Sized(64, 8)*harness.MiB),
		int64(relay.MaxMaxEvents)
	// an empty one is a key
	b := newBounded(t, ", seq_key text NOT NULL", maxBytes, maxEvents, "REORDER_HORIZON=24h")
	harness.Exec(t, b.conn, `CREATE PROCEDURE fill(rows int) LANGUAGE plpgsql AS $$
		BEGIN
			FOR t IN 0 .. rows / 1000 - 1 LOOP
				INSERT INTO outbox SELECT t * 1000 + n, to_hex(t * 1000 + n), '', 1, '', ''
				FROM generate_series(1, 1000) n;
				COMMIT;
			END LOOP;
		END $$`)
	harness.Exec(t, b.conn, fmt.Sprintf("CALL fill(%d)", rows))
	b.Start()
	f := b.Watch(t)
	b.await(rows - int(maxBytes/64) - 1000)
	b.check(fmt.Sprintf("%d empty events", rows), f, 0)
}

// published is how many messages there are.
func (b *bounded) published() uint64 {
	b.T.Helper()
	s, err := b.js.Stream(b.T.Context(), b.Stream)
	harness.Must(b.T, err)
	return s.CachedInfo().State.LastSeq
}

// anew takes everything away, and makes it again.
func (b *bounded) anew() {
	b.T.Helper()
	b.Kill()
	harness.AwaitSlotFree(b.T, b.conn, b.Slot)
	harness.Exec(b.T, b.conn, "SELECT pg_drop_replication_slot($1)", b.Slot)
	harness.Exec(b.T, b.conn, "TRUNCATE outbox")
	for _, stream := range []string{b.Stream, "KV_" + checkpoint.Bucket(b.Stream)} {
		harness.Must(b.T, b.js.DeleteStream(b.T.Context(), stream))
	}
	b.Init()
}

// oneTransaction writes rows in one transaction, each out of order.
func (b *bounded) oneTransaction(rows, payload int) {
	b.T.Helper()
	harness.Exec(b.T, b.conn, "INSERT INTO outbox SELECT n, 'doc' || n % 1000, 'actor', $1::int - n, "+
		"repeat('x', $2::int) FROM generate_series(1, $1::int) n", rows, payload)
}

// spilling waits until so many bytes have lain in scratch files.
func (b *bounded) spilling(f *harness.Footprint, least int64) {
	b.T.Helper()
	harness.Eventually(b.T, fmt.Sprintf("%d MiB of scratch files", least/harness.MiB), func() error {
		if got := spilled(f); got < least {
			return fmt.Errorf("%d MiB", got/harness.MiB)
		}
		return nil
	})
}

// TestSIGTERMEndsALongSort: a large transaction is sorted in one call, which may take minutes. SIGTERM ends
// outflow in the middle of it, before a message of it is published; afterwards all of it is.
func TestSIGTERMEndsALongSort(t *testing.T) {
	rows := harness.Sized(5_000_000, 200_000)
	b := newBounded(t, "", harness.MiB, 65536, "REORDER_SORT=commit")
	for try := 1; ; try++ {
		b.oneTransaction(rows, 100)
		b.Start()
		f := b.Watch(t)
		b.spilling(f, int64(rows)*200) // the transaction is read: its second copy is being made
		b.MustStop(t)
		b.nothingLeft()
		published := b.published()
		b.Start()
		b.await(rows)
		b.each(rows, nil)
		if published == 0 {
			return
		}
		if try == harness.Tries {
			t.Fatalf("%d messages: it was not stopped while it sorted", published)
		}
		t.Logf("again: %d messages, this test stood still while it sorted", published)
		b.anew()
	}
}

// TestAKillWhileSpillingLeavesNothingOnDisk: kill -9 leaves neither a name in the folder nor a block on the
// disk.
func TestAKillWhileSpillingLeavesNothingOnDisk(t *testing.T) {
	const rows = 200_000
	b := newBounded(t, "", harness.MiB, 65536)
	b.oneTransaction(rows, 100)
	if dir, err := os.MkdirTemp("/dev/shm", "outflow"); err == nil { // a disk on which little else happens
		t.Cleanup(func() { os.RemoveAll(dir) })
		b.dir = dir
		b.Set("REORDER_SPILL_DIR=" + dir)
	}
	before := free(t, b.dir)
	for n := range 3 {
		if n > 0 && b.published() > 0 {
			t.Logf("killed %d times, until it had published while this test stood still", n)
			break
		}
		b.Start()
		f := b.Watch(t)
		b.spilling(f, 16*harness.MiB)
		b.Kill()
		if f.Peaks(); f.Named != "" {
			t.Errorf("a scratch file had a name: %s", f.Named)
		}
		b.nothingLeft()
	}
	harness.Eventually(t, "the blocks are free", func() error {
		if now := free(t, b.dir); now < before-8*harness.MiB {
			return fmt.Errorf("%d MiB are missing", (before-now)/harness.MiB)
		}
		return nil
	})
	b.Start()
	b.await(rows)
	b.each(rows, nil)
}

func free(t *testing.T, dir string) int64 {
	t.Helper()
	var st syscall.Statfs_t
	harness.Must(t, syscall.Statfs(dir, &st))
	return int64(st.Bfree) * st.Bsize
}

// TestTheSpillLimitStopsOutflowAndLosesNothing: what needs more than reorder.max_spill ends run, says what to
// do, and loses nothing.
func TestTheSpillLimitStopsOutflowAndLosesNothing(t *testing.T) {
	const rows = 50_000
	b := newBounded(t, "", harness.MiB, 65536, "REORDER_MAX_SPILL=2MiB")
	b.oneTransaction(rows, 100)
	b.Start()
	b.MustEnd(3, "reorder.max_spill", "2097152", "Raise", "Nothing is lost")
	b.nothingLeft()
	b.Set("REORDER_MAX_SPILL=64MiB")
	b.Start()
	b.await(rows)
	b.each(rows, nil)
}
