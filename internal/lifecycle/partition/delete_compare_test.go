package partition

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// TestRowsOlderThanTheFirstRunAreComparedWithTheStream: those in no message stay, and are named.
func TestRowsOlderThanTheFirstRunAreComparedWithTheStream(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.insert(0, 12, false)
	w.insert(0, 40, true)
	w.mustRemove()
	w.insert(0, 25, true)
	w.confirm(w.Slot)
	w.Exec("SELECT pg_logical_emit_message(true, 'x', 'x')") // the next fence is not confirmed yet
	_, err := w.remove()
	f := wantFault(t, err, outbox.Gap, codeUnpublished)
	if !strings.Contains(f.Message, "12 rows of") || strings.Count(f.Message, "-4") < 10 {
		t.Error(f)
	}
	if got := w.rows(); got != "37" {
		t.Errorf("%s rows are left", got)
	}
	w.confirm(w.Slot)
	_, err = w.remove()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	if got := w.rows(); got != "12" {
		t.Errorf("%s rows are left", got)
	}
	w.o.AcceptUnpublished = 12
	w.confirm(w.Slot)
	if s := w.mustRemove(); s.Rows != 12 || w.rows() != "0" {
		t.Errorf("%v; %s rows are left", s, w.rows())
	}
}

// TestRowsAreDeletedWhenTheArchiveHasEachOfThem: also those that came after the first run, because a gap of
// the archive may have been accepted.
func TestRowsAreDeletedWhenTheArchiveHasEachOfThem(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Archive, w.cfg.Keep = true, time.Hour
	w.mustRemove()
	w.insert(0, 40, true)
	w.insert(0, 3, false)
	w.mustRemove()
	w.confirm(w.Slot)
	w.Exec("SELECT pg_logical_emit_message(true, 'x', 'x')") // the next fence is not confirmed yet
	w.out.Archive = Reach{Last: 9, Complete: 1, Whole: 1}
	if s := w.mustRemove(); s.Action != Wait || !strings.Contains(s.Why, "the archive ends at sequence 9") {
		t.Errorf("%v", s)
	}
	w.confirm(w.Slot)
	w.out.Archive = Reach{Last: 50, Complete: 1 << 60, Whole: 1}
	reads := len(w.reads)
	_, err := w.remove()
	f := wantFault(t, err, outbox.Gap, codeUnpublished)
	if !strings.Contains(f.Message, "3 rows of") ||
		!strings.Contains(f.Message, "no message of the archive") {
		t.Error(f)
	}
	if got := w.reads[reads:]; w.rows() != "3" || len(got) != 3 || got[0].Until.IsZero() ||
		got[1].Since.IsZero() || got[2] != (Period{}) {
		t.Errorf("%s rows are left; read %v", w.rows(), got)
	}
	w.o.AcceptUnpublished = 3
	w.confirm(w.Slot)
	if s := w.mustRemove(); s.Rows != 3 {
		t.Errorf("%v", s)
	}
	w.o.AcceptUnpublished, w.cfg.ID = 0, ""
	w.insert(0, 4, true)
	for range 2 { // the run before may have set a fence
		w.confirm(w.Slot)
		if _, err = w.remove(); err != nil {
			break
		}
	}
	if f := wantFault(t, err, outbox.Gap, codeUnpublished); !strings.Contains(f.Message, "the 4 rows of") ||
		w.rows() != "4" {
		t.Errorf("%s rows are left: %v", w.rows(), f)
	}
	w.out.Archive.Whole = 1 << 60
	w.mustRemove()
	if got := w.rows(); got != "0" {
		t.Errorf("%s rows are left", got)
	}
	w.out.Archive.Err = &outbox.Fault{Class: outbox.Gap, Code: "archive_damaged"}
	m := w.manager()
	_, err = m.Delete(outboxdb.Within(t))
	wantFault(t, err, outbox.Gap, "archive_damaged")
}

