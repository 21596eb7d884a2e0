package replication

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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

// PostgreSQL does not stop while a walsender's client has not taken and confirmed everything; an outflow that
// can't publish never will.
func TestFastStopIsNotHeldUp(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		t.Run("postgres-"+strconv.Itoa(major), func(t *testing.T) {
			t.Parallel()
			srv := pgtest.Own(t, major)
			d := ready(t, srv)
			for name, meanwhile := range map[string]func(s *Session){
				"nothing is confirmed": func(s *Session) {
					d.Insert(outboxdb.Ops(t, 100))
					read(t, s, inserts(100))
				},
				"everything is confirmed": func(s *Session) {
					d.Insert(outboxdb.Ops(t, 100))
					commits := read(t, s, inserts(100)).commits
					s.Confirm(commits[len(commits)-1])
				},
				// What the server could say of its end on the stream lies behind more than the queue and the
				// sockets hold.
				"nobody reads": func(*Session) {
					d.Exec("SELECT pg_logical_emit_message(false, 'flood', repeat('x', 1000000)) FROM " +
						"generate_series(1, 64)")
					eventually(t, "the server can't send more", func() bool {
						return d.Text(`SELECT coalesce(wait_event, '') FROM pg_replication_slots
							JOIN pg_stat_activity ON pid = active_pid
							WHERE slot_name = $1`, d.cfg.Slot) == "WalSenderWriteData"
					})
				},
			} {
				s := d.start(0)
				meanwhile(s)
				postgres.Close(d.Conn)
				if err := srv.Stop("fast"); err != nil { // gives up after minutes
					t.Fatalf("%s: %v", name, err)
				}
				if err := s.Err(); err == nil || outbox.ClassOf(err) != outbox.Transient {
					t.Errorf("%s: ended with %v", name, err)
				}
				must.Succeed(t, srv.Start(within(t)))
				d.Connect()
			}
		})
	}
}

func TestKilledServerIsTransient(t *testing.T) {
	t.Parallel()
	srv := pgtest.Own(t, 0)
	d := ready(t, srv)
	s := d.start(0)
	d.Insert(outboxdb.Ops(t, 10))
	read(t, s, inserts(10))
	must.Succeed(t, srv.Kill())
	if err := end(t, s); err == nil || outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("ended with %v", err)
	}
	if _, err := Open(within(t), d.config()); err == nil || outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("open: %v", err)
	}
	must.Succeed(t, srv.Start(within(t)))
	read(t, d.start(0), inserts(10))
}

// Nothing is taken off the socket, and still the server hears from us.
func TestConnectionOutlivesAConsumerThatReadsNothing(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Own(t, 0, "wal_sender_timeout=500ms"))
	const rounds = 6 // more than the socket's buffers and the queue hold
	edits := outboxdb.Ops(t, 20000)
	for range rounds {
		d.CopyIn(edits)
	}
	for begun := time.Now(); ; { // a process that stands still answers nobody
		s := d.start(0)
		server, err := s.Server(within(t))
		if err != nil || server.WALSenderTimeout.Milliseconds() != 500 {
			t.Fatal(server, err)
		}
		if d.outlives(t, s) {
			got, ended := readUntil(t, s, inserts(rounds*len(edits)))
			if !ended && got.kinds['I'] != rounds*len(edits) {
				t.Errorf("%d inserts", got.kinds['I'])
			}
			if !ended {
				return
			}
		}
		if time.Since(begun) > outboxdb.Patience {
			t.Fatalf("the server ends the connection each time: %v", s.Err())
		}
		s.Close()
		eventually(t, "the slot is free", func() bool { return d.Text(slotActive, d.cfg.Slot) == "false" })
	}
}

const slotActive = "SELECT coalesce((SELECT active FROM pg_replication_slots WHERE slot_name = $1), " +
	"false)::text"

// outlives waits until four times wal_sender_timeout has passed for a session that nobody reads from. It
// reports whether the session is still there.
func (d *database) outlives(t *testing.T, s *Session) bool {
	t.Helper()
	eventually(t, "the queue is full", func() bool {
		return len(s.Batches()) == queued || d.Text(slotActive, d.cfg.Slot) == "false"
	})
	pid := d.Text("SELECT coalesce((SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1), "+
		"0)::text", d.cfg.Slot)
	eventually(t, "four timeouts have passed at the server", func() bool {
		return d.Text("SELECT coalesce((SELECT clock_timestamp() - backend_start > '2s' FROM "+
			"pg_stat_activity WHERE pid = $1::int), true)::text", pid) == "true"
	})
	return d.Text(slotActive, d.cfg.Slot) == "true" && len(s.Batches()) == queued
}

