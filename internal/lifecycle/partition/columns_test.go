package partition

import (
	"context"
	"fmt"
	"slices"
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

// columns are the values of columns in a snapshot of the outbox, in some order.
func (w *world) columns(id string, names ...string) (all []string, err error) {
	w.T.Helper()
	s, err := tablesnapshot.Open(outboxdb.Within(w.T), catalog.Config{URL: w.URL, Table: w.cfg.Table,
		Slot: w.Slot, Publication: w.Slot}, "")
	must.Succeed(w.T, err)
	defer s.Close()
	q := tablesnapshot.Query{Mapping: outboxdb.Mapping, ID: id, Columns: names}
	q.Mapping.Key = ""
	err = s.Rows(outboxdb.Within(w.T), q, func(v [][]byte) error {
		row := make([]string, len(v))
		for i, value := range v {
			if row[i] = string(value); value == nil {
				row[i] = "NULL"
			}
		}
		all = append(all, strings.Join(row, " "))
		return nil
	})
	slices.Sort(all)
	return all, err
}

// newRetyped makes an outbox whose first partition is sealed with two rows, and has columns of types that the
// outbox leaves behind.
func newRetyped(t *testing.T, srv *pgserver.Server) *world {
	t.Helper()
	w := newWorld(t, srv, 1)
	w.Exec("ALTER TABLE outbox ALTER counter TYPE int, ALTER actor_id TYPE varchar(9), ALTER payload " +
		"TYPE json, ADD number int NOT NULL DEFAULT 7")
	w.insert(0, 2, true)
	w.apply()
	w.want(0, Sealed)
	return w
}

// TestColumnsOfADetachedPartitionAreReadAsTheOutboxs: ALTER TABLE of the outbox does not reach it. One that
// was renamed is refused, and never read as NULL, until the partition has it as well, by the statement that
// is named; one that was added is NULL; another type is cast, or refused.
func TestColumnsOfADetachedPartitionAreReadAsTheOutboxs(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		alter   string
		columns string
		want    []string // of the two rows; nil: it is refused
		says    string
		mend    string // what the hint says, or a part of it
		mended  []string
	}{
		{alter: "ALTER counter TYPE bigint, ALTER actor_id TYPE text, ALTER payload TYPE jsonb",
			columns: "counter actor_id payload", want: []string{"1 a {}", "2 a {}"}},
		{alter: "ALTER counter TYPE text", columns: "counter doc_id", want: []string{"1 d", "2 d"}},
		{alter: "ADD note text", columns: "doc_id counter note", want: []string{"d 1 NULL", "d 2 NULL"}},
		{alter: "RENAME counter TO serial", columns: "doc_id actor_id", want: []string{"d a", "d a"}},
		{alter: "RENAME counter TO serial", columns: "doc_id serial",
			says: `table "public"."outbox_0" lacks column "serial" of the outbox "public"."outbox"`,
			mend: `ALTER TABLE "public"."outbox_0" RENAME COLUMN "counter" TO "serial"`, mended: []string{"d 1", "d 2"}},
		{alter: "RENAME number TO size", columns: "size", says: `lacks column "size"`, // the last one
			mend: `ALTER TABLE "public"."outbox_0" RENAME COLUMN "number" TO "size"`, mended: []string{"7", "7"}},
		{alter: "RENAME payload TO body; ALTER TABLE outbox ADD payload text", columns: "body",
			says: `lacks column "body"`, mend: `ALTER TABLE "public"."outbox_0" RENAME COLUMN ... TO "body"`},
		{alter: "ADD note text, DROP number", columns: "note", says: `lacks column "note"`,
			mend: `ALTER TABLE "public"."outbox_0" ADD COLUMN "note" text`, mended: []string{"NULL", "NULL"}},
		{alter: "ALTER payload TYPE bytea USING 'a'", columns: "payload",
			says: `column "payload" of table "public"."outbox_0" is of type json, and of the outbox`,
			mend: `ALTER TABLE "public"."outbox_0" ALTER COLUMN "payload" TYPE bytea`},
	} {
		t.Run(c.alter+" "+c.columns, func(t *testing.T) {
			t.Parallel()
			w := newRetyped(t, pgtest.Server(t))
			w.Exec("ALTER TABLE outbox " + c.alter)
			got, err := w.columns("id", strings.Fields(c.columns)...)
			if c.want != nil {
				if err != nil || !slices.Equal(got, c.want) {
					t.Errorf("%q, %v", got, err)
				}
				return
			}
			f := wantFault(t, err, outbox.Fatal, catalog.CodePartitionColumns)
			if !strings.Contains(f.Message, c.says) || !strings.Contains(f.Hint, c.mend) {
				t.Errorf("%s; %s", f.Message, f.Hint)
			}
			if c.mended != nil {
				w.Exec(c.mend)
				got, err := w.columns("id", strings.Fields(c.columns)...)
				if err != nil || !slices.Equal(got, c.mended) {
					t.Errorf("%s: %q, %v", c.mend, got, err)
				}
			}
		})
	}
}