// TestFencesWhoseRowsHaveGoneAreNotReadFor: where retain.table.rows ends each run, none comes to its last
// page.
func TestFencesWhoseRowsHaveGoneAreNotReadFor(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Archive = true
	for range 4 {
		w.insert(0, 5, true)
		w.mustRemove()
		w.confirm(w.Slot)
		w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '1 day'")
	}
	w.Exec("DELETE FROM outbox WHERE ctid < '(0,11)'") // those of the first two
	w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
	if s := w.mustRemove(); w.rows() != "0" || len(w.reads) != 1 ||
		time.Since(w.reads[0].Since) > 84*time.Hour {
		t.Errorf("%s rows are left, and it read %v: %v", w.rows(), w.reads, s)
	}
}

// idsRead is how many rows of its temporary tables, of those names, a manager has read by scans of them.
func (w *world) idsRead(m *Manager, like string) (n int64) {
	w.T.Helper()
	_, err := m.conn.Exec(outboxdb.Within(w.T), "SELECT pg_stat_force_next_flush()")
	if postgres.SQLState(err) == postgres.StateUndefinedFunction {
		w.T.Skip("PostgreSQL 14 tells no session what it has counted")
	}
	must.Succeed(w.T, err)
	must.Succeed(w.T, m.conn.QueryRow(outboxdb.Within(w.T), "SELECT sum(pg_stat_get_tuples_returned(oid)) "+
		"FROM pg_class WHERE relnamespace = pg_my_temp_schema() AND relkind = 'r' AND relname LIKE $1", like).
		Scan(&n))
	return n
}

// TestABatchDoesNotReadAllIDs: where some rows stay, what is known of ids is read for all rows together, and
// not for each batch.
func TestABatchDoesNotReadAllIDs(t *testing.T) {
	t.Parallel()
	const rows = 12 * batchRows
	for _, archive := range []bool{true, false} {
		w := newPlain(t, 0)
		w.cfg.Archive = archive
		w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
		w.insert(0, rows, true)
		w.insert(0, maxMissing+1, false) // so many that it is not noted of the fence which they are
		w.settle()
		m := w.manager()
		_, err := m.Delete(outboxdb.Within(t))
		wantFault(t, err, outbox.Gap, codeUnpublished)
		if got := w.rows(); got != fmt.Sprint(maxMissing+1) {
			t.Errorf("archive %v: %s rows are left", archive, got)
		}
		if read := w.idsRead(m, "%"); read < rows || read > 6*rows {
			t.Errorf("archive %v: %d ids were read for %d rows", archive, read, rows)
		}
	}
}

// TestAFenceDoesNotReadAllIDs: some of each fence's rows stay, and the ids are read for all fences together.
func TestAFenceDoesNotReadAllIDs(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Keep = time.Hour
	const each, rows = 9, 100
	for range each {
		w.insert(0, rows, true)
		w.insert(0, 1, false)
		w.settle()
		w.settle()
	}
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
	m := w.manager()
	_, err := m.Delete(outboxdb.Within(t))
	wantFault(t, err, outbox.Gap, codeUnpublished)
	if got := w.rows(); got != fmt.Sprint(each) {
		t.Errorf("%s rows are left", got)
	}
	if read := w.idsRead(m, "outflow_known"); read < each*rows || read > 4*each*rows {
		t.Errorf("%d ids were read for %d rows", read, each*rows)
	}
}

// TestWithoutAnIDRowsOfAnotherStreamAreAcceptedOnce: after the stream was made anew nothing shows that the
// rows that there were are published. Those that come later went to the new one.
func TestWithoutAnIDRowsOfAnotherStreamAreAcceptedOnce(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.Archive, w.cfg.ID = true, ""
	w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
	w.mustRemove()
	w.out.Stream.Created = w.out.Stream.Created.Add(time.Hour)
	w.seen.Stream = w.out.Stream
	settled := func() error {
		w.insert(0, 4, true)
		var err error
		for range 3 {
			if _, err = w.remove(); err != nil || w.rows() == "0" {
				break
			}
			w.confirm(w.Slot)
		}
		return err
	}
	wantFault(t, settled(), outbox.Gap, codeUnpublished)
	w.o.AcceptUnpublished = 4
	w.confirm(w.Slot)
	w.mustRemove()
	w.o.AcceptUnpublished = 0
	if err := settled(); err != nil || w.rows() != "0" {
		t.Errorf("of the new stream %s rows are left: %v", w.rows(), err)
	}
}

