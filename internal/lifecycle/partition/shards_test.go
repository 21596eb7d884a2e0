package partition

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// shards makes a slot of a second shard, and returns what makes the world that of a shard, with a stream of
// its own.
func (w *world) shards() (as func(i int)) {
	w.T.Helper()
	slots, streams := []string{w.Slot, w.Slot + "_2"}, []Stream{w.out.Stream, w.out.Stream}
	streams[1].Created = streams[0].Created.Add(time.Second)
	w.slot(slots[1])
	return func(i int) {
		w.Slot, w.cfg.Slot, w.cfg.Own = slots[i], slots[i], fmt.Sprintf("counter %% 2 = %d", i)
		w.out.Stream, w.seen.Stream = streams[i], streams[i]
		w.out.Streams = map[string]time.Time{slots[1-i]: streams[1-i].Created}
		for _, slot := range slots {
			w.confirm(slot)
		}
	}
}

// TestEachShardComparesItsOwnRows: what one has found out is nothing to the other.
func TestEachShardComparesItsOwnRows(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = time.Hour
	shard := w.shards()
	as := func(i int) (Step, error) {
		shard(i)
		return w.remove()
	}
	w.insert(0, 20, true)
	for range 2 {
		for i := range 2 {
			_, err := as(i)
			must.Succeed(t, err)
		}
	}
	clear(w.published) // by the streams' limits
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
	for i := range 2 {
		if s, err := as(i); err != nil || s.Rows != 10 {
			t.Errorf("shard %d: %v, %d rows, %v", i, s, s.Rows, err)
		}
	}
}

// TestEachShardHasABaselineOfItsOwn: without an id column the fence of one's stream shows its rows, whatever
// the other's shows of others.
func TestEachShardHasABaselineOfItsOwn(t *testing.T) {
	t.Parallel()
	for _, archive := range []bool{true, false} {
		w := newPlain(t, 0)
		w.cfg.ID, w.cfg.Archive = "", archive
		w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
		as := w.shards()
		each := func(wantFirst, wantSecond string) {
			t.Helper()
			for i := range 2 {
				for range 3 {
					as(i)
					if _, err := w.remove(); err != nil {
						wantFault(t, err, outbox.Gap, codeUnpublished)
					}
				}
				want := []string{wantFirst, wantSecond}[i]
				if got := w.Text("SELECT count(*)::text FROM outbox WHERE " + w.cfg.Own); got != want {
					t.Errorf("archive %v: shard %d has %s rows left, want %s", archive, i, got, want)
				}
			}
		}
		w.insert(0, 20, true)
		each("0", "0")
		as(1)
		w.anew(func() { w.insert(0, 10, false) })
		each("0", "5")
		w.o.AcceptUnpublished = 5
		each("0", "0")
		w.o.AcceptUnpublished = 0
		w.insert(0, 10, true)
		each("0", "0")
	}
}

// TestASlotThatIsMadeAnewHasABaseline, also that of a shard that has none yet, or only the one that an older
// version made for all shards.
func TestASlotThatIsMadeAnewHasABaseline(t *testing.T) {
	t.Parallel()
	for _, shared := range []bool{false, true} {
		w := newPlain(t, 0)
		w.cfg.ID = ""
		as := w.shards()
		as(0)
		w.mustRemove()
		if s := w.survey(); len(s.Blocked) == 0 || strings.HasPrefix(s.Blocked[0].Name, baseline) {
			t.Errorf("rows wait by %v", s.Blocked)
		}
		if shared {
			w.Exec("UPDATE outflow_partitions SET name = $1 WHERE name LIKE 'baseline%'", baseline)
		}
		as(1)
		w.anew(func() { w.insert(0, 10, false) })
		for _, i := range []int{1, 0, 1} {
			for range 3 {
				as(i)
				_, err := w.remove()
				if err != nil {
					wantFault(t, err, outbox.Gap, codeUnpublished)
				}
			}
		}
		if got := w.Text("SELECT string_agg(counter % 2 || '', '') FROM outbox"); got != "11111" {
			t.Errorf("shared %v: of the 5 rows that the new slot has not read are left: %s", shared, got)
		}
	}
}

