package partition

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// TestAnErasureWaitsForWhoeverMayHaveWritten: a row that is written and not committed yet is erased as well,
// and the cut lies behind its commit.
func TestAnErasureWaitsForWhoeverMayHaveWritten(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		w := newWorld(t, srv, 1)
		w.insert(0, 3, true)
		w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) SELECT 'e', 'a', n, " +
			"'{}', '2024-05-01 12:00Z' FROM generate_series(1, 2500) n")
		open, err := w.target().Connect(outboxdb.Within(t))
		must.Succeed(t, err)
		defer func() { _ = open.Close(context.Background()) }()
		tx, err := open.Begin(outboxdb.Within(t))
		must.Succeed(t, err)
		_, err = tx.Exec(outboxdb.Within(t), "INSERT INTO public.outbox (doc_id, actor_id, counter, "+
			"payload, created_at) VALUES ('e', 'a', 9, '{}', '2024-05-01 12:00Z')")
		must.Succeed(t, err)
		m := w.manager()
		type result struct {
			cut Cut
			err error
		}
		done, reads := make(chan result, 1), uint64(0)
		go func() {
			cut, err := m.EraseDocument(outboxdb.Within(t), Document{Column: "doc_id", Name: "e", ID: "id"},
				time.Minute, func(context.Context) (uint64, error) { reads++; return reads, nil })
			done <- result{cut, err}
		}()
		if !await.True(func() bool {
			return w.Text(`SELECT (count(*) > 0)::text FROM pg_stat_activity WHERE datname = current_database()
				AND query LIKE 'SELECT l.virtualtransaction%'`) == "true"
		}) {
			t.Error("nobody waits for the transaction that is open")
		}
		must.Succeed(t, tx.Commit(outboxdb.Within(t)))
		end, err := outbox.ParseLSN(w.Text("SELECT pg_current_wal_insert_lsn()::text"))
		must.Succeed(t, err)
		r := <-done
		must.Succeed(t, r.err)
		if left := w.Text("SELECT string_agg(doc_id, ' ') FROM outbox"); left != "d d d" {
			t.Errorf("left: %s", left)
		}
		if r.cut.Rows != 2501 || r.cut.LSN < end || r.cut.Seq != reads || reads < 2 {
			t.Errorf("%+v, read %d times, and the commit was below %v", r.cut, reads, end)
		}
	})
}

// TestAnErasureNamesWhoseTransactionDoesNotEnd, and goes on when it has ended.
func TestAnErasureNamesWhoseTransactionDoesNotEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical", "max_prepared_transactions=5"), 1)
	open, err := w.target().Connect(outboxdb.Within(t), func(c *pgx.ConnConfig) {
		c.RuntimeParams["application_name"] = "a batch"
	})
	must.Succeed(t, err)
	defer func() { _ = open.Close(context.Background()) }()
	write := func(sql string) {
		t.Helper()
		_, err := open.PgConn().Exec(outboxdb.Within(t), sql).ReadAll()
		must.Succeed(t, err)
	}
	const insert = "INSERT INTO public.outbox (doc_id, actor_id, counter, payload, created_at) " +
		"VALUES ('e', 'a', 9, '{}', '2024-05-01 12:00Z')"
	m := w.manager()
	erase := func() (Cut, error) {
		return m.EraseDocument(outboxdb.Within(t), Document{Column: "doc_id", Name: "e", ID: "id"}, 0,
			func(context.Context) (uint64, error) { return 1, nil })
	}
	gid := "batch of " + w.Slot
	for _, c := range []struct{ begun, ended, named string }{
		{insert, "COMMIT", fmt.Sprintf("pid %d of user postgres, application 'a batch', since 20",
			open.PgConn().PID())},
		{insert + "; PREPARE TRANSACTION '" + gid + "'", "COMMIT PREPARED '" + gid + "'",
			"prepared transaction '" + gid + "' of user postgres, since 20"},
	} {
		write("BEGIN; " + c.begun)
		_, err := erase()
		f := wantFault(t, err, outbox.Transient, "erase_waits")
		if !strings.Contains(f.Message, c.named) {
			t.Errorf("%s, not %s", f.Message, c.named)
		}
		write(c.ended)
		if cut, err := erase(); err != nil || cut.Rows != 1 {
			t.Errorf("%+v, %v", cut, err)
		}
	}
}

