package replication

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func TestSetupIsIdempotent(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		s := d.setup()
		defer s.Close()
		if made, err := s.EnsureTable(within(t)); err != nil || made {
			t.Error(made, err)
		}
		first, err := s.Publication(within(t))
		if err != nil {
			t.Fatal(err)
		}
		if made, id, err := s.EnsurePublication(within(t)); err != nil || made || id != first {
			t.Error(made, id, err)
		}
		_, err = s.CreateSlot(within(t))
		wantFault(t, err, outbox.Fatal, "slot_exists")
		state, err := s.Slot(within(t))
		if err != nil || state.Plugin != "pgoutput" || state.Confirmed == 0 || state.Restart == 0 || state.Invalidation != "" ||
			state.SafeWALSize != -1 || state.WALStatus != "reserved" || state.Active || state.Database != d.text("SELECT current_database()") {
			t.Errorf("%+v, %v", state, err)
		}
	})
}

func TestSlotStartsWhereItSays(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	s := d.setup()
	defer s.Close()
	if _, err := s.EnsureTable(within(t)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.EnsurePublication(within(t)); err != nil {
		t.Fatal(err)
	}
	d.insert(ops(t, 5)) // older than the slot
	lsn, err := s.CreateSlot(within(t))
	if err != nil {
		t.Fatal(err)
	}
	d.insert(ops(t, 3))
	if state, err := s.Slot(within(t)); err != nil || state.Confirmed != lsn {
		t.Errorf("made at %v, the slot says %v (%v)", lsn, state.Confirmed, err)
	}
	if got := read(t, d.start(lsn), inserts(3)); len(got.inserts) != 3 || got.commits[0] <= lsn {
		t.Errorf("%d inserts, commits %v", len(got.inserts), got.commits)
	}
}

// From 17 on the slot is one that standbys may synchronise.
func TestSlotIsForFailover(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		d := newDatabase(t, srv)
		s := d.setup()
		defer s.Close()
		if _, err := s.CreateSlot(within(t)); err != nil {
			t.Fatal(err)
		}
		want := ""
		if srv.Installation.Major >= 17 {
			want = "true"
		}
		const failover = "SELECT coalesce(to_jsonb(s) ->> 'failover', '') FROM pg_replication_slots s WHERE slot_name = $1"
		if got := d.text(failover, d.cfg.Slot); got != want {
			t.Errorf("failover is %q, want %q", got, want)
		}
	})
}

// Creating a slot waits for every transaction that writes.
func TestBlockedSlotNamesWhoBlocks(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := newDatabase(t, srv)
		d.exec("SET application_name = 'order service'")
		d.exec("BEGIN")
		d.exec("CREATE TABLE unfinished (id int)")
		d.cfg.Patience = 50 * time.Millisecond
		s := d.setup()
		defer s.Close()
		_, err := s.CreateSlot(within(t))
		f := wantFault(t, err, outbox.Fatal, "slot_blocked")
		for _, want := range []string{fmt.Sprint("pid ", d.conn.PgConn().PID()), "order service", "open for"} {
			if !strings.Contains(f.Hint, want) {
				t.Errorf("%s: does not name %s", f.Hint, want)
			}
		}
		if state, err := s.Slot(within(t)); err != nil || state.Exists {
			t.Errorf("half a slot is left: %+v, %v", state, err)
		}
		d.exec("ROLLBACK")
		s.cfg.Patience = patience
		if _, err := s.CreateSlot(within(t)); err != nil {
			t.Error(err)
		}
	})
}

func TestCheckServer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ setting, code string }{
		{"wal_level=replica", "wal_level"},
		{"max_replication_slots=0", "max_replication_slots"},
	} {
		t.Run(c.code, func(t *testing.T) {
			t.Parallel()
			d := newDatabase(t, pgtest.Own(t, 0, c.setting))
			s := d.setup()
			defer s.Close()
			f := wantFault(t, s.CheckServer(within(t)), outbox.Fatal, c.code)
			if name, value, _ := strings.Cut(c.setting, "="); !strings.Contains(f.Error(), name) || !strings.Contains(f.Message, value) {
				t.Errorf("%v does not name %s", f, c.setting)
			}
		})
	}
	t.Run("role", func(t *testing.T) {
		t.Parallel()
		d := newDatabase(t, pgtest.Server(t))
		role := strings.Replace(d.cfg.Slot, "outflow_", "plain_", 1)
		d.exec("CREATE ROLE " + role + " LOGIN")
		t.Cleanup(func() { d.exec("DROP ROLE " + role) })
		d.cfg.URL = withUser(t, d.url, role)
		s := d.setup()
		defer s.Close()
		wantFault(t, s.CheckServer(within(t)), outbox.Fatal, "no_replication_right")
		d.cfg.Table = "pg_catalog.outbox"
		s2 := d.setup()
		defer s2.Close()
		_, err := s2.EnsureTable(within(t))
		wantFault(t, err, outbox.Fatal, "no_right")
		_, err = s.CreateSlot(within(t))
		wantFault(t, err, outbox.Fatal, "no_replication_right")
	})
	for version, bad := range map[int]bool{130022: true, 140000: false, 180004: false} {
		if err := checkVersion(version); (err != nil) != bad {
			t.Errorf("version %d: %v", version, err)
		}
	}
}

