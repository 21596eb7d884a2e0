package repair

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestWhatTheBrokerLostLongAgoIsNotRemoved: its events came again behind the hole, and the record has dropped
// it since. What somebody removed from within still counts.
func TestWhatTheBrokerLostLongAgoIsNotRemoved(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := archived(t, 1, rows)
	_, js := natstest.Connect(t, cfg.NATS.URL)
	const hole = 18 // up to the end
	again := copies(t, ctx, s, hole)
	for seq := uint64(hole); seq <= rows; seq++ {
		must.Succeed(t, s.DeleteMsg(ctx, seq))
	}
	again[0].Header.Set(outbox.HeaderLost, strconv.Itoa(hole))
	for _, m := range again {
		_, err := js.PublishMsg(ctx, m)
		must.Succeed(t, err)
	}
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'b', 1, '{}')")
	for _, url := range []string{cfg.Archive.URL, ""} {
		cfg.Archive.URL = url
		report, err := Run(ctx, cfg, quiet, Options{})
		outboxdb.WantFault(t, err, outbox.Gap, "slot_missing")
		if report.Missing != 1 || report.InStream != rows {
			t.Errorf("archive %q: %+v", url, report)
		}
	}
	must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(hole)))
	_, err := Run(ctx, cfg, quiet, Options{})
	outboxdb.WantFault(t, err, outbox.Fatal, "repair_removed")
	if want := fmt.Sprintf("%d messages", hole-1); !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// TestARepairSaysWhatTheBrokerHadLostAtTheEnd: consumers that have not read it find a hole, which is a gap if
// no message explains it, and so does the next repair. Of what was durable it says nothing, as nobody knows
// whether the table still has all of it.
func TestARepairSaysWhatTheBrokerHadLostAtTheEnd(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := archived(t, 1, rows)
	cfg.Archive.URL = ""
	insert := func(doc string) {
		db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, 'b', 1, '{}')", doc)
	}
	killed := func() {
		t.Helper()
		db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
		killed(t, ctx, cfg, Options{Accept: "slot_missing"})
	}
	repaired := func(fault string, published uint64) {
		t.Helper()
		report, err := Run(ctx, cfg, quiet, Options{Accept: fault})
		if err != nil || report.Published != published {
			t.Errorf("%+v, %v", report, err)
		}
	}
	lost := func(seq uint64) string {
		t.Helper()
		m, err := s.GetMsg(ctx, seq)
		must.Succeed(t, err)
		return m.Header.Get(outbox.HeaderLost)
	}
	for _, doc := range []string{"e", "f", "g"} {
		insert(doc)
	}
	killed()
	must.Succeed(t, s.DeleteMsg(ctx, rows+2))
	must.Succeed(t, s.DeleteMsg(ctx, rows+3))
	repaired("repair_unfinished", 2)
	if from := lost(rows + 4); from != "22" {
		t.Errorf("lost from %q", from)
	}
	insert("h")
	killed() // at 26
	must.Succeed(t, s.DeleteMsg(ctx, rows+6))
	db.Exec("DELETE FROM outbox WHERE doc_id = 'h'")
	repaired("repair_unfinished", 0)
	l, err := backfill.Open(ctx, cfg, quiet)
	must.Succeed(t, err)
	defer l.Close()
	rd, err := l.Read(ctx)
	must.Succeed(t, err)
	start, err := checkpoint.Resolve(l.CC, rd.Readings)
	if err != nil || start.LostFrom() != rows+6 || start.LastSeq != rows+6 {
		t.Errorf("%+v, %v", start, err)
	}
	must.Succeed(t, s.DeleteMsg(ctx, rows+5)) // which was durable
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	repaired("slot_missing", 1)
	if from := lost(rows + 7); from != "26" {
		t.Errorf("lost from %q", from)
	}
}

// TestWhatARepairHadAcceptedMayBeLost: then no checkpoint says which of the stream's messages are of WAL that
// the slot brings again.
func TestWhatARepairHadAcceptedMayBeLost(t *testing.T) {
	t.Parallel()
	at := relay.Checkpoint{Due: 0x200, Seq: 110, PublishedAhead: []outbox.Position{{LSN: 0x300}}}
	rd := backfill.Readings{}
	rd.Record = &checkpoint.Record{Base: 110, Checkpoints: []checkpoint.StoredCheckpoint{{Checkpoint: at}}}
	rd.Slot.Confirmed, rd.Stream.NewestSeq, rd.Stream.LastSeq = 0x200, 104, 120
	s := &scan{}
	if s.setAnchor(rd, true, relay.Settings{}); s.known != 0 {
		t.Errorf("up to %d", s.known)
	}
	rd.Stream.NewestSeq = 120
	if s.setAnchor(rd, true, relay.Settings{}); s.known != 110 {
		t.Errorf("up to %d", s.known)
	}
}

// TestAnUnfinishedRepairIsNotOverWithTheStream: it was killed before it published what is missing, and the
// stream was put back meanwhile, with all that the record says.
func TestAnUnfinishedRepairIsNotOverWithTheStream(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := archived(t, 1, rows)
	cfg.Archive.URL = ""
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'b', 1, '{}')")
	killed, kill := context.WithCancel(ctx)
	looks := 0
	_, err := Run(killed, cfg, quiet, Options{Accept: "slot_missing", past: func() {
		if looks++; looks == 2 { // the slot is made
			kill()
		}
	}})
	if err == nil || looks != 2 {
		t.Fatalf("%d looks, %v", looks, err)
	}
	_, js := natstest.Connect(t, cfg.NATS.URL)
	all := copies(t, ctx, s, 1)
	must.Succeed(t, js.DeleteStream(ctx, "OUTBOX"))
	_, err = js.CreateStream(ctx, s.CachedInfo().Config)
	must.Succeed(t, err)
	for _, m := range all {
		_, err := js.PublishMsg(ctx, m)
		must.Succeed(t, err)
	}
	report, err := Run(ctx, cfg, quiet, Options{Accept: "repair_unfinished"})
	if err != nil || report.Published != 1 {
		t.Errorf("%+v, %v", report, err)
	}
}

