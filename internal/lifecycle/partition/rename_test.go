package partition

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// snapshot is how many rows a snapshot of the outbox has, those of detached partitions among them.
func (w *world) snapshot() int {
	w.T.Helper()
	s, err := tablesnapshot.Open(outboxdb.Within(w.T), catalog.Config{URL: w.URL, Table: w.cfg.Table,
		Slot: w.Slot, Publication: w.Slot}, "")
	must.Succeed(w.T, err)
	defer s.Close()
	q := tablesnapshot.Query{Mapping: outboxdb.Mapping, ID: "id"}
	q.Mapping.Key = ""
	n, err := s.Count(outboxdb.Within(w.T), q)
	must.Succeed(w.T, err)
	return int(n)
}

// survey is that of the outbox.
func (w *world) survey() Survey {
	w.T.Helper()
	m := w.manager()
	defer m.Close()
	s, err := Look(outboxdb.Within(w.T), w.Conn, m.root.Table, w.cfg.OtherSlots)
	must.Succeed(w.T, err)
	return s
}

// left are the first partitions that are still there, under whatever name.
func (w *world) left() string {
	w.T.Helper()
	return w.Text("SELECT count(*)::text FROM pg_class WHERE relkind = 'r' AND (relname ~ '^outbox_[01]$' " +
		"OR relname = 'renamed')")
}

// move moves the outbox to another schema.
func (w *world) move() {
	w.T.Helper()
	w.Exec("CREATE SCHEMA notes; ALTER TABLE outbox SET SCHEMA notes")
	w.cfg.Table = "notes.outbox"
}

// replace renames the outbox, and makes another one of its name, without partitions.
func (w *world) replace() {
	w.T.Helper()
	w.Exec("ALTER TABLE outbox RENAME TO former")
	w.Exec("CREATE TABLE outbox (LIKE former INCLUDING ALL) PARTITION BY RANGE (created_at)")
	w.Exec("ALTER PUBLICATION " + w.Slot + " ADD TABLE outbox")
}

// renames are what a person may do to an outbox with two partitions, and how it is called then.
var renames = []struct{ sql, table string }{
	{"ALTER TABLE outbox RENAME TO note_events", "note_events"},
	{"CREATE SCHEMA notes; ALTER TABLE outbox SET SCHEMA notes; ALTER TABLE notes.outbox RENAME TO events",
		"notes.events"},
	{"ALTER SCHEMA public RENAME TO notes", "notes.outbox"},
	{"ALTER TABLE outbox_0 RENAME TO renamed", "outbox"},
	{"ALTER TABLE outbox_0 RENAME TO x; ALTER TABLE outbox_1 RENAME TO outbox_0; ALTER TABLE x RENAME TO " +
		"outbox_1", "outbox"},
	{"CREATE SCHEMA notes; ALTER TABLE outbox_0 SET SCHEMA notes; ALTER TABLE outbox SET SCHEMA notes",
		"notes.outbox"},
	{"CREATE SCHEMA notes; CREATE TABLE notes.outflow_partitions (LIKE outflow_partitions INCLUDING ALL); " +
		"ALTER TABLE outbox SET SCHEMA notes", "notes.outbox"}, // where its owner has another outbox
}

// TestARenamedOutboxKeepsItsDetachedPartitions: readers find them at once, and the next runs let them go.
// Their names in the table of states are those of now, so that they are found after a dump and restore as
// well.
func TestARenamedOutboxKeepsItsDetachedPartitions(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		for _, restored := range []string{"", "system_id = '1', oid = 1, root_oid = 1",
			"oid = 1, root_oid = 1"} { // into another cluster, or another database of the same one
			for _, to := range renames {
				w := newWorld(t, srv, 2)
				w.insert(0, 5, true)
				w.insert(1, 4, true)
				w.apply()
				w.want(0, Sealed)
				w.want(1, Sealed)
				w.Exec(to.sql)
				w.cfg.Table = to.table
				if n, s := w.snapshot(), w.survey(); n != 9 || !s.Managed || len(s.Blocked) != 2 {
					t.Errorf("%s: %d rows, %+v", to.sql, n, s)
				}
				if restored != "" {
					w.apply()
					states := w.manager().ledger()
					w.Exec("UPDATE " + states + " SET " + restored)
					if n := w.snapshot(); n != 9 {
						t.Errorf("%s, dumped and restored: %d rows", to.sql, n)
					}
					w.apply() // they are sealed again
				}
				w.confirm(w.Slot)
				w.apply()
				if left := w.left(); left != "0" {
					t.Errorf("%s, restored with %q: %s partitions did not go", to.sql, restored, left)
				}
			}
		}
	})
}