// TestNoShardDropsWhatAnotherHasRefused: its rows were never published, and the other one's were. Nor does a
// shard, or a second Outflow, wait before it compares its own until the other one compares again.
func TestNoShardDropsWhatAnotherHasRefused(t *testing.T) {
	t.Parallel()
	for _, whole := range []bool{false, true} {
		w := newWorld(t, pgtest.Server(t), 1)
		shard, slot := w.shards(), w.Slot
		as := func(i int) ([]Step, error) {
			shard(i)
			w.out.Others = []string{slot, slot + "_2"}
			if w.out.Apart = w.out.Others; whole {
				w.cfg.Own, w.out.Apart = "", nil
			}
			return w.try()
		}
		w.o.Turn = time.Minute
		w.insert(0, 6, false)
		if _, err := as(0); err != nil {
			t.Fatal(err)
		}
		w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '1 day'")
		for range 2 {
			_, err := as(0)
			wantFault(t, err, outbox.Gap, codeUnpublished)
		}
		for _, id := range strings.Split(w.Text("SELECT string_agg(id::text, ',') FROM outbox_0 "+
			"WHERE counter % 2 = 1"), ",") {
			w.published[id] = true // in the stream of the second one
		}
		if whole {
			w.published[w.Text("SELECT id::text FROM outbox_0 WHERE counter = 2")] = true
			w.published[w.Text("SELECT id::text FROM outbox_0 WHERE counter = 4")] = true
			w.published[w.Text("SELECT id::text FROM outbox_0 WHERE counter = 6")] = true
		}
		steps, err := as(1)
		must.Succeed(t, err)
		if w.exists(0) == whole {
			t.Fatalf("whole %v: %v", whole, steps)
		}
		if whole {
			continue
		}
		wantWhy(t, steps, 0, "3 rows of another shard were never published", slot)
		// also where its record can't be read, and one whose rows all came by way of the WAL
		shard(1)
		w.out.Readers = Readers{May: map[string]string{slot: "the record has version 99"}}
		w.Exec("UPDATE outflow_partitions SET made = true")
		steps = w.apply()
		wantWhy(t, steps, 0, "3 rows of another shard were never published", slot)
		w.Exec("UPDATE outflow_partitions SET made = false")
		w.o.AcceptUnpublished, w.o.Turn = 3, 0
		if steps, err = as(0); err != nil {
			t.Fatal(steps, err)
		}
		w.o.AcceptUnpublished = 0
		if steps, err := as(1); err != nil || w.exists(0) {
			t.Errorf("%v, %v", steps, err)
		}
	}
}

// TestWithoutAnIDAShardThatCantTellHoldsNoOther: the fence of a partition is of the stream of the shard that
// sealed it, and shows the others nothing.
func TestWithoutAnIDAShardThatCantTellHoldsNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.cfg.ID = ""
	as, slots := w.shards(), []string{w.Slot, w.Slot + "_2"}
	w.out.Others, w.out.Apart = slots, slots
	w.insert(0, 6, true)
	as(0)
	w.apply()
	as(1)
	_, err := w.try()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	as(0)
	if steps := w.apply(); w.exists(0) {
		t.Errorf("%v", steps)
	}
}

// TestTwoOutflowsDoNotCompareBecauseOfEachOther: what both have refused rests for each of them.
func TestTwoOutflowsDoNotCompareBecauseOfEachOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	shard, slots, passes := w.shards(), []string{w.Slot, w.Slot + "_2"}, [2]*Pass{{}, {}}
	w.o.Turn, w.out.Others = time.Minute, slots
	as := func(i int) {
		t.Helper()
		shard(i)
		w.cfg.Own, w.o.Pass = "", passes[i]
		_, err := w.try()
		wantFault(t, err, outbox.Gap, codeUnpublished)
	}
	w.insert(0, 3, false)
	w.apply()
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '1 day'")
	as(0)
	as(1)
	reads := len(w.reads)
	for i := range 4 {
		if as(i % 2); len(w.reads) > reads {
			t.Fatalf("the %d. run compares it again", i+1)
		}
	}
}

