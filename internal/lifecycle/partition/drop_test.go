package partition

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// TestAPartitionGoesWhenEverySlotHasConfirmedIt: the way of a partition from its first look to its end, with
// what it waits for at each point, and each step only once.
func TestAPartitionGoesWhenEverySlotHasConfirmedIt(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		w := newWorld(t, srv, 2)
		other := w.Slot + "_debezium"
		w.slot(other)
		w.insert(0, 30, true)
		w.insert(1, 10, true)
		if got := of(w.plan(), 0); got != "wait" { // nothing is known of inserts yet
			t.Errorf("planned at first: %s", got)
		}
		w.confirm(w.Slot)
		steps := w.apply()
		w.want(0, Sealed)
		w.want(1, Sealed)
		wantWhy(t, steps, 0, other, "nobody reads it")
		if strings.Contains(why(steps, 0), w.Slot+" "+
			"has") && !strings.Contains(why(steps, 0), "slot "+w.Slot+" ") {
			t.Error(why(steps, 0))
		}
		w.confirm(w.Slot)
		wantWhy(t, w.apply(), 0, "slot "+other+" has confirmed")
		if !w.exists(0) {
			t.Fatal("it is gone, and a slot has not confirmed it")
		}
		w.confirm(other)
		w.cfg.Keep = time.Hour
		steps = w.apply()
		wantWhy(t, steps, 0, "retain.table.keep")
		w.want(0, Verified)
		w.want(1, Verified)
		if len(w.reads) != 1 {
			t.Errorf("the stream was read %d times", len(w.reads))
		}
		w.cfg.Keep = 0
		if got := of(w.plan(), 0); got != "drop" {
			t.Errorf("planned at the end: %s", got)
		}
		if steps = w.apply(); of(steps, 0) != "drop" || of(steps, 1) != "drop" {
			t.Errorf("at the end: %v", steps)
		}
		if w.exists(0) || w.exists(1) {
			t.Error("it is still there")
		}
		w.want(0, Dropped)
		if got := w.Text("SELECT concat(rows, ' ', state) FROM outflow_partitions WHERE name = $1",
			quoted("public", old(0))); got != "30 dropped" {
			t.Errorf("what stays is %q", got)
		}
	})
}

func TestASlotThatDoesNotCountIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.slot(w.Slot + "_other")
	w.insert(0, 3, true)
	w.cfg.OtherSlots = []string{w.Slot + "_other"}
	w.apply()
	w.confirm(w.Slot)
	w.apply()
	if w.exists(0) {
		t.Errorf("it is %s", w.state(0))
	}
}

// TestAnOutflowWhoseRecordCannotBeReadIsWaitedFor: it may read the table. Nothing is known of one without a
// slot.
func TestAnOutflowWhoseRecordCannotBeReadIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	other := w.Slot + "_other"
	w.slot(other)
	w.insert(0, 3, true)
	w.out.May = map[string]string{other: "the record has version 99", "gone": "it is corrupt"}
	w.cfg.OtherSlots = []string{other}
	w.apply()
	w.confirm(w.Slot)
	wantWhy(t, w.apply(), 0, "slot "+other+" has confirmed", "although retain.other_slots names it",
		"the record has version 99")
	if !w.exists(0) {
		t.Fatal("it is gone, and an Outflow may not have read it")
	}
	w.confirm(other)
	w.apply()
	if w.exists(0) {
		t.Errorf("it is %s", w.state(0))
	}
}

// TestAnOutflowThatReadsTheTableIsWaitedFor: naming its slot among those that do not count changes nothing.
// Once the slot is gone it does: then the record alone is left.
func TestAnOutflowThatReadsTheTableIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	shard := w.Slot + "_shard"
	w.slot(shard)
	w.insert(0, 3, true)
	w.out.Others = []string{shard}
	w.cfg.OtherSlots = []string{w.Slot, shard}
	wantWhy(t, w.apply(), 0, "slot "+w.Slot+" has confirmed", "slot "+shard+" has confirmed",
		"although retain.other_slots names it")
	w.confirm(w.Slot)
	wantWhy(t, w.apply(), 0, "slot "+shard+" has confirmed")
	if !w.exists(0) {
		t.Fatal("it is gone, and an Outflow has not read it")
	}
	w.Exec("SELECT pg_drop_replication_slot($1)", shard)
	w.apply()
	if w.exists(0) {
		t.Errorf("it is %s", w.state(0))
	}
}

func TestWithoutOutflowsSlotNothingGoes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 3, true)
	w.apply()
	w.confirm(w.Slot)
	w.cfg.Slot = "another"
	wantWhy(t, w.apply(), 0, "slot another does not exist")
	if !w.exists(0) {
		t.Fatal("it is gone")
	}
}

