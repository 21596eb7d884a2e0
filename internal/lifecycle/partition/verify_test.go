package partition

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// TestRowsThatWereNeverPublishedStay: they are counted and named, however old, and only their exact number
// lets the partition go.
func TestRowsThatWereNeverPublishedStay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.insert(0, 20, true)
	w.insert(1, 20, true)
	w.Exec("CREATE TABLE brought (LIKE outbox INCLUDING ALL)")
	w.Exec(`INSERT INTO brought (doc_id, actor_id, counter, payload, created_at) SELECT 'd', 'a', n, '{}',
		'2024-04-30 12:00Z' FROM generate_series(1, 13) n`)
	w.Exec("ALTER TABLE outbox ATTACH PARTITION brought FOR VALUES FROM ('2024-04-30') TO ('2024-05-01')")
	w.apply()
	w.confirm(w.Slot)
	_, err := w.try()
	f := wantFault(t, err, outbox.Gap, codeUnpublished)
	named := 0
	for _, id := range strings.Fields(w.Text("SELECT string_agg(id::text, ' ') FROM brought")) {
		if strings.Contains(f.Message, id) {
			named++
		}
	}
	if !strings.Contains(f.Message, "13 rows of partition \"public\".\"brought\"") || named != 10 ||
		!strings.Contains(f.Hint, "--accept-unpublished 13") {
		t.Errorf("%d are named: %v", named, f)
	}
	if w.exists(0) || w.exists(1) {
		t.Error("the others did not go")
	}
	if len(w.reads) != 3 || w.reads[0].Until.IsZero() || w.reads[1].Since.IsZero() ||
		w.reads[2] != (Period{}) {
		t.Errorf("before rows are said to be missing the whole stream is read: %v", w.reads)
	}
	w.o.AcceptUnpublished = 12
	_, err = w.try()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	w.o.AcceptUnpublished = 13
	if !slices.ContainsFunc(w.apply(), func(s Step) bool {
		return s.Action == Drop && strings.Contains(s.Why, "13 of its 13 rows were never published")
	}) {
		t.Error("it does not say what it drops")
	}
	if w.Text("SELECT (to_regclass('brought') IS NULL)::text") != "true" {
		t.Error("it did not go")
	}
}

// TestRowsThatWerePublishedLateAreFound behind the time in which they were written; no accepting of missing
// rows takes them for those before everything was read.
func TestRowsThatWerePublishedLateAreFound(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		stored time.Time
		reads  int
	}{
		{day.Add(25 * time.Hour), 1}, // within an hour of the partition's end
		{day.AddDate(0, 1, 0), 2},
		{day.AddDate(0, -1, 0), 3}, // by a clock that was wrong
	} {
		t.Run(c.stored.String(), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, pgtest.Server(t), 1)
			w.insert(0, 20, true)
			w.stored, w.o.AcceptUnpublished = c.stored, 20
			w.apply()
			w.confirm(w.Slot)
			steps := w.apply()
			if len(w.reads) != c.reads || w.exists(0) {
				t.Errorf("read %v", w.reads)
			}
			for _, s := range steps {
				if len(s.Unpublished) > 0 {
					t.Errorf("%v", s)
				}
			}
		})
	}
}

