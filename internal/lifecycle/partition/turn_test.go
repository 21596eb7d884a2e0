package partition

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// slow makes each run of a turn that has begun come to its end after it has come to one of some points.
func (w *world) slow(points ...string) (run func(), hits *int) {
	var began time.Time
	hits = new(int)
	w.o.Turn, w.o.Pass = 1, &Pass{}
	w.o.Hit = func(point string) {
		for _, p := range points {
			if p == point {
				*hits++
				time.Sleep(2 * time.Since(began))
			}
		}
	}
	return func() { began, *hits = time.Now(), 0 }, hits
}

// TestADeleteEndsWithItsTurn, at a batch, and the next one goes on at its page: what is empty by then is not
// read each time. Rows that were put there meanwhile go behind it.
func TestADeleteEndsWithItsTurn(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.Exec("ALTER TABLE outbox SET (fillfactor = 10)")
	w.insert(0, 4200, true)
	pages := w.Text("SELECT (pg_relation_size('outbox') / 8192)::text")
	w.settle()
	begin, hits := w.slow("partition.deleted")
	all, gone := 0, int64(0)
	for n := 1; w.rows() != "0"; n++ {
		w.confirm(w.Slot)
		begin()
		s := w.mustRemove()
		if all, gone = all+*hits, gone+s.Rows; *hits > 1 || n > 12 {
			t.Fatalf("run %d had %d batches of %s pages: %v", n, *hits, pages, s)
		}
		if n == 2 {
			if !strings.Contains(s.Why, "the rest goes in the next round") {
				t.Errorf("it says %v", s)
			}
			w.Exec("VACUUM outbox")
			w.insert(0, 9, true)
		}
	}
	if gone != 4209 {
		t.Errorf("%d rows went in %d batches", gone, all)
	}
}

// TestAnApplyEndsWithItsTurn, at a partition, and the next one goes on.
func TestAnApplyEndsWithItsTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 3)
	for i := range 3 {
		w.insert(i, 5, true)
	}
	begin, hits := w.slow("partition.sealed", "partition.dropped")
	for n, want := range []int{2, 1, 2, 1} { // the turn begins with the first one
		if n == 2 {
			w.confirm(w.Slot)
		}
		begin()
		if w.apply(); *hits != want {
			t.Errorf("run %d did it with %d partitions, want %d", n, *hits, want)
		}
	}
}
