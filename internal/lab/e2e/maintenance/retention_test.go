package maintenance

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// retained is an installation on an outbox that is partitioned by day, with partitions of three days long
// ago.
type retained struct {
	*harness.Installation
	t       *testing.T
	counter int
}

func newRetained(t *testing.T, pg *pgserver.Server, name string, settings ...string) *retained {
	t.Helper()
	return newRetainedAt(t, pg, natstest.Server(t).URL(), name, settings...)
}

func newRetainedAt(t *testing.T, pg *pgserver.Server, natsURL, name string, settings ...string) *retained {
	t.Helper()
	r := &retained{t: t, Installation: harness.NewInstallation(t, pg, natsURL, name,
		append([]string{"RETAIN_TABLE_KEEP=0s", "RETAIN_TABLE_SLACK=0s", "RETAIN_TABLE_EVERY=24h",
			"SINK_DURABLE_AFTER=0s"}, settings...)...)}
	harness.Exec(t, r.Conn, `CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), doc_id text NOT NULL,
		actor_id text NOT NULL, counter bigint NOT NULL, seq_key text NOT NULL GENERATED ALWAYS AS
		(actor_id || ':' || lpad(counter::text, 20, '0')) STORED, payload jsonb NOT NULL,
		created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at)`)
	for day := 1; day <= 3; day++ {
		harness.Exec(t, r.Conn, fmt.Sprintf("CREATE TABLE day_%d PARTITION OF outbox FOR VALUES FROM "+
			"('2024-05-0%[1]d') TO ('2024-05-0%d')", day, day+1))
	}
	return r
}