// TestRowsOlderThanTheStreamAreMissedWhereNothingShowsThatTheyWerePublished: retention has removed the
// messages of a partition that Outflow made, and of one that it did not.
func TestRowsOlderThanTheStreamAreMissedWhereNothingShowsThatTheyWerePublished(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 2, false)
	w.cfg.Every, w.cfg.Slack = time.Second, 1000000*time.Hour
	w.apply() // makes some of a second each
	made := w.Text("SELECT name FROM outflow_partitions WHERE made ORDER BY lower LIMIT 1")
	w.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) SELECT 'd', 'a', 1, '{}', lower
		FROM outflow_partitions WHERE name = $1`, made)
	w.cfg.Slack = 0
	outboxdb.Eventually(t, "the made one is over", func() bool {
		return w.Text("SELECT (upper < now())::text FROM outflow_partitions WHERE name = $1", made) == "true"
	})
	w.seen.Oldest, w.seen.Removed = time.Now().Add(time.Hour), true
	w.apply()
	w.confirm(w.Slot)
	for range 2 {
		_, err := w.try()
		wantFault(t, err, outbox.Gap, codeUnpublished)
	}
	if !w.exists(0) || w.Text("SELECT state FROM outflow_partitions WHERE name = "+
		"$1", made) != string(Dropped) {
		t.Errorf("the one that was there: %s, the one that was made: %s", w.state(0), w.Text(
			"SELECT state FROM outflow_partitions WHERE name = $1", made))
	}
}

// TestWithoutAnIDAnAcceptedGapOfTheArchiveRefusesAllRows: nobody knows whose messages were lost.
func TestWithoutAnIDAnAcceptedGapOfTheArchiveRefusesAllRows(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.cfg.ID, w.cfg.Archive = "", true
	w.insert(0, 5, true)
	w.apply()
	w.confirm(w.Slot)
	fence := w.fence(0)
	w.out.Archive = Reach{Last: 9, Complete: fence + 1, Whole: fence - 1}
	_, err := w.try()
	if f := wantFault(t, err, outbox.Gap, codeUnpublished); !strings.Contains(f.Message, "5 rows of") ||
		len(w.reads) == 0 {
		t.Errorf("%v; read %d times", f, len(w.reads))
	}
	w.o.AcceptUnpublished = 5
	w.apply()
	if w.exists(0) {
		t.Errorf("it is %s", w.state(0))
	}
}

// TestTheDropVerifiesAgain: the first run only sleeps between the verification and the drop.
func TestTheDropVerifiesAgain(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.confirm(w.Slot)
	w.o.Hit = func(point string) {
		if point == "partition.verified" {
			w.Exec(`INSERT INTO outbox_0 (doc_id, actor_id, counter, payload, created_at) VALUES ('d', 'a', 9,
				'{}', '2024-05-01 02:00Z')`)
			w.o.Hit = nil
		}
	}
	wantWhy(t, w.apply(), 0, "its rows are not those that were verified")
	if w.Text("SELECT count(*)::text FROM outbox_0") != "6" {
		t.Error("a row is gone")
	}
}

// TestWithoutAnIDOnlyTheFenceOfTheSameStreamCounts: rows can't be compared, so after stream or cluster were
// made anew nothing shows that they are published.
func TestWithoutAnIDOnlyTheFenceOfTheSameStreamCounts(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"same", "stream", "cluster", "attached again"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, pgtest.Server(t), 1)
			w.cfg.ID = ""
			w.insert(0, 5, false)
			w.apply()
			switch what {
			case "stream", "attached again":
				w.out.Stream.Created = w.out.Stream.Created.Add(time.Minute)
				if what != "stream" {
					w.Exec("ALTER TABLE outbox ATTACH PARTITION outbox_0 FOR VALUES FROM ('2024-05-01') TO " +
						"('2024-05-02')")
					w.apply() // sets another fence
				}
			case "cluster":
				w.Exec("UPDATE outflow_partitions SET system_id = '1' WHERE state = 'sealed'")
				w.apply()
			}
			w.confirm(w.Slot)
			_, err := w.try()
			if what == "same" {
				must.Succeed(t, err)
			} else {
				wantFault(t, err, outbox.Gap, codeUnpublished)
			}
			if w.exists(0) == (what == "same") {
				t.Errorf("it is %s", w.state(0))
			}
		})
	}
}

// TestWhatWasRefusedIsNotComparedByEachRun that comes by itself: everything is read for it, for one row the
// whole archive. The others go meanwhile, and only what is near to them is read.
func TestWhatWasRefusedIsNotComparedByEachRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 3)
	w.insert(0, 1, false)
	w.insert(2, 1, true)
	w.cfg.Age = time.Since(day.AddDate(0, 0, 1)) // the first one is beyond it
	w.apply()
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 days'")
	w.confirm(w.Slot)
	refused := func(reads int, says string) {
		t.Helper()
		w.reads = nil
		_, err := w.try()
		f := wantFault(t, err, outbox.Gap, codeUnpublished)
		if len(w.reads) != reads || !strings.Contains(f.Message, says) ||
			!strings.Contains(f.Hint, "--accept-unpublished 1") {
			t.Errorf("it read %v: %v", w.reads, f)
		}
	}
	again := func() { w.Exec("UPDATE outflow_partitions SET refused_at = refused_at - interval '1 day'") }
	refused(3, "1 row of partition")
	refused(3, "1 row of partition") // by a person
	w.o.Turn = time.Hour
	refused(0, "compared again at")
	// by a clock that was ahead
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at + interval '1 year'")
	refused(0, "compared again at")
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '1 year'")
	w.cfg.Age = 0
	refused(0, "compared again at") // and seals the others
	w.confirm(w.Slot)
	refused(1, "compared again at")
	if w.exists(2) || w.reads[0].Since.Before(day.AddDate(0, 0, 1).Add(-margin)) {
		t.Errorf("of the last one, which is %s, it read %v", w.state(2), w.reads)
	}
	again()
	refused(3, "1 row of partition")
	w.published[w.Text("SELECT id::text FROM outbox_0")] = true
	refused(0, "compared again at")
	again()
	if w.apply(); w.exists(0) {
		t.Errorf("its row is published, and it is %s", w.state(0))
	}
}

// TestForWhatWasRefusedEverythingIsReadOnce, wherever they lie, up to so many rows; by a run that
// comes by itself also for those that have rested for half of their time.
func TestForWhatWasRefusedEverythingIsReadOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 3)
	w.Exec("CREATE TABLE outbox_30 PARTITION OF outbox FOR VALUES FROM ('2024-05-31') TO ('2024-06-01')")
	for _, i := range []int{0, 1, 30} {
		w.insert(i, 1, false)
	}
	w.insert(2, 1, true)
	w.apply()
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 days'")
	w.confirm(w.Slot)
	refused := func(near, reads int) {
		t.Helper()
		w.reads = nil
		_, err := w.try()
		wantFault(t, err, outbox.Gap, codeUnpublished)
		n := 0
		for _, in := range w.reads {
			if !in.Until.IsZero() {
				n++
			}
		}
		if n != near || len(w.reads) != reads || !w.exists(0) || !w.exists(1) || w.exists(2) ||
			!w.exists(30) {
			t.Errorf("it read %v", w.reads)
		}
	}
	rest := func(first, others string) {
		w.Exec("UPDATE outflow_partitions SET refused_at = now() - CASE WHEN name LIKE '%outbox\\_0\"' "+
			"THEN $1 ELSE $2 END::text::interval WHERE refused > 0", first, others)
	}
	refused(2, 6) // each for itself, as long as nobody knows
	refused(2, 4)
	w.o.Turn = time.Hour
	refused(0, 0)
	rest("25 h", "25 h")
	refused(2, 4)
	rest("25 h", "13 h")
	refused(2, 4)
	rest("25 h", "1 h")
	refused(1, 3)
	refused(0, 0)
	w.o.Turn, w.cfg.together = 0, 2 // rows, whose ids PostgreSQL may have at once
	refused(2, 6)
}

// TestWhatWasVerifiedByAnotherStreamIsFoundInThisOne, also far from the time of its rows.
func TestWhatWasVerifiedByAnotherStreamIsFoundInThisOne(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.stored = day.AddDate(0, 1, 0)
	w.confirm(w.Slot)
	w.cfg.Keep = time.Hour
	w.apply()
	w.want(0, Verified)
	w.cfg.Keep = 0
	w.out.Stream.Created = w.out.Stream.Created.Add(time.Minute)
	w.seen.Stream = w.out.Stream
	if w.apply(); w.exists(0) || len(w.reads) != 4 {
		t.Errorf("it is %s after %v", w.state(0), w.reads)
	}
}

// TestAPartitionThatWasRefusedAndIsGoneIsForgotten: somebody has dropped it, with its rows.
func TestAPartitionThatWasRefusedAndIsGoneIsForgotten(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 1, false)
	w.apply()
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 days'")
	w.confirm(w.Slot)
	w.o.Turn = time.Hour
	_, err := w.try()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	w.Exec("DROP TABLE outbox_0")
	if w.apply(); w.state(0) != "none" {
		t.Errorf("it is %s", w.state(0))
	}
}

// TestFewIDsAreLoadedForARowThatIsMissing: beyond the time of the rows there may be a thousand times as many.
func TestFewIDsAreLoadedForARowThatIsMissing(t *testing.T) {
	t.Parallel()
	for lower, reads := range map[string]int{"'2024-05-01'": 3, "MINVALUE": 2} {
		for _, inMemory := range []int{1, 3, 4} {
			t.Run(fmt.Sprintf("%s, %d in memory", lower, inMemory), func(t *testing.T) {
				t.Parallel()
				fewIDsAreLoaded(t, lower, reads, inMemory)
			})
		}
	}
}

func fewIDsAreLoaded(t *testing.T, lower string, reads, inMemory int) {
	t.Helper()
	w := newWorld(t, pgtest.Server(t), 0)
	w.cfg.inMemory = inMemory
	w.Exec("CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES FROM (" + lower + ") TO ('2024-05-02')")
	w.insert(0, 4, true)
	w.insert(0, 1, false)
	missing := w.Text("SELECT id FROM outbox ORDER BY ctid DESC LIMIT 1")
	w.apply()
	w.confirm(w.Slot)
	read := w.o.Published
	w.o.Published = func(ctx context.Context, in Period, add func([16]byte) error) (Seen, error) {
		if len(w.reads) == 0 {
			return read(ctx, in, add)
		}
		w.reads = append(w.reads, in)
		for id := range w.published {
			for n := range byte(100) {
				sum := sha256.Sum256([]byte(id))
				sum[15] = n
				must.Succeed(t, add([16]byte(sum[:16])))
			}
		}
		return w.seen, nil
	}
	m := w.manager()
	_, err := m.Apply(outboxdb.Within(t))
	wantFault(t, err, outbox.Gap, codeUnpublished)
	if !strings.Contains(err.Error(), missing) {
		t.Errorf("%s is missing, and it says: %v", missing, err)
	}
	var n int
	must.Succeed(t, m.conn.QueryRow(outboxdb.Within(t), "SELECT count(*) FROM pg_temp.outflow_known").
		Scan(&n))
	n += len(slices.Concat(append(m.published.more, m.published.hashes)...))
	if n != 4 || (m.published.in == inTable) != (inMemory < 4) || len(w.reads) != reads ||
		w.reads[0].Until.IsZero() {
		t.Errorf("it knows %d ids after %v", n, w.reads)
	}
}

// TestIDsInMemoryAreNotCopiedWhileTheyCome: a list of eight million that grows took 550 MiB.
func TestIDsInMemoryAreNotCopiedWhileTheyCome(t *testing.T) { //nolint:paralleltest // it measures memory
	const n = 1 << 18
	p, before, after := &published{}, runtime.MemStats{}, runtime.MemStats{}
	id := func(i uint32) (id [16]byte) {
		binary.LittleEndian.PutUint32(id[:], i) // not in their order
		return id
	}
	for i := range uint32(2 * n) {
		if i == n {
			runtime.ReadMemStats(&before)
		}
		must.Succeed(t, p.add(id(i), maxInMemory, nil))
		if i == n/2 && !p.knows(id(7)) {
			t.Error("it does not know an id")
		}
	}
	runtime.ReadMemStats(&after)
	if all := after.TotalAlloc - before.TotalAlloc; all > 20*n {
		t.Errorf("%d bytes for an id", all/n)
	}
	for i := range uint32(3 * n) {
		if p.knows(id(i)) != (i < 2*n) {
			t.Fatalf("of id %d it says the contrary", i)
		}
	}
}

// TestOnlyWhatIsNearIsReadTogether: for what lies apart, and for many rows, the ids are read one after the
// other, so that few are in PostgreSQL at once.
func TestOnlyWhatIsNearIsReadTogether(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		together int64
		reads    int
	}{{0, 2}, {9, 3}, {10, 2}} {
		w := newWorld(t, pgtest.Server(t), 2)
		w.cfg.together = c.together
		w.Exec("CREATE TABLE outbox_30 PARTITION OF outbox FOR VALUES FROM ('2024-05-31') TO ('2024-06-01')")
		for _, i := range []int{0, 1, 30} {
			w.insert(i, 5, true)
		}
		w.apply()
		w.confirm(w.Slot)
		if w.apply(); len(w.reads) != c.reads || w.exists(0) || w.exists(1) || w.exists(30) {
			t.Errorf("at most %d together: it read %v", c.together, w.reads)
		}
	}
}

// TestAStreamThatIsMadeAnewWhileItIsReadShowsNothing: some ids are of the one, and some of the other.
func TestAStreamThatIsMadeAnewWhileItIsReadShowsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 4, true)
	w.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES ('d', 'late', 9, '{}',
		'2024-05-01 02:00Z')`)
	w.apply()
	w.confirm(w.Slot)
	read := w.o.Published
	w.o.Published = func(ctx context.Context, in Period, add func([16]byte) error) (Seen, error) {
		if len(w.reads) == 1 {
			w.out.Stream.Created = w.out.Stream.Created.Add(time.Minute)
			w.seen.Stream = w.out.Stream
			clear(w.published)
			w.published[w.Text("SELECT id::text FROM outbox_0 WHERE actor_id = 'late'")] = true
		}
		return read(ctx, in, add)
	}
	if w.apply(); !w.exists(0) || len(w.reads) != 2 {
		t.Errorf("it is gone after %v", w.reads)
	}
}