// TestAnErasureGetsAlongWithADetachThatHasNotEnded: a transaction that wrote to another partition holds that
// up. Rows of the half detached one go as those of the others, and it is the transaction that is waited for
// and named, whoever began the DETACH.
func TestAnErasureGetsAlongWithADetachThatHasNotEnded(t *testing.T) {
	t.Parallel()
	for _, ours := range []bool{false, true} {
		w := newWorld(t, pgtest.Own(t, 0, "wal_level=logical"), 2)
		w.insert(0, 5, true)
		const row = "INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) " +
			"VALUES ('e', 'a', 1, '{}', "
		w.Exec(row + "'2024-05-01 12:00Z')")
		w.flushed(0, 6) // or it would be watched for more
		within := outboxdb.Within(t)
		open := w.other()
		tx, err := open.Begin(within)
		must.Succeed(t, err)
		_, err = tx.Exec(within, "SELECT FROM outbox LIMIT 1") // or FINALIZE would not wait for it
		must.Succeed(t, err)
		_, err = tx.Exec(within, row+"'2024-05-02 12:00Z')")
		must.Succeed(t, err)
		if ours {
			wantWhy(t, w.apply(), 0, "open transactions hold it")
		} else {
			person := w.other()
			_, err := person.Exec(within, "SET lock_timeout = 100")
			must.Succeed(t, err)
			_, err = person.Exec(within, "ALTER TABLE outbox DETACH PARTITION outbox_0 CONCURRENTLY")
			if err == nil {
				t.Fatal("it was detached")
			}
		}
		w.detachWaits()
		m := w.manager()
		d := Document{Column: "doc_id", Name: "e", ID: "id"}
		if n, err := m.CountDocument(within, d); err != nil || n != 1 {
			t.Errorf("ours %v: %d rows are counted, %v", ours, n, err)
		}
		erase := func() (Cut, error) {
			return m.EraseDocument(within, d, 0, func(context.Context) (uint64, error) { return 1, nil })
		}
		_, err = erase()
		f := wantFault(t, err, outbox.Transient, CodeWaits)
		if !strings.Contains(f.Message, fmt.Sprintf("pid %d of user", open.PgConn().PID())) {
			t.Errorf("ours %v: %s", ours, f.Message)
		}
		if n := w.Text("SELECT count(*)::text FROM outbox_0 WHERE doc_id = 'e'"); n != "0" {
			t.Errorf("ours %v: %s rows are left in the half detached partition", ours, n)
		}
		must.Succeed(t, tx.Commit(within))
		if cut, err := erase(); err != nil || cut.Rows != 1 {
			t.Errorf("ours %v: %+v, %v", ours, cut, err)
		}
		if ours {
			w.apply()
			w.want(0, Sealed)
		}
	}
}

// TestAPartitionWithoutAnErasedDocumentGoesAsBefore: it is detached and sealed, and not sealed again.
func TestAPartitionWithoutAnErasedDocumentGoesAsBefore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.insert(0, 5, true)
	w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES ('e', 'a', 1, '{}', " +
		"'2024-05-01 12:00Z')") // published by nobody
	w.apply()
	w.want(0, Sealed)
	m := w.manager()
	w.Exec("CREATE TABLE noted (sum uuid, slot text, request text)")
	d := Document{Column: "doc_id", Name: "e", ID: "id", Noted: "public.noted", Slot: "s", Request: "r"}
	want := w.Text("SELECT left(encode(sha256(convert_to(id::text, 'UTF8')), 'hex'), 32)::uuid || ' s r' " +
		"FROM " + old(0) + " WHERE doc_id = 'e'")
	if n, err := m.CountDocument(outboxdb.Within(t), d); err != nil || n != 1 {
		t.Fatalf("%d rows, %v", n, err)
	}
	lastSeq := func(context.Context) (uint64, error) { return 1, nil }
	cut, err := m.EraseDocument(outboxdb.Within(t), d, 0, lastSeq)
	if err != nil || cut.Rows != 1 {
		t.Fatalf("%+v, %v", cut, err)
	}
	if got := w.Text("SELECT concat_ws(' ', sum, slot, request) FROM noted"); got != want {
		t.Errorf("noted is %q, want %q", got, want)
	}
	w.want(0, Sealed)
	w.confirm(w.Slot)
	w.apply()
	if w.exists(0) {
		t.Errorf("it is %s", w.state(0))
	}
}

