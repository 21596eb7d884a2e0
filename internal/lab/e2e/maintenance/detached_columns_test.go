package maintenance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestARepairReadsDetachedPartitionsWhoseOutboxWasAltered: columns of the outbox get other types and another
// name while its partitions are detached. Events that the stream has lost are published from them as before;
// without the renamed column in them nothing is.
func TestARepairReadsDetachedPartitionsWhoseOutboxWasAltered(t *testing.T) {
	t.Parallel()
	r := newRetained(t, pgtest.Server(t), "altereddetached", "RETAIN_TABLE_KEEP=1h", "COLUMNS_SEQ_KEY=")
	harness.Exec(t, r.Conn, "ALTER TABLE outbox DROP seq_key, ALTER counter TYPE int, ALTER doc_id TYPE "+
		"varchar(20), ALTER payload TYPE json")
	r.Init()
	r.Start()
	harness.Exec(t, r.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) SELECT 'doc' || n % 3,
		'a', n, json_build_object('n', n), '2024-05-01 12:00Z' FROM generate_series(1, 20) n`)
	harness.AwaitMessages(t, r.JS, r.Stream, 20)
	published := func() map[string]string {
		all := map[string]string{}
		for _, m := range harness.Messages(t, r.JS, r.Stream) {
			data := strings.ReplaceAll(string(m.Data), " ", "")
			all[m.Outflow.ID] = m.Subject + " " + m.Outflow.Key + " " + data
		}
		return all
	}
	before := published()
	r.settle()
	r.MustRun("partition", "apply")
	if n := harness.Value[int](t, r.Conn, "SELECT count(*) FROM outbox"); n != 0 {
		t.Fatalf("%d rows are in partitions that are attached", n)
	}
	r.MustStop(t)
	harness.AwaitSlotFree(t, r.Conn, r.Slot)
	harness.Exec(t, r.Conn, "ALTER TABLE outbox ALTER counter TYPE bigint, ALTER doc_id TYPE text, ALTER "+
		"payload TYPE jsonb; ALTER TABLE outbox RENAME payload TO body")
	r.Set("COLUMNS_PAYLOAD=body")
	r.Init()
	harness.Must(t, r.JS.DeleteStream(t.Context(), r.Stream))
	for _, day := range []string{"day_1", "day_2", "day_3"} {
		mend := `ALTER TABLE "public"."` + day + `" RENAME COLUMN "payload" TO "body"`
		if report, stderr, code := r.Repair("--accept", "stream_missing"); code != 3 ||
			!strings.Contains(stderr, "partition_columns") || !strings.Contains(stderr, mend) {
			t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
		}
		harness.Exec(t, r.Conn, mend)
	}
	if report, stderr, code := r.Repair("--accept", "stream_missing"); code != 0 || report.Published != 20 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	after := published()
	if len(before) != 20 || len(after) != 20 {
		t.Fatalf("%d messages before, %d after", len(before), len(after))
	}
	for id, was := range before {
		if after[id] != was {
			t.Errorf("%s: %s, was %s", id, after[id], was)
		}
	}
	r.Start()
	r.settle()
	r.MustStop(t)
}

// TestRowsOfADetachedPartitionAreThereUnderAnotherName: rows that a detached partition has are not put back
// where the id column has another name and type by now; it is refused until the partition has that name.
func TestRowsOfADetachedPartitionAreThereUnderAnotherName(t *testing.T) {
	t.Parallel()
	r := newRetained(t, pgtest.Server(t), "rowsthere", "ARCHIVE_URL=file://"+t.TempDir())
	r.Init()
	r.Start()
	r.write(1, 20)
	harness.AwaitMessages(t, r.JS, r.Stream, 20)
	r.settle()
	r.MustRun("partition", "apply")
	r.beat() // another window: the newest one can't be archived
	archived(t, r.Installation, 20)
	r.MustStop(t)
	harness.Exec(t, r.Conn, "ALTER TABLE outbox ALTER id TYPE text; ALTER TABLE outbox RENAME id TO event_id")
	r.Set("COLUMNS_ID=event_id")
	mend := `ALTER TABLE "public"."day_1" RENAME COLUMN "id" TO "event_id"`
	r.MustFail(3, []string{"archive", "rows", "--to", "20"}, "partition_columns", mend)
	for day := range 3 {
		harness.Exec(t, r.Conn, strings.ReplaceAll(mend, "day_1", fmt.Sprintf("day_%d", day+1)))
	}
	r.MustContain("rows", r.MustRun("archive", "rows", "--to", "20"), " 0 rows put back, 20 were there")
}