// limitedRun is the context of a run whose time is over when that is said, however slow the machine is.
type limitedRun struct {
	context.Context
	over chan struct{}
}

func (r limitedRun) Done() <-chan struct{} { return r.over }

func (r limitedRun) Err() error {
	select {
	case <-r.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// cantReadEverything lets the time of a run be over when everything is read, and returns what makes the
// context of one.
func (w *world) cantReadEverything(t *testing.T) (limited func() context.Context) {
	published, over := w.o.Published, func() {}
	w.o.Published = func(ctx context.Context, in Period, add func([16]byte) error) (Seen, error) {
		seen, err := published(ctx, in, add)
		if in == (Period{}) {
			over()
			<-ctx.Done()
			err = ctx.Err()
		}
		return seen, err
	}
	return func() context.Context {
		run := limitedRun{outboxdb.Within(t), make(chan struct{})}
		over = sync.OnceFunc(func() { close(run.over) })
		return run
	}
}

// TestARunThatCantReadEverythingLeavesTimeForOthers: to read everything takes longer than a run may, and a
// row was never published. The next run does not begin with it again.
func TestARunThatCantReadEverythingLeavesTimeForOthers(t *testing.T) {
	t.Parallel()
	for _, plain := range []bool{false, true} {
		w, run := (*world)(nil), (*Manager).Delete
		if plain {
			w = newPlain(t, 0)
			w.settle()
			w.insert(0, 1, false)
			w.settle()
		} else {
			w, run = newWorld(t, pgtest.Server(t), 1), (*Manager).Apply
			w.insert(0, 1, false)
			w.apply()
			w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '1 h'")
		}
		w.confirm(w.Slot)
		limited := w.cantReadEverything(t)
		w.o.Pass, w.o.Turn = &Pass{}, time.Minute
		m := w.manager()
		_, err := run(m, limited())
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("plain %v: %v", plain, err)
		}
		m.Close()
		w.o.Pass.again = w.o.Pass.again.Add(time.Hour)
		m = w.manager()
		_, err = run(m, limited())
		wantFault(t, err, outbox.Gap, codeUnpublished)
		m.Close()
	}
}

// TestWhatCantBeReadInOneRunKeepsNoOtherPartition, also of runs by cron or a person, which don't let it rest.
func TestWhatCantBeReadInOneRunKeepsNoOtherPartition(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.cfg.together = 1
	w.insert(0, 1, false)
	w.insert(1, 1, true)
	w.apply()
	w.confirm(w.Slot)
	limited := w.cantReadEverything(t)
	for range 2 {
		m := w.manager()
		if _, err := m.Apply(limited()); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		m.Close()
	}
	if !w.exists(0) || w.exists(1) {
		t.Errorf("the first one is there: %v; the other one is %s", w.exists(0), w.state(1))
	}
}

// TestWhatWasRefusedByAClockThatWasAheadIsComparedAgain, and not when the time has come that it had shown.
func TestWhatWasRefusedByAClockThatWasAheadIsComparedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.o.Turn = time.Minute
	w.insert(0, 3, false)
	w.apply()
	w.confirm(w.Slot)
	_, err := w.try()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	w.Exec("UPDATE outflow_partitions SET refused_at = refused_at + interval '1 year'")
	for id := range strings.SplitSeq(w.Text("SELECT string_agg(id::text, ',') FROM outbox_0"), ",") {
		w.published[id] = true
	}
	if steps := w.apply(); w.exists(0) {
		t.Errorf("%v", steps)
	}
}

// TestWhatIsRefusedIsNotVerifiedAnyMore: of a stream that was restored from an older copy, and that has as
// many messages as before by now.
func TestWhatIsRefusedIsNotVerifiedAnyMore(t *testing.T) {
	t.Parallel()
	for _, own := range []string{"", "counter > 0"} {
		w := newWorld(t, pgtest.Server(t), 1)
		w.cfg.Own, w.cfg.Keep = own, time.Hour
		w.insert(0, 3, true)
		w.apply()
		w.confirm(w.Slot)
		w.apply()
		w.want(0, Verified)
		w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
		clear(w.published)
		for _, last := range []int{-5, 5} {
			w.out.Stream.LastSeq += uint64(last)
			w.seen.Stream = w.out.Stream
			_, err := w.try()
			wantFault(t, err, outbox.Gap, codeUnpublished)
			if !w.exists(0) {
				t.Fatalf("own rows %q: it is gone", own)
			}
		}
	}
}