// What --print shows makes what init makes.
func TestPrintedStatements(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	d.cfg.Table, d.cfg.Publication = `public.out"box`, `pub's "one"`
	d.cfg.Mapping.Doc, d.cfg.Mapping.Actor = "Doc Id", `a"ctor`
	d.cfg.Columns = []string{"id", "Doc Id", `a"ctor`, "counter", "payload"}
	statements, err := SQL(d.cfg)
	if err != nil || len(statements) != 3 {
		t.Fatal(statements, err)
	}
	for _, sql := range statements {
		d.exec(sql)
	}
	s := d.setup()
	defer s.Close()
	if made, err := s.EnsureTable(within(t)); err != nil || made {
		t.Error(made, err)
	}
	if made, _, err := s.EnsurePublication(within(t)); err != nil || made {
		t.Error(made, err)
	}
	d.exec(`INSERT INTO "out""box" ("Doc Id", "a""ctor", counter, payload) VALUES ('d', 'anna', 42, '{}')`)
	if key := d.text(`SELECT seq_key FROM "out""box"`); key != "anna:00000000000000000042" {
		t.Errorf("seq_key %q", key)
	}
	read(t, d.start(0), inserts(1))
	if err := Peek(within(t), d.cfg.Config, 0, false, nil); err == nil {
		t.Error("a peek at a slot that is in use")
	}
}

func TestTableWithoutTheOptionalColumns(t *testing.T) {
	t.Parallel()
	cfg := SetupConfig{
		Config: Config{Table: "outbox", Slot: "s", Publication: "p"}, Mapping: relay.Mapping{Doc: "topic", Payload: "message"},
		CreatedAt: "at",
	}
	statements, err := SQL(cfg)
	if err != nil {
		t.Fatal(err)
	}
	want := "CREATE TABLE \"public\".\"outbox\" (\n  \"topic\" text NOT NULL,\n  \"message\" jsonb NOT NULL,\n  \"at\" timestamptz NOT NULL DEFAULT now()\n)"
	if statements[0] != want {
		t.Errorf("got %s, want %s", statements[0], want)
	}
}

