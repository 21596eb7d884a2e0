package partition

import (
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// waited is how the server's log says that a writer has waited for a table.
var waited = regexp.MustCompile(`acquired RowExclusiveLock on relation \d+ of database \d+ after ([0-9.]+) ms`)

// TestApplyDoesNotStopWriters: partitions are made, detached and dropped while services write. No insert
// fails. How long the longest one took, and without apply, is a figure that it prints: nothing here depends
// on time.
func TestApplyDoesNotStopWriters(t *testing.T) {
	t.Parallel()
	rounds := 4
	if tier.Long() {
		rounds = 40
	}
	srv := pgtest.Own(t, 0, "wal_level=logical", "log_lock_waits=on", "deadlock_timeout=1ms")
	w := newWorld(t, srv, 0)
	w.apply()
	var stop atomic.Bool
	var writers sync.WaitGroup
	var mu sync.Mutex
	var took []time.Duration
	for range 4 {
		conn := w.other()
		writers.Go(func() {
			for !stop.Load() {
				begun := time.Now()
				_, err := conn.Exec(outboxdb.Within(t), `INSERT INTO outbox (doc_id, actor_id, counter, payload)
					VALUES ('d', 'a', 1, '{}')`)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				took = append(took, time.Since(begun))
				mu.Unlock()
			}
		})
	}
	// worst is the longest insert since it was last asked, the 99th percentile, and how many there were
	worst := func() (longest, p99 time.Duration, n int) {
		mu.Lock()
		defer mu.Unlock()
		slices.Sort(took)
		if n = len(took); n > 0 {
			longest, p99 = took[n-1], took[n*99/100]
		}
		took = took[:0]
		return longest, p99, n
	}
	for range rounds { // as long as apply takes below, about
		for range 50 {
			must.Succeed(t, w.Conn.Ping(outboxdb.Within(t)))
			time.Sleep(10 * time.Millisecond)
		}
	}
	longest, p99, n := worst()
	t.Logf("alone: longest insert %v, 99 %% within %v, of %d", longest, p99, n)
	for i := range rounds {
		w.Exec("CREATE TABLE " + old(i) + " (LIKE outbox INCLUDING ALL)")
		w.Exec("ALTER TABLE outbox ATTACH PARTITION " + old(i) + " FOR VALUES FROM ('" +
			day.AddDate(0, 0, i).Format(time.DateOnly) + "') TO " +
			"('" + day.AddDate(0, 0, i+1).Format(time.DateOnly) +
			"')")
		w.insert(i, 1000, true)
		w.cfg.Ahead = 3 + i // one more is made each time
		w.apply()
		outboxdb.Eventually(t, "it is dropped", func() bool { // a lock may not be had at first
			w.confirm(w.Slot)
			w.apply()
			return !w.exists(i)
		})
	}
	longest, p99, n = worst()
	t.Logf("with %d partitions made, detached and dropped: longest insert %v, 99 %% within %v, of "+
		"%d", rounds, longest, p99, n)
	longestWait := func() (waits int, most float64) {
		for _, found := range waited.FindAllStringSubmatch(srv.Log(), -1) {
			ms, err := strconv.ParseFloat(found[1], 64)
			must.Succeed(t, err)
			waits, most = waits+1, max(most, ms)
		}
		return waits, most
	}
	waits, most := longestWait()
	t.Logf("inserts waited %d times for more than 1 ms for a lock on a table, %v ms at most", waits, most)
	// would it be seen?
	w.Exec("BEGIN; LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(0.05); COMMIT")
	outboxdb.Eventually(t, "the server's log says that writers waited", func() bool {
		again, _ := longestWait()
		return again > waits
	})
	stop.Store(true)
	writers.Wait()
}