// TestWhatIsWrittenToADetachedPartitionIsFound: a row that came after the fence, and even after the
// verification, keeps the partition from being dropped: also where the stream does not reach back so far, and
// without ids.
func TestWhatIsWrittenToADetachedPartitionIsFound(t *testing.T) {
	t.Parallel()
	type kind struct {
		after State
		made  bool // by Outflow, and the stream has lost its front
		noID  bool
	}
	for _, k := range []kind{{after: Sealed}, {after: Verified}, {Sealed, true, false},
		{Verified, true, false}, {Sealed, false, true}, {Verified, false, true}} {
		after := k.after
		t.Run(fmt.Sprintf("%+v", k), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, pgtest.Server(t), 1)
			w.insert(0, 5, true)
			if k.noID {
				w.cfg.ID = ""
			}
			w.apply()
			if k.made {
				w.Exec("UPDATE outflow_partitions SET made = true WHERE name = $1", quoted("public", old(0)))
				w.seen.Removed, w.seen.Oldest = true, time.Now()
			}
			w.cfg.Keep = time.Hour
			if after == Verified {
				w.confirm(w.Slot)
				w.apply()
			}
			w.want(0, after)
			w.Exec(`INSERT INTO outbox_0 (doc_id, actor_id, counter, payload, created_at) VALUES
				('d', 'a', 9, '{}', '2024-05-01 02:00Z')`)
			w.cfg.Keep = 0
			w.confirm(w.Slot)
			wantWhy(t, w.apply(), 0, map[State]string{Sealed: "it was written to after it was sealed",
				Verified: "its rows are not those that were verified"}[after])
			w.apply()
			w.confirm(w.Slot)
			_, err := w.try()
			wantFault(t, err, outbox.Gap, codeUnpublished)
			if !w.exists(0) {
				t.Error("it is gone")
			}
		})
	}
}

// TestARecordThatSaysRepairingKeepsEverything.
func TestARecordThatSaysRepairingKeepsEverything(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.confirm(w.Slot)
	w.cfg.Keep = time.Hour
	w.apply()
	w.cfg.Keep, w.out.Repairing = 0, "outflow repair --accept slot_missing"
	wantWhy(t, w.apply(), 0, "outflow repair --accept slot_missing has not finished")
	w.want(0, Verified)
	// somebody made the stream anew: it is compared again
	w.out.Repairing, w.out.Stream.Created = "", w.out.Stream.Created.Add(time.Minute)
	w.seen.Stream = w.out.Stream
	clear(w.published)
	_, err := w.try()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	if !w.exists(0) {
		t.Error("it is gone")
	}
}

// TestTheArchiveIsWaitedFor: with one, nothing goes that it does not have, and the time for a repair is its
// matter.
func TestTheArchiveIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 5, true)
	w.cfg.Archive, w.cfg.Keep = true, time.Hour
	w.apply()
	w.confirm(w.Slot)
	fence := w.fence(0)
	w.out.Archive = Reach{Last: 7, Complete: fence - 1, Whole: fence - 1}
	says := fmt.Sprintf("the archive ends at sequence 7, complete below %v, not %v", fence-1, fence)
	wantWhy(t, w.apply(), 0, says)
	w.want(0, Durable)
	wantWhy(t, w.plan(), 0, says)
	if len(w.reads) != 0 {
		t.Error("it is read before it has got so far")
	}
	w.out.Archive.Err = &outbox.Fault{Class: outbox.Gap, Code: "archive_damaged"}
	wantWhy(t, w.plan(), 0, "the archive does not count")
	_, err := w.try()
	wantFault(t, err, outbox.Gap, "archive_damaged")
	if n := w.Text("SELECT count(*)::text FROM pg_inherits"); n == "0" {
		t.Error("no partition was made because of it")
	}
	w.out.Archive = Reach{Last: 9, Complete: fence, Whole: fence}
	w.o.Hit = func(point string) {
		if point == "partition.verified" { // an object is lost, and then the process is killed
			w.out.Archive.Err = &outbox.Fault{Class: outbox.Gap, Code: "archive_damaged"}
		}
	}
	_, err = w.try()
	wantFault(t, err, outbox.Gap, "archive_damaged")
	w.want(0, Verified)
	w.o.Hit, w.out.Archive.Err = nil, nil
	reads := len(w.reads)
	clear(w.published) // and the next run reads it again
	_, err = w.try()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	if len(w.reads) != reads+3 || !w.exists(0) {
		t.Errorf("read %d times more", len(w.reads)-reads)
	}
	for _, id := range strings.Fields(w.Text("SELECT string_agg(id::text, ' ') FROM outbox_0")) {
		w.published[id] = true
	}
	w.apply()
	if w.exists(0) {
		t.Errorf("it is %s", w.state(0))
	}
}