// TestARepairThatWakesUpLateLeavesTheSlotAlone: it sleeps just before it would drop the slot and make it
// anew, and another one comes to its end. What is written from then on is in the slot alone.
func TestARepairThatWakesUpLateLeavesTheSlotAlone(t *testing.T) {
	t.Parallel()
	ctx, cfg, _, db := archived(t, 1, rows)
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	db.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", db.Slot)
	confirmed := func() string {
		return db.Text("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1",
			db.Slot)
	}
	o, at := Options{Accept: "slot_ahead", NewSlot: true}, ""
	line := progress.New(progress.Config{Stderr: until("dropping slot", func() {
		other := o
		other.Accept = "repair_unfinished"
		_, err := Run(ctx, cfg, quiet, other)
		must.Succeed(t, err)
		at = confirmed()
		db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'b', 1, '{}')")
	})})
	_, err := Run(progress.With(ctx, line), cfg, quiet, o)
	if now := confirmed(); err != nil || at == "" || now != at {
		t.Errorf("%v: the slot was at %q, and is at %s", err, at, now)
	}
}

// TestTheEndMayGoBetweenTwoAttempts: what an attempt had published is counted up to the newest message. At
// the stream's last sequence there may be none.
func TestTheEndMayGoBetweenTwoAttempts(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := archived(t, 1, rows)
	cfg.Archive.URL = ""
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	for n := range 3 {
		db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('e', 'a', $1, '{}')", n)
	}
	line := progress.New(progress.Config{Stderr: until("begins again", func() {
		must.Succeed(t, s.DeleteMsg(ctx, rows+3))
	})})
	n := 0
	report, err := Run(progress.With(ctx, line), cfg, quiet, Options{Accept: "slot_missing",
		Where: "doc_id = 'e'", sent: func() {
			if n++; n == 3 { // the first one is acknowledged
				must.Succeed(t, s.DeleteMsg(ctx, rows+1))
			}
		}})
	if err != nil || report.Published != 3 {
		t.Errorf("%+v, %v", report, err)
	}
	m, err := s.GetMsg(ctx, rows+4)
	must.Succeed(t, err)
	if lost := m.Header.Get(outbox.HeaderLost); lost != strconv.Itoa(rows+3) {
		t.Errorf("lost from %q", lost)
	}
}

// TestOfAServerThatWasPutBackIdsMayRepeat: it has no slot, which is what is found first, and gives ids of a
// counter once more. By these alone its rows would count as published.
func TestOfAServerThatWasPutBackIdsMayRepeat(t *testing.T) {
	t.Parallel()
	ctx, cfg, _, db := archived(t, 1, rows)
	l, err := backfill.Open(ctx, cfg, quiet)
	must.Succeed(t, err)
	defer l.Close()
	rec, revision, err := l.Store.Load(ctx)
	must.Succeed(t, err)
	rec.Publication.Seen += 1 << 30
	_, err = l.Store.Save(ctx, rec, revision)
	must.Succeed(t, err)
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	again := func(from int, code string) {
		t.Helper()
		db.Exec("UPDATE outbox SET doc_id = 'another' WHERE counter > $1", from)
		_, err = Run(ctx, cfg, quiet, Options{Accept: code})
		f := outboxdb.WantFault(t, err, outbox.Fatal, "repair_ids")
		if want := fmt.Sprintf("%d rows", rows-from); !strings.Contains(f.Message, want) {
			t.Errorf("%v, want %s", f, want)
		}
	}
	again(rows-5, "slot_missing")
	db.Exec("UPDATE outbox SET doc_id = 'd'")
	killed, kill := context.WithCancel(ctx)
	line := progress.New(progress.Config{Stderr: until("making slot", kill)})
	if _, err := Run(progress.With(killed, line), cfg, quiet, Options{Accept: "slot_missing"}); err == nil {
		t.Fatal("it was not killed")
	}
	again(rows-6, "repair_unfinished")
}

// TestWhatTwoKilledRepairsHadPublishedMayBeLost: that the second one found it there does not make it durable.
func TestWhatTwoKilledRepairsHadPublishedMayBeLost(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := archived(t, 1, rows)
	cfg.Archive.URL = ""
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'b', 1, '{}')")
	killed(t, ctx, cfg, Options{Accept: "slot_missing"})
	killed(t, ctx, cfg, Options{Accept: "repair_unfinished"})
	must.Succeed(t, s.DeleteMsg(ctx, rows+1))
	report, err := Run(ctx, cfg, quiet, Options{Accept: "repair_unfinished"})
	if err != nil || report.Published != 1 {
		t.Fatalf("%+v, %v", report, err)
	}
	m, err := s.GetMsg(ctx, rows+2)
	must.Succeed(t, err)
	if from := m.Header.Get(outbox.HeaderLost); from != strconv.Itoa(rows+1) {
		t.Errorf("lost from %q", from)
	}
}