// TestRowsThatATriggerKeepsAreNotSaidToBeErased: also in a partition that is detached.
func TestRowsThatATriggerKeepsAreNotSaidToBeErased(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"outbox", "outbox_0"} {
		w := newWorld(t, pgtest.Server(t), 2)
		w.insert(0, 5, true)
		w.insert(1, 5, true)
		if table != "outbox" {
			w.apply()
			w.want(0, Sealed)
		}
		w.Exec("CREATE FUNCTION keeps() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
		w.Exec("CREATE TRIGGER keeps BEFORE DELETE ON " + table + " FOR EACH ROW EXECUTE FUNCTION keeps()")
		erase := func() error {
			d := Document{Column: "doc_id", Name: "d", ID: "id"}
			_, err := w.manager().EraseDocument(outboxdb.Within(t), d, 0,
				func(context.Context) (uint64, error) { return 1, nil })
			return err
		}
		f := outboxdb.WantFault(t, erase(), outbox.Fatal, "erase_kept")
		if !strings.Contains(f.Message, table) {
			t.Error(f.Message)
		}
		w.Exec("DROP TRIGGER keeps ON " + table)
		must.Succeed(t, erase())
	}
}

// TestAnErasureFindsAPartitionByItsOID: a detached one has another name than in the table of states, or is in
// another schema, as pg_partman's retention_schema, until the next run of apply. One that is known by an OID
// of another server is refused before anything is deleted.
func TestAnErasureFindsAPartitionByItsOID(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{"ALTER TABLE outbox_0 RENAME TO outbox_of_may",
		"CREATE SCHEMA kept; ALTER TABLE outbox_0 SET SCHEMA kept",
		"ALTER TABLE outbox_0 RENAME TO former; ALTER TABLE outbox_1 RENAME TO outbox_0",
		"UPDATE outflow_partitions SET system_id = '1', oid = 1"} {
		w := newWorld(t, pgtest.Server(t), 2)
		w.insert(0, 5, true)
		w.insert(1, 4, true)
		w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES ('e', 'a', 1, " +
			"'{}', '2024-05-01 12:00Z')")
		w.apply()
		w.want(0, Sealed)
		w.Exec(sql)
		m := w.manager()
		d := Document{Column: "doc_id", Name: "e", ID: "id"}
		erase := func() (Cut, error) {
			return m.EraseDocument(outboxdb.Within(t), d, 0,
				func(context.Context) (uint64, error) { return 1, nil })
		}
		if strings.HasPrefix(sql, "UPDATE") {
			_, err := m.CountDocument(outboxdb.Within(t), d)
			wantFault(t, err, outbox.Fatal, codeTaken)
			_, err = erase()
			wantFault(t, err, outbox.Fatal, codeTaken)
			w.apply()
		}
		before, err := m.CountDocument(outboxdb.Within(t), d)
		must.Succeed(t, err)
		cut, err := erase()
		must.Succeed(t, err)
		after, err := m.CountDocument(outboxdb.Within(t), d)
		must.Succeed(t, err)
		if before != 1 || cut.Rows != 1 || after != 0 {
			t.Errorf("%s: %d rows of the document, %d erased, %d left", sql, before, cut.Rows, after)
		}
		w.confirm(w.Slot)
		w.apply()
		if n := w.Text("SELECT count(*)::text FROM pg_class WHERE relkind = 'r' AND relname IN " +
			"('outbox_0', 'outbox_1', 'outbox_of_may', 'former')"); n != "0" {
			t.Errorf("%s: %s of the partitions did not go", sql, n)
		}
	}
}

// TestAnErasureNamesThePartitionsThatSomebodyElseDetached, by the names that they have now: what is in them
// stays, if they are known as theirs when rows are erased.
func TestAnErasureNamesThePartitionsThatSomebodyElseDetached(t *testing.T) {
	t.Parallel()
	w := newWorld(t, pgtest.Server(t), 2)
	w.cfg.Slack = 1000000 * time.Hour
	w.apply()
	w.insert(0, 1, true)
	w.Exec("ALTER TABLE outbox DETACH PARTITION outbox_0")
	erase := func() Cut {
		t.Helper()
		d := Document{Column: "doc_id", Name: "d", ID: "id"}
		cut, err := w.manager().EraseDocument(outboxdb.Within(t), d, 0,
			func(context.Context) (uint64, error) { return 1, nil })
		must.Succeed(t, err)
		return cut
	}
	if cut := erase(); cut.Rows != 1 || len(cut.Theirs) > 0 {
		t.Errorf("nobody has seen that it was detached: %+v", cut)
	}
	w.Exec("INSERT INTO outbox_0 (doc_id, actor_id, counter, payload, created_at) " +
		"VALUES ('d', 'a', 9, '{}', '2024-05-01 12:00Z')")
	w.apply()
	w.want(0, Kept)
	w.Exec("ALTER TABLE outbox_0 RENAME TO mine")
	if cut := erase(); cut.Rows != 0 || strings.Join(cut.Theirs, " ") != "public.mine" {
		t.Errorf("of one that is theirs: %+v", cut)
	}
	theirs := func() string {
		t.Helper()
		names, err := w.manager().Theirs(outboxdb.Within(t))
		must.Succeed(t, err)
		return strings.Join(names, " ")
	}
	if got := theirs(); got != "public.mine" {
		t.Errorf("it names %q", got)
	}
	w.Exec("ALTER TABLE outbox ATTACH PARTITION mine FOR VALUES FROM ('2024-05-01') TO ('2024-05-02')")
	if got := theirs(); got != "" {
		t.Errorf("it is attached again, and it names %q", got)
	}
}