// TestAnOutboxOfTheFormerNameHasPartitionsOfItsOwn: a table is known by its OID, not by a name that another
// one had. Both have rows in one table of states.
func TestAnOutboxOfTheFormerNameHasPartitionsOfItsOwn(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 2)
	w.replace()
	if n := w.snapshot(); n != 0 {
		t.Errorf("the new one has %d rows", n)
	}
	w.cfg.Table = "former"
	w.apply()
	w.cfg.Table = "outbox"
	w.Exec("CREATE TABLE now PARTITION OF outbox FOR VALUES FROM (now()) TO (MAXVALUE)")
	w.apply()
	w.Exec("ALTER TABLE outbox RENAME TO later")
	w.Exec("ALTER TABLE former RENAME TO outbox")
	w.confirm(w.Slot)
	w.apply()
	if w.left() != "0" {
		t.Error("the former one's partitions did not go")
	}
	if got := w.Text(`SELECT string_agg(root, ' ' ORDER BY root) FROM outflow_partitions WHERE name =
		'"public"."now"'`); !strings.HasPrefix(got, `"public"."outbox" of OID `) {
		t.Errorf("the other one's partition is noted of %s", got)
	}
	w.cfg.Table = "later"
	w.apply()
	if got := w.Text(`SELECT root FROM outflow_partitions WHERE name = '"public"."now"'`); got !=
		`"public"."later"` {
		t.Errorf("then it is noted of %s", got)
	}
}

// TestPartitionsOfTheFormerNameAreInTheWay of those that the outbox with that name gets. The hint names a way
// out that loses neither: the former one goes on to use its partitions, one that is detached among them.
func TestPartitionsOfTheFormerNameAreInTheWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 5, true)
	w.apply()
	w.want(0, Sealed)
	w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', 1, '{}')")
	last := w.Text("SELECT name FROM outflow_partitions ORDER BY lower DESC LIMIT 1")
	w.Exec("ALTER TABLE " + last + " RENAME TO last")
	w.Exec("ALTER TABLE outbox_0 RENAME TO " + strings.TrimPrefix(last, `"public".`))
	w.Exec("ALTER TABLE outbox RENAME TO former")
	w.Exec("CREATE TABLE outbox (LIKE former INCLUDING ALL) PARTITION BY RANGE (created_at)")
	_, err := w.try()
	for i := 0; err != nil && i < 10; i++ {
		f := wantFault(t, err, outbox.Fatal, codeTaken)
		_, hint, _ := strings.Cut(f.Hint, ": ")
		statement, _, _ := strings.Cut(hint, "…")
		w.Exec(statement + fmt.Sprint("kept_", i))
		_, err = w.try()
	}
	must.Succeed(t, err)
	if n := w.snapshot(); n != 0 {
		t.Errorf("the new outbox has %d rows", n)
	}
	w.cfg.Table = "former"
	w.apply()
	if n := w.snapshot(); n != 6 {
		t.Errorf("the former outbox has %d rows", n)
	}
	w.confirm(w.Slot)
	w.apply()
	if n := w.snapshot(); n != 1 {
		t.Errorf("its detached partition did not go: it has %d rows", n)
	}
}

// TestATableOfStatesWithoutOIDsIsTakenUp: an older version made it. Nothing that it says is lost.
func TestATableOfStatesWithoutOIDsIsTakenUp(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 2)
	w.Exec("ALTER TABLE outflow_partitions DROP COLUMN root_oid")
	all := "SELECT string_agg(concat_ws(' ', root, name, oid, state, fence, rows, hash, sealed_at), ', ' " +
		"ORDER BY name) FROM outflow_partitions WHERE state = 'sealed'"
	before := w.Text(all)
	if n := w.snapshot(); n != 5 {
		t.Errorf("%d rows", n)
	}
	for range 2 {
		w.apply()
		if now := w.Text(all); now != before {
			t.Errorf("it says\n%s, and before\n%s", now, before)
		}
	}
	if n := w.Text("SELECT count(*)::text FROM outflow_partitions WHERE root_oid IS DISTINCT FROM " +
		"'outbox'::regclass"); n != "0" {
		t.Errorf("of %s rows the outbox is not known", n)
	}
}