// TestARunSaysOnceWhatItDoes: with an archive each run looks again whether that has a partition, and whether
// that has its rows. What an earlier one had found is no news.
func TestARunSaysOnceWhatItDoes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 5, true)
	w.cfg.Archive = true
	w.apply()
	w.confirm(w.Slot)
	w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
	run := func(steps []Step) (done string) {
		for _, s := range steps {
			if s.Done() && s.Partition == quoted("public", old(0)) {
				done += string(s.Action) + " "
			}
		}
		return done
	}
	all := w.published
	w.published = nil
	for _, want := range []string{"confirm archive ", ""} {
		steps, err := w.try()
		wantFault(t, err, outbox.Gap, codeUnpublished)
		if got := run(steps); got != want {
			t.Errorf("its rows are in no message: it says %q, not %q", got, want)
		}
	}
	w.published, w.out.Repairing = all, "outflow repair --accept slot_missing"
	if got := run(w.apply()); got != "" {
		t.Errorf("a repair is under way: it says %q", got)
	}
	w.out.Repairing, w.cfg.Keep = "", time.Hour // for who else reads the table
	w.slot(w.Slot + "_other")
	w.out.Others = []string{w.Slot + "_other"}
	w.confirm(w.Slot + "_other")
	for _, want := range []string{"verify ", ""} {
		if got := run(w.apply()); got != want {
			t.Errorf("it is kept: it says %q, not %q", got, want)
		}
	}
	w.cfg.Keep = 0
	if got := run(w.apply()); got != "drop " || w.exists(0) {
		t.Errorf("then it says %q", got)
	}
}

// TestAPlanSaysThatRowsWereNeverPublished: as apply found out, until that finds something else, or somebody
// has accepted them.
func TestAPlanSaysThatRowsWereNeverPublished(t *testing.T) {
	t.Parallel()
	for _, archive := range []bool{true, false} {
		w := newWorld(t, pgtest.Server(t), 1)
		w.insert(0, 5, true)
		w.insert(0, 2, false)
		w.cfg.Archive, w.out.Archive = archive, Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
		w.apply()
		w.confirm(w.Slot)
		if got := of(w.plan(), 0); got != "confirm" {
			t.Errorf("archive %v: nothing was compared, and it plans %s", archive, got)
		}
		_, err := w.try()
		wantFault(t, err, outbox.Gap, codeUnpublished)
		planned := w.plan()
		wantWhy(t, planned, 0, "2 of its 7 rows were never published", codeUnpublished)
		if got := of(planned, 0); got != string(Refuse) {
			t.Errorf("archive %v: it plans %s", archive, got)
		}
		w.o.AcceptUnpublished = 2
		w.out.Repairing = "outflow repair --accept slot_missing" // so that it stays
		w.apply()
		w.o.AcceptUnpublished = 0
		if got := of(w.plan(), 0); got == string(Refuse) {
			t.Errorf("archive %v: they are accepted, and it plans %s", archive, got)
		}
	}
}

// fence is that of a partition.
func (w *world) fence(i int) outbox.LSN {
	w.T.Helper()
	lsn, err := outbox.ParseLSN(w.Text("SELECT fence::text FROM outflow_partitions WHERE name = $1",
		quoted("public", old(i))))
	must.Succeed(w.T, err)
	return lsn
}

// TestPgPartmanIsLeftItsWork: Outflow neither makes nor detaches, and takes up what it moved away.
func TestPgPartmanIsLeftItsWork(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.insert(0, 5, true)
	w.Exec("CREATE SCHEMA partman")
	w.Exec("CREATE SCHEMA old")
	w.Exec("CREATE TABLE partman.part_config (parent_table text, retention text, retention_keep_table " +
		"boolean, retention_schema text)")
	w.Exec("INSERT INTO partman.part_config VALUES ('public.outbox', '30 days', false, NULL)")
	_, err := w.try()
	wantFault(t, err, outbox.Fatal, codePartman)
	w.Exec("UPDATE partman.part_config SET retention_keep_table = true, retention_schema = 'old'")
	steps := w.apply()
	wantWhy(t, steps, 0, "pg_partman detaches it")
	for _, s := range steps {
		if s.Action.does() {
			t.Errorf("it did %v", s)
		}
	}
	w.Exec("ALTER TABLE outbox DETACH PARTITION outbox_0")
	w.Exec("ALTER TABLE outbox_0 SET SCHEMA old")
	w.apply()
	if got := w.Text("SELECT concat(state, ' ', name) FROM outflow_partitions WHERE oid = " +
		"'old.outbox_0'::regclass"); got !=
		`sealed "old"."outbox_0"` {
		t.Errorf("it is %s", got)
	}
	w.confirm(w.Slot)
	w.apply()
	if w.Text("SELECT (to_regclass('old.outbox_0') IS NULL)::text") != "true" || !w.exists(1) {
		t.Errorf("it is still there")
	}
}

