package e2e

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// editRecord changes the checkpoint record as a crash of init would have left it.
func editRecord(t *testing.T, f *faulty, edit func(record map[string]any)) {
	t.Helper()
	kv, err := f.js.KeyValue(t.Context(), "outflow-"+f.stream)
	must(t, err)
	entry, err := kv.Get(t.Context(), f.slot)
	must(t, err)
	var record map[string]any
	must(t, json.Unmarshal(entry.Value(), &record))
	edit(record)
	value, err := json.Marshal(record)
	must(t, err)
	_, err = kv.Put(t.Context(), f.slot, value)
	must(t, err)
}

// creating is the record between the decision to make the slot and the first place.
func creating(record map[string]any) {
	record["creating"] = true
	delete(record, "places")
}

// TestInitFinishes: wherever a crash has cut init, the next init finishes it, and outflow publishes all that is written from then on.
func TestInitFinishes(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	dropSlot := func(t *testing.T, f *faulty) { mustExec(t, f.conn, "SELECT pg_drop_replication_slot($1)", f.slot) }
	dropRecord := func(t *testing.T, f *faulty) { must(t, f.js.DeleteStream(t.Context(), "KV_outflow-"+f.stream)) }
	for _, c := range []struct {
		name  string
		crash func(t *testing.T, f *faulty)
		run   bool // outflow run needs no init
		made  []string
	}{
		{"nothing is missing", func(*testing.T, *faulty) {}, true, []string{"table public.outbox: there", ": there, confirmed up to"}},
		{"after the table", func(t *testing.T, f *faulty) {
			dropSlot(t, f)
			dropRecord(t, f)
			must(t, f.js.DeleteStream(t.Context(), f.stream))
			mustExec(t, f.conn, "DROP PUBLICATION "+f.slot)
		}, false, []string{"table public.outbox: there", "publication ", "stream ", ": made"}},
		{"after the publication", func(t *testing.T, f *faulty) {
			dropSlot(t, f)
			dropRecord(t, f)
			must(t, f.js.DeleteStream(t.Context(), f.stream))
		}, false, []string{"stream ", ": made"}},
		{"after the stream", func(t *testing.T, f *faulty) { dropSlot(t, f); dropRecord(t, f) }, false, []string{"slot ", "first place"}},
		{"after the bucket", func(t *testing.T, f *faulty) {
			dropSlot(t, f)
			kv, err := f.js.KeyValue(t.Context(), "outflow-"+f.stream)
			must(t, err)
			must(t, kv.Delete(t.Context(), f.slot))
		}, false, []string{"slot ", "first place"}},
		{"record without slot", func(t *testing.T, f *faulty) { dropSlot(t, f); editRecord(t, f, creating) }, false, []string{"slot ", "first place"}},
		{"slot and unfinished record", func(t *testing.T, f *faulty) { editRecord(t, f, creating) }, false, []string{"slot ", ": there", "first place"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := &faulty{js: js(t, ns.URL())}
			f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "init")
			f.init()
			c.crash(t, f)
			if !c.run {
				f.fails(3, []string{"run"}, "outflow init")
			}
			out, errOut, code := f.exec("init")
			if code != 0 {
				t.Fatalf("outflow init: exit code %d\n%s%s", code, out, errOut)
			}
			f.mustSay("outflow init", out, c.made...)
			row(t, f.conn, "doc", 1, "{}")
			f.start()
			awaitMessages(t, f.js, f.stream, 1)
			f.init() // while it runs
			row(t, f.conn, "doc", 2, "{}")
			awaitMessages(t, f.js, f.stream, 2)
			f.mustBeComplete(f.conn, ns.URL())
		})
	}
}