// TestRowsOfARenamedPlainTableGoAsBefore: what its first fence shows is not forgotten.
func TestRowsOfARenamedPlainTableGoAsBefore(t *testing.T) {
	t.Parallel()
	w := newPlain(t, pgtest.Majors(t)[0])
	w.insert(0, 3, false)
	w.mustRemove()
	first := w.Text("SELECT horizon::text FROM outflow_partitions WHERE name = $1", baseline)
	w.move()
	w.mustRemove()
	if got := w.Text("SELECT string_agg(horizon::text, ' ') FROM notes.outflow_partitions WHERE name = $1",
		baseline); got != first {
		t.Errorf("its first fence is %s, and was %s", got, first)
	}
	if n := w.Text("SELECT count(*)::text FROM public.outflow_partitions"); n != "0" {
		t.Errorf("%s fences stayed behind", n)
	}
}

// TestASlotThatIsMadeAnewIsNotedOfARenamedOutbox, before a run has found its new name.
func TestASlotThatIsMadeAnewIsNotedOfARenamedOutbox(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.Exec("UPDATE outflow_partitions SET made = true")
	w.move()
	m := w.manager()
	must.Succeed(t, m.CheckForget(outboxdb.Within(t)))
	must.Succeed(t, m.Forget(outboxdb.Within(t)))
	if got := w.Text("SELECT bool_or(made)::text FROM outflow_partitions"); got != "false" {
		t.Error("what the former slot has shown is not forgotten")
	}
}

// TestAnErasureFindsThePartitionsOfARenamedOutbox.
func TestAnErasureFindsThePartitionsOfARenamedOutbox(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.move()
	m := w.manager()
	cut, err := m.EraseDocument(outboxdb.Within(t), Document{Column: "doc_id", Name: "d", ID: "id"}, 0,
		func(context.Context) (uint64, error) { return 1, nil })
	if err != nil || cut.Rows != 5 {
		t.Errorf("%+v, %v", cut, err)
	}
	if got := w.Text("SELECT state || ' ' || rows FROM notes.outflow_partitions WHERE name = $1",
		quoted("public", old(0))); got != "sealed 0" {
		t.Errorf("it is %s", got)
	}
}

// TestOwnersDoNotShareATableOfStates: the second of two outboxes in a schema is refused, with a way out that
// leaves the first one's states alone.
func TestOwnersDoNotShareATableOfStates(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 2)
	states := w.Text("SELECT string_agg(concat_ws(' ', name, state, fence), ', ' ORDER BY name) FROM " +
		"outflow_partitions")
	role := w.Text("SELECT quote_ident('second_' || current_database())")
	w.Exec("CREATE ROLE " + role)
	t.Cleanup(func() { w.Exec("DROP OWNED BY " + role + " CASCADE; DROP ROLE " + role) })
	w.Exec("CREATE TABLE second (LIKE outbox INCLUDING ALL) PARTITION BY RANGE (created_at)")
	w.Exec("ALTER TABLE second OWNER TO " + role)
	w.Exec("GRANT CREATE ON SCHEMA public TO " + role)
	w.cfg.Table = "second"
	_, err := w.try()
	f := wantFault(t, err, outbox.Fatal, "foreign_owner")
	if !strings.Contains(f.Hint, "leave the table to it") || !strings.Contains(f.Hint, "SET SCHEMA") {
		t.Errorf("the hint is %q", f.Hint)
	}
	w.Exec("CREATE SCHEMA second AUTHORIZATION " + role + "; ALTER TABLE second SET SCHEMA second")
	w.cfg.Table = "second.second"
	w.apply()
	if n := w.Text("SELECT count(*)::text FROM second.outflow_partitions"); n == "0" {
		t.Error("the second one has no states")
	}
	if now := w.Text("SELECT string_agg(concat_ws(' ', name, state, fence), ', ' ORDER BY name) FROM " +
		"public.outflow_partitions"); now != states {
		t.Errorf("the first one's states are\n%s, and were\n%s", now, states)
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
	w := newSealed(t, 1)
	w.want(0, Sealed)
	w.replace()
	w.Exec("ALTER TABLE outbox_0 RENAME TO former_0")
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
