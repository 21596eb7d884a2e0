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
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestAPeekShowsWhatTheStreamWould(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		edits := outboxdb.Ops(t, 60)
		d.CopyIn(edits[:20])
		d.CopyIn(edits[20:40])
		d.CopyIn(edits[40:])
		count := func(limit int) *seen {
			t.Helper()
			got := &seen{kinds: map[byte]int{}}
			err := Peek(within(t), d.config(), limit, func(m Message) error {
				got.add(Message{WALEnd: m.WALEnd, Data: append([]byte(nil), m.Data...)})
				return nil
			})
			must.Succeed(t, err)
			return got
		}
		all := count(0)
		if len(all.inserts) != 60 || len(count(25).inserts) != 40 {
			t.Errorf("%d inserts", len(all.inserts))
		}
		// It is the same as what the stream brings, and nothing was consumed.
		s := d.start(0)
		streamed := read(t, s, inserts(60))
		if fmt.Sprint(streamed.commits) != fmt.Sprint(all.commits) ||
			strings.Join(streamed.inserts, "") != strings.Join(all.inserts, "") {
			t.Error("the stream brings something else")
		}
		err := Peek(within(t), d.config(), 0, func(Message) error { return nil })
		f := wantFault(t, err, outbox.Fatal, "slot_in_use")
		if pid := d.Text("SELECT active_pid::text FROM pg_replication_slots WHERE slot_name = $1",
			d.cfg.Slot); !strings.Contains(f.Message, pid) {
			t.Errorf("%v does not name pid %s", f, pid)
		}
		s.Close()
		stop := errors.New("enough")
		eventually(t, "the slot is free", func() bool {
			err := Peek(within(t), d.config(), 0, func(Message) error { return stop })
			return errors.Is(err, stop)
		})
		d.cfg.Slot = "no_such_slot"
		err = Peek(within(t), d.config(), 0, nil)
		wantFault(t, err, outbox.Fatal, "slot_missing")
	})
}

// What a slot holds is streamed: the server keeps none of it in temporary files, no limit of statements ends
// it, and nothing is confirmed. It ends although a transaction is open that has written much, and although
// others go on.
func TestAPeekLeavesNoTrace(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		d.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'd', 'a', n, " +
			"to_jsonb(repeat(md5(n::text), 30)) FROM generate_series(1, 5000) n")
		open, err := pgx.Connect(within(t), d.URL)
		must.Succeed(t, err)
		defer postgres.Close(open)
		for _, sql := range []string{
			"BEGIN", "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'open', 'a', n, " +
				"to_jsonb(repeat('x', 2000)) FROM generate_series(1, 1000) n",
		} {
			if _, err := open.Exec(within(t), sql); err != nil {
				t.Fatal(err)
			}
		}
		for _, set := range []string{"temp_file_limit = '1MB'", "work_mem = '64kB'"} {
			d.Exec("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET " + strings.ReplaceAll(set, "'", "''") +
				"', current_database()); END $$")
		}
		confirmed := "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1"
		before := d.Text(confirmed, d.cfg.Slot)
		for range 2 { // one right after the other: the slot is free when it returns
			seen := &seen{kinds: map[byte]int{}}
			if err := Peek(within(t), d.config(), 0, func(m Message) error {
				seen.add(m)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if len(seen.inserts) != 5000 || len(seen.commits) == 0 {
				t.Errorf("%d inserts, %d commits", len(seen.inserts), len(seen.commits))
			}
			d.Exec("SELECT pg_switch_wal()")
		}
		stop := errors.New("enough")
		for range 2 { // in the middle of a transaction, too
			err := Peek(within(t), d.config(), 0, func(m Message) error {
				if m.Data[0] == 'I' {
					return stop
				}
				return nil
			})
			if !errors.Is(err, stop) {
				t.Error(err)
			}
		}
		if after := d.Text(confirmed, d.cfg.Slot); after != before {
			t.Errorf("the slot is confirmed up to %s, was %s", after, before)
		}
	})
}

// Where a transaction is open that has written a part of a page, and nobody else writes, not even the server
// itself now and then, a peek ends.
func TestAPeekEndsOnASilentServer(t *testing.T) {
	t.Parallel()
	srv := pgtest.Own(t, 0)
	d := ready(t, srv)
	pid, err := strconv.Atoi(d.Text("SELECT pid::text FROM pg_stat_activity WHERE backend_type = " +
		"'background writer'"))
	must.Succeed(t, err)
	must.Succeed(t, syscall.Kill(pid, syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	before := d.Text("SELECT pg_current_wal_flush_lsn()::text")
	d.Exec("BEGIN")
	d.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'open', 'a', n, " +
		"to_jsonb(repeat('x', 2000)) FROM generate_series(1, 100) n")
	// the WAL writer has flushed whole pages
	for d.Text("SELECT pg_current_wal_flush_lsn()::text") == before {
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := Peek(ctx, d.config(), 0, func(Message) error { return nil }); err != nil {
		t.Error(err)
	}
}

// A slot that lost its WAL says so, in the words of each version.
func TestASlotThatLostItsWALSaysSo(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			t.Parallel()
			d := ready(t, pgtest.Own(t, major, "max_slot_wal_keep_size=1MB", "wal_keep_size=0",
				"max_wal_size=32MB"))
			s := d.open()
			for range 4 {
				d.Exec("SELECT pg_logical_emit_message(false, 'x', repeat('y', 1000000)) FROM " +
					"generate_series(1, 3)")
				d.Exec("SELECT pg_switch_wal()")
				d.Exec("CHECKPOINT")
			}
			state, err := s.Slot(within(t))
			if err != nil || state.WALStatus != "lost" || state.Invalidation == "" {
				t.Errorf("%+v, %v", state, err)
			}
			err = s.Start(within(t), 0, false)
			if postgres.SQLState(err) != postgres.StateNotInPrerequisiteState ||
				outbox.ClassOf(err) != outbox.Transient {
				t.Errorf("start: %v", err)
			}
			err = Peek(within(t), d.config(), 0, nil)
			wantFault(t, err, outbox.Fatal, "slot_unusable")
		})
	}
}

func TestASlotStartsWhereItSays(t *testing.T) {
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
	d.Insert(outboxdb.Ops(t, 5)) // older than the slot
	lsn, err := s.CreateSlot(within(t))
	must.Succeed(t, err)
	d.Insert(outboxdb.Ops(t, 3))
	if state, err := s.Slot(within(t)); err != nil || state.Confirmed != lsn {
		t.Errorf("made at %v, the slot says %v (%v)", lsn, state.Confirmed, err)
	}
	if got := read(t, d.start(lsn), inserts(3)); len(got.inserts) != 3 || got.commits[0] <= lsn {
		t.Errorf("%d inserts, commits %v", len(got.inserts), got.commits)
	}
}
