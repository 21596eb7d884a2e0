package repair

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// rows is how many rows an installation of archived has.
const rows = 20

// archived makes an installation whose stream a repair has filled, and these messages of it are archived;
// what lies before them is an accepted gap.
func archived(t *testing.T, from, to uint64) (ctx context.Context, cfg config.Config, s jetstream.Stream,
	db *outboxdb.DB) {
	t.Helper()
	db = outboxdb.New(t, pgtest.Server(t))
	url := natstest.Server(t).URL()
	cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": url, "slot": db.Slot,
		"stream": "OUTBOX", "sink.durable_after": "0s", "archive.url": "file://" + t.TempDir()}, nil)
	must.Succeed(t, err)
	ctx = outboxdb.Within(t)
	must.Succeed(t, initialize.Run(ctx, cfg, quiet, func(string, ...any) {}, nil))
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'd', 'a', n, '{}' FROM generate_series(1, $1::int) n`, rows)
	report, err := Run(ctx, cfg, quiet, Options{Accept: "slot_missing"})
	if err != nil || report.Published != rows {
		t.Fatalf("%+v, %v", report, err)
	}
	nc, js := natstest.Connect(t, url)
	api := jsapi.New(nc, "")
	s, err = js.Stream(ctx, "OUTBOX")
	must.Succeed(t, err)
	store, err := archive.Open(ctx, cfg.Archive.URL)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, store.Close()) }()
	a, err := archive.Load(ctx, store, archive.FolderOf("OUTBOX", s.CachedInfo().Created), nil)
	must.Succeed(t, err)
	segment, err := a.NewSegment()
	must.Succeed(t, err)
	if from > 1 {
		segment.Gap(outbox.Sequences{{From: 1, To: from - 1}}, nil)
	}
	for seq := from; seq <= to; seq++ {
		m, err := api.Message(ctx, "OUTBOX", jsapi.MessageRequest{Seq: seq})
		must.Succeed(t, err)
		header, err := nats.DecodeHeadersMsg(m.Header)
		must.Succeed(t, err)
		must.Succeed(t, segment.Add(&archive.Message{Seq: m.Seq, Time: m.Time, Subject: m.Subject,
			Header: header, Data: m.Data}))
	}
	_, err = a.Append(ctx, segment, 0)
	must.Succeed(t, err)
	return ctx, cfg, s, db
}

// copies are the messages from one on, to be published again.
func copies(t *testing.T, ctx context.Context, s jetstream.Stream, from uint64) (all []*nats.Msg) {
	t.Helper()
	info, err := s.Info(ctx)
	must.Succeed(t, err)
	ingress := strings.TrimSuffix(info.Config.Subjects[0], ">")
	for seq := from; seq <= rows; seq++ {
		m, err := s.GetMsg(ctx, seq)
		must.Succeed(t, err)
		for name := range m.Header {
			if strings.HasPrefix(name, "Nats-") {
				m.Header.Del(name)
			}
		}
		all = append(all, &nats.Msg{Subject: ingress + m.Subject, Header: m.Header, Data: m.Data})
	}
	return all
}

var quiet = slog.New(slog.DiscardHandler)

// TestWhatRetentionTakesBetweenArchiveAndStreamIsNotMissing: when the archive was read it was in the stream,
// and when that is read it is not any more.
func TestWhatRetentionTakesBetweenArchiveAndStreamIsNotMissing(t *testing.T) {
	t.Parallel()
	for name, gone := range map[string]uint64{"nothing was taken before": 0, "some was": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cfg, s, _ := archived(t, 1, rows)
			purge := func(below uint64) {
				must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(below)))
			}
			purge(gone + 1)
			looks := 0
			past := func() {
				if looks++; looks == 1 {
					purge(11)
				}
			}
			report, err := Run(ctx, cfg, quiet, Options{Check: true, past: past})
			if err != nil || report.InStream != rows || looks < 2 {
				t.Errorf("%d looks, %+v, %v", looks, report, err)
			}
			// Without the archive nobody has them any more, and that is what is said.
			cfg.Archive.URL, looks = "", 0
			past = func() {
				if looks++; looks == 1 {
					purge(15)
				}
			}
			report, err = Run(ctx, cfg, quiet, Options{Check: true, Where: "true", past: past})
			outboxdb.WantFault(t, err, outbox.Gap, codeMissing)
			if report.Missing != 14 || looks < 2 {
				t.Errorf("%d looks, %+v", looks, report)
			}
		})
	}
}

// TestAnEmptyStreamIsNotFilledFromTheTableAlone: the archive has what retention took from the table, under
// the sequences that consumers know. Whoever does not want it has to say so.
func TestAnEmptyStreamIsNotFilledFromTheTableAlone(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := archived(t, 1, rows)
	const restore = "outflow archive restore"
	_, js := natstest.Connect(t, cfg.NATS.URL)
	must.Succeed(t, js.DeleteStream(ctx, "OUTBOX"))
	report, err := Run(ctx, cfg, quiet, Options{})
	f := outboxdb.WantFault(t, err, outbox.Gap, "stream_missing")
	if text := strings.Join(report.Lines(), "\n"); report.Command != restore ||
		!strings.Contains(f.Hint, restore) || !strings.Contains(text, "up to sequence 20") {
		t.Errorf("%v, %s", f, text)
	}
	_, err = Run(ctx, cfg, quiet, Options{Accept: "stream_missing"})
	outboxdb.WantFault(t, err, outbox.Fatal, "repair_archived")
	if _, err := js.Stream(ctx, "OUTBOX"); err == nil {
		t.Error("it has made the stream")
	}
	there := cfg.Archive.URL
	cfg.Archive.URL += "/not/mounted"
	_, err = Run(ctx, cfg, quiet, Options{Accept: "stream_missing"})
	f = outboxdb.WantFault(t, err, outbox.Fatal, "repair_archived")
	if !strings.Contains(f.Message, "/not/mounted does not exist") {
		t.Error(f)
	}
	cfg.Archive.URL = there
	made := s.CachedInfo().Config
	_, err = js.CreateStream(ctx, made)
	must.Succeed(t, err)
	_, err = Run(ctx, cfg, quiet, Options{Accept: "stream_recreated"})
	f = outboxdb.WantFault(t, err, outbox.Fatal, "repair_archived")
	if !strings.Contains(f.Hint, "nats stream rm OUTBOX") {
		t.Error(f)
	}
	cfg.Archive.URL = ""
	report, err = Run(ctx, cfg, quiet, Options{Accept: "stream_recreated"})
	if err != nil || report.Published != rows {
		t.Errorf("%+v, %v", report, err)
	}
}

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

// TestARepairDoesNotCountAsAnOutflowThatStandsBy: none of its connections has the name of outflow run, and
// uninstall finds them all the same.
func TestARepairDoesNotCountAsAnOutflowThatStandsBy(t *testing.T) {
	t.Parallel()
	ctx, cfg, _, db := archived(t, 1, rows)
	cfg.Command = "repair"
	named := func(prefix string) string {
		return db.Text("SELECT count(*)::text FROM pg_stat_activity WHERE datname = current_database() AND "+
			"starts_with(application_name, $1)", prefix)
	}
	looks := 0
	_, err := Run(ctx, cfg, quiet, Options{Check: true, past: func() {
		looks++
		run, commands := named(postgres.NamePrefix(db.Slot)), named(postgres.CommandPrefix(db.Slot))
		if run != "0" || commands == "0" {
			t.Errorf("%s connections of outflow run, %s of commands", run, commands)
		}
	}})
	if err != nil || looks == 0 {
		t.Errorf("%d looks, %v", looks, err)
	}
}

// TestWhatTheLimitsTakeDoesNotKeepAConditionWaiting: of a stream with a max_age the front goes all the time.
// Who gives a condition has said that it holds for no row of what is gone.
func TestWhatTheLimitsTakeDoesNotKeepAConditionWaiting(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := archived(t, 1, rows)
	cfg.Archive.URL = ""
	gone := uint64(1)
	past := func() {
		gone++
		must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(gone)))
	}
	report, err := Run(ctx, cfg, quiet, Options{Check: true, Where: "counter > 15", past: past})
	if err != nil || report.InStream != 5 {
		t.Errorf("%+v, %v", report, err)
	}
}

// TestWhatWasGoneBeforeIsNotMadeUpForByWhatGoes: the archive has what retention takes while the stream is
// read, and lacks what was gone before.
func TestWhatWasGoneBeforeIsNotMadeUpForByWhatGoes(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := archived(t, 4, rows)
	purge := func(below uint64) {
		must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(below)))
	}
	purge(4)
	report, err := Run(ctx, cfg, quiet, Options{Check: true, past: func() { purge(15) }})
	f := outboxdb.WantFault(t, err, outbox.Fatal, "repair_removed")
	if !strings.Contains(f.Message, "3 messages") {
		t.Errorf("%+v, %v", report, f)
	}
}

// TestARepairThatMakesTheSlotAnewReadsTheArchiveAsItsPlanDid: the stream's first message is of an earlier
// repair, which has ended. That this one is under way by now says nothing of that message.
func TestARepairThatMakesTheSlotAnewReadsTheArchiveAsItsPlanDid(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := archived(t, 1, rows-5)
	must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(rows-4)))
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', $1, '{}')", rows+1)
	report, err := Run(ctx, cfg, quiet, Options{Accept: "slot_missing"})
	if err != nil || report.Published != 1 {
		t.Errorf("%+v, %v", report, err)
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

// TestNotEachHoleIsAskedFor: with max_msgs_per_subject a stream may have as many holes as messages.
func TestNotEachHoleIsAskedFor(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := archived(t, 1, rows)
	for seq := uint64(2); seq < rows; seq += 2 {
		must.Succeed(t, s.DeleteMsg(ctx, seq))
	}
	nc, _ := natstest.Connect(t, cfg.NATS.URL)
	asked, err := nc.SubscribeSync("$JS.API.STREAM.MSG.GET.OUTBOX")
	must.Succeed(t, err)
	must.Succeed(t, nc.Flush())
	report, err := Run(ctx, cfg, quiet, Options{Check: true, Where: "counter % 2 = 1"})
	if err != nil || report.InStream != rows/2 {
		t.Errorf("%+v, %v", report, err)
	}
	must.Succeed(t, nc.Flush())
	n, _, err := asked.Pending()
	must.Succeed(t, err)
	if n == 0 || n >= rows/2 {
		t.Errorf("%d messages were asked for", n)
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

// until is a writer that calls f once, with the first text that has what.
func until(what string, f func()) writer {
	var once sync.Once
	return func(b []byte) (int, error) {
		if strings.Contains(string(b), what) {
			once.Do(f)
		}
		return len(b), nil
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

// TestWhatTheStreamItselfReplacesIsPublishedOnce: with max_msgs_per_subject a row takes the place of one of
// the same document, also within what a repair publishes.
func TestWhatTheStreamItselfReplacesIsPublishedOnce(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := archived(t, 1, rows)
	_, js := natstest.Connect(t, cfg.NATS.URL)
	limited := s.CachedInfo().Config
	limited.MaxMsgsPerSubject = 1
	_, err := js.UpdateStream(ctx, limited)
	must.Succeed(t, err)
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	for n := range 3 {
		db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('e', 'a', $1, '{}')", n)
	}
	report, err := Run(ctx, cfg, quiet, Options{Accept: "slot_missing", Where: "doc_id = 'e'"})
	info, _ := s.Info(ctx)
	if err != nil || report.Published != 3 || info.State.LastSeq != rows+3 {
		t.Errorf("%+v, %v, %+v", report, err, info.State)
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

// TestWhatWasRemovedMattersOnlyToRowsThatAreMissing: where none is, no condition has to be given, neither to
// look nor to repair.
func TestWhatWasRemovedMattersOnlyToRowsThatAreMissing(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := archived(t, 1, rows)
	cfg.Archive.URL = ""
	must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(6)))
	_, err := Run(ctx, cfg, quiet, Options{Check: true})
	outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
	db.Exec("DELETE FROM outbox WHERE counter <= 5")
	insert := func(counter int) {
		db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', $1, '{}')",
			counter)
	}
	insert(rows + 1) // the slot brings it
	report, err := Run(ctx, cfg, quiet, Options{Check: true})
	if err != nil || report.InStream != rows-5 || report.InWAL != 1 {
		t.Errorf("%+v, %v", report, err)
	}
	gone := uint64(6)
	check := func(times int) (*Report, error) { // one message more goes each time that it reads
		return Run(ctx, cfg, quiet, Options{Check: true, past: func() {
			if times--; times >= 0 {
				gone++
				must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(gone)))
			}
		}})
	}
	_, err = check(1)
	outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
	db.Exec("DELETE FROM outbox WHERE counter <= 15")
	if report, err = check(attempts); err != nil || report.InStream != rows-15 || gone != 13 {
		t.Errorf("%d gone, %+v, %v", gone, report, err)
	}
	db.Exec("DELETE FROM outbox WHERE counter > $1", rows)
	renew := func(meanwhile func()) (*Report, error) {
		db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
		line := progress.New(progress.Config{Stderr: until("making slot", meanwhile)})
		return Run(progress.With(ctx, line), cfg, quiet, Options{Accept: "slot_missing"})
	}
	if report, err = renew(func() { insert(rows + 2) }); err != nil || report.Published != 1 {
		t.Errorf("%+v, %v", report, err)
	}
	_, err = renew(func() { must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(rows))) })
	outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
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

// TestARecordIsRebuiltThoughMessagesWereRemoved: then the table can't show whether the stream has everything,
// and the plan says so.
func TestARecordIsRebuiltThoughMessagesWereRemoved(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := archived(t, 1, rows)
	cfg.Archive.URL = ""
	must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(6)))
	_, js := natstest.Connect(t, cfg.NATS.URL)
	must.Succeed(t, js.DeleteKeyValue(ctx, checkpoint.Bucket("OUTBOX")))
	report, err := Run(ctx, cfg, quiet, Options{Accept: "record_missing"})
	if err != nil || report.Mode != string(modeRecord) ||
		!strings.Contains(strings.Join(report.Notes, "\n"), "the table was not compared: 5 messages") {
		t.Errorf("%+v, %v", report, err)
	}
}
