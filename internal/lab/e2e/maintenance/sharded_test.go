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

// TestNoShardTakesAPartitionThatAnotherHasNotRead: where the slot of one shard is gone, no run of the other
// one takes partitions with rows of both, until a repair has made the slot and published what is missing.
func TestNoShardTakesAPartitionThatAnotherHasNotRead(t *testing.T) {
	t.Parallel()
	pg := pgtest.Own(t, 0, "wal_level=logical")
	if pg.Installation.Major < 15 {
		t.Skip("no row filters")
	}
	natsURL := natstest.Server(t).URL()
	r := newRetainedAt(t, pg, natsURL, "parted_0", "SHARD=0/2")
	o := harness.New(t, r.URL, natsURL, "parted_1", "SHARD=1/2", "SINK_DURABLE_AFTER=0s")
	other := &harness.Installation{Outflow: o, Conn: r.Conn, JS: r.JS, URL: r.URL}
	all := []*harness.Installation{r.Installation, other}
	for _, f := range all {
		f.UseStream(strings.ToUpper(f.Slot))
		f.Init()
		f.Start()
	}
	r.write(1, 20)
	for _, f := range all {
		f.AwaitConfirmed(r.Conn, harness.WALEnd(t, r.Conn))
	}
	other.MustStop(t)
	harness.AwaitSlotFree(t, r.Conn, other.Slot)
	harness.Exec(t, r.Conn, "SELECT pg_drop_replication_slot($1)", other.Slot)
	r.write(1, 20)
	for range 3 {
		r.settle()
		r.MustContain("without a slot", r.MustRun("partition", "apply"), "slot parted_1 does not exist",
			"uninstall")
	}
	if got := r.left(); got != "day_1 day_2 day_3" {
		t.Fatalf("left: %s", got)
	}
	if report, stderr, code := other.Repair("--accept", "slot_missing"); code != 0 || report.Published == 0 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	other.Start()
	harness.Eventually(t, "the partitions go", func() error {
		for _, f := range all {
			f.AwaitConfirmed(r.Conn, harness.WALEnd(t, r.Conn))
		}
		other.MustRun("partition", "apply") // Outflow did not make them, so each shard compares its rows
		if out, left := r.MustRun("partition", "apply"), r.left(); left != "" {
			return fmt.Errorf("%s are left: %s", left, out)
		}
		return nil
	})
	n := 0
	for _, f := range all {
		n += len(harness.Messages(t, r.JS, f.Stream))
		f.MustStop(t)
	}
	if n != 40 {
		t.Errorf("%d of 40 events are in the streams", n)
	}
}