// TestTheRowsOfADocumentAreThoseOfItsMessages: PostgreSQL compares and casts values of some types otherwise
// than it prints them for the WAL.
func TestTheRowsOfADocumentAreThoseOfItsMessages(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ typ, doc, other, refused, hasIt string }{
		{"char(5)", "gone ", "stays", "gone", `has it as "gone "`},
		{"varchar(5)", "gone ", "gone", "gone and more", `has it as "gone "`},
		{"boolean", "t", "f", "true", `has it as "t"`},
		{"uuid", "6f1c8a70-2b7e-4d0e-9c39-b5f3a4a0e1d2", "00000000-0000-0000-0000-000000000000",
			"6F1C8A70-2B7E-4D0E-9C39-B5F3A4A0E1D2", `has it as "6f1c`},
		{"bigint", "7", "8", "seven", "no value of column doc_id"},
		{"bytea", "\\xff", "gone", "", ""},
		{"seven", "7", "77", "8", "no value of column doc_id"},
	} {
		w := newWorld(t, pgtest.Server(t), 1)
		value := "$1::text::"
		if c.typ == "bytea" {
			value = "convert_to($1, 'UTF8')::"
		}
		w.Exec("CREATE DOMAIN public.seven AS text CHECK (value ^@ '7')")
		w.Exec("ALTER TABLE outbox ALTER doc_id TYPE " + c.typ + " USING NULL")
		for _, doc := range []string{c.doc, c.doc, c.other} {
			w.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at) VALUES ("+value+c.typ+
				", 'a', 1, '{}', '2024-05-01 12:00Z')", doc)
		}
		m := w.manager()
		d := Document{Column: "doc_id", Name: c.doc, ID: "id"}
		must.Succeed(t, m.CheckDocument(outboxdb.Within(t), d))
		n, err := m.CountDocument(outboxdb.Within(t), d)
		must.Succeed(t, err)
		cut, err := m.EraseDocument(outboxdb.Within(t), d, 0,
			func(context.Context) (uint64, error) { return 1, nil })
		must.Succeed(t, err)
		if left := w.Text("SELECT count(*) FROM outbox"); n != 2 || cut.Rows != 2 || left != "1" {
			t.Errorf("%s: %d rows of the document, %d erased, %s left", c.typ, n, cut.Rows, left)
		}
		if c.refused != "" {
			d.Name = c.refused
			f := wantFault(t, m.CheckDocument(outboxdb.Within(t), d), outbox.Usage, "flags")
			if !strings.Contains(f.Message, c.hasIt) {
				t.Errorf("%s: %s", c.typ, f.Message)
			}
			// messages may have it so from when the column had another type
			if n, err := m.CountDocument(outboxdb.Within(t), d); err != nil || n != 0 {
				t.Errorf("%s: %d rows of %q, %v", c.typ, n, d.Name, err)
			}
		}
	}
}

// TestAnErasureWaitsForAllTransactionsAsLongAsItWasTold, not for each of them: by a clock that goes on only
// while one is waited for.
func TestAnErasureWaitsForAllTransactionsAsLongAsItWasTold(t *testing.T) {
	t.Parallel()
	const wait, transactions = time.Minute, 2
	for each, enough := range map[time.Duration]bool{wait / 3: true, wait * 2 / 3: false} {
		w := newWorld(t, pgtest.Server(t), 1)
		m := w.manager()
		clock, asked, begun := time.Now(), 0, 0
		m.now = func() time.Time {
			if asked++; asked == 2 { // since one has begun
				w.Exec("COMMIT")
				clock = clock.Add(each)
			}
			return clock
		}
		d := Document{Column: "doc_id", Name: "d", ID: "id"}
		cut, err := m.EraseDocument(outboxdb.Within(t), d, wait, func(context.Context) (uint64, error) {
			if begun++; begun <= transactions {
				w.Exec("BEGIN")
				w.insert(0, 1, false)
				asked = 0
			}
			return 1, nil
		})
		if !enough {
			wantFault(t, err, outbox.Transient, CodeWaits)
		} else if err != nil || cut.Waited != transactions*each || cut.Rows != transactions {
			t.Errorf("each for %v: %+v, %v", each, cut, err)
		}
	}
}
