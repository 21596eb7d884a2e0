package backfill

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// snapshotMemory is what outflow init --snapshot may have resident, whatever the table: messages in flight,
// receive buffers, the program's own pages, and what the collector leaves.
const snapshotMemory = 96 * harness.MiB

// TestASnapshotOfALargeTableKeepsMemoryBounded: a large table beside 1,000 writes a second. Each row is in
// the stream once, as it was written, in order, and memory does not grow with the table. OUTFLOW_TEST_LONG=1:
// 10,000,000 rows, killed once in the middle.
func TestASnapshotOfALargeTableKeepsMemoryBounded(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	rows := harness.EnvInt(t, "OUTFLOW_TEST_ROWS", harness.Sized(10_000_000, 20_000))
	nats := natstest.Process(t)
	f := harness.NewInstallation(t, pgtest.Own(t, 0, "max_wal_size=8GB"), nats.URL(), "large")
	harness.Exec(t, f.Conn, `CREATE TABLE outbox (id bigint GENERATED ALWAYS
		AS IDENTITY PRIMARY KEY, doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
		payload jsonb NOT NULL)`)
	begun := time.Now()
	harness.Exec(t, f.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'd' || n % 10007, 'a' || n % 3, n,
		jsonb_build_object('n', n, 'text', repeat('x', 80)) FROM generate_series(1, $1::bigint) n
		ORDER BY hashint8(n)`, rows)
	t.Logf("%d rows written in %v", rows, time.Since(begun))
	w := startRate(t, f.URL, int64(rows), 1000)

	for cut := true; ; cut = false {
		begun, was := time.Now(), w.written.Load()
		if cut {
			f.Set(fmt.Sprintf("FAILPOINT=snapshot.row:%d", rows/3))
		}
		k := startTaking(f, t)
		f.Process = k.child
		foot := f.Watch(t)
		code, stderr := k.endsWithin(t, time.Hour)
		peak, _ := foot.Peaks()
		took := time.Since(begun)
		perSecond := float64(w.written.Load()-was) / took.Seconds()
		t.Logf("cut %t: %v, %.0f writes a second beside it, peak resident %d MiB\n%s", cut, took, perSecond,
			peak/harness.MiB, stderr)
		if peak > snapshotMemory {
			t.Errorf("peak resident %d MiB, at most %d", peak/harness.MiB, snapshotMemory/harness.MiB)
		}
		if !cut {
			if code != 0 {
				t.Fatalf("exit code %d", code)
			}
			break
		}
		f.Env = f.Env[:len(f.Env)-1]
	}
	f.Start()
	f.AwaitReady()
	written := int(w.stop())
	deadline := time.Now().Add(30 * time.Minute)
	for {
		s, err := f.JS.Stream(t.Context(), f.Stream)
		harness.Must(t, err)
		if last := s.CachedInfo().State.LastSeq; last >= uint64(rows+written) {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("%d of %d messages", last, rows+written)
		}
		time.Sleep(100 * time.Millisecond)
	}
	judgeMany(f, t, rows+written)
}

// judgeMany compares the table with the stream, and holds of neither more than a bit a row.
func judgeMany(f *harness.Installation, t *testing.T, total int) {
	t.Helper()
	seen := make([]uint64, total/64+2)
	var repeated, changed, disorder, snapshot, live, windows int
	var was *oracle.Message
	harness.Must(t, oracle.Read(t.Context(), f.JS, f.Stream, func(m *oracle.Message) error {
		h := m.Outflow
		id, err := strconv.ParseUint(h.ID, 10, 64)
		if err != nil || id > uint64(total) {
			return fmt.Errorf("message %d has id %q", m.Seq, h.ID)
		}
		if seen[id/64]&(1<<(id%64)) != 0 {
			repeated++
		}
		seen[id/64] |= 1 << (id % 64)
		actor, counter, _ := strings.Cut(h.Key, ":")
		n, _ := strconv.ParseUint(counter, 10, 64)
		doc, data := fmt.Sprint("d", n%10007), fmt.Sprintf(`{"n": %d, "text": "%s"}`, n,
			strings.Repeat("x", 80))
		if string(m.Data) != data || actor != fmt.Sprint("a", n%3) || docOfSubject(m) != doc {
			changed++
		}
		if h.Pos.Index < 1<<30 {
			live++
			return nil
		}
		if snapshot++; live > 0 {
			disorder++
		}
		if was == nil || was.Outflow.Due != h.Due {
			windows++
		} else if last := docOfSubject(was); h.N != was.Outflow.N+1 || doc < last || doc == last &&
			h.Key <= was.Outflow.Key {
			disorder++
		}
		was = m
		return nil
	}))
	missing, inTable := 0, 0
	rows, err := f.Conn.Query(t.Context(), "SELECT id FROM outbox")
	harness.Must(t, err)
	var id uint64
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error {
		if inTable++; seen[id/64]&(1<<(id%64)) == 0 {
			missing++
		}
		return nil
	})
	harness.Must(t, err)
	t.Logf("%d rows, %d messages: %d from the snapshot in %d windows, %d from the WAL; missing %d, "+
		"repeated %d, changed %d, out of order %d",
		inTable, snapshot+live, snapshot, windows, live, missing, repeated, changed, disorder)
	if inTable != total || snapshot+live != total || missing+repeated+changed+disorder > 0 || live == 0 ||
		windows != 2 {
		t.Error("table and stream differ")
	}
}

// rate writes single rows, in transactions of their own, at a rate.
type rate struct {
	written atomic.Int64
	cancel  context.CancelFunc
	group   sync.WaitGroup
}

func startRate(t *testing.T, url string, from, perSecond int64) *rate {
	t.Helper()
	const connections = 4
	ctx, cancel := context.WithCancel(t.Context())
	r := &rate{cancel: cancel}
	begun := time.Now()
	var next atomic.Int64
	for range connections {
		conn, err := pgx.Connect(ctx, url)
		harness.Must(t, err)
		r.group.Go(func() {
			defer conn.Close(context.Background()) //nolint:errcheck // the test is over
			for ctx.Err() == nil {
				n := next.Add(1)
				select {
				case <-ctx.Done():
					return
				case <-time.After(time.Until(
					begun.Add(time.Duration(n) * time.Second / time.Duration(perSecond)))):
				}
				// Not to be cut off with the context: it is counted when it has been written.
				if _, err := conn.Exec(context.WithoutCancel(ctx), `INSERT INTO outbox (doc_id, actor_id,
					counter, payload)
					SELECT 'd' || n % 10007, 'a' || n % 3, n, jsonb_build_object('n', n, 'text', repeat('x',
					80)) FROM (SELECT $1::bigint) AS w (n)`, from+n); err != nil {
					t.Error(err)
					return
				}
				r.written.Add(1)
			}
		})
	}
	t.Cleanup(func() { r.stop() })
	return r
}

// stop ends it, and returns how many rows there are.
func (r *rate) stop() int64 {
	r.cancel()
	r.group.Wait()
	return r.written.Load()
}