// write writes rows into the range of a day.
func (r *retained) write(day, rows int) {
	r.t.Helper()
	harness.Exec(r.t, r.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at)
		SELECT 'doc' || n % 3, 'a', n, '{}', make_timestamptz(2024, 5, $1, 12, 0, 0, 'UTC')
		FROM generate_series($2::bigint, $3) n`, day, r.counter+1, r.counter+rows)
	r.counter += rows
}

// settle waits until everything that is written is confirmed.
func (r *retained) settle() {
	r.t.Helper()
	r.AwaitConfirmed(r.Conn, harness.WALEnd(r.t, r.Conn))
}

// beat settles with a row of now.
func (r *retained) beat() {
	r.t.Helper()
	settle(r.t, r.Installation)
	r.counter++
}

// left are the partitions of the three days that still exist, attached or not.
func (r *retained) left() string {
	r.t.Helper()
	return harness.Value[string](r.t, r.Conn, "SELECT coalesce(string_agg(relname, ' ' ORDER BY relname), "+
		"'') FROM pg_class WHERE relname LIKE 'day~_%' ESCAPE '~' AND relkind = 'r'")
}

// TestOldPartitionsGoWhenTheStreamHasThem: apply makes the partitions to come, and takes the old ones away in
// its own time, while outflow run publishes; what is in the stream is what was written, once.
func TestOldPartitionsGoWhenTheStreamHasThem(t *testing.T) {
	t.Parallel()
	r := newRetained(t, pgtest.Server(t), "retained")
	r.Init()
	r.write(1, 20)
	out := r.MustRun("partition", "apply")
	r.MustContain("before outflow runs", out, "create ", "detach ", "slot "+r.Slot+" has confirmed",
		"nobody reads it")
	if got := r.left(); got != "day_1 day_2 day_3" {
		t.Fatalf("left: %s", got)
	}
	r.Start()
	r.settle()
	var report struct {
		Table string
		Steps []struct{ Partition, Action string }
	}
	if err := json.Unmarshal([]byte(r.MustRun("partition", "plan", "--json")), &report); err != nil ||
		report.Table != "public.outbox" || len(report.Steps) < 7 || report.Steps[0].Action == "" {
		t.Fatalf("%v, %+v", err, report)
	}
	dry := r.MustRun("partition", "apply", "--dry-run")
	if got := r.left(); got != "day_1 day_2 day_3" {
		t.Fatalf("a dry run left %s: %s", got, dry)
	}
	r.MustRun("partition", "apply")
	if got := r.left(); got != "" {
		t.Fatalf("left: %s", got)
	}
	harness.Insert(t, r.Conn, "now", 1, "{}")
	harness.AwaitMessages(t, r.JS, r.Stream, 21)
	r.MustStop(t)
}

// waitsFor runs, and sees that rows stay because the other has not confirmed them, and that this says why it
// counts.
func (r *retained) waitsFor(second *harness.Outflow, why ...string) {
	r.t.Helper()
	r.Start()
	r.settle()
	r.MustContain("before the other", r.MustRun("partition", "apply"),
		append(why, "slot "+second.Slot+" has confirmed")...)
	r.settle()
	r.MustRun("partition", "apply")
	if got := r.left(); !strings.Contains(got, "day_1") {
		r.t.Fatalf("left: %s", got)
	}
}

// goesWith sees that they go when the other has confirmed them.
func (r *retained) goesWith(second *harness.Outflow) {
	r.t.Helper()
	second.Start()
	second.AwaitConfirmed(r.Conn, harness.WALEnd(r.t, r.Conn))
	r.settle()
	r.MustRun("partition", "apply")
	if got := r.left(); got != "" {
		r.t.Fatalf("left: %s", got)
	}
	second.MustStop(r.t)
	r.MustStop(r.t)
}

// TestRowsWaitForAnOutflowWhoseTableHasAnotherName: its record has the name that the table had before, until
// init is run for it as well.
func TestRowsWaitForAnOutflowWhoseTableHasAnotherName(t *testing.T) {
	t.Parallel()
	natsURL := natstest.Server(t).URL()
	r := newRetainedAt(t, pgtest.Server(t), natsURL, "rowsrenamed")
	second := beside(t, r.Installation, natsURL)
	r.write(1, 20)
	harness.Exec(t, r.Conn, "CREATE SCHEMA notes; ALTER TABLE outbox SET SCHEMA notes; ALTER TABLE "+
		"notes.outbox RENAME TO note_events; CREATE VIEW public.outbox AS SELECT * FROM notes.note_events")
	r.Set("TABLE=notes.note_events")
	r.Init()
	r.waitsFor(second, "by its record it reads this table")
	second.Set("TABLE=notes.note_events")
	second.Init()
	r.goesWith(second)
}

// TestRowsWaitForAnOutflowWhoseRecordCannotBeRead, as one that a newer build has written.
func TestRowsWaitForAnOutflowWhoseRecordCannotBeRead(t *testing.T) {
	t.Parallel()
	natsURL := natstest.Server(t).URL()
	r := newRetainedAt(t, pgtest.Server(t), natsURL, "rowsunread")
	second := beside(t, r.Installation, natsURL)
	restore := rewritten(t, r.Installation, second, "v", 99)
	r.write(1, 20)
	r.waitsFor(second, "the checkpoint record has version 99", "the newest version of outflow")
	restore()
	r.goesWith(second)
}

// TestRowsWaitForAnOutflowWhoseDatabaseHadAnotherName: its record has the name that the database had before.
func TestRowsWaitForAnOutflowWhoseDatabaseHadAnotherName(t *testing.T) {
	t.Parallel()
	natsURL := natstest.Server(t).URL()
	r := newRetainedAt(t, pgtest.Server(t), natsURL, "rowsmoved")
	second := beside(t, r.Installation, natsURL)
	rewritten(t, r.Installation, second, "database", "before")
	r.write(1, 20)
	r.waitsFor(second, `its record is of database "before"`)
	r.goesWith(second)
}

// TestRowsWaitForARepairThatBeganBeforeItsDatabaseWasRenamed: its record has the former name, and there may
// be no slot. The slot alone, before the repair, is missed as well.
func TestRowsWaitForARepairThatBeganBeforeItsDatabaseWasRenamed(t *testing.T) {
	t.Parallel()
	natsURL := natstest.Server(t).URL()
	r := newRetainedAt(t, pgtest.Server(t), natsURL, "repairmoved")
	second := beside(t, r.Installation, natsURL)
	named := "RETAIN_OTHER_SLOTS=" + second.Slot
	r.write(1, 20)
	r.Start()
	r.settle()
	harness.Exec(t, r.Conn, "SELECT pg_drop_replication_slot($1)", second.Slot)
	renamed := func(says ...string) {
		t.Helper()
		for _, former := range []string{"before", "postgres"} { // of which one is another one's name by now
			restore := rewritten(t, r.Installation, second, "database", former)
			for range 2 {
				r.MustContain("with the database renamed", r.MustRun("partition", "apply"), says...)
			}
			restore()
		}
		if got := r.left(); got != "day_1 day_2 day_3" {
			t.Fatalf("left: %s", got)
		}
	}
	r.Set("RETAIN_OTHER_SLOTS=")
	renamed("slot " + second.Slot + " does not exist, and by its record it reads this table")
	r.Set(named)
	second.Set("SINK_DURABLE_AFTER=1h")
	repair := exec.CommandContext(t.Context(), harness.Program(second.Env), "repair", "--accept",
		"slot_missing")
	repair.Env = second.Env
	harness.Must(t, repair.Start())
	harness.Eventually(t, "the repair has begun", func() error {
		kv, err := r.JS.KeyValue(t.Context(), checkpoint.Bucket(second.Stream))
		harness.Must(t, err)
		rec, err := kv.Get(t.Context(), second.Slot)
		if err == nil && !strings.Contains(string(rec.Value()), `"repairing"`) {
			err = errors.New("it has not")
		}
		return err
	})
	harness.Must(t, repair.Process.Kill())
	_ = repair.Wait()
	renamed("outflow repair --accept slot_missing of slot "+second.Slot,
		`whose record is of database "`, "has not finished")
	second.Set("SINK_DURABLE_AFTER=0s")
	if report, stderr, code := second.Repair("--accept", "slot_missing"); code != 0 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	r.goesWith(second)
}

