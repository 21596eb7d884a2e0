package repair

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

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

// TestARepairWithoutAMissingRowSaysWhatItCannotFind: the stream is gone, and so are the rows. That no row is
// missing does not mean that nothing is.
func TestARepairWithoutAMissingRowSaysWhatItCannotFind(t *testing.T) {
	t.Parallel()
	ctx, cfg, _, db := archived(t, 1, rows)
	db.Exec("DELETE FROM outbox")
	_, js := natstest.Connect(t, cfg.NATS.URL)
	must.Succeed(t, js.DeleteStream(ctx, "OUTBOX"))
	report, err := Run(ctx, cfg, quiet, Options{})
	outboxdb.WantFault(t, err, outbox.Gap, "stream_missing")
	if text := strings.Join(report.Lines(), "\n"); strings.Contains(text, "can't be found") {
		t.Errorf("the archive has them\n%s", text)
	}
	cfg.Archive.URL = ""
	for _, accept := range []string{"", "stream_missing"} {
		report, err := Run(ctx, cfg, quiet, Options{Accept: accept})
		text := strings.Join(report.Lines(), "\n")
		if (err == nil) != (accept != "") || report.Missing != 0 ||
			!strings.Contains(text, "deleted from the table, by retention too, can't be found") {
			t.Errorf("--accept %q: %v\n%s", accept, err, text)
		}
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

// TestARepairThatWasKilledReadsTheArchive, if the stream's first message is of an earlier repair: its own
// ones come behind the sequences that the record has.
func TestARepairThatWasKilledReadsTheArchive(t *testing.T) {
	t.Parallel()
	for _, says := range []string{"making slot", "sink.durable_after"} {
		t.Run(says, func(t *testing.T) {
			t.Parallel()
			ctx, cfg, s, db := archived(t, 1, rows-5)
			must.Succeed(t, s.Purge(ctx, jetstream.WithPurgeSequence(rows-4)))
			db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
			db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', $1, '{}')",
				rows+1)
			killedAt(t, ctx, cfg, says, Options{Accept: "slot_missing"})
			report, err := run(ctx, cfg, Options{Accept: "repair_unfinished"})
			if seq, _ := last(t, ctx, s); err != nil || seq != rows+1 {
				t.Errorf("%d: %+v, %v", seq, report, err)
			}
		})
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
