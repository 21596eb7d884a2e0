package partition

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// newPlain makes an outbox that is not partitioned, on a server of its own: transactions of other tests are
// as good as those of services, and what is older than none of them stays.
func newPlain(t *testing.T, major int) *world {
	t.Helper()
	return newPlainOn(t, pgtest.Own(t, major, "wal_level=logical", "autovacuum=off"))
}

func newPlainOn(t *testing.T, srv *pgserver.Server) *world {
	t.Helper()
	w := newWorld(t, srv, 0)
	w.Exec("DROP TABLE outbox")
	w.Exec(`CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL,
		actor_id text NOT NULL, counter bigint NOT NULL, payload jsonb NOT NULL,
		created_at timestamptz NOT NULL DEFAULT now())`)
	w.Exec("ALTER PUBLICATION " + w.Slot + " ADD TABLE outbox")
	return w
}

// remove runs delete once.
func (w *world) remove() (Step, error) {
	w.T.Helper()
	m := w.manager()
	defer m.Close()
	steps, err := m.Delete(outboxdb.Within(w.T))
	if len(steps) != 1 {
		must.Succeed(w.T, err)
		w.T.Fatalf("%d steps", len(steps))
	}
	return steps[0], err
}

func (w *world) mustRemove() Step {
	w.T.Helper()
	s, err := w.remove()
	must.Succeed(w.T, err)
	return s
}

// publish publishes all rows that there are.
func (w *world) publish() {
	w.T.Helper()
	found, err := w.Conn.Query(outboxdb.Within(w.T), "SELECT id::text FROM outbox")
	must.Succeed(w.T, err)
	ids, err := pgx.CollectRows(found, pgx.RowTo[string])
	must.Succeed(w.T, err)
	for _, id := range ids {
		w.published[id] = true
	}
}

// rows counts them.
func (w *world) rows() string {
	w.T.Helper()
	return w.Text("SELECT count(*)::text FROM outbox")
}

// TestRowsAreDeletedBehindAFence: not before every slot has confirmed it, and not those of transactions that
// were open then, nor rows that were updated since.
func TestRowsAreDeletedBehindAFence(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		w := newPlain(t, major)
		w.insert(0, 3000, true)
		writer := w.other()
		within := outboxdb.Within(t)
		tx, err := writer.Begin(within)
		must.Succeed(t, err)
		_, err = tx.Exec(within, "SAVEPOINT s")
		must.Succeed(t, err)
		_, err = tx.Exec(within, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('open', "+
			"'a', 1, '{}')")
		must.Succeed(t, err)
		w.insert(0, 7, true) // of a transaction that is younger than the open one
		if s := w.mustRemove(); s.Action != Wait || !strings.Contains(s.Why, w.Slot) {
			t.Errorf("before the slot has confirmed it: %v", s)
		}
		if got := w.rows(); got != "3007" {
			t.Fatalf("%s rows", got)
		}
		must.Succeed(t, tx.Commit(within))
		w.Exec("UPDATE outbox SET payload = '[]' WHERE counter = 5 AND doc_id = 'd'")
		w.confirm(w.Slot)
		w.Exec("SELECT pg_logical_emit_message(true, 'x', 'x')") // the next fence is not confirmed yet
		s := w.mustRemove()
		// of the 2 with counter 5 one lies behind the fence, and was updated after it
		if got := w.rows(); s.Action != Delete || s.Rows != 2999 || got != "9" {
			t.Errorf("%v, %d; %s rows are left", s, s.Rows, got)
		}
		if got := w.Text("SELECT count(*)::text FROM outbox WHERE doc_id = 'open'"); got != "1" {
			t.Error("a row of the open transaction is gone")
		}
		w.published[w.Text("SELECT id::text FROM outbox WHERE doc_id = 'open'")] = true
		for range 2 {
			w.confirm(w.Slot)
			w.mustRemove()
		}
		if got := w.rows(); got != "0" {
			t.Errorf("%s rows at the end", got)
		}
	}
}

