package replication

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestEachCommitArrivesWhole(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		s := d.start(0)
		edits := outboxdb.Ops(t, 3000)
		d.CopyIn(edits[:1000])
		d.Insert(edits[1000:2000])
		for i := range 50 {
			d.Insert(edits[2000+i : 2001+i])
		}
		d.Exec("BEGIN")
		d.Insert(edits[:10])
		d.Exec("ROLLBACK")
		d.Insert(edits[2050:2051])
		got := read(t, s, inserts(2051))
		if len(got.inserts) != 2051 {
			t.Errorf("%d inserts, want 2051", len(got.inserts))
		}
		for i := 1; i < len(got.commits); i++ {
			if got.commits[i] <= got.commits[i-1] {
				t.Errorf("commit %d at %v follows %v", i, got.commits[i], got.commits[i-1])
			}
		}
		// A payload is there byte for byte.
		if p := d.Text("SELECT payload::text FROM outbox WHERE actor_id = $1 AND counter = $2 LIMIT 1",
			edits[2050].Actor, edits[2050].Counter); !strings.Contains(got.inserts[2050], p) {
			t.Errorf("insert %q does not hold %s", got.inserts[2050], p)
		}
		last := got.commits[len(got.commits)-1]
		if s.Received() < last {
			t.Errorf("received %v, but a commit ended at %v", s.Received(), last)
		}
		s.Confirm(last)
		eventually(t, "the server has the confirmed LSN", func() bool {
			state, err := s.Slot(within(t))
			return err == nil && state.Confirmed == last
		})
		if err := s.Stop(within(t)); err != nil {
			t.Error(err)
		}
		if err := s.Err(); !errors.Is(err, ErrClosed) {
			t.Errorf("after Stop: %v", err)
		}
	})
}

func TestNothingReceivedIsConfirmed(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	s := d.start(0)
	before, err := s.Slot(within(t))
	must.Succeed(t, err)
	d.Insert(outboxdb.Ops(t, 20))
	read(t, s, inserts(20))
	if err := s.Stop(within(t)); err != nil { // the last status has been read when Stop returns
		t.Fatal(err)
	}
	s = d.open()
	after, err := s.Slot(within(t))
	if err != nil || after.Confirmed != before.Confirmed {
		t.Errorf("confirmed went from %v to %v (%v)", before.Confirmed, after.Confirmed, err)
	}
}

func TestStopSendsTheLastConfirmedLSN(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	s := d.start(0)
	d.Insert(outboxdb.Ops(t, 20))
	last := read(t, s, inserts(20)).commits[0]
	s.Confirm(last)
	must.Succeed(t, s.Stop(within(t)))
	if got, err := d.open().Slot(within(t)); err != nil || got.Confirmed != last {
		t.Errorf("confirmed %v, want %v (%v)", got.Confirmed, last, err)
	}
}

// Gap mode confirms where the commit record of its oldest held event starts: that transaction and what
// follows it come again, and nothing before.
func TestATransactionWhoseCommitRecordStartsAtTheConfirmedLSNComesAgain(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		s := d.start(0)
		ops := outboxdb.Ops(t, 20)
		for i := range ops {
			d.Insert(ops[i : i+1])
		}
		got := read(t, s, inserts(20))
		for from := 5; from < 15; from += 3 {
			start := got.starts[from]
			if start >= got.commits[from] || start < got.commits[from-1] {
				t.Fatalf("commit record %d is %v to %v, behind %v", from, start, got.commits[from],
					got.commits[from-1])
			}
			s.Confirm(start)
			must.Succeed(t, s.Stop(within(t)))
			state, err := d.open().Slot(within(t))
			if err != nil || state.Confirmed != start {
				t.Fatalf("confirmed %v, want %v (%v)", state.Confirmed, start, err)
			}
			s = d.start(start)
			if again := read(t, s, inserts(20-from)); !slices.Equal(again.starts, got.starts[from:]) {
				t.Errorf("from %v on came %v, want %v", start, again.starts, got.starts[from:])
			}
		}
	})
}

func TestNothingBeyondWhatWasReceivedIsConfirmed(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	s := d.start(0)
	d.Insert(outboxdb.Ops(t, 5))
	read(t, s, inserts(5))
	s.Confirm(1 << 60)
	must.Succeed(t, s.Stop(within(t)))
	state, err := d.open().Slot(within(t))
	if err != nil || state.Confirmed == 0 || state.Confirmed >= 1<<60 {
		t.Errorf("confirmed %v (%v)", state.Confirmed, err)
	}
}

