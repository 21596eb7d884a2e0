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

// TestRowsOfOtherShardsThatAreWrittenToASealedPartitionStay: no slot was sent them, of whatever shard.
func TestRowsOfOtherShardsThatAreWrittenToASealedPartitionStay(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"sealed", "verified"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 1)
			w.cfg.Own = "counter % 2 = 0"
			w.insert(0, 5, true)
			write := func() {
				w.Exec(`INSERT INTO outbox_0 (doc_id, actor_id, counter, payload, created_at)
					VALUES ('d', 'a', 7, '{}', '2024-05-01 01:00:00Z')`)
			}
			w.apply()
			w.want(0, Sealed)
			if when == "sealed" {
				write()
			} else {
				w.o.Hit = func(point string) {
					if point == "partition.verified" {
						write()
						w.o.Hit = nil
					}
				}
			}
			var err error
			for range 6 {
				w.confirm(w.Slot)
				if _, err = w.try(); err != nil || !w.exists(0) {
					break
				}
			}
			if !w.exists(0) {
				t.Fatal("a row of another shard, which no slot was sent, is gone")
			}
			wantFault(t, err, outbox.Gap, codeUnpublished)
		})
	}
}

// TestRowsOfOtherServersInAMadePartitionStay: Outflow made the partition, a subscription brought rows, which
// Outflow does not publish, and retention has removed the stream's oldest messages.
func TestRowsOfOtherServersInAMadePartitionStay(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"id", ""} {
		w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 0)
		w.cfg.OwnOnly, w.cfg.ID = true, id
		w.cfg.Every, w.cfg.Slack = time.Second, 1000000*time.Hour
		w.apply() // makes some of a second each
		w.Exec("CREATE SUBSCRIPTION away CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false)")
		w.Exec("INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) SELECT oid, " +
			"'outbox'::regclass, 'r' FROM pg_subscription")
		t.Cleanup(func() {
			w.Exec("ALTER SUBSCRIPTION away SET (slot_name = NONE)")
			w.Exec("DROP SUBSCRIPTION away")
		})
		made := w.Text("SELECT name FROM outflow_partitions WHERE made ORDER BY lower LIMIT 1")
		w.Exec("SELECT pg_replication_origin_create('away')")
		w.Exec("SELECT pg_replication_origin_session_setup('away')")
		w.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at)
			SELECT 'd', 'a', 1, '{}', lower FROM outflow_partitions WHERE name = $1`, made)
		w.Exec("SELECT pg_replication_origin_session_reset()")
		w.cfg.Slack = 0
		outboxdb.Eventually(t, "the made one is over", func() bool {
			return w.Text("SELECT (upper < now())::text FROM outflow_partitions WHERE name = $1",
				made) == "true"
		})
		w.seen.Oldest, w.seen.Removed = time.Now().Add(time.Hour), true
		var err error
		for range 4 {
			if _, err = w.try(); err != nil {
				break
			}
			w.confirm(w.Slot)
		}
		if w.Text("SELECT (to_regclass($1) IS NULL)::text", made) == "true" {
			t.Errorf("id %q: a row that no Outflow here publishes is gone: %s", id, w.Text(
				"SELECT state || ' accepted ' || accepted FROM outflow_partitions WHERE name = $1", made))
			continue
		}
		wantFault(t, err, outbox.Gap, codeUnpublished)
	}
}

// TestRowsWithoutAnIDHaveAWayOut: they are named as what they are, and can be accepted.
func TestRowsWithoutAnIDHaveAWayOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 1)
	w.Exec("ALTER TABLE outbox DROP CONSTRAINT outbox_pkey")
	w.Exec("ALTER TABLE outbox ALTER id DROP NOT NULL")
	w.insert(0, 3, true)
	w.Exec("UPDATE outbox SET id = NULL")
	var err error
	for range 4 {
		if _, err = w.try(); err != nil {
			break
		}
		w.confirm(w.Slot)
	}
	if f := wantFault(t, err, outbox.Gap, codeUnpublished); !strings.Contains(f.Message, "NULL, NULL, NULL") {
		t.Error(f.Message)
	}
	w.o.AcceptUnpublished = 3
	w.apply()
	if w.exists(0) {
		t.Error("it stays")
	}
}

// TestAPartitionThatAPersonDetachesAfterADetachThatFailedIsTheirs: Outflow could not detach it.
func TestAPartitionThatAPersonDetachesAfterADetachThatFailedIsTheirs(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 1)
	w.Exec("CREATE TABLE rest PARTITION OF outbox DEFAULT")
	w.insert(0, 3, true)
	outboxdb.Eventually(t, "PostgreSQL counts the rows", func() bool {
		return w.Text("SELECT pg_stat_get_tuples_inserted('outbox_0'::regclass)::text") == "3"
	})
	w.cfg.Slack = 1000000 * time.Hour
	w.apply()
	w.cfg.Slack = 0
	within := outboxdb.Within(t)
	tx, err := w.other().Begin(within)
	must.Succeed(t, err)
	_, err = tx.Exec(within, "SELECT FROM outbox LIMIT 1")
	must.Succeed(t, err)
	w.apply()
	must.Succeed(t, tx.Rollback(within))
	w.cfg.Age = 100 * 365 * 24 * time.Hour // everything is to stay
	w.apply()
	w.Exec("ALTER TABLE outbox DETACH PARTITION outbox_0")
	for range 4 {
		w.confirm(w.Slot)
		w.apply()
	}
	if !w.exists(0) {
		t.Error("it was dropped")
	}
}

// TestRowsOfAPlainTableWaitForAnOutflowWithoutASlot, as partitions do, unless that one reads rows of another
// shard only, or the operator has named its slot.
func TestRowsOfAPlainTableWaitForAnOutflowWithoutASlot(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.insert(0, 5, true)
	w.out.Others = []string{"gone"}
	w.mustRemove()
	for range 2 {
		w.confirm(w.Slot)
		if s := w.mustRemove(); s.Action != Wait || s.Clause != "shards" ||
			!strings.Contains(s.Why, "slot gone does not exist") {
			t.Errorf("%v by %q", s, s.Clause)
		}
	}
	if got := w.rows(); got != "5" {
		t.Fatalf("%s of 5 rows are left that another Outflow may not have read", got)
	}
	w.out.Apart = []string{"gone"}
	w.confirm(w.Slot)
	if w.mustRemove(); w.rows() != "0" {
		t.Errorf("%s rows are left, none of which is of the other's shard", w.rows())
	}
	w.insert(0, 5, true)
	w.out.Apart, w.cfg.OtherSlots = nil, []string{"gone"}
	for range 2 {
		w.confirm(w.Slot)
		w.mustRemove()
	}
	if got := w.rows(); got != "0" {
		t.Errorf("%s rows are left, although the slot is named", got)
	}
}

// TestTheRepairOfAnotherOutflowFindsRowsThatAreArchivedHere: the archive is not that of its stream. Of a
// plain table no row goes that is of another shard.
func TestTheRepairOfAnotherOutflowFindsRowsThatAreArchivedHere(t *testing.T) {
	t.Parallel()
	for _, k := range []struct {
		plain bool
		of    Readers
		waits bool
	}{
		{true, Readers{}, false},
		{true, Readers{Others: []string{"second"}}, true},
		{true, Readers{May: map[string]string{"second": "why"}}, true},
		{true, Readers{Others: []string{"second"}, Apart: []string{"second"}}, false},
		{false, Readers{}, false},
		{false, Readers{Others: []string{"second"}}, true},
		{false, Readers{May: map[string]string{"second": "why"}}, true},
		{false, Readers{Others: []string{"second"}, Apart: []string{"second"}}, true},
	} {
		t.Run(fmt.Sprintf("%+v", k), func(t *testing.T) {
			t.Parallel()
			srv := pgtest.Own(t, 0, "wal_level=logical", "autovacuum=off")
			w := newWorld(t, srv, 1)
			if k.plain {
				w = newPlainOn(t, srv)
			}
			w.slot("second")
			w.cfg.Archive, w.cfg.Keep, w.out.Readers = true, time.Hour, k.of
			w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
			w.insert(0, 5, true)
			run := func() string {
				w.confirm(w.Slot)
				w.confirm("second")
				if k.plain {
					return w.mustRemove().Why
				}
				return why(w.apply(), 0)
			}
			run()
			said := run()
			if waits := w.rows() == "5" || !k.plain && w.exists(0); waits != k.waits {
				t.Errorf("it waits: %v; %s", waits, said)
			}
			if k.waits && !strings.Contains(said, "retain.table.keep") {
				t.Errorf("it says %q", said)
			}
		})
	}
}