// TestAPartitionGoesWhenEachShardHasComparedIt, unless Outflow made it: only ids show then that its rows were
// published, and each shard has but those of its own stream. It need not wait for keep to compare them.
func TestAPartitionGoesWhenEachShardHasComparedIt(t *testing.T) {
	t.Parallel()
	for _, archive := range []bool{false, true} {
		w := newWorld(t, pgtest.Server(t), 2)
		w.cfg.Keep, w.cfg.Archive = time.Hour, archive
		w.out.Archive = Reach{Complete: 1 << 60, Whole: 1 << 60}
		shard, slots := w.shards(), []string{w.Slot, w.Slot + "_2"}
		streams, anew, unread := [2]map[string]bool{{}, {}}, time.Duration(0), false
		as := func(i int, refused bool) []Step {
			t.Helper()
			shard(i)
			other := slots[1-i : 2-i]
			w.published, w.out.Readers = streams[i], Readers{Others: other, Apart: other}
			if unread {
				w.out.Readers = Readers{May: map[string]string{other[0]: "the record has version 99"}}
			}
			w.out.Stream.Created = w.out.Stream.Created.Add(anew * time.Duration(i))
			w.out.Streams[other[0]] = w.out.Streams[other[0]].Add(anew * time.Duration(1-i))
			w.seen.Stream = w.out.Stream
			steps, err := w.try()
			if refused {
				wantFault(t, err, outbox.Gap, codeUnpublished)
			} else if err != nil {
				t.Fatalf("archive %v, shard %d: %v", archive, i, err)
			}
			return steps
		}
		publish := func(i int) {
			for _, id := range strings.Split(w.Text("SELECT string_agg(id::text, ',') FROM outbox_0 "+
				"WHERE counter % 2 = $1::text::int", fmt.Sprint(i)), ",") {
				streams[i][id] = true
			}
		}
		kept := func() { w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'") }
		waits := func(steps []Step, says ...string) {
			t.Helper()
			if wantWhy(t, steps, 0, says...); !w.exists(0) {
				t.Fatalf("archive %v: it is gone", archive)
			}
		}
		w.cfg.Slack = 1000000 * time.Hour
		as(0, false)
		w.Exec("UPDATE outflow_partitions SET made = true WHERE name = $1", quoted("public", old(1)))
		w.cfg.Slack = 0
		w.insert(0, 6, false)
		as(0, false) // seals both
		publish(0)
		waits(as(0, false), "not compared", slots[1])
		kept()
		unread = true
		waits(as(0, false), "not compared", slots[1], "the record has version 99")
		unread = false
		if w.exists(1) {
			t.Error("one whose rows all came by way of the WAL waits for the other shard")
		}
		reads := len(w.reads)
		if waits(as(0, false), "not compared"); len(w.reads) > reads {
			t.Error("its rows are compared again while it waits for the other shard")
		}
		as(1, true)
		waits(as(0, false), "3 rows of another shard were never published")
		w.Exec("UPDATE outflow_partitions SET sealed_at = clock_timestamp()")
		publish(1)
		waits(as(1, false), "a repair may need it")
		waits(as(0, false), "a repair may need it")
		streams[1], anew = map[string]bool{}, time.Minute
		waits(as(0, false), "not compared", slots[1])
		as(1, true)
		publish(1)
		waits(as(1, false), "a repair may need it")
		for _, sealed := range []string{"fence = '0/1', system_id = '1', oid = 1",
			"fence = pg_current_wal_insert_lsn()"} { // by an older version
			w.Exec("UPDATE outflow_partitions SET " + sealed)
			as(0, false)
			kept()
			waits(as(0, false), "not compared", slots[1])
			w.Exec("UPDATE outflow_partitions SET sealed_at = clock_timestamp()")
			waits(as(1, false), "a repair may need it")
		}
		kept()
		if as(0, false); w.exists(0) {
			t.Errorf("archive %v: it is still there", archive)
		}
	}
}

// TestAFenceShowsNothingOfAnotherOnesFormerStream: the stream of a shard, or of a second Outflow, was made
// anew after the fence was set. Its limits have removed its oldest messages, and the rows of a partition that
// Outflow made are older: they were in its former stream, and are in no message now. Nor does the fence show
// anything of an Outflow that was set up behind it.
func TestAFenceShowsNothingOfAnotherOnesFormerStream(t *testing.T) {
	t.Parallel()
	for _, whole := range []bool{false, true} {
		for _, what := range []string{"a new stream", "set up later", "uninstalled for a while", "upgraded",
			"of an older version", "anew since the older version", "the same"} {
			for _, first := range []int{0, 1} {
				w := newWorld(t, pgtest.Server(t), 1)
				shard, slots, anew := w.shards(), []string{w.Slot, w.Slot + "_2"}, time.Duration(0)
				var own [2]map[string]bool
				as := func(i int) error {
					shard(i)
					w.published, w.seen.Removed, w.seen.Oldest = own[i], i == 1, time.Now()
					if w.out.Readers = (Readers{Others: slots[1-i : 2-i], Apart: slots}); whole {
						w.cfg.Own, w.out.Apart = "", nil
					}
					if i == 1 {
						w.out.Stream.Created = w.out.Stream.Created.Add(anew)
						w.seen.Stream = w.out.Stream
					} else {
						w.out.Streams[slots[1]] = w.out.Streams[slots[1]].Add(anew)
					}
					_, err := w.try()
					return err
				}
				w.cfg.Slack = 1000000 * time.Hour
				must.Succeed(t, as(0))
				w.Exec("UPDATE outflow_partitions SET made = true")
				w.cfg.Slack = 0
				w.published = map[string]bool{}
				w.insert(0, 6, true)
				own[0], w.cfg.Keep = w.published, time.Hour
				must.Succeed(t, as(0))
				w.want(0, Sealed)
				switch what {
				case "a new stream":
					anew = time.Minute
				case "set up later":
					w.Exec("UPDATE outflow_partitions SET streams = streams - $1::text", slots[1])
				case "uninstalled for a while":
					w.Exec("SELECT pg_drop_replication_slot($1)", slots[1])
					w.out.Readers, w.out.Streams = Readers{}, nil
					w.confirm(slots[0])
					w.apply()
					w.slot(slots[1])
					must.Succeed(t, w.manager().Forget(outboxdb.Within(t)))
				case "upgraded":
					w.Exec("UPDATE outflow_partitions SET fence = '0/1', system_id = '1', oid = 1")
					must.Succeed(t, as(0))
					anew = time.Minute
				case "of an older version":
					w.Exec("ALTER TABLE outflow_partitions DROP COLUMN streams")
				case "anew since the older version":
					must.Succeed(t, as(0))
					w.want(0, Verified)
					w.Exec("ALTER TABLE outflow_partitions DROP COLUMN streams")
					must.Succeed(t, as(0))
					anew = time.Minute
				}
				if whole && first == 0 {
					continue // what one has promised the other one is retain.table.keep
				}
				name := fmt.Sprintf("whole %v, %s, %d is first", whole, what, first)
				stays := what != "the same" && what != "of an older version"
				w.cfg.Keep = 0
				for i := range 4 {
					if whole {
						i = 0
					}
					if err := as((first + i) % 2); err != nil && !stays {
						t.Errorf("%s: %v", name, err)
					}
				}
				if w.exists(0) != stays {
					t.Errorf("%s: it is there: %v, %s", name, !stays, w.state(0))
				}
			}
		}
	}
}

// TestTwoOutflowsAreVerifiedEachForItself: neither compares again because the other one has, and each does at
// once when its own stream is a new one.
func TestTwoOutflowsAreVerifiedEachForItself(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	shard, slots, anew := w.shards(), []string{w.Slot, w.Slot + "_2"}, time.Duration(0)
	w.cfg.Keep = time.Hour
	w.insert(0, 3, true)
	as := func(i int) {
		t.Helper()
		shard(i)
		w.cfg.Own, w.out.Others = "", slots[1-i:2-i]
		w.out.Stream.Created = w.out.Stream.Created.Add(anew * time.Duration(i))
		w.seen.Stream = w.out.Stream
		w.out.Streams[slots[1-i]] = w.out.Streams[slots[1-i]].Add(anew * time.Duration(1-i))
		w.apply()
	}
	for n, want := range []int{0, 1, 2, 2, 2, 3, 3, 3} {
		if n == 4 {
			anew = time.Minute
		}
		as([]int{0, 0, 1, 0, 0, 1, 0, 1}[n])
		if len(w.reads) != want {
			t.Errorf("after run %d the streams were read %d times, want %d", n, len(w.reads), want)
		}
	}
	w.cfg.Keep = 0
	clear(w.published)
	if as(1); w.exists(0) {
		t.Error("it is still there")
	}
}

// TestWhatWasVerifiedStaysSoWithoutTheOtherOutflow, although that one has noted last what it has found, and
// the stream's limits have removed the messages since. It is compared with a new stream, once.
func TestWhatWasVerifiedStaysSoWithoutTheOtherOutflow(t *testing.T) {
	t.Parallel()
	for _, refused := range []bool{false, true} { // by the other one
		w := newWorld(t, pgtest.Server(t), 1)
		shard, slots := w.shards(), []string{w.Slot, w.Slot + "_2"}
		w.cfg.Keep = time.Hour
		w.insert(0, 3, true)
		all := w.published
		as := func(i int) {
			shard(i)
			w.cfg.Own, w.out.Others = "", slots[1-i:2-i]
		}
		for _, i := range []int{0, 0, 1} {
			if as(i); i == 1 && refused {
				w.published = nil
			}
			_, err := w.try()
			if w.published == nil {
				wantFault(t, err, outbox.Gap, codeUnpublished)
			} else {
				must.Succeed(t, err)
			}
		}
		as(0)
		w.Exec("SELECT pg_drop_replication_slot($1)", slots[1])
		w.out.Others, w.out.Streams = nil, nil
		w.published = nil
		w.apply()
		w.published = all
		w.out.Stream.Created = w.out.Stream.Created.Add(time.Minute)
		w.seen.Stream = w.out.Stream
		reads := len(w.reads)
		for range 2 {
			w.apply()
		}
		if len(w.reads) != reads+1 {
			t.Errorf("refused %v: the new stream was read %d times", refused, len(w.reads)-reads)
		}
		w.cfg.Keep, w.published = 0, nil
		if w.apply(); w.exists(0) {
			t.Errorf("refused %v: it is still there", refused)
		}
	}
}

// TestWhatWasVerifiedAloneStaysSoBesideAnotherOutflow, which has noted last what it has found.
func TestWhatWasVerifiedAloneStaysSoBesideAnotherOutflow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	shard, slots := w.shards(), []string{w.Slot, w.Slot + "_2"}
	w.cfg.Keep = time.Hour
	w.insert(0, 3, true)
	shard(0)
	w.Exec("SELECT pg_drop_replication_slot($1)", slots[1])
	w.cfg.Own, w.out.Others, w.out.Streams = "", nil, nil
	for range 3 {
		w.confirm(w.Slot)
		w.apply()
	}
	w.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slots[1])
	for _, i := range []int{1, 0} {
		shard(i)
		w.cfg.Own, w.out.Others = "", slots[1-i:2-i]
		_, err := w.try()
		must.Succeed(t, err)
		w.want(0, Verified)
		w.published = nil // the stream's limits take all
	}
}