// TestAnErasureReadsColumnsOfADetachedPartitionAsTheOutboxs: one that was renamed is refused before a row
// goes, and those that an erasure does not read are of no matter.
func TestAnErasureReadsColumnsOfADetachedPartitionAsTheOutboxs(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 1)
	w.insert(0, 2, true)
	w.apply()
	w.Exec("ALTER TABLE outbox ALTER id TYPE text, ALTER actor_id TYPE varchar(9); ALTER TABLE outbox " +
		"RENAME payload TO body; ALTER TABLE outbox RENAME doc_id TO doc")
	w.Exec("INSERT INTO outbox (id, doc, actor_id, counter, body) SELECT gen_random_uuid(), 'd', 'a', 9, " +
		"'{}' FROM generate_series(1, 3)")
	w.Exec("CREATE TABLE noted (sum uuid, slot text, request text)")
	d := Document{Column: "doc", Name: "d", ID: "id", Noted: "public.noted", Slot: "s", Request: "r",
		Keep: w.Text("SELECT id::text FROM outbox_0 LIMIT 1")}
	m := w.manager()
	erase := func() (Cut, error) {
		return m.EraseDocument(outboxdb.Within(t), d, 0,
			func(context.Context) (uint64, error) { return 1, nil })
	}
	_, err := m.CountDocument(outboxdb.Within(t), d)
	wantFault(t, err, outbox.Fatal, catalog.CodePartitionColumns)
	_, err = erase()
	wantFault(t, err, outbox.Fatal, catalog.CodePartitionColumns)
	if n := w.Text("SELECT count(*)::text FROM outbox"); n != "3" {
		t.Errorf("%s rows are left before it was refused", n)
	}
	w.Exec("ALTER TABLE outbox_0 RENAME doc_id TO doc")
	n, err := m.CountDocument(outboxdb.Within(t), d)
	must.Succeed(t, err)
	cut, err := erase()
	if err != nil || n != 4 || cut.Rows != 4 {
		t.Errorf("%d rows, %+v, %v", n, cut, err)
	}
	if got := w.Text("SELECT count(*) || ' ' || (SELECT count(*) FROM outbox_0) FROM noted"); got != "4 1" {
		t.Errorf("noted, and left: %s", got)
	}
}

