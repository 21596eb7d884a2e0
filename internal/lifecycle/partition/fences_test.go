package partition

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// settle lets a run set a fence behind all rows, and the slot confirm it.
func (w *world) settle() {
	w.T.Helper()
	w.confirm(w.Slot)
	if _, err := w.remove(); err != nil { // it may be confirmed at once
		outboxdb.WantFault(w.T, err, outbox.Gap, codeUnpublished)
	}
	w.confirm(w.Slot)
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

// TestFewFencesAreKept, however often it runs, and they tell the time evenly: rows go when they have the age.
func TestFewFencesAreKept(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = 1000 * time.Hour
	w.insert(0, 10, true)
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
	w.cfg.Keep = 30 * time.Hour // of the 32 since then
	if s := w.mustRemove(); w.rows() != "0" {
		t.Errorf("%s rows are left: %v", w.rows(), s)
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

// TestAFenceInTheFutureIsLeftBehindAsTheHintSays: what the fault asks for helps a plain table, too. What was
// dropped stays so: another table may have its OID.
func TestAFenceInTheFutureIsLeftBehindAsTheHintSays(t *testing.T) {
	t.Parallel()
	w := newPlain(t, pgtest.Majors(t)[0])
	w.insert(0, 5, true)
	w.mustRemove()
	w.Exec("INSERT INTO outflow_partitions (root, root_oid, name, oid, state, system_id) SELECT root, " +
		"root_oid, 'gone', 1, 'dropped', system_id FROM outflow_partitions LIMIT 1")
	w.Exec("UPDATE outflow_partitions SET fence = 'FFFFFF/0'")
	m := w.manager()
	defer m.Close()
	_, err := m.Delete(outboxdb.Within(t))
	f := wantFault(t, err, outbox.Gap, codeBehind)
	m.Close()
	_, sql, _ := strings.Cut(f.Hint, "Then: ")
	w.Exec(sql)
	if state := w.Text("SELECT state FROM outflow_partitions WHERE name = 'gone'"); state != "dropped" {
		t.Errorf("one that was dropped is %s", state)
	}
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

// TestAClockThatWasAheadKeepsNothing: a fence that was set then lies in the future when the clock is right
// again. The rows behind it go when those set later are old enough, however many there are, and no sooner.
func TestAClockThatWasAheadKeepsNothing(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = 15 * time.Hour
	w.mustRemove()
	w.insert(0, 10, true)
	w.confirm(w.Slot)
	w.mustRemove()
	w.confirm(w.Slot)
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at + interval '1 year' WHERE name LIKE " +
		"'fence %' AND sealed_at = (SELECT max(sealed_at) FROM outflow_partitions)")
	m := w.manager()
	for i := range 2 * fences {
		_, err := m.Delete(outboxdb.Within(t))
		must.Succeed(t, err)
		w.confirm(w.Slot)
		w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '10 min'")
		if i == 50 && w.rows() != "10" {
			t.Fatalf("%s of 10 rows are left before their time", w.rows())
		}
	}
	if got := w.rows(); got != "0" {
		t.Errorf("%s rows are left", got)
	}
}