// TestRepairReadsPartitionsThatAreDetached: while they wait for their end, a repair finds their rows.
func TestRepairReadsPartitionsThatAreDetached(t *testing.T) {
	t.Parallel()
	r := newRetained(t, pgtest.Server(t), "detached", "RETAIN_TABLE_KEEP=1h")
	r.Init()
	r.Start()
	r.write(1, 10)
	r.write(2, 10)
	harness.AwaitMessages(t, r.JS, r.Stream, 20)
	r.settle()
	r.MustRun("partition", "apply")
	// one whose fence was confirmed before apply came to its end is verified by the same apply
	if got := harness.Value[int](t, r.Conn, "SELECT count(*) FROM outflow_partitions WHERE "+
		"name LIKE '%day%' AND state IN ('sealed', 'verified')"); got != 3 ||
		r.left() != "day_1 day_2 day_3" {
		t.Fatalf("%d are sealed or verified; left: %s", got, r.left())
	}
	if n := harness.Value[int](t, r.Conn, "SELECT count(*) FROM pg_inherits WHERE inhparent = "+
		"'outbox'::regclass AND inhrelid::regclass::text LIKE 'day%'"); n != 0 {
		t.Fatalf("%d of them are attached", n)
	}
	r.MustStop(t)
	harness.AwaitSlotFree(t, r.Conn, r.Slot)
	harness.Must(t, r.JS.DeleteStream(t.Context(), r.Stream))
	harness.Insert(t, r.Conn, "now", 1, "{}")
	// nothing goes while the stream is gone, and none of it while it is repaired
	r.MustFailInGap("stream_missing", "partition", "apply")
	if report, stderr, code := r.Repair("--accept", "stream_missing"); code != 0 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	r.Start()
	harness.AwaitMessages(t, r.JS, r.Stream, 21)
	r.settle()
	r.MustStop(t)
}

// points are those at which outflow partition apply can be killed in this test, archivePoints those that come
// with an archive.
var (
	points = []string{"partition.made", "partition.attached", "partition.detaching", "partition.detached",
		"partition.sealing", "partition.sealed", "partition.durable", "partition.compared",
		"partition.verified", "partition.dropping", "partition.dropped"}
	archivePoints = []string{"archive.begin", "archive.written", "archive.verified", "archive.manifest",
		"partition.archived"}
)

// TestApplyKilledBetweenAnyTwoSteps: killed at each point, then run again, it ends where it would have ended.
// Nothing is lost: no partition goes before its rows are in the stream, and none stays half done.
func TestApplyKilledBetweenAnyTwoSteps(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	killed(t, newRetained(t, pgtest.Server(t), "killed"), points, "partition apply")
}

// TestArchiveAndApplyKilledBetweenAnyTwoSteps: with an archive, which is run before each apply.
func TestArchiveAndApplyKilledBetweenAnyTwoSteps(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	r := newRetained(t, pgtest.Server(t), "killedcold", "ARCHIVE_URL=file://"+t.TempDir())
	at := archivePoints
	if tier.Long() { // at the others it is killed without an archive
		at = append(slices.Clone(at), points...)
	}
	killed(t, r, at, "archive run --now", "partition apply")
	r.MustRun("archive", "verify")
}