// TestRowsThatAreLockedAreLeftForTheNextRun.
func TestRowsThatAreLockedAreLeftForTheNextRun(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.insert(0, 10, true)
	w.mustRemove()
	w.confirm(w.Slot)
	tx, err := w.other().Begin(outboxdb.Within(t))
	must.Succeed(t, err)
	_, err = tx.Exec(outboxdb.Within(t), "SELECT FROM outbox WHERE counter <= 4 FOR UPDATE")
	must.Succeed(t, err)
	if s := w.mustRemove(); s.Rows != 6 {
		t.Errorf("%v", s)
	}
	must.Succeed(t, tx.Rollback(outboxdb.Within(t)))
	w.confirm(w.Slot)
	w.mustRemove()
	if got := w.rows(); got != "0" {
		t.Errorf("%s rows are left", got)
	}
}

func TestRowsStayAsLongAsARepairMayNeedThem(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = time.Hour
	w.insert(0, 10, true)
	w.mustRemove()
	w.confirm(w.Slot)
	if s := w.mustRemove(); s.Action != Wait || !strings.Contains(s.Why, "retain.table.keep") {
		t.Errorf("%v", s)
	}
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
	w.out.Repairing = "outflow repair --accept x"
	if s := w.mustRemove(); s.Action != Wait || !strings.Contains(s.Why, "has not finished") {
		t.Errorf("%v", s)
	}
	w.out.Repairing = ""
	w.cfg.Age = 24 * time.Hour
	if s := w.mustRemove(); s.Action != Wait || !strings.Contains(s.Why, "retain.table.age") {
		t.Errorf("%v", s)
	}
	w.cfg.Age = 0
	if s := w.mustRemove(); s.Rows != 10 {
		t.Errorf("%v", s)
	}
	w.Exec("UPDATE outflow_partitions SET fence = 'FFFFFF/0'")
	m := w.manager()
	_, err := m.Delete(outboxdb.Within(t))
	wantFault(t, err, outbox.Gap, codeBehind)
}

// TestADeleteLooksAgainBeforeItBegins: a repair may have begun while the archive was read, for hours, or the
// stream may have been made anew.
func TestADeleteLooksAgainBeforeItBegins(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.insert(0, 10, true)
	w.mustRemove()
	w.confirm(w.Slot)
	w.o.Hit = func(point string) {
		if point == "partition.verified" {
			w.out.Repairing = "outflow repair --accept x"
		}
	}
	if s := w.mustRemove(); w.rows() != "10" || !strings.Contains(s.Why, "has not finished") {
		t.Errorf("%s rows are left: %v", w.rows(), s)
	}
}