func TestSlotInUseCanBeTriedAgain(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	holder, standby := d.start(0), d.open()
	for range 3 {
		if err := standby.Start(within(t), 0, true); !errors.Is(err, ErrSlotInUse) {
			t.Fatalf("second start: %v", err)
		}
	}
	state, err := standby.Slot(within(t))
	if err != nil || !state.Active || state.ActivePID == 0 || !strings.Contains(state.Holder, "outflow") {
		t.Errorf("slot %+v, %v", state, err)
	}
	must.Succeed(t, holder.Stop(within(t)))
	eventually(t, "the standby takes over", func() bool {
		err := standby.Start(within(t), 0, true)
		if err != nil && !errors.Is(err, ErrSlotInUse) {
			t.Fatal(err)
		}
		return err == nil
	})
	d.Insert(outboxdb.Ops(t, 3))
	read(t, standby, inserts(3))
}

func TestSlotThatIsMissingIsAPlainError(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.Exec("SELECT pg_drop_replication_slot($1)", d.cfg.Slot)
	s := d.open()
	if state, err := s.Slot(within(t)); err != nil || state != (relay.SlotState{}) {
		t.Errorf("slot %+v, %v", state, err)
	}
	err := s.Start(within(t), 0, false)
	if postgres.SQLState(err) != postgres.StateUndefinedObject || outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("start: %v", err)
	}
}

func TestTheServerStateIsReadBeforeAndAfterStart(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		s := d.open()
		before, err := s.Server(within(t))
		must.Succeed(t, err)
		must.Succeed(t, s.Start(within(t), 0, false))
		d.Insert(outboxdb.Ops(t, 1))
		after, err := s.Server(within(t))
		must.Succeed(t, err)
		if after.WALEnd <= before.WALEnd {
			t.Errorf("end of WAL went from %v to %v", before.WALEnd, after.WALEnd)
		}
		if want := d.Text("SELECT system_identifier::text FROM pg_control_system()"); after.SystemID != want {
			t.Errorf("system %s, want %s", after.SystemID, want)
		}
		if after.History.Timeline != 1 || len(after.History.Switches) != 0 || after.InRecovery ||
			after.Database == "" ||
			after.Version/10000 != srv.Installation.Major || after.WALSenderTimeout.Seconds() != 60 {
			t.Errorf("%+v", after)
		}
		before.WALEnd, after.WALEnd = 0, 0
		if before.SystemID != after.SystemID || before.Database != after.Database {
			t.Errorf("before %+v, after %+v", before, after)
		}
	})
}

func TestTerminatedWalsenderEndsTheStream(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	s := d.start(0)
	d.Exec("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1",
		d.cfg.Slot)
	err := end(t, s)
	if postgres.SQLState(err) != "57P01" || outbox.ClassOf(err) != outbox.Transient {
		t.Errorf("ended with %v", err)
	}
	again := d.start(0)
	d.Insert(outboxdb.Ops(t, 2))
	read(t, again, inserts(2))
}

// end reads until the stream has ended and returns why.
func end(t testing.TB, s *Session) error {
	t.Helper()
	ctx := within(t)
	for {
		select {
		case b, ok := <-s.Batches():
			if !ok {
				return s.Err()
			}
			b.Release()
		case <-ctx.Done():
			return errors.New("the stream does not end")
		}
	}
}

func TestCloseMayComeAtAnyTime(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.CopyIn(outboxdb.Ops(t, 20000))
	for range 10 {
		s := d.open()
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				if _, err := s.Server(context.Background()); err != nil {
					return
				}
			}
		}()
		eventually(t, "the slot is free", func() bool { return s.Start(within(t), 0, false) == nil })
		<-s.Batches()
		s.Close()
		s.Close()
		<-done
		if !errors.Is(s.Err(), ErrClosed) {
			t.Fatalf("ended with %v", s.Err())
		}
	}
}

func TestBytesReadAheadOfTheTakeOverAreNotLost(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	edits := outboxdb.Ops(t, 40)
	for i := range edits {
		d.Insert(edits[i : i+1])
	}
	for range 50 {
		s := d.open()
		eventually(t, "the slot is free", func() bool { return s.Start(within(t), 0, false) == nil })
		if got := read(t, s, inserts(40)); len(got.inserts) != 40 || len(got.commits) != 40 {
			t.Fatalf("%d inserts, %d commits", len(got.inserts), len(got.commits))
		}
		s.Close()
	}
}

func TestAMessageMayBeLargerThanTheBuffer(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	s := d.start(0)
	op := outboxdb.Ops(t, 1)[0]
	sizes := []int{bufferSize - 400, bufferSize, 2*bufferSize + 1, largeRoom, largeRoom + bufferSize}
	for _, n := range sizes {
		d.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, $2, $3,
			jsonb_build_object('op', $4::jsonb, 'pad', repeat('x', $5)))`, op.Doc, op.Actor, op.Counter, string(op.Payload), n)
	}
	got := read(t, s, inserts(len(sizes)))
	for i, n := range sizes {
		if !strings.Contains(got.inserts[i], strings.Repeat("x", n)) {
			t.Errorf("insert %d of %d bytes does not hold %d times x", i, len(got.inserts[i]), n)
		}
	}
}