func killed(t *testing.T, r *retained, points []string, commands ...string) {
	t.Helper()
	r.Init()
	r.Start()
	r.MustRun("partition", "apply") // makes a partition of now
	gone := func(when string) {
		t.Helper()
		harness.Eventually(t, when+" the partitions go", func() error {
			r.beat()
			for _, command := range commands {
				r.MustRun(strings.Fields(command)...)
			}
			if got := r.left(); got != "" {
				return fmt.Errorf("left: %s; %s", got, r.MustRun("partition", "plan"))
			}
			return nil
		})
	}
	gone("at first")
	rounds := harness.EnvInt(t, "OUTFLOW_TEST_ROUNDS", harness.Sized(46,
		1)) // 46 times 11 points are 506 kills, 16 with an archive
	kills := 0
	for range rounds {
		for i, point := range points {
			at := point + ":1"
			for day := 1; day <= 3; day++ { // as at the beginning
				harness.Exec(t, r.Conn, fmt.Sprintf("CREATE TABLE IF NOT EXISTS day_%d PARTITION OF "+
					"outbox FOR VALUES FROM ('2024-05-0%[1]d') TO ('2024-05-0%d')", day, day+1))
			}
			if newest := harness.Value[*string](t, r.Conn, "SELECT max(c.oid::regclass::text) FROM "+
				"pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent = 'outbox'::regclass "+
				"AND relname LIKE "+
				"'outbox%'"); newest != nil { // one is to be made again
				harness.Exec(t, r.Conn, "DROP TABLE "+*newest)
			}
			r.write(1+i%3, 5)
			harness.AwaitMessages(t, r.JS, r.Stream, r.counter)
			r.Set("FAILPOINT=" + at)
			try := 0
			harness.Eventually(t, "a command comes to "+point, func() error {
				command := commands[try%len(commands)]
				try++
				cmd := exec.CommandContext(t.Context(), harness.Program(r.Env), strings.Fields(command)...)
				cmd.Env = r.Env
				out, err := cmd.CombinedOutput()
				if err != nil && strings.Contains(err.Error(), "killed") {
					return nil
				}
				r.beat()
				return fmt.Errorf("%s: %v\n%s", command, err, out)
			})
			kills++
			r.Env = r.Env[:len(r.Env)-1]
			gone("after " + at)
			rest := harness.Value[[]string](t, r.Conn, "SELECT array_agg(DISTINCT state) FROM "+
				"outflow_partitions")
			slices.Sort(rest)
			if got := strings.Join(rest, " "); got != "ahead attached dropped" {
				t.Fatalf("after %s the states are %s", at, got)
			}
			if n := harness.Value[int](t, r.Conn, "SELECT count(*) FROM pg_inherits WHERE inhparent = "+
				"'outbox'::regclass"); n < 4 || n > 5 {
				t.Fatalf("after %s there are %d partitions", at, n)
			}
		}
	}
	t.Logf("%d kills", kills)
	harness.AwaitMessages(t, r.JS, r.Stream, r.counter)
	r.MustStop(t)
}

// TestInitMakesAPartitionedOutbox: with partitions of now and the days to come, its key ends in the column
// that they go by, it is published as a whole, and partition apply goes on where init ended.
func TestInitMakesAPartitionedOutbox(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), "ranges",
		"INIT_PARTITION_BY=written_at", "INIT_PARTITION_EVERY=12h", "SINK_DURABLE_AFTER=0s")
	f.MustContain("init --print", f.MustRun("init", "--print"), `PARTITION BY RANGE ("written_at")`,
		`PRIMARY KEY ("id", "written_at")`, "PARTITION OF \"public\".\"outbox\"")
	f.MustRun("init", "--sql-api")
	f.MustContain("init again", f.MustRun("init"), "there")
	f.Start()
	harness.Insert(t, f.Conn, "a", 1, "{}")
	harness.Exec(t, f.Conn, "SELECT outflow.enqueue('b', 'x', NULL, '{}')")
	harness.Exec(t, f.Conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload, written_at) VALUES "+
		"('c', 'x', 1, '{}', now() + interval '40 hours')")
	harness.AwaitMessages(t, f.JS, f.Stream, 3)
	f.AwaitReady()
	out := f.MustRun("partition", "apply")
	f.MustContain("partition apply", out, "its range ends at")
	n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM pg_inherits WHERE inhparent = "+
		"'outbox'::regclass")
	if n < 5 || n > 6 { // 6: the half of a day has just begun
		t.Errorf("%d partitions: %s", n, out)
	}
	f.MustStop(t)
	f.MustRun("uninstall")
}

