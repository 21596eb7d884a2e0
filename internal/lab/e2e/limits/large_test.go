package limits

import (
	"fmt"
	"os"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestATransactionLargerThanTheBufferIsOrderedCompletely is claim C6 from outside: one transaction many times
// as large as the buffer is ordered completely, also across a kill in the middle of it, memory stays within
// bounds, and nothing is left on disk.
func TestATransactionLargerThanTheBufferIsOrderedCompletely(t *testing.T) {
	harness.SkipIfShort(t)
	const maxBytes = 8 << 20
	rows := harness.Sized(300_000, 120_000)
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Process(t)
	spill := t.TempDir()
	o := harness.New(t, url, nats.URL(), "large", fmt.Sprintf("REORDER_MAX_BYTES=%d", maxBytes),
		"REORDER_SPILL_DIR="+spill)
	o.Init()
	conn := harness.Connect(t, url)
	// Counters descend, so that the whole transaction is out of order.
	harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'doc' || n % 1000, 'actor', $1::int - n, jsonb_build_object('op', repeat('x', 150), 'n', n)
		FROM generate_series(1, $1::int) n`, rows)
	o.Start()
	harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), o.Stream, rows/3)
	o.Kill()
	o.Start()
	harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), o.Stream, rows)
	resident := harness.Metric(t, o, "process_resident_memory_bytes")
	t.Logf("%d rows, max_bytes %d: %.0f MB resident at the end", rows, maxBytes, resident/1e6)
	// The process itself takes about 25 MB, what is in flight and the collector's head room the rest.
	if limit := float64(128 << 20); resident > limit {
		t.Errorf("%.0f bytes resident, want at most %.0f", resident, limit)
	}
	o.MustStop(t)
	v, err := oracle.Compare(t.Context(), conn, "outbox", harness.JetStream(t, nats.URL()), o.Stream, 0)
	harness.Must(t, err)
	if !v.OK() || v.OutOfOrder != 0 {
		t.Errorf("%s", v.String())
	}
	if left, err := os.ReadDir(spill); err != nil || len(left) != 0 {
		t.Errorf("left in the spill folder: %v, %v", left, err)
	}
}