// A promotion is a new timeline with a history, and what an earlier session kept of it is not used any
// longer.
func TestAPromotionIsANewTimeline(t *testing.T) {
	t.Parallel()
	srv := pgtest.Own(t, 0)
	d := ready(t, srv)
	edits := outboxdb.Ops(t, 10)
	d.Insert(edits)
	postgres.Close(d.Conn)
	asStandby(t, srv)
	standby := d.open()
	state, err := standby.Server(within(t))
	if err != nil || !state.InRecovery || state.History.Timeline != 1 || state.WALEnd == 0 {
		t.Fatalf("standby: %+v, %v", state, err)
	}
	w := NewWriter(d.config())
	defer w.Close()
	wantFault(t, w.Heartbeat(within(t)), outbox.Transient, "write_standby")
	d.Connect()
	d.Exec("SELECT pg_promote()")
	state, err = standby.Server(within(t))
	if err != nil || state.InRecovery || state.History.Timeline != 2 || len(state.History.Switches) != 1 {
		t.Fatalf("promoted: %+v, %v", state, err)
	}
	left := state.History.Switches[0]
	if left.Timeline != 1 || left.End == 0 || left.End > state.WALEnd {
		t.Errorf("left timeline 1 at %v, WAL ends at %v", left.End, state.WALEnd)
	}
	must.Succeed(t, standby.Start(within(t), 0, false))
	again, err := standby.Server(within(t))
	if err != nil || again.History.Timeline != 2 || len(again.History.Switches) != 1 {
		t.Errorf("after Start: %+v, %v", again, err)
	}
	unlock, err := standby.lock(within(t)) // the stream asks as well
	must.Succeed(t, err)
	standby.identity.history.Timeline = 1
	unlock()
	if _, err := standby.Server(within(t)); err == nil || outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("with an outdated history: %v", err)
	}
}

// TestNothingOfANewTimelineIsHandedOut: a walsender of a standby goes on across a switch of the timeline. A
// message of what came behind it would name the old one, and look as if it were lost.
func TestNothingOfANewTimelineIsHandedOut(t *testing.T) {
	t.Parallel()
	srv := pgtest.Own(t, 0)
	if srv.Installation.Major < 16 {
		t.Skip("no logical decoding on a standby")
	}
	d := ready(t, srv)
	d.Insert(outboxdb.Ops(t, 1))
	postgres.Close(d.Conn)
	asStandby(t, srv)
	s := d.start(0)
	read(t, s, inserts(1)) // a standby hands out what it has
	must.Succeed(t, srv.Promote(within(t)))
	d.Connect()
	d.Insert(outboxdb.Ops(t, 1))
	got, ended := readUntil(t, s, inserts(1))
	if !ended || outbox.ClassOf(s.Err()) != outbox.Transient {
		t.Fatalf("ended: %v, %v; came: %v", ended, s.Err(), got.kinds)
	}
	s.Close()
	eventually(t, "the slot is free", func() bool { return d.Text(slotActive, d.cfg.Slot) == "false" })
	read(t, d.start(0), inserts(2))
}

// TestAStandbyThatFollowsAnotherPrimaryIsNoticed: it stays in recovery, and its control file names the old
// timeline until the next restart point.
func TestAStandbyThatFollowsAnotherPrimaryIsNoticed(t *testing.T) {
	t.Parallel()
	first := pgtest.Own(t, 0)
	if first.Installation.Major < 16 {
		t.Skip("no logical decoding on a standby")
	}
	d := ready(t, first)
	standby := func(name string) *pgserver.Server {
		srv, err := first.Standby(within(t), name, nil)
		must.Succeed(t, err)
		t.Cleanup(func() { must.Succeed(t, srv.Remove()) })
		return srv
	}
	second, follower := standby("second"), standby("follower")
	primary := d.URL
	d.URL = follower.URL(d.Text("SELECT current_database()"))
	d.cfg.URL, d.cfg.Slot = d.URL, "follower"
	made := make(chan error, 1)
	go func() {
		conn, err := pgx.Connect(within(t), d.URL)
		if err == nil {
			defer conn.Close(context.Background())
			_, err = conn.Exec(within(t), "SELECT pg_create_logical_replication_slot('follower', 'pgoutput')")
		}
		made <- err
	}()
	eventually(t, "a slot on the standby", func() bool {
		d.Exec("SELECT pg_log_standby_snapshot()") // without it there is none
		return len(made) > 0
	})
	must.Succeed(t, <-made)
	s := d.start(0)
	d.Insert(outboxdb.Ops(t, 1))
	read(t, s, inserts(1))
	eventually(t, "the other standby has it", func() bool {
		return d.Text("SELECT bool_and(replay_lsn >= pg_current_wal_lsn())::text FROM pg_stat_replication") ==
			"true"
	})
	postgres.Close(d.Conn)
	must.Succeed(t, first.Kill())
	must.Succeed(t, second.Promote(within(t)))
	d.Connect()
	d.Exec(fmt.Sprintf("ALTER SYSTEM SET primary_conninfo = 'host=127.0.0.1 port=%d user=postgres'",
		second.Port))
	d.Exec("ALTER SYSTEM SET primary_slot_name = ''")
	d.Exec("SELECT pg_reload_conf()")
	postgres.Close(d.Conn)
	d.URL = strings.Replace(primary, fmt.Sprint(first.Port), fmt.Sprint(second.Port), 1)
	d.Connect()
	d.Insert(outboxdb.Ops(t, 1))
	got, ended := readUntil(t, s, inserts(1))
	if !ended || !strings.Contains(s.Err().Error(), "from timeline 1 to 2") {
		t.Fatalf("ended: %v, %v; came: %v", ended, s.Err(), got.kinds)
	}
}

// asStandby starts a server again in standby mode: promoted behind that, it is a failover on one machine.
func asStandby(t *testing.T, srv *pgserver.Server) {
	t.Helper()
	must.Succeed(t, srv.Stop("fast"))
	must.Succeed(t, os.WriteFile(filepath.Join(srv.Dir, "data", "standby.signal"), nil, 0o644))
	must.Succeed(t, srv.Start(within(t)))
}