// TestADocumentIsErasedFromADetachedPartitionOfAnotherType: its messages have it as that type printed it,
// which may be no value of the outbox's type, or another one.
func TestADocumentIsErasedFromADetachedPartitionOfAnotherType(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		was, now string // the column's type
		doc      string
		rows     int64
	}{
		{"varchar(9)", "text", "gone", 2},
		{"text", "varchar(3)", "gone", 2},
		{"char(5)", "char(9)", "gone ", 2},
		{"char(5)", "char(9)", "gone     ", 0},
		{"int", "bigint", "5000000000", 0},
		{"numeric(4,1)", "numeric(9,3)", "7.5", 2},
		{"inet", "text", "192.0.2.1", 2},
		{"boolean", "text", "t", 2},
		{"bytea", "bytea", "gone", 2},
		{"", "bytea", "gone", 0}, // it was added
	} {
		w := newWorld(t, pgtest.Server(t), 1)
		if c.was != "" {
			w.Exec("ALTER TABLE outbox ADD doc " + c.was)
		}
		w.insert(0, 2, true)
		if c.rows > 0 || c.was == "char(5)" {
			w.Exec("UPDATE outbox SET doc = '" + c.doc + "'")
		}
		w.insert(0, 1, true) // without a document
		w.apply()
		w.want(0, Sealed)
		if c.was == "" {
			w.Exec("ALTER TABLE outbox ADD doc " + c.now)
		} else {
			w.Exec("ALTER TABLE outbox ALTER doc TYPE " + c.now)
		}
		m := w.manager()
		d := Document{Column: "doc", Name: c.doc, ID: "id"}
		n, err := m.CountDocument(outboxdb.Within(t), d)
		must.Succeed(t, err)
		cut, err := m.EraseDocument(outboxdb.Within(t), d, 0,
			func(context.Context) (uint64, error) { return 1, nil })
		must.Succeed(t, err)
		if n != c.rows || cut.Rows != c.rows {
			t.Errorf("%s, then %s: %q has %d rows, %d erased, want %d", c.was, c.now, c.doc, n, cut.Rows,
				c.rows)
		}
	}
}

// TestAPartitionWhoseIDWasRenamedIsRefused by apply, with the statement that mends it.
func TestAPartitionWhoseIDWasRenamedIsRefused(t *testing.T) {
	t.Parallel()
	w := newSealed(t, 1)
	w.Exec("ALTER TABLE outbox RENAME id TO event_id")
	w.cfg.ID = "event_id"
	w.confirm(w.Slot)
	_, err := w.try()
	f := wantFault(t, err, outbox.Fatal, catalog.CodePartitionColumns)
	mend := fmt.Sprintf(`ALTER TABLE %s RENAME COLUMN "id" TO "event_id"`, quoted("public", old(0)))
	if !strings.Contains(f.Hint, mend) || !w.exists(0) {
		t.Errorf("%s", f.Hint)
	}
	w.Exec(mend)
	w.apply()
	if w.exists(0) {
		t.Errorf("it is %s", w.state(0))
	}
}

// TestAColumnThatAVerifyNeedsWasRenamed: the partition key and the column of the shard are refused in a
// detached partition like any other, with the statement.
func TestAColumnThatAVerifyNeedsWasRenamed(t *testing.T) {
	t.Parallel()
	for column, set := range map[string]func(w *world){
		"created_at": func(w *world) {
			w.Exec("UPDATE outflow_partitions SET made = true, detach_xmin = 1::bigint << 62")
			w.seen.Removed, w.seen.Oldest = true, day.AddDate(1, 0, 0)
		},
		"doc_id": func(w *world) { w.cfg.Own, w.cfg.ShardBy = "renamed = 'd'", "renamed" },
	} {
		w := newSealed(t, 1)
		set(w)
		w.Exec("ALTER TABLE outbox RENAME " + column + " TO renamed")
		w.confirm(w.Slot)
		_, err := w.try()
		f := wantFault(t, err, outbox.Fatal, catalog.CodePartitionColumns)
		mend := fmt.Sprintf(`ALTER TABLE "public"."outbox_0" RENAME COLUMN %q TO "renamed"`, column)
		if !strings.Contains(f.Hint, mend) {
			t.Fatalf("column %s: %v", column, f)
		}
		w.Exec(mend)
		w.apply()
		if w.exists(0) {
			t.Errorf("column %s: it did not go", column)
		}
	}
}