// TestTheTableStaysSmallWhileItIsWrittenTo: rows come without a pause, the slot confirms, rows go, and vacuum
// runs as the printed settings would let it. The table is not much larger than what it has to hold.
func TestTheTableStaysSmallWhileItIsWrittenTo(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	m := w.manager()
	set, err := m.Autovacuum(outboxdb.Within(t))
	must.Succeed(t, err)
	w.Exec(set)
	if again, err := m.Autovacuum(outboxdb.Within(t)); again != "" || err != nil {
		t.Errorf("it is set, and %q, %v", again, err)
	}
	m.Close()
	w.mustRemove()
	insert := func() {
		w.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'd', 'a', n,
			jsonb_build_object('text', repeat('x', 200)) FROM generate_series(1, 5000) n`)
		w.publish()
	}
	size := func() (n int64) {
		must.Succeed(t, w.Conn.QueryRow(outboxdb.Within(t), "SELECT pg_relation_size('outbox')").Scan(&n))
		return n
	}
	insert()
	insert()
	live := size() // what is live at most: a run leaves what came since the last one
	for range 6 {
		w.confirm(w.Slot)
		w.mustRemove()
		w.Exec("VACUUM (TRUNCATE false) outbox")
		insert()
	}
	if after := size(); after*10 > live*13 {
		t.Errorf("it grew from %d to %d bytes, and has %s rows", live, after, w.rows())
	}
}

// TestDeleteKilledOnTheWayGoesOn: the session ends between two batches, and the next run deletes the rest.
func TestDeleteKilledOnTheWayGoesOn(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.insert(0, 2500, true)
	w.mustRemove()
	w.confirm(w.Slot)
	for _, point := range []string{"partition.sealed", "partition.verified", "partition.deleted"} {
		killed := false
		var m *Manager
		w.o.Hit = func(at string) {
			if at == point && !killed {
				killed = true
				w.Exec("SELECT pg_terminate_backend($1::text::int, 10000)", fmt.Sprint(m.conn.PgConn().PID()))
			}
		}
		m = w.manager()
		if _, err := m.Delete(context.Background()); !killed || err == nil && point != "partition.verified" {
			t.Errorf("%s: %v, %v", point, killed, err)
		}
		m.Close()
	}
	w.o.Hit = nil
	if got := w.rows(); got != "1500" && got != "2500" {
		t.Errorf("%s rows", got)
	}
	w.mustRemove()
	if got := w.rows(); got != "0" {
		t.Errorf("%s rows are left", got)
	}
}

func TestAPartitionedTableIsNotDeletedFrom(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	m := w.manager()
	_, err := m.Delete(outboxdb.Within(t))
	wantFault(t, err, outbox.Fatal, codeKey)
}

// TestRowsOfOtherShardsStayForTheirRuns: also those that are older than the first run, which this shard's
// stream does not show to be published.
func TestRowsOfOtherShardsStayForTheirRuns(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Own = "doc_id = 'd'"
	w.Exec("SELECT pg_drop_replication_slot($1)", w.Slot)
	w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('other', 'a', 1, '{}')")
	w.slot(w.Slot)
	w.insert(0, 3, true)
	for range 4 {
		w.confirm(w.Slot)
		w.mustRemove()
	}
	if got := w.rows(); got != "1" {
		t.Errorf("%s rows are left, not that of the other shard alone", got)
	}
}

// TestTheTableOfStatesTakesAnyTransactionID: with its epoch it has 64 bits.
func TestTheTableOfStatesTakesAnyTransactionID(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.mustRemove()
	m := w.manager()
	defer m.Close()
	p := &Partition{Name: "far", State: Sealed, Horizon: 1 << 40}
	must.Succeed(t, m.note(outboxdb.Within(t), m.conn, p))
	got := w.Text("SELECT horizon::text FROM outflow_partitions WHERE name = 'far'")
	if got != "1099511627776" {
		t.Errorf("horizon %s", got)
	}
}

// TestTheOldestRowsGoWhereverTheyAre: where retain.table.rows says how many stay, those that came last do, on
// whatever page, and with an archive only those are compared that are to go.
func TestTheOldestRowsGoWhereverTheyAre(t *testing.T) {
	t.Parallel()
	for _, archive := range []bool{true, false} {
		w := newPlain(t, 0)
		w.cfg.Archive, w.cfg.Rows = archive, 300
		w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
		fence := func() {
			w.confirm(w.Slot)
			w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '1 day'")
			w.mustRemove()
		}
		w.mustRemove()
		w.insert(0, 1000, true)
		w.Exec("UPDATE outbox SET doc_id = 'oldest' WHERE counter > 900") // they are on the last pages
		w.Exec("DELETE FROM outbox WHERE doc_id = 'd'")
		w.Exec("VACUUM (TRUNCATE false) outbox")      // the first ones are free
		w.out.Repairing = "outflow repair --accept x" // nothing goes
		fence()
		for range 3 {
			w.insert(0, 150, true)
			fence()
		}
		w.confirm(w.Slot)
		w.Exec("ANALYZE outbox")
		w.out.Repairing, w.reads = "", nil
		s := w.mustRemove()
		if w.rows() != "300" || s.Rows != 250 {
			t.Errorf("archive %v: %s rows are left: %v", archive, w.rows(), s)
		}
		if got := w.Text("SELECT count(*)::text FROM outbox WHERE doc_id = 'oldest'"); got != "0" {
			t.Errorf("archive %v: %s of the oldest 100 rows are left", archive, got)
		}
		if archive && (len(w.reads) != 1 || time.Since(w.reads[0].Until) < 24*time.Hour) {
			t.Errorf("it read %v", w.reads)
		}
		w.reads = nil
		if s := w.mustRemove(); s.Action != Leave || archive && len(w.reads) > 0 || w.rows() != "300" {
			t.Errorf("archive %v: %s rows are left, and it read %v: %v", archive, w.rows(), w.reads, s)
		}
	}
}
