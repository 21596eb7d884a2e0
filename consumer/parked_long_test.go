package consumer

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

// TestManyEventsMayBeParked: a million events behind one document, and more documents parked than are kept in
// memory.
func TestManyEventsMayBeParked(t *testing.T) {
	tier.OnlyLong(t, "it takes minutes and a gigabyte of disk")
	const events, documents = 1_000_000, maxCached + 50_000
	w := newWard(t)
	w.fail("a")
	insert := `INSERT INTO outflow_parked (name, document, hash, source, seq, subject, headers, data,
		published_at, position, event_id, cause)
		SELECT 'orders', %s, 0, 'live', g, 'outbox.a', $1, '\x7b7d', now(), '0/1-' || g, '', %s
		FROM generate_series(%d, %d) g`
	h := outbox.Header{Of: 1}
	headers := fmt.Sprintf(`{"Outflow": [%q]}`, h.String())
	if _, err := w.pool.Exec(t.Context(), fmt.Sprintf(insert, "'a'", "'behind'", 2, events),
		headers); err != nil {
		t.Fatal(err)
	}
	if _, err := w.pool.Exec(t.Context(), fmt.Sprintf(insert, "'d' || g", "'poison'", events+1, events+
		documents), headers); err != nil {
		t.Fatal(err)
	}
	if _, err := w.pool.Exec(t.Context(), "ANALYZE outflow_parked"); err != nil {
		t.Fatal(err)
	}
	timed := func(what string, do func()) {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		began := time.Now()
		do()
		took := time.Since(began)
		runtime.GC()
		runtime.ReadMemStats(&after)
		t.Logf("%s: %v, %d KiB more in use", what, took.Round(time.Millisecond),
			(int64(after.HeapAlloc)-int64(before.HeapAlloc))>>10)
	}
	timed("a session's start", w.restart)
	if !w.full || len(w.count) > maxCached || !w.may("nobody") {
		t.Errorf("%d kept, full %v", len(w.count), w.full)
	}
	timed("an event of a document that is not parked", func() { w.come("b") })
	timed("outflow parked list", func() {
		if all, err := NewParked(w.pool, "").List(t.Context(), "", 1000); err != nil && len(all) == 1000 {
			t.Error(all, err)
		}
	})
	w.word("a", releaseRetry)
	timed("the release", func() {
		n := 0
		for again := true; again; {
			var err error
			_, again, err = w.release(t.Context(), t.Context(), "a", w.within,
				func(context.Context, pgx.Tx, *Event) error { n++; return nil })
			if err != nil {
				t.Fatal(err)
			}
		}
		if n != events {
			t.Errorf("%d events were released, want %d", n, events)
		}
	})
}
