package partition

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

// unread writes rows that no slot brings, because the publication does not have the table.
func (w *world) unread(rows int) {
	w.T.Helper()
	w.Exec("ALTER PUBLICATION " + w.Slot + " DROP TABLE outbox")
	w.insert(0, rows, false)
	w.Exec("ALTER PUBLICATION " + w.Slot + " ADD TABLE outbox")
}

// settle lets a run set a fence behind all rows, and the slot confirm it.
func (w *world) settle() {
	w.T.Helper()
	w.confirm(w.Slot)
	if _, err := w.remove(); err != nil { // it may be confirmed at once
		outboxdb.WantFault(w.T, err, outbox.Gap, codeUnpublished)
	}
	w.confirm(w.Slot)
}

// rewrites are what gives rows another place in the table, and some of them another transaction.
var rewrites = []string{
	"UPDATE outbox SET payload = payload || '{\"seen\": true}'",
	"ALTER TABLE outbox ALTER counter TYPE numeric",
	"ALTER TABLE outbox ALTER counter TYPE bigint",
	"VACUUM (FULL) outbox",
	"VACUUM (FREEZE) outbox",
	"CLUSTER outbox USING outbox_pkey",
}

// TestRowsThatAreWrittenAgainAreNotTakenForPublished: an update, or a statement that rewrites the table,
// makes rows that are older than init, or that no slot has read, look as if they had come later.
func TestRowsThatAreWrittenAgainAreNotTakenForPublished(t *testing.T) {
	t.Parallel()
	for _, how := range rewrites {
		w := newPlain(t, 0)
		w.insert(0, 12, false)
		w.insert(0, 40, true)
		w.mustRemove()
		w.unread(3)
		w.Exec(how)
		w.insert(0, 5, true)
		for range 3 {
			w.settle()
			_, err := w.remove()
			wantFault(t, err, outbox.Gap, codeUnpublished)
			w.Exec(how)
		}
		if got := w.rows(); got != "15" {
			t.Errorf("%s: %s rows are left of 15 that are in no message, and 45 others", how, got)
		}
		w.settle()
		w.o.AcceptUnpublished = 15
		w.mustRemove()
		if got := w.rows(); got != "0" {
			t.Errorf("%s: %s rows are left at the end", how, got)
		}
	}
}

