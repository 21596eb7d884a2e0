package maintenance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestEachShardDeletesItsRows: those of the other one are in another stream and another archive. They are not
// missed, and stay for its own run.
func TestEachShardDeletesItsRows(t *testing.T) {
	t.Parallel()
	pg := pgtest.Own(t, 0, "wal_level=logical")
	if pg.Installation.Major < 15 {
		t.Skip("no row filters")
	}
	url, natsURL := pgtest.Database(t, pg), natstest.Server(t).URL()
	conn, js := harness.Connect(t, url), harness.JetStream(t, natsURL)
	var all []*harness.Installation
	for k := range 2 {
		o := harness.New(t, url, natsURL, fmt.Sprintf("coldshard_%d", k), fmt.Sprintf("SHARD=%d/2", k),
			"RETAIN_TABLE_METHOD=delete", "ARCHIVE_URL=file://"+t.TempDir(), "SINK_DURABLE_AFTER=0s")
		o.UseStream(strings.ToUpper(o.Slot))
		f := &harness.Installation{Outflow: o, Conn: conn, JS: js, URL: url}
		if all = append(all, f); k == 0 {
			harness.Exec(t, conn, harness.GeneratedKey)
		}
		f.Init()
		f.Start()
	}
	counter := 0
	write := func(rows int) {
		t.Helper()
		for range rows {
			harness.Insert(t, conn, fmt.Sprint("doc", counter), counter, "{}")
			counter++
		}
		for _, f := range all {
			f.AwaitConfirmed(conn, harness.WALEnd(t, conn))
		}
	}
	write(20)
	old := func(f *harness.Installation) int {
		t.Helper()
		k := f.Slot[len(f.Slot)-1:]
		return harness.Value[int](t, conn, "SELECT count(*) FROM outbox WHERE counter < 20 AND "+
			"((hash_array(ARRAY[doc_id]) & 2147483647) % 2) = "+k)
	}
	before := old(all[1])
	for i, f := range all {
		harness.Eventually(t, "its rows are deleted", func() error {
			write(10)
			f.MustRun("archive", "run", "--now")
			if out, n := f.MustRun("partition", "apply"), old(f); n > 0 {
				return fmt.Errorf("%d are left: %s", n, out)
			}
			return nil
		})
		if n := old(all[1]); i == 0 && n != before {
			t.Errorf("%d rows of the other shard are left, not %d", n, before)
		}
	}
	for _, f := range all {
		f.MustStop(t)
	}
}
