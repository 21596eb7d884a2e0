package partition

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

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

// TestALongTransactionElsewhereMakesNoRowsLate: a transaction that is open since before a partition's last
// rows, in another table, is no reason to miss messages that the stream's limits took.
func TestALongTransactionElsewhereMakesNoRowsLate(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"id", ""} {
		w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 1)
		w.cfg.ID = id
		w.cfg.Slack = 1000000 * time.Hour
		w.apply()
		w.Exec("UPDATE outflow_partitions SET made = true WHERE name = $1", quoted("public", old(0)))
		w.cfg.Slack = 0
		w.Exec("CREATE TABLE elsewhere (n int)")
		within := outboxdb.Within(t)
		long, err := w.other().Begin(within)
		must.Succeed(t, err)
		_, err = long.Exec(within, "INSERT INTO elsewhere VALUES (1)")
		must.Succeed(t, err)
		w.insert(0, 5, true)
		clear(w.published) // by the stream's limits, long after the slot had confirmed them
		w.seen.Removed, w.seen.Oldest = true, time.Now()
		for range 4 {
			w.confirm(w.Slot)
			_, err := w.try()
			if err != nil {
				t.Errorf("id %q: %v", id, err)
				break
			}
		}
		must.Succeed(t, long.Rollback(within))
		for range 4 {
			w.confirm(w.Slot)
			_, _ = w.try()
		}
		if w.exists(0) {
			t.Errorf("id %q: the partition does not go: %s", id, why(w.plan(), 0))
		}
	}
}

// TestLateRowsOfOtherShardsStay: rows that come while a DETACH waits are in no stream, of whatever shard they
// are.
func TestLateRowsOfOtherShardsStay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 1)
	w.cfg.Own = "counter % 2 = 0"
	within := outboxdb.Within(t)
	writer, err := w.other().BeginTx(within, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	must.Succeed(t, err)
	_, err = writer.Exec(within, "SELECT FROM outbox LIMIT 1")
	must.Succeed(t, err)
	wantWhy(t, w.apply(), 0, "open transactions hold it")
	_, err = writer.Exec(within, `INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at)
		VALUES ('d', 'a', 7, '{}', '2024-05-01 01:00:00Z')`)
	must.Succeed(t, err)
	must.Succeed(t, writer.Commit(within))
	for range 4 {
		_, _ = w.try()
		w.confirm(w.Slot)
	}
	if !w.exists(0) {
		t.Error("a row of another shard, which no slot was sent, is gone")
	}
}

// TestANewOutboxOfTheFormerNameTakesNoStates: the new one is run first.
func TestANewOutboxOfTheFormerNameTakesNoStates(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.ID = ""
	w.insert(0, 3, false)
	w.mustRemove()
	must.Succeed(t, w.manager().Forget(outboxdb.Within(t)))
	for range 2 {
		w.confirm(w.Slot)
		_, err := w.remove()
		wantFault(t, err, outbox.Gap, codeUnpublished)
	}
	w.Exec("ALTER TABLE outbox RENAME TO former")
	w.Exec("CREATE TABLE outbox (LIKE former INCLUDING ALL)")
	w.mustRemove()
	w.cfg.Table = "former"
	for range 3 {
		w.confirm(w.Slot)
		_, _ = w.remove()
	}
	if n := w.Text("SELECT count(*)::text FROM former"); n != "3" {
		t.Errorf("%s of 3 rows are left that nothing shows to be published", n)
	}
}

// TestANewOutboxOfTheFormerNameLeavesDetachedPartitions: both have partitions of the same names.
func TestANewOutboxOfTheFormerNameLeavesDetachedPartitions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 5, true)
	w.apply()
	w.want(0, Sealed)
	w.Exec("ALTER TABLE outbox RENAME TO former")
	w.Exec("ALTER TABLE outbox_0 RENAME TO former_0")
	w.Exec("CREATE TABLE outbox (LIKE former INCLUDING ALL) PARTITION BY RANGE (created_at)")
	w.Exec("ALTER PUBLICATION " + w.Slot + " ADD TABLE outbox")
	w.Exec("CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES FROM ('2024-05-01') TO ('2024-05-02')")
	w.Exec("CREATE TABLE now PARTITION OF outbox FOR VALUES FROM (now()) TO (MAXVALUE)")
	w.apply()
	w.cfg.Table = "former"
	if n := w.snapshot(); n != 5 {
		t.Errorf("a snapshot has %d of 5 rows", n)
	}
	w.confirm(w.Slot)
	w.apply()
	if w.Text("SELECT (to_regclass('former_0') IS NULL)::text") != "true" {
		t.Error("the former one's partition does not go")
	}
}