// TestRowsOfOtherShardsAreNotMissed: they are in other streams. Their archives are others as well, so an
// archive of this one does not replace the time that they are kept.
func TestRowsOfOtherShardsAreNotMissed(t *testing.T) {
	t.Parallel()
	for _, archived := range []bool{false, true} {
		t.Run(fmt.Sprint(archived), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, pgtest.Server(t), 1)
			w.cfg.Own, w.cfg.Archive, w.cfg.Keep = "doc_id = 'd'", archived, time.Hour
			w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
			w.insert(0, 3, true)
			w.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES
				('other', 'a', 9, '{}', '2024-05-01 02:00Z')`)
			w.apply()
			w.confirm(w.Slot)
			wantWhy(t, w.apply(), 0, "a repair may need it until")
			w.cfg.Keep = 0
			w.apply()
			if w.exists(0) {
				t.Error("it is still there")
			}
		})
	}
}

// TestWhatWaitsForKeepIsNotComparedByEachRun, but first, and when it may go: with an archive it waits as well
// if it has rows of other shards.
func TestWhatWaitsForKeepIsNotComparedByEachRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.cfg.Own, w.cfg.Archive, w.cfg.Keep = "doc_id = 'd'", true, time.Hour
	w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
	w.insert(0, 3, true)
	w.insert(1, 3, true)
	w.apply()
	w.confirm(w.Slot)
	for i, want := range []int{1, 0, 1} {
		if i == 2 {
			w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h' " +
				"WHERE name LIKE '%outbox\\_0\"'")
		}
		w.reads = nil
		steps := w.apply()
		if len(w.reads) != want || w.exists(0) != (i < 2) {
			t.Errorf("run %d read %v: %v", i, w.reads, steps)
		}
		wantWhy(t, steps, 1, "a repair may need it until")
	}
	if w.reads[0].Until.After(day.AddDate(0, 0, 1).Add(margin)) {
		t.Errorf("for one that waits, too, it read %v", w.reads)
	}
}

// TestWhatCantBeDroppedIsNotComparedByEachRun: something else needs it, or somebody holds it. With an archive
// it was read for it each time.
func TestWhatCantBeDroppedIsNotComparedByEachRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.cfg.Archive = true
	w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
	w.insert(0, 3, true)
	w.Exec("CREATE VIEW needs AS SELECT id FROM outbox_0")
	w.apply()
	w.confirm(w.Slot)
	for i := range 3 {
		_, err := w.try()
		f := wantFault(t, err, outbox.Fatal, codeNeeded)
		if len(w.reads) != 1 || !strings.Contains(f.Message, "needs depends on table") {
			t.Errorf("run %d read %v: %v", i, w.reads, f)
		}
	}
	w.Exec("DROP VIEW needs")
	within := outboxdb.Within(t)
	reader, err := w.other().Begin(within)
	must.Succeed(t, err)
	_, err = reader.Exec(within, "SELECT FROM outbox_0")
	must.Succeed(t, err)
	if wantWhy(t, w.apply(), 0, "open transactions hold it"); len(w.reads) != 1 {
		t.Errorf("while it is held it read %v", w.reads)
	}
	must.Succeed(t, reader.Rollback(within))
	if steps := w.apply(); w.exists(0) || len(w.reads) != 2 {
		t.Errorf("it read %v: %v", w.reads, steps)
	}
}

// TestPartitionsWithRowsThatNoSlotHasReadStay: Outflow has made them, and the stream's oldest messages have
// gone. What the former slot has confirmed goes, whatever the new one has read.
func TestPartitionsWithRowsThatNoSlotHasReadStay(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"id", ""} {
		w := newWorld(t, pgtest.Server(t), 3)
		w.cfg.ID = id
		for i := range 3 {
			w.insert(i, 3, true)
		}
		w.cfg.Age = time.Since(day.AddDate(0, 0, 1)) - time.Hour // the first one
		w.apply()
		w.Exec("UPDATE outflow_partitions SET made = true")
		w.cfg.Keep = time.Hour
		w.confirm(w.Slot)
		w.apply()
		w.want(0, Verified)
		w.cfg.Age -= 24 * time.Hour // the second one
		w.apply()
		w.want(1, Sealed)
		w.want(2, Attached)
		w.anew(func() { w.insert(2, 7, false) })
		w.seen.Oldest, w.seen.Removed = time.Now(), true
		clear(w.published)
		w.cfg.Age, w.cfg.Keep = 0, 0
		for range 3 {
			w.confirm(w.Slot)
			_, err := w.try()
			if w.exists(0) || err != nil {
				wantFault(t, err, outbox.Gap, codeUnpublished)
			}
		}
		if w.exists(0) || !w.exists(1) || !w.exists(2) {
			t.Errorf("id %q: there are %v, %v, %v", id, w.exists(0), w.exists(1), w.exists(2))
		}
		for _, rows := range []int64{3, 10} {
			w.o.AcceptUnpublished = rows
			_, _ = w.try()
		}
		if w.exists(1) || w.exists(2) {
			t.Errorf("id %q: accepted, and there are %v, %v", id, w.exists(1), w.exists(2))
		}
	}
}

// TestOnePartitionThatCantGoKeepsNoOther: something needs it, or no partition can be made.
func TestOnePartitionThatCantGoKeepsNoOther(t *testing.T) {
	t.Parallel()
	const ref = "CREATE TABLE ref (id uuid, at timestamptz, FOREIGN KEY (id, at) REFERENCES outbox (id, " +
		"created_at))"
	for name, c := range map[string]struct {
		sql  []string
		code string
		says string
	}{
		"a view": {[]string{"CREATE VIEW v AS SELECT id FROM outbox_0"}, codeNeeded, "depends on table"},
		"a foreign key": {[]string{ref, "INSERT INTO ref SELECT id, created_at FROM outbox WHERE " +
			"created_at < '2024-05-02' LIMIT 1"}, codeNeeded, "still referenced"},
		"rows of now in a default partition": {[]string{"CREATE TABLE rest PARTITION OF outbox DEFAULT",
			"INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', 1, '{}')"}, "", ""},
		"one that is partitioned": {[]string{"CREATE TABLE parted PARTITION OF outbox FOR VALUES FROM " +
			"('2024-06-01') TO ('2200-01-01') PARTITION BY HASH (id)"}, "", ""},
		"one of another table": {[]string{"CREATE TABLE elsewhere (LIKE outbox INCLUDING ALL) PARTITION BY " +
			"RANGE (created_at)"}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, pgtest.Server(t), 2)
			w.insert(0, 5, true)
			w.insert(1, 5, true)
			for _, sql := range c.sql {
				w.Exec(sql)
			}
			_, _ = w.try()
			if name == "one of another table" {
				w.Exec("ALTER TABLE elsewhere ATTACH PARTITION outbox_0 FOR VALUES FROM ('2024-05-01') TO " +
					"('2024-05-02')")
			}
			for range 3 {
				w.confirm(w.Slot)
				steps, err := w.try()
				switch {
				case c.code != "":
					if f := wantFault(t, err, outbox.Fatal, c.code); !strings.Contains(f.Error(), c.says) {
						t.Error(f)
					}
				case err != nil:
					t.Error(err)
				case name == "one of another table":
					wantWhy(t, steps, 0, "it is a partition of another table")
				}
			}
			if w.exists(1) {
				t.Errorf("the other one is %s", w.state(1))
			}
			kept := !strings.HasPrefix(name, "rows of") && name != "one that is partitioned"
			if w.exists(0) != kept {
				t.Errorf("the first one exists: %v", !kept)
			}
		})
	}
}

// TestAPartitionThatWasSealedByAClockThatWasAheadGoes when one that was sealed after it is old enough.
func TestAPartitionThatWasSealedByAClockThatWasAheadGoes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.cfg.Keep = 3 * time.Hour
	w.cfg.Age = time.Since(day.AddDate(0, 0, 1)) - time.Hour // the first one
	w.insert(0, 3, true)
	w.insert(1, 3, true)
	w.apply()
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at + interval '1 year'")
	w.confirm(w.Slot)
	wantWhy(t, w.apply(), 0, "a repair may need it until "+time.Now().UTC().AddDate(1, 0, 0).Format("2006-"))
	w.cfg.Age = 0
	w.apply()
	w.confirm(w.Slot)
	for range 2 {
		if w.apply(); !w.exists(0) {
			t.Fatal("it went when the other one had just been sealed")
		}
		w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h' WHERE sealed_at < " +
			"now() + interval '1 h'")
	}
	if steps := w.apply(); w.exists(0) || w.exists(1) {
		t.Errorf("%v", steps)
	}
}