// TestRowsOfTheTimeWithoutASlotStay: uninstall, services that go on to write, and init again. Retention has
// run for a while before, and does not take rows that were written in between for published, until a repair
// has published them.
func TestRowsOfTheTimeWithoutASlotStay(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Own(t, 0, "wal_level=logical"), natstest.Server(t).URL(),
		"between", "RETAIN_TABLE_METHOD=delete", "RETAIN_TABLE_KEEP=0s", "SINK_DURABLE_AFTER=0s")
	rows := func() int { return harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox") }
	gone := func(what string) {
		t.Helper()
		harness.Eventually(t, what, func() error {
			settle(t, f)
			f.MustRun("maintain", "--once")
			if n := rows(); n > 1 { // that of the newest settle may stay
				return fmt.Errorf("%d rows are left", n)
			}
			return nil
		})
	}
	f.Init()
	f.Start()
	gone("rows go")
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.Drain()
	f.MustRun("uninstall", "--yes")
	for n := range 5 {
		harness.Insert(t, f.Conn, "between", n+1, "{}")
	}
	f.Init()
	f.Start()
	between := func() int {
		return harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id = 'between'")
	}
	harness.Eventually(t, "the rows are named", func() error {
		settle(t, f)
		out, said, code := f.Run("maintain", "--once")
		if code != 4 || !strings.Contains(said, "partition_unpublished") {
			if n := between(); n != 5 {
				t.Fatalf("%d of 5 rows are left that are in no message", n)
			}
			return fmt.Errorf("exit code %d: %s%s", code, out, said)
		}
		return nil
	})
	f.MustFail(4, []string{"partition", "apply"}, "partition_unpublished", "5 rows of")
	if n := between(); n != 5 {
		t.Fatalf("%d of 5 rows are left that are in no message", n)
	}
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.MustFail(4, []string{"repair", "--check"}, "rows_missing")
	if report, stderr, code := f.Repair("--accept", "rows_missing"); code != 0 || report.Published != 5 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	f.Start()
	gone("then they go")
	f.MustStop(t)
}

// TestRowsThatARepairLeavesOutStay: the slot is lost, services go on to write, and a repair makes the slot
// anew and leaves some of these rows out. Retention, which has run for a while before, does not take them for
// published, until they are.
func TestRowsThatARepairLeavesOutStay(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Own(t, 0, "wal_level=logical"), natstest.Server(t).URL(),
		"leftout", "RETAIN_TABLE_METHOD=delete", "RETAIN_TABLE_KEEP=0s", "SINK_DURABLE_AFTER=0s")
	left := func() {
		t.Helper()
		n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id = 'left'")
		if n != 5 {
			t.Fatalf("%d of 5 rows are left that are in no message", n)
		}
	}
	maintain := func(want int, says string) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("exit code %d", want), func() error {
			settle(t, f)
			if out, said, code := f.Run("maintain", "--once"); code != want || !strings.Contains(said, says) {
				return fmt.Errorf("exit code %d: %s%s", code, out, said)
			}
			return nil
		})
	}
	f.Init()
	f.Start()
	maintain(0, "")
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.DropSlot(t)
	for n := range 5 {
		harness.Insert(t, f.Conn, "left", n+1, "{}")
		harness.Insert(t, f.Conn, "missed", n+1, "{}")
	}
	report, stderr, code := f.Repair("--accept", "slot_missing", "--where", "doc_id <> 'left'")
	if code != 0 || report.Published != 5 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	f.Start()
	settle(t, f)
	f.Run("maintain", "--once")
	left()
	maintain(4, "partition_unpublished")
	f.MustFail(4, []string{"partition", "apply"}, "partition_unpublished", "5 rows of")
	left()
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	if report, stderr, code := f.Repair("--accept", "rows_missing"); code != 0 || report.Published != 5 {
		t.Fatalf("exit code %d: %+v\n%s", code, report, stderr)
	}
	f.Start()
	maintain(0, "")
	f.MustStop(t)
}