func TestPeek(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		edits := ops(t, 60)
		d.copyIn(edits[:20])
		d.copyIn(edits[20:40])
		d.copyIn(edits[40:])
		count := func(limit int, binary bool) *seen {
			t.Helper()
			got := &seen{kinds: map[byte]int{}}
			err := Peek(within(t), d.cfg.Config, limit, binary, func(m Message) error {
				got.add(Message{WALEnd: m.WALEnd, Data: append([]byte(nil), m.Data...)})
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		all := count(0, false)
		if len(all.inserts) != 60 || len(count(0, true).inserts) != 60 || len(count(25, false).inserts) != 40 {
			t.Errorf("%d inserts", len(all.inserts))
		}
		// It is the same as what the stream brings, and nothing was consumed.
		s := d.start(0)
		streamed := read(t, s, inserts(60))
		if fmt.Sprint(streamed.commits) != fmt.Sprint(all.commits) || strings.Join(streamed.inserts, "") != strings.Join(all.inserts, "") {
			t.Error("the stream brings something else")
		}
		err := Peek(within(t), d.cfg.Config, 0, false, func(Message) error { return nil })
		f := wantFault(t, err, outbox.Fatal, "slot_in_use")
		if pid := d.text("SELECT active_pid::text FROM pg_replication_slots WHERE slot_name = $1", d.cfg.Slot); !strings.Contains(f.Message, pid) {
			t.Errorf("%v does not name pid %s", f, pid)
		}
		s.Close()
		stop := errors.New("enough")
		eventually(t, "the slot is free", func() bool {
			err := Peek(within(t), d.cfg.Config, 0, false, func(Message) error { return stop })
			return errors.Is(err, stop)
		})
		d.cfg.Slot = "no_such_slot"
		err = Peek(within(t), d.cfg.Config, 0, false, nil)
		wantFault(t, err, outbox.Fatal, "slot_missing")
	})
}

// What a slot holds is streamed: the server keeps none of it in temporary files, no limit of statements ends it, and nothing is confirmed.
// It ends although a transaction is open that has written much, and although others go on.
func TestPeekLeavesNoTrace(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		d.exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'd', 'a', n, to_jsonb(repeat(md5(n::text), 30)) FROM generate_series(1, 5000) n")
		open, err := pgx.Connect(within(t), d.url)
		if err != nil {
			t.Fatal(err)
		}
		defer closeConn(open)
		for _, sql := range []string{
			"BEGIN", "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'open', 'a', n, to_jsonb(repeat('x', 2000)) FROM generate_series(1, 1000) n",
		} {
			if _, err := open.Exec(within(t), sql); err != nil {
				t.Fatal(err)
			}
		}
		for _, set := range []string{"temp_file_limit = '1MB'", "work_mem = '64kB'"} {
			d.exec("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET " + strings.ReplaceAll(set, "'", "''") + "', current_database()); END $$")
		}
		confirmed := "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1"
		before := d.text(confirmed, d.cfg.Slot)
		for range 2 { // one right after the other: the slot is free when it returns
			seen := &seen{kinds: map[byte]int{}}
			if err := Peek(within(t), d.cfg.Config, 0, false, func(m Message) error { seen.add(m); return nil }); err != nil {
				t.Fatal(err)
			}
			if len(seen.inserts) != 5000 || len(seen.commits) == 0 {
				t.Errorf("%d inserts, %d commits", len(seen.inserts), len(seen.commits))
			}
			d.exec("SELECT pg_switch_wal()")
		}
		stop := errors.New("enough")
		for range 2 { // in the middle of a transaction, too
			err := Peek(within(t), d.cfg.Config, 0, false, func(m Message) error {
				if m.Data[0] == 'I' {
					return stop
				}
				return nil
			})
			if !errors.Is(err, stop) {
				t.Error(err)
			}
		}
		if after := d.text(confirmed, d.cfg.Slot); after != before {
			t.Errorf("the slot is confirmed up to %s, was %s", after, before)
		}
	})
}

// Where a transaction is open that has written a part of a page, and nobody else writes, not even the server itself now and then, a peek ends.
func TestPeekEndsOnASilentServer(t *testing.T) {
	t.Parallel()
	srv := pgtest.Own(t, 0)
	d := ready(t, srv)
	pid, err := strconv.Atoi(d.text("SELECT pid::text FROM pg_stat_activity WHERE backend_type = 'background writer'"))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	before := d.text("SELECT pg_current_wal_flush_lsn()::text")
	d.exec("BEGIN")
	d.exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'open', 'a', n, to_jsonb(repeat('x', 2000)) FROM generate_series(1, 100) n")
	for d.text("SELECT pg_current_wal_flush_lsn()::text") == before { // the WAL writer has flushed whole pages
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := Peek(ctx, d.cfg.Config, 0, false, func(Message) error { return nil }); err != nil {
		t.Error(err)
	}
}

// A slot that lost its WAL says so, in the words of each version.
func TestInvalidatedSlot(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			t.Parallel()
			d := ready(t, pgtest.Own(t, major, "max_slot_wal_keep_size=1MB", "wal_keep_size=0", "max_wal_size=32MB"))
			s := d.open()
			for range 4 {
				d.exec("SELECT pg_logical_emit_message(false, 'x', repeat('y', 1000000)) FROM generate_series(1, 3)")
				d.exec("SELECT pg_switch_wal()")
				d.exec("CHECKPOINT")
			}
			state, err := s.Slot(within(t))
			if err != nil || state.WALStatus != "lost" || state.Invalidation == "" {
				t.Errorf("%+v, %v", state, err)
			}
			err = s.Start(within(t), 0, false)
			if sqlState(err) != codeNotInPrerequisite || outbox.ClassOf(err) != outbox.Transient {
				t.Errorf("start: %v", err)
			}
			err = Peek(within(t), d.cfg.Config, 0, false, nil)
			wantFault(t, err, outbox.Fatal, "slot_unusable")
		})
	}
}