// TestInitRefuses: what init must not paper over.
func TestInitRefuses(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "refuse")
	mustExec(t, f.conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.slot)
	f.fails(4, []string{"init"}, "record", f.slot, "LSN range") // a slot that no record speaks of
	mustExec(t, f.conn, "SELECT pg_drop_replication_slot($1)", f.slot)
	f.fails(2, []string{"init", "--init.max_age", "1s"}, "init.max_age", "sink.durable_after")
	f.init()
	s, err := f.js.Stream(t.Context(), f.stream)
	must(t, err)
	cfg := s.CachedInfo().Config
	cfg.MaxAge, cfg.Duplicates = 1900*time.Millisecond, time.Second
	_, err = f.js.UpdateStream(t.Context(), cfg)
	must(t, err)
	f.fails(3, []string{"init"}, "max_age 1.9s", "sink.durable_after", "2s")
	cfg.MaxAge = 0
	_, err = f.js.UpdateStream(t.Context(), cfg)
	must(t, err)
	kv, err := f.js.KeyValue(t.Context(), "outflow-"+f.stream)
	must(t, err)
	record, err := kv.Get(t.Context(), f.slot)
	must(t, err)
	must(t, kv.Delete(t.Context(), f.slot))
	f.fails(4, []string{"init"}, "checkpoint record", "missing", "nats kv revert") // neither adopted nor made anew
	_, err = kv.Put(t.Context(), f.slot, record.Value())
	must(t, err)
	f.init()
	f.start()
	row(t, f.conn, "doc", 1, "{}")
	awaitMessages(t, f.js, f.stream, 1)
	if code := f.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	mustExec(t, f.conn, "SELECT pg_drop_replication_slot($1)", f.slot)
	f.fails(4, []string{"init"}, "does not exist", "LSN range") // no slot anew for a record with places
	must(t, f.js.DeleteStream(t.Context(), f.stream))
	f.fails(4, []string{"init"}, "LSN range")
	if _, err := f.js.Stream(t.Context(), f.stream); err == nil {
		t.Error("init made a stream anew that was lost")
	}
}

// TestInitSlotBeingMade: an init that was killed leaves a server process behind that goes on making the slot. Its slot is not adopted
// before it is whole: nobody knows yet where it begins.
func TestInitSlotBeingMade(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "halfslot")
	f.init()
	mustExec(t, f.conn, "SELECT pg_drop_replication_slot($1)", f.slot)
	editRecord(t, f, creating)

	open, maker := db(t, f.url), db(t, f.url)
	mustExec(t, open, "BEGIN")
	row(t, open, "doc", 1, "{}") // a new slot waits for its end
	made := make(chan error, 1)
	go func() {
		_, err := maker.Exec(t.Context(), "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.slot)
		made <- err
	}()
	for n := 0; n == 0; time.Sleep(10 * time.Millisecond) {
		must(t, f.conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", f.slot).Scan(&n))
	}
	f.fails(3, []string{"init"}, f.slot, "being made", "pid")
	mustExec(t, open, "ROLLBACK")
	must(t, <-made)
	f.init()
	f.start()
	row(t, f.conn, "doc", 2, "{}")
	awaitMessages(t, f.js, f.stream, 1)
	f.mustBeComplete(f.conn, ns.URL())
}

// TestInitPrint: the owner runs the SQL that is printed; init then finds it, and neither init nor run needs more than the role that
// docs/postgres.md describes.
func TestInitPrint(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, url := installation(t, pgtest.Server(t), ns.URL(), "print")
	mustExec(t, conn, "DO $$ BEGIN CREATE ROLE least LOGIN REPLICATION; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
	mustExec(t, conn, "REVOKE ALL ON SCHEMA public FROM public; REVOKE ALL ON DATABASE "+conn.Config().Database+" FROM public")
	mustExec(t, conn, "GRANT CONNECT ON DATABASE "+conn.Config().Database+" TO least")
	o.set("POSTGRES_URL=" + strings.Replace(url, "postgres@", "least@", 1))
	o.fails(3, []string{"init"}, "may not make table", "outflow init --print")
	sql, errOut, code := o.exec("init", "--print")
	if code != 0 {
		t.Fatalf("outflow init --print: exit code %d\n%s", code, errOut)
	}
	if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%v:\n%s", err, sql)
	}
	out, errOut, code := o.exec("init")
	if code != 0 {
		t.Fatalf("outflow init: exit code %d\n%s", code, errOut)
	}
	o.mustSay("outflow init", out, "table public.outbox: there", "publication "+o.slot+": there", "slot "+o.slot)
	o.start()
	row(t, conn, "doc", 1, "{}")
	awaitMessages(t, js(t, ns.URL()), o.stream, 1)
	o.mustBeComplete(conn, ns.URL())
}