// TestWhatTheStreamHadMayGoWhenItHasItNoMore: rows are compared when every slot has confirmed their fence,
// and go when a repair does not need them any more. One that was written again meanwhile is compared again.
func TestWhatTheStreamHadMayGoWhenItHasItNoMore(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = time.Hour
	w.insert(0, 20, true)
	w.mustRemove()
	w.confirm(w.Slot)
	w.mustRemove()
	w.insert(0, 10, true)
	clear(w.published) // and the ten before they were compared
	w.Exec("UPDATE outbox SET payload = '[]' WHERE ctid IN (SELECT ctid FROM outbox LIMIT 2)")
	w.settle() // sets the fence of the twelve
	old := func() { w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'") }
	old()
	_, err := w.remove()
	f := wantFault(t, err, outbox.Gap, codeUnpublished)
	if got := w.rows(); got != "12" || !strings.Contains(f.Message, "12 rows of") {
		t.Errorf("%s of 12 rows are left that nothing shows to be published: %v", got, f)
	}
	w.settle()
	old()
	w.o.AcceptUnpublished = 12
	if s := w.mustRemove(); w.rows() != "0" {
		t.Errorf("%v: %s rows are left", s, w.rows())
	}
}

// TestRowsAreComparedAnewWithAnotherStream.
func TestRowsAreComparedAnewWithAnotherStream(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = time.Hour
	w.insert(0, 20, true)
	w.mustRemove()
	w.confirm(w.Slot)
	w.mustRemove()
	w.out.Stream.Created = w.out.Stream.Created.Add(time.Minute)
	w.seen.Stream = w.out.Stream
	clear(w.published)
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
	_, err := w.remove()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	if got := w.rows(); got != "20" {
		t.Errorf("%s of 20 rows are left that the stream does not have", got)
	}
}

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

// TestTheStreamIsReadOnceForEachFence: each time what was stored since the fence before.
func TestTheStreamIsReadOnceForEachFence(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = time.Hour
	w.mustRemove()
	for i := range 5 {
		w.insert(0, 3, true)
		w.confirm(w.Slot)
		w.mustRemove()
		w.confirm(w.Slot)
		w.mustRemove()
		if i == 0 {
			w.reads = nil // of the first fence nothing is known
		}
	}
	if len(w.reads) != 4 {
		t.Errorf("read %d times: %v", len(w.reads), w.reads)
	}
	for _, in := range w.reads {
		if in.Since.IsZero() || in.Until.IsZero() {
			t.Errorf("read %v", in)
		}
	}
}

// TestFewFencesAreKept, however often it runs, and they tell the time evenly.
func TestFewFencesAreKept(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = 1000 * time.Hour
	m := w.manager()
	for range 3 * fences {
		_, err := m.Delete(outboxdb.Within(t))
		must.Succeed(t, err)
		w.confirm(w.Slot)
		w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '10 min'")
	}
	n := w.Text("SELECT count(*)::text FROM outflow_partitions WHERE name LIKE 'fence %'")
	if n != fmt.Sprint(fences) {
		t.Errorf("%s fences", n)
	}
	longest := w.Text(`SELECT max(d)::text FROM (SELECT extract(epoch FROM sealed_at - lag(sealed_at)
		OVER (ORDER BY sealed_at))::int / 60 AS d FROM outflow_partitions WHERE name LIKE 'fence %') s`)
	if minutes, err := strconv.Atoi(longest); err != nil || minutes > 80 { // 30 on the average
		t.Errorf("two are %s minutes apart: %v", longest, err)
	}
}

// TestRowsThatASubscriptionBringsGoBehindTheFence: nobody publishes them here, so they are in no message.
func TestRowsThatASubscriptionBringsGoBehindTheFence(t *testing.T) {
	t.Parallel()
	for _, ownOnly := range []bool{true, false} {
		w := newPlain(t, 0)
		w.cfg.OwnOnly = ownOnly
		w.insert(0, 2, false)
		w.mustRemove()
		w.Exec("CREATE SUBSCRIPTION s CONNECTION 'dbname=none' PUBLICATION p WITH (connect = false)")
		w.Exec("INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) SELECT oid, " +
			"'outbox'::regclass, 'r' FROM pg_subscription")
		w.T.Cleanup(func() {
			w.Exec("ALTER SUBSCRIPTION s SET (slot_name = NONE)")
			w.Exec("DROP SUBSCRIPTION s")
		})
		w.insert(0, 4, false)
		want := map[bool]string{true: "2", false: "6"}[ownOnly]
		for range 2 {
			w.confirm(w.Slot)
			_, err := w.remove()
			wantFault(t, err, outbox.Gap, codeUnpublished)
		}
		if got := w.rows(); got != want {
			t.Errorf("own only %v: %s rows are left, not %s", ownOnly, got, want)
		}
	}
}

// TestNoHistoryDeletesARowThatNobodyHas: whatever is done to the table, slot, publication and stream between
// runs, each row that goes was in the stream.
func TestNoHistoryDeletesARowThatNobodyHas(t *testing.T) {
	t.Parallel()
	histories := uint64(4)
	if tier.Long() {
		histories = 60
	}
	for seed := range histories {
		w := newPlain(t, 0)
		rnd := rand.New(rand.NewPCG(seed, 2))
		w.Exec("CREATE TABLE had (id uuid)") // the rows that the stream has, or had
		var log []string
		unread, gone := 0, int64(0)
		for range 50 {
			var what string
			switch n := rnd.IntN(12); n {
			case 0, 1, 2:
				what = "insert"
				w.insert(0, 1+rnd.IntN(5), true)
				for id := range w.published {
					w.Exec("INSERT INTO had VALUES ($1::uuid)", id)
				}
			case 3:
				what = "unread"
				n := 1 + rnd.IntN(3)
				unread += n
				w.unread(n)
			case 4:
				what = "anew"
				n := rnd.IntN(3)
				unread += n
				w.anew(func() { w.insert(0, n, false) })
			case 5:
				what = "confirm"
				w.confirm(w.Slot)
			case 6, 7:
				what = rewrites[rnd.IntN(len(rewrites))]
				w.Exec(what)
			case 8:
				what = "limits"
				clear(w.published)
			default:
				what = "confirm, remove"
				w.confirm(w.Slot)
				s, err := w.remove()
				if err != nil {
					wantFault(t, err, outbox.Gap, codeUnpublished)
				}
				gone += s.Rows
			}
			log = append(log, what)
			left := w.Text("SELECT count(*)::text FROM outbox WHERE id NOT IN (SELECT id FROM had)")
			if left != fmt.Sprint(unread) {
				t.Fatalf("seed %d: %s of %d rows are left that were in no message, after %s", seed, left,
					unread, strings.Join(log, ", "))
			}
		}
		if gone == 0 {
			t.Errorf("seed %d: no row has gone, after %s", seed, strings.Join(log, ", "))
		}
	}
}

// TestATransactionIDHas64Bits: the youngest that it can be, whatever the epoch, for rows that are 2^31
// transactions old as well as for those that a lock has followed to beyond the snapshot.
func TestATransactionIDHas64Bits(t *testing.T) {
	t.Parallel()
	w := outboxdb.New(t, pgtest.Server(t))
	const epoch = 1 << 32
	for _, c := range []struct{ xmin, next, want int64 }{
		{700, 750, 700},
		{749, 750, 749},
		{760, 750, 760}, // of a transaction that is younger than the snapshot
		{700, epoch + 750, epoch + 700},
		{1 << 31, epoch + 750, 1 << 31},
		{xidAhead + 751, epoch + 750, xidAhead + 751},         // the oldest that there can be
		{xidAhead + 750, epoch + 750, epoch + xidAhead + 750}, // looks new
		{epoch - 1, epoch + 5, epoch - 1},
		{3, 7*epoch + 5, 7*epoch + 3},
		{2, 750, 2}, // frozen by an old release
		{2, epoch + 750, epoch + 2},
		{epoch - 1000, 750, -1000}, // of a transaction that never was
	} {
		got := w.Text("SELECT ("+writtenBy("x.xmin", fmt.Sprintf("(%d)", c.next+xidAhead))+")::text FROM "+
			"(SELECT $1::text::xid) x (xmin)", fmt.Sprint(c.xmin))
		if got != fmt.Sprint(c.want) {
			t.Errorf("%d before %d: %s, want %d", c.xmin, c.next, got, c.want)
		}
	}
}

// TestRowsGoAfterMoreThanTwoBillionTransactions: a row and its fence may be so old, and the next epoch may
// have begun. What came later stays, and so does all when a fence is too old for it to be seen.
func TestRowsGoAfterMoreThanTwoBillionTransactions(t *testing.T) {
	t.Parallel()
	all := pgserver.Installations()
	i := slices.IndexFunc(all, func(i pgserver.Installation) bool {
		_, ok := i.Tool("pg_resetwal")
		return ok
	})
	if i < 0 {
		tier.Missing(t, "pg_resetwal", "no installation of PostgreSQL has pg_resetwal")
	}
	srv := pgtest.Own(t, all[i].Major, "wal_level=logical", "autovacuum=off")
	var w *world
	t.Cleanup(func() { _ = w.Conn.Close(context.Background()) }) // after what newPlainOn does at the end
	w = newPlainOn(t, srv)
	w.cfg.Keep = time.Hour
	skip := func(to uint64) {
		t.Helper()
		w.Exec("SELECT pg_drop_replication_slot($1)", w.Slot)
		w.Exec("UPDATE pg_database SET datallowconn = true")
		for _, name := range []string{"postgres", "template0", "template1", w.Conn.Config().Database} {
			conn, err := pgx.Connect(outboxdb.Within(t), srv.URL(name))
			must.Succeed(t, err)
			_, err = conn.Exec(outboxdb.Within(t), "VACUUM (FREEZE)")
			must.Succeed(t, err)
			must.Succeed(t, conn.Close(outboxdb.Within(t)))
		}
		must.Succeed(t, w.Conn.Close(outboxdb.Within(t)))
		must.Succeed(t, srv.Stop("fast"))
		must.Succeed(t, srv.SkipTo(outboxdb.Within(t), to))
		must.Succeed(t, srv.Start(outboxdb.Within(t)))
		var err error
		w.Conn, err = pgx.Connect(outboxdb.Within(t), w.URL)
		must.Succeed(t, err)
		w.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", w.Slot)
	}
	w.insert(0, 20, true)
	w.mustRemove()
	w.confirm(w.Slot)
	w.mustRemove()
	skip(3 << 29) // PostgreSQL itself bears less than 2^31 without a VACUUM
	skip(3 << 30)
	w.insert(0, 5, true)
	w.settle()
	if got := w.rows(); got != "25" {
		t.Fatalf("%s rows are left of 25 that are not old enough", got)
	}
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h' WHERE horizon < 1000000")
	if s := w.mustRemove(); s.Rows != 20 || w.rows() != "5" {
		t.Errorf("%v; %s rows are left", s, w.rows())
	}
	skip(1<<32 + 1<<29) // in another epoch
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
	w.settle()
	if got := w.rows(); got != "0" {
		t.Errorf("%s rows are left", got)
	}
	w.Exec("UPDATE outflow_partitions SET sealed_at = clock_timestamp()")
	w.insert(0, 7, true)
	w.settle()
	w.Exec("UPDATE outflow_partitions SET horizon = horizon - $1, sealed_at = sealed_at - interval '2 h'",
		xidReach)
	if s := w.mustRemove(); s.Action != Wait || !strings.Contains(s.Why, "retain.table.keep") ||
		w.rows() != "7" {
		t.Errorf("%v; %s rows are left", s, w.rows())
	}
}

// TestABaselineThatIsTooOldShowsNothing: rows that are older than it look younger then, so nothing counts as
// cleared of them.
func TestABaselineThatIsTooOldShowsNothing(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.ID = ""
	w.insert(0, 4, false)
	w.mustRemove()
	w.out.Stream.Created = w.out.Stream.Created.Add(time.Minute)
	w.Exec("UPDATE outflow_partitions SET state = 'verified', horizon = horizon - $1 WHERE name = 'baseline'",
		xidReach)
	w.settle()
	_, err := w.remove()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	if got := w.rows(); got != "4" {
		t.Errorf("%s of 4 rows are left that nothing shows to be published", got)
	}
}

// TestARowThatOthersReferToIsNamed, and the rows of other pages go.
func TestARowThatOthersReferToIsNamed(t *testing.T) {
	t.Parallel()
	for _, clause := range []string{"", "ON DELETE RESTRICT", "DEFERRABLE INITIALLY DEFERRED"} {
		w := newPlain(t, 0)
		w.insert(0, 3000, true)
		w.Exec("CREATE TABLE delivery (outbox_id uuid CONSTRAINT of_event REFERENCES outbox (id) " +
			clause + ")")
		w.Exec("INSERT INTO delivery SELECT id FROM outbox WHERE counter = 1500")
		w.mustRemove()
		for range 2 {
			w.confirm(w.Slot)
			_, err := w.remove()
			f := wantFault(t, err, outbox.Fatal, codeNeeded)
			if !strings.Contains(f.Message, "of_event") || !strings.Contains(f.Message, "delivery") {
				t.Error(f)
			}
			if n, err := strconv.Atoi(w.rows()); err != nil || n < 1 || n > 150 { // of 3000 those on one page
				t.Errorf("%s: %d rows are left: %v", clause, n, err)
			}
		}
		w.Exec("DROP TABLE delivery")
		w.confirm(w.Slot)
		w.mustRemove()
		if got := w.rows(); got != "0" {
			t.Errorf("%s: %s rows are left", clause, got)
		}
	}
}

// TestRowsAreComparedWhileAnotherSlotIsBehind: another slot of the database (Debezium) is behind for longer
// than the stream keeps messages. Outflow's own slot has confirmed the rows long ago, and they were in the
// stream.
func TestRowsAreComparedWhileAnotherSlotIsBehind(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.slot("debezium_" + w.Slot)
	for range 3 {
		w.insert(0, 10, true)
		w.mustRemove()
		w.confirm(w.Slot)
		w.mustRemove() // its rows are in the stream now
		clear(w.published)
	}
	w.confirm("debezium_" + w.Slot)
	if s, err := w.remove(); err != nil || w.rows() != "0" {
		t.Errorf("%v, %s rows are left: %v", s, w.rows(), err)
	}
}

// TestVerifiedRowsThatCantGoStayVerified: rows that others refer to, or that were locked, beside older ones
// that were never published.
func TestVerifiedRowsThatCantGoStayVerified(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.insert(0, 1, false)
	w.settle()
	w.insert(0, 5, true)
	within := outboxdb.Within(t)
	locker, err := w.other().Begin(within)
	must.Succeed(t, err)
	_, err = locker.Exec(within, "SELECT FROM outbox FOR UPDATE")
	must.Succeed(t, err)
	for range 2 {
		w.settle()
	}
	clear(w.published)
	must.Succeed(t, locker.Rollback(within))
	_, err = w.remove()
	f := wantFault(t, err, outbox.Gap, codeUnpublished)
	if w.rows() != "1" {
		t.Errorf("%s rows are left: %v", w.rows(), f)
	}
}

// TestARowThatWasNeverPublishedTakesNoOthersWithIt: rows that were compared count as published when the
// stream has their messages no more, also beside some that were never published, in more fences than are
// kept. With many of these in one they don't, and when they are published all go.
func TestARowThatWasNeverPublishedTakesNoOthersWithIt(t *testing.T) {
	t.Parallel()
	for _, k := range []struct {
		rounds, lost int
		left         string
	}{{fences + 2, 1, strconv.Itoa(fences + 2)}, {1, maxMissing, strconv.Itoa(maxMissing)},
		{1, maxMissing + 1, strconv.Itoa(maxMissing + 3)}} {
		t.Run(fmt.Sprintf("%+v", k), func(t *testing.T) {
			t.Parallel()
			w := newPlain(t, 0)
			w.cfg.Keep = time.Hour
			for range k.rounds {
				w.insert(0, 2, true)
				w.insert(0, k.lost, false)
				for range 2 {
					w.settle()
				}
			}
			clear(w.published)
			w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
			_, err := w.remove()
			wantFault(t, err, outbox.Gap, codeUnpublished)
			if w.rows() != k.left {
				t.Errorf("%s rows are left, want %s", w.rows(), k.left)
			}
			w.publish()
			if w.mustRemove(); w.rows() != "0" {
				t.Errorf("%s rows are left when all are published", w.rows())
			}
		})
	}
}

// TestRowsBesideManyThatWereNeverPublished count as published when these are, or are accepted, while the
// stream still has their messages. The refusal says so.
func TestRowsBesideManyThatWereNeverPublished(t *testing.T) {
	t.Parallel()
	for _, accept := range []bool{false, true} {
		w := newPlain(t, 0)
		w.cfg.Keep = time.Hour
		w.insert(0, 2, true)
		w.insert(0, maxMissing, false)
		w.settle()
		_, err := w.remove()
		f := wantFault(t, err, outbox.Gap, codeUnpublished)
		if strings.Contains(f.Hint, "between two fences") {
			t.Errorf("of %d rows it says %q", maxMissing, f.Hint)
		}
		w.insert(0, 2, true)
		w.insert(0, maxMissing+1, false)
		w.settle()
		_, err = w.remove()
		f = wantFault(t, err, outbox.Gap, codeUnpublished)
		if !strings.Contains(f.Hint, "More than 1000 of them") ||
			!strings.Contains(f.Hint, "before the stream") {
			t.Errorf("it says %q", f.Hint)
		}
		if accept {
			w.o.AcceptUnpublished = 2*maxMissing + 1
		} else {
			w.publish()
		}
		w.mustRemove()
		w.o.AcceptUnpublished = 0
		clear(w.published)
		w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
		if w.mustRemove(); w.rows() != "0" {
			t.Errorf("accepted %v: %s rows are left", accept, w.rows())
		}
	}
}

// TestAFenceInTheFutureIsLeftBehindAsTheHintSays: what the fault asks for helps a plain table, too.
func TestAFenceInTheFutureIsLeftBehindAsTheHintSays(t *testing.T) {
	t.Parallel()
	w := newPlain(t, pgtest.Majors(t)[0])
	w.insert(0, 5, true)
	w.mustRemove()
	w.Exec("UPDATE outflow_partitions SET fence = 'FFFFFF/0'")
	m := w.manager()
	defer m.Close()
	_, err := m.Delete(outboxdb.Within(t))
	f := wantFault(t, err, outbox.Gap, codeBehind)
	if !strings.Contains(f.Hint, "set state = 'detaching', fence = NULL where that is so") {
		t.Fatal(f)
	}
	m.Close()
	w.Exec("UPDATE outflow_partitions SET state = 'detaching', fence = NULL " +
		"WHERE fence > pg_current_wal_lsn()")
	w.mustRemove()
	w.confirm(w.Slot)
	if s := w.mustRemove(); s.Rows != 5 {
		t.Errorf("nothing goes: %v", s)
	}
}

// TestFencesOfOneTransactionThatStaysOpen have the same transaction ID, and the newest is not confirmed yet:
// rows that are older than it go, and a run that finds none left to compare ends as any other.
func TestFencesOfOneTransactionThatStaysOpen(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.insert(0, 5, true)
	within := outboxdb.Within(t)
	tx, err := w.other().Begin(within)
	must.Succeed(t, err)
	_, err = tx.Exec(within, "SELECT pg_current_xact_id()")
	must.Succeed(t, err)
	w.mustRemove()
	for range 3 {
		w.confirm(w.Slot)
		w.Exec("SELECT pg_logical_emit_message(true, 'x', 'x')") // the next fence is not confirmed yet
		if s := w.mustRemove(); s.Action != Delete || w.rows() != "0" {
			t.Errorf("%v; %s rows are left", s, w.rows())
		}
	}
	must.Succeed(t, tx.Rollback(within))
}