// anew makes the slot anew, as uninstall and init do, after somebody has written rows that no slot reads.
func (w *world) anew(write func()) {
	w.T.Helper()
	w.Exec("SELECT pg_drop_replication_slot($1)", w.Slot)
	write()
	w.slot(w.Slot)
	m := w.manager()
	defer m.Close()
	must.Succeed(w.T, m.CheckForget(outboxdb.Within(w.T)))
	must.Succeed(w.T, m.Forget(outboxdb.Within(w.T)))
}

// TestRowsThatNoSlotHasReadStay: retention has run for long, the slot is dropped, services go on to write,
// and the slot is made anew. Rows of that time stay until they are published or accepted, and those that are
// written afterwards go as before.
func TestRowsThatNoSlotHasReadStay(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"id", ""} {
		w := newPlain(t, 0)
		w.cfg.ID = id
		w.insert(0, 3, true)
		w.mustRemove()
		w.confirm(w.Slot)
		w.mustRemove()
		w.anew(func() { w.insert(0, 7, false) })
		w.confirm(w.Slot)
		_, _ = w.remove() // sets a fence behind those rows, which may be confirmed already
		for range 2 {
			w.confirm(w.Slot)
			_, err := w.remove()
			f := wantFault(t, err, outbox.Gap, codeUnpublished)
			if !strings.Contains(f.Message, "7 rows of") {
				t.Error(f)
			}
		}
		if got := w.rows(); got != "7" {
			t.Errorf("id %q: %s of 7 rows are left that are in no message", id, got)
		}
		w.o.AcceptUnpublished = 7
		w.confirm(w.Slot)
		if s := w.mustRemove(); s.Rows != 7 {
			t.Errorf("id %q: %v", id, s)
		}
		w.o.AcceptUnpublished = 0
		w.insert(0, 4, id != "") // they came through the WAL that the slot reads
		for range 2 {
			w.confirm(w.Slot)
			w.mustRemove()
		}
		if got := w.rows(); got != "0" {
			t.Errorf("id %q: %s rows are left at the end", id, got)
		}
	}
}

// TestNotEverythingIsReadByEachRunForRowsOfAPlainTable that were never published: what came since goes, for
// which what is near is read.
func TestNotEverythingIsReadByEachRunForRowsOfAPlainTable(t *testing.T) {
	t.Parallel()
	for _, archive := range []bool{true, false} {
		t.Run(fmt.Sprintf("archive %v", archive), func(t *testing.T) {
			t.Parallel()
			notEverythingIsRead(t, archive)
		})
	}
}

func notEverythingIsRead(t *testing.T, archive bool) {
	t.Helper()
	w := newPlain(t, 0)
	w.cfg.Archive = archive
	w.out.Archive = Reach{Last: 9, Complete: 1 << 60, Whole: 1 << 60}
	w.insert(0, 1, false)
	pass, missing := &Pass{}, w.Text("SELECT id::text FROM outbox")
	w.o.Pass = pass
	more := 1
	refused := func(everything bool) {
		t.Helper()
		w.insert(0, 4, true)
		w.out.Repairing = "outflow repair --accept x" // nothing goes before this
		w.settle()
		w.out.Repairing, w.reads = "", nil
		_, err := w.remove()
		f := wantFault(t, err, outbox.Gap, codeUnpublished)
		if slices.Contains(w.reads, Period{}) != everything || w.rows() != fmt.Sprint(more) ||
			!strings.Contains(f.Message, units.Of(more, "row")+" of") ||
			!strings.Contains(f.Message, missing) ||
			strings.Contains(f.Message, "compared again at") == everything {
			t.Errorf("%s rows are left; it read %v: %v", w.rows(), w.reads, f)
		}
	}
	refused(true)
	pass.again = pass.again.Add(time.Hour)
	refused(false)
	w.stored = time.Now().Add(time.Hour) // they are published late, and looked for
	refused(false)
	w.stored = time.Time{}
	for range 2 { // nor for one more of them in each round
		w.insert(0, 1, false)
		more++
		refused(false)
	}
	pass.again = time.Now()
	refused(true)
	pass.again = pass.again.Add(time.Hour)
	w.publish()
	w.o.Pass = nil
	w.mustRemove()
	if w.rows() != "0" {
		t.Errorf("%s rows are left when all are published", w.rows())
	}
}