// TestATableThatTakesTheNameMeanwhileIsLeftAlone: while the stream is read, or rows are deleted, another
// table gets the name.
func TestATableThatTakesTheNameMeanwhileIsLeftAlone(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"read", "partition.deleted", "partition.verified"} {
		w := newPlain(t, 0)
		w.Exec("CREATE TABLE later (LIKE outbox INCLUDING ALL)")
		w.Exec("INSERT INTO later (doc_id, actor_id, counter, payload) SELECT 'd', 'a', n, '{}' FROM " +
			"generate_series(1, 3000) n")
		w.insert(0, 3000, true)
		w.insert(0, 2, false)
		w.confirm(w.Slot)
		if at != "read" {
			w.publish()
		}
		w.mustRemove()
		w.confirm(w.Slot)
		swapped := false
		swap := func() {
			if !swapped {
				swapped = true
				w.Exec("ALTER TABLE outbox RENAME TO former; ALTER TABLE later RENAME TO outbox")
			}
		}
		published := w.o.Published
		switch at {
		case "read":
			w.Exec("DELETE FROM later")
			w.o.Published = func(ctx context.Context, in Period, add func([16]byte) error) (Seen, error) {
				swap()
				return published(ctx, in, add)
			}
		default:
			w.o.Hit = func(point string) {
				if point == at {
					swap()
				}
			}
		}
		_, err := w.manager().Delete(outboxdb.Within(t))
		if at == "read" {
			wantFault(t, err, outbox.Transient, codeBusy)
			w.o.Published = published
			w.Exec("ALTER TABLE outbox RENAME TO later; ALTER TABLE former RENAME TO outbox")
			_, err = w.remove()
			if n := w.rows(); n != "2" {
				t.Errorf("%s: %s of 2 rows are left that were never published: %v", at, n, err)
			}
			continue
		}
		if n := w.rows(); n != "3000" {
			t.Errorf("%s: %s of 3000 rows are left of the table that got the name: %v", at, n, err)
		}
	}
}

// TestARowThatWasNeverPublishedTakesNoOthersWithIt: rows that were compared count as published when the
// stream has their messages no more, also beside one that was never published.
func TestARowThatWasNeverPublishedTakesNoOthersWithIt(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = time.Hour
	w.insert(0, 10, true)
	w.insert(0, 1, false)
	for range 2 {
		w.settle()
	}
	clear(w.published)
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
	_, err := w.remove()
	if f := wantFault(t, err, outbox.Gap, codeUnpublished); w.rows() != "1" {
		t.Errorf("%s rows are left: %v", w.rows(), f)
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

// TestADetachDoesNotStarve: transactions that hold the partition follow each other without a pause, as those
// of services that update rows by their id do. None of them is open for long.
func TestADetachDoesNotStarve(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 1)
	w.insert(0, 5, true)
	ctx, stop := context.WithCancel(outboxdb.Within(t))
	ended := make(chan struct{})
	const writers = 3
	for i := range writers {
		conn := w.other()
		go func() {
			defer func() { ended <- struct{}{} }()
			for ctx.Err() == nil {
				_, _ = conn.Exec(ctx, fmt.Sprintf("UPDATE outbox SET counter = counter WHERE id = "+
					"gen_random_uuid() AND %d = %[1]d RETURNING pg_sleep(0.01)", i))
				_, _ = conn.Exec(ctx, "BEGIN; UPDATE outbox SET counter = 0 WHERE doc_id = 'x'; "+
					"SELECT pg_sleep(0.02); COMMIT")
			}
		}()
	}
	var last string
	for range 10 {
		w.apply()
		if last = w.state(0); last == string(Sealed) {
			break
		}
	}
	stop()
	for range writers {
		<-ended
	}
	if last != string(Sealed) {
		t.Errorf("after ten runs it is %s", last)
	}
}
