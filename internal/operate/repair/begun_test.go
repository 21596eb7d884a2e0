package repair

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	catalogue "github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
)

func onePerSubject(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1 }

func asItIs(*jetstream.StreamConfig) {}

// TestNoConditionOfTheRecordIsRunUnasked: whoever may write the record could have any SQL run.
func TestNoConditionOfTheRecordIsRunUnasked(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, onePerSubject, "", 4)
	earlier := "doc_id = 'e' AND counter < 3 AND 'a\"b' <> '" + strings.Repeat("long", 500) + "'"
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: earlier})
	before, _ := last(t, ctx, s)
	o := Options{Accept: "repair_unfinished", Where: "doc_id = 'e'", EarlierWhere: []string{"true"}}
	_, err := Run(ctx, cfg, quiet, o)
	f := outbox.FaultOf(err)
	if seq, _ := last(t, ctx, s); f == nil || f.Code != "earlier_where" || f.Class != outbox.Usage ||
		!strings.Contains(f.Hint, "as --where") ||
		!strings.Contains(f.Message, catalogue.Word(earlier)) || seq != before {
		t.Errorf("%v; the stream ends at %d, and did at %d", err, seq, before)
	}
	o.EarlierWhere = []string{earlier}
	report, err := Run(ctx, cfg, quiet, o)
	must.Succeed(t, err)
	if seq, _ := last(t, ctx, s); seq != before+2 || len(report.EarlierWhere) != 1 {
		t.Errorf("the stream ends at %d, and did at %d: %+v", seq, before, report)
	}
}

// TestAnotherConditionDoesNotHideARow: the killed repair left one out, and the next one leaves out another,
// whose message the stream has replaced. As many rows are missing as are gone, and it is not they.
func TestAnotherConditionDoesNotHideARow(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, onePerSubject, "", 4)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter IN (1, 3)"})
	report, err := run(ctx, cfg, Options{Accept: "repair_unfinished",
		Where: "doc_id = 'e' AND counter > 1"})
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 2 || seq != rows+4 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestRepairsOfDifferentRowsMayBeKilled: each of them has published up to a row of its own.
func TestRepairsOfDifferentRowsMayBeKilled(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := limited(t, onePerSubject, "", 3)
	db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'f', 'a', n, '{}' FROM generate_series(1, 3) n`)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'f' AND counter < 3"})
	killed(t, ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'e' AND counter < 3"})
	killed(t, ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'e' AND counter < 3"})
	report, err := run(ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id IN ('e', 'f')"})
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 2 || seq != rows+6 || !strings.HasSuffix(key, "3") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestANewRowBeforeThoseThatWerePublished is of no account for them, even if it is published since.
func TestANewRowBeforeThoseThatWerePublished(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := limited(t, asItIs, "", 4)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter < 3"})
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('dd', 'a', 1, '{}')")
	killed(t, ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'dd'", NewSlot: true})
	must.Succeed(t, s.DeleteMsg(ctx, rows+1))
	report, err := run(ctx, cfg, Options{Accept: "repair_unfinished",
		Where: "doc_id IN ('dd', 'e')"})
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 2 || seq != rows+5 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestWhatWasPublishedMayBeTooOld: all of it is gone from the stream, and no message is left to tell.
func TestWhatWasPublishedMayBeTooOld(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, asItIs, "", 4)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter < 3"})
	grownOld(t, ctx, cfg, s, Options{Accept: "repair_unfinished", Where: "doc_id = 'e'"})
	m, err := s.GetMsg(ctx, rows+3)
	must.Succeed(t, err)
	h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
	if err != nil || h.Pos.Index != outbox.RepairedIndex+rows+2 { // it is one event's for ever
		t.Errorf("%v, %v", h, err)
	}
}

// grownOld is a repair for which two rows are left to publish, when all messages have become too old.
func grownOld(t *testing.T, ctx context.Context, cfg config.Config, s jetstream.Stream, o Options) {
	t.Helper()
	keeps := func(age time.Duration) {
		info, err := s.Info(ctx)
		must.Succeed(t, err)
		info.Config.MaxAge, info.Config.Duplicates = age, min(age, time.Minute)
		update(t, ctx, cfg, info.Config)
	}
	keeps(5 * time.Second)
	await.Until(t, "all messages are gone", func() error {
		info, err := s.Info(ctx)
		if err == nil && info.State.Msgs > 0 {
			err = fmt.Errorf("%d messages", info.State.Msgs)
		}
		return err
	})
	o.sent = func() { keeps(time.Hour) }
	report, err := run(ctx, cfg, o)
	if err != nil || report.Published != 2 {
		t.Fatalf("%+v, %v", report, err)
	}
}

// TestAForeignMessageAmongThoseOfAKilledRepairHidesNoRow when all of them are gone: as many sequences are,
// and one of them was his.
func TestAForeignMessageAmongThoseOfAKilledRepairHidesNoRow(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, o := killedAround(t)
	grownOld(t, ctx, cfg, s, o)
	if seq, key := last(t, ctx, s); seq != rows+5 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s", seq, key)
	}
}

// killedAround are two repairs that published a row each, and somebody else's message between. Two are left.
func killedAround(t *testing.T) (ctx context.Context, cfg config.Config, s jetstream.Stream, o Options) {
	t.Helper()
	ctx, cfg, s, _ = limited(t, asItIs, "", 4)
	o = Options{Accept: "slot_missing", Where: "doc_id = 'e'"}
	killedInside(t, ctx, cfg, o)
	nc, err := nats.Connect(cfg.NATS.URL, nats.Timeout(time.Minute))
	must.Succeed(t, err)
	defer nc.Close()
	info, err := s.Info(ctx)
	must.Succeed(t, err)
	_, err = nc.Request(strings.TrimSuffix(info.Config.Subjects[0], ">")+"outbox.g", nil, time.Minute)
	must.Succeed(t, err)
	o.Accept = "repair_unfinished"
	killedInside(t, ctx, cfg, o)
	return ctx, cfg, s, o
}

// TestWhatTheBrokerLostOfAKilledRepairComesAgain, also where another one had gone on behind it: what was left
// to that one says nothing of a stream that has gone back.
func TestWhatTheBrokerLostOfAKilledRepairComesAgain(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, o := killedAround(t)
	for seq := uint64(rows + 3); seq > rows; seq-- {
		must.Succeed(t, s.DeleteMsg(ctx, seq))
	}
	report, err := run(ctx, cfg, o)
	if err != nil || report.Published != 4 {
		t.Errorf("%+v, %v", report, err)
	}
}

// TestARowThatAConditionLeftOutForAWhileIsPublished: the second repair did not miss it, and the first one has
// not published it.
func TestARowThatAConditionLeftOutForAWhileIsPublished(t *testing.T) {
	t.Parallel()
	ctx, cfg, _, db := limited(t, asItIs, "", 4)
	db.Exec("CREATE TABLE later (n bigint); GRANT SELECT ON later TO PUBLIC")
	o := Options{Accept: "slot_missing",
		Where: "doc_id = 'e' AND counter NOT IN (SELECT n FROM public.later)"}
	killedInside(t, ctx, cfg, o)
	db.Exec("INSERT INTO later VALUES (2)")
	o.Accept = "repair_unfinished"
	killedInside(t, ctx, cfg, o)
	db.Exec("DELETE FROM later")
	report, err := run(ctx, cfg, o)
	if err != nil || report.Published != 2 {
		t.Errorf("%+v, %v", report, err)
	}
}

// TestTheBrokerSaysHowOldIsWhatWasPublished, whatever the clock here says: an empty stream had it if it is
// too old. That is as old as the last message: an attempt may have published for long.
func TestTheBrokerSaysHowOldIsWhatWasPublished(t *testing.T) {
	t.Parallel()
	age := func(c *jetstream.StreamConfig) { c.MaxAge, c.Duplicates = 10*time.Minute, time.Minute }
	ctx, cfg, _, _ := limited(t, age, "", 0)
	l, err := backfill.Open(ctx, cfg, quiet)
	must.Succeed(t, err)
	defer l.Close()
	rd, err := l.Read(ctx)
	must.Succeed(t, err)
	for _, ahead := range []time.Duration{-time.Hour, time.Hour} {
		s, rec := &scan{r: &repair{cfg: cfg}, l: l}, &checkpoint.Record{Begun: &checkpoint.Begun{}}
		rd := rd
		rd.Stream.Now, rd.Stream.NewestSeq = rd.Stream.Now.Add(ahead), 0
		rd.Stream.LastTime = rd.Stream.LastTime.Add(ahead)
		s.addAttempt(rec, rd)
		s.attempts = []attempt{{Attempt: rec.Begun.Attempts[0]}}
		for after, want := range map[time.Duration]uint64{time.Minute: 0, 20 * time.Minute: rows} {
			later := rd
			later.Stream.Now = rd.Stream.Now.Add(after)
			if to, err := s.publishedTo(ctx, later); err != nil || to != want {
				t.Errorf("%v, %v later: %d, %v", ahead, after, to, err)
			}
			later.Stream.LastTime = later.Stream.Now.Add(-time.Second)
			if to, err := s.publishedTo(ctx, later); err != nil || to != 0 {
				t.Errorf("%v, %v later, a second after a message: %d, %v", ahead, after, to, err)
			}
		}
	}
}

// TestAStreamThatWasPutBackHasWhatWasPublished: a repair that is killed there as well goes on from both.
func TestAStreamThatWasPutBackHasWhatWasPublished(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, onePerSubject, "", 4)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter < 3"})
	l, err := backfill.Open(ctx, cfg, quiet)
	must.Succeed(t, err)
	defer l.Close()
	rec, revision, err := l.Store.Load(ctx)
	must.Succeed(t, err)
	rec.Created = rec.Created.Add(-time.Hour)
	_, err = l.Store.Save(ctx, rec, revision)
	must.Succeed(t, err)
	killed(t, ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'e' AND counter < 4"})
	report, err := run(ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'e'"})
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 1 || seq != rows+4 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestWhatWasNotDurableBeforeAKilledRepairIsSaidToBeLost, with what that has published.
func TestWhatWasNotDurableBeforeAKilledRepairIsSaidToBeLost(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"slot_missing", "foreign_message"} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			ctx, cfg, s, db := archived(t, 1, rows)
			cfg.Archive.URL = ""
			db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
				SELECT 'e', 'a', n, '{}' FROM generate_series(1, 2) n`)
			if code == "slot_missing" {
				db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
			} else {
				db.Exec("SELECT pg_replication_slot_advance($1, pg_current_wal_insert_lsn())", db.Slot)
			}
			nc, err := nats.Connect(cfg.NATS.URL, nats.Timeout(time.Minute))
			must.Succeed(t, err)
			defer nc.Close()
			ingress := strings.TrimSuffix(s.CachedInfo().Config.Subjects[0], ">")
			_, err = nc.Request(ingress+"outbox.g", nil, time.Minute)
			must.Succeed(t, err)
			o := Options{Accept: code, Where: "doc_id = 'e'"}
			killed(t, ctx, cfg, o)
			for seq := uint64(rows + 3); seq > rows; seq-- {
				must.Succeed(t, s.DeleteMsg(ctx, seq))
			}
			o.Accept = "repair_unfinished"
			report, err := run(ctx, cfg, o)
			if err != nil || report.Published != 2 {
				t.Fatalf("%+v, %v", report, err)
			}
			m, err := s.GetMsg(ctx, rows+4)
			must.Succeed(t, err)
			if from := m.Header.Get(outbox.HeaderLost); from != fmt.Sprint(rows+1) {
				t.Errorf("lost from %q on", from)
			}
		})
	}
}

// killedInside is a repair that ends when its first row is acknowledged, or when there was none.
func killedInside(t *testing.T, ctx context.Context, cfg config.Config, o Options) {
	t.Helper()
	o.sent = runtime.Goexit
	var attempt sync.WaitGroup
	attempt.Go(func() { killed(t, ctx, cfg, o) })
	attempt.Wait()
}

// TestARepairMayBeKilledAgainAndAgain in the middle: each of its rows is published once, and what it has
// begun remains one attempt.
func TestARepairMayBeKilledAgainAndAgain(t *testing.T) {
	t.Parallel()
	const of = 9
	ctx, cfg, s, _ := limited(t, onePerSubject, "", of)
	o := Options{Accept: "slot_missing", Where: "doc_id = 'e'"}
	for range 3 {
		killedInside(t, ctx, cfg, o)
		o.Accept = "repair_unfinished"
	}
	l, err := backfill.Open(ctx, cfg, quiet)
	must.Succeed(t, err)
	defer l.Close()
	rec, _, err := l.Store.Load(ctx)
	must.Succeed(t, err)
	if rec.Begun == nil || len(rec.Begun.Attempts) != 1 || rec.Begun.Durable != rows {
		t.Errorf("%+v", rec.Begun)
	}
	report, err := run(ctx, cfg, o)
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != of-3 || seq != rows+of || !strings.HasSuffix(key, "9") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestARowOfAKilledRepairMayBePublishedByAnother: what the first one had found is known all the same.
func TestARowOfAKilledRepairMayBePublishedByAnother(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, onePerSubject, "", 4)
	killedInside(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e'"})
	killed(t, ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'e' AND counter = 3"})
	report, err := run(ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'e'"})
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 2 || seq != rows+4 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestARowThatWasWrittenSinceIsNotTakenForOneThatIsGone, if the slot that would bring it is made anew. It is
// published once it is known what is gone.
func TestARowThatWasWrittenSinceIsNotTakenForOneThatIsGone(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := limited(t, onePerSubject, "", 3)
	const where = "doc_id IN ('dd', 'e')"
	o := Options{Accept: "slot_missing", Where: where + " AND counter < 3"}
	killed(t, ctx, cfg, o)
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('dd', 'a', 1, '{}')")
	o.Accept, o.NewSlot = "repair_unfinished", true
	_, err := run(ctx, cfg, o)
	outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
	o.Where = "doc_id = 'e' AND counter > 1"
	report, err := run(ctx, cfg, o)
	if err != nil || report.Published != 1 {
		t.Fatalf("%+v, %v", report, err)
	}
	report, err = run(ctx, cfg, Options{Accept: codeMissing, Where: "doc_id = 'dd'"})
	if seq, _ := last(t, ctx, s); err != nil || report.Published != 1 || seq != rows+4 {
		t.Errorf("%d: %+v, %v", seq, report, err)
	}
}

// TestOfAServerThatWasPutBackNoIdTellsWhatWasPublished: another row may have that of one whose message is
// gone.
func TestOfAServerThatWasPutBackNoIdTellsWhatWasPublished(t *testing.T) {
	t.Parallel()
	ctx, cfg, _, db := limited(t, onePerSubject, "", 3)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e'"})
	l, err := backfill.Open(ctx, cfg, quiet)
	must.Succeed(t, err)
	defer l.Close()
	rec, revision, err := l.Store.Load(ctx)
	must.Succeed(t, err)
	rec.Publication.Seen += 1 << 30
	_, err = l.Store.Save(ctx, rec, revision)
	must.Succeed(t, err)
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	db.Exec("UPDATE outbox SET counter = 0 WHERE doc_id = 'e' AND counter = 1")
	o := Options{Accept: "repair_unfinished", Where: "doc_id = 'e' AND counter = 0"}
	_, err = run(ctx, cfg, o)
	outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
}

// TestWhatAKilledRepairHasReplacedItselfIsNotPublishedAgain: the condition holds for it too, and it was in
// the stream when that repair began. Once more it would come behind what has replaced it.
func TestWhatAKilledRepairHasReplacedItselfIsNotPublishedAgain(t *testing.T) {
	t.Parallel()
	type kill = func(*testing.T, context.Context, config.Config, Options)
	for name, c := range map[string]struct {
		perSubject int64
		where      string
		kill       kill
		left       uint64
	}{
		"in the middle":                  {1, "counter >= 20", killedInside, 1},
		"when all was published":         {1, "counter >= 20", killed, 0},
		"in the middle, of all":          {rows, "", killedInside, 1},
		"when all was published, of all": {rows, "", killed, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := func(with *jetstream.StreamConfig) { with.MaxMsgsPerSubject = c.perSubject }
			ctx, cfg, s, db := limited(t, set, "", 0)
			db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
				SELECT 'd', 'a', n, '{}' FROM generate_series(21, 23) n`)
			o := Options{Accept: "slot_missing", Where: c.where}
			for range 2 {
				c.kill(t, ctx, cfg, o)
				o.Accept = "repair_unfinished"
			}
			db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('c', 'a', 30, '{}')")
			report, err := run(ctx, cfg, o)
			seq, key := last(t, ctx, s)
			if err != nil || report.Published != c.left || seq != rows+3 || !strings.HasSuffix(key, "23") ||
				report.InWAL != 1 {
				t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
			}
		})
	}
}

// TestANewSlotDoesNotTellWhatAKilledRepairHasReplaced: a row that is missing may have been written since.
func TestANewSlotDoesNotTellWhatAKilledRepairHasReplaced(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := limited(t, onePerSubject, "", 0)
	db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'd', 'a', n, '{}' FROM generate_series(21, 22) n`)
	o := Options{Accept: "slot_missing", Where: "counter >= 20"}
	killedInside(t, ctx, cfg, o)
	o.Accept, o.NewSlot = "repair_unfinished", true
	_, err := run(ctx, cfg, o)
	outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
	o.Where = "counter > 20"
	report, err := run(ctx, cfg, o)
	if seq, _ := last(t, ctx, s); err != nil || report.Published != 1 || seq != rows+2 {
		t.Errorf("%d: %+v, %v", seq, report, err)
	}
}

// TestARowBehindAFormerAnchorIsNotTakenForOneThatIsGone: the slot that was to bring it is no more, and the
// repair that made another one was killed as well. As many rows come before the newest message as are gone.
func TestARowBehindAFormerAnchorIsNotTakenForOneThatIsGone(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := limited(t, onePerSubject, "", 3)
	const where = "doc_id IN ('dd', 'e')"
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: where})
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('dd', 'a', 1, '{}')")
	o := Options{Accept: "repair_unfinished", Where: "false", NewSlot: true}
	killed(t, ctx, cfg, o)
	db.Exec("DELETE FROM outbox WHERE doc_id = 'e' AND counter = 1")
	o = Options{Accept: "repair_unfinished", Where: where}
	_, err := run(ctx, cfg, o)
	outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
	o.Where = "doc_id = 'e' AND counter > 2"
	if report, err := run(ctx, cfg, o); err != nil || report.Published != 0 {
		t.Fatalf("%+v, %v", report, err)
	}
	report, err := run(ctx, cfg, Options{Accept: codeMissing, Where: "doc_id = 'dd'"})
	if seq, _ := last(t, ctx, s); err != nil || report.Published != 1 || seq != rows+4 {
		t.Errorf("%d: %+v, %v", seq, report, err)
	}
}

// TestAnIndexAscendsWithAnySequence: a busy stream has more of these than there are indexes.
func TestAnIndexAscendsWithAnySequence(t *testing.T) {
	t.Parallel()
	for _, seq := range []uint64{0, 1 << 31, 1 << 32, 1 << 40} {
		s := &scan{}
		s.counts[missing] = 10
		s.anchor.Seq = seq
		first := s.freeIndex()
		s.anchor.Seq += 10
		if next := s.freeIndex(); first < outbox.RepairedIndex || next < first+10 {
			t.Errorf("behind sequence %d: %d, then %d", seq, first, next)
		}
	}
	s := &scan{}
	s.counts[missing] = 10
	s.anchor.Seq = 3*(1<<32-outbox.RepairedIndex) - 5
	if n := s.freeIndex(); n+10 < n {
		t.Errorf("%d: there are no 10 indexes from it on", n)
	}
}

// TestRepairsThatAreKilledAtRandomPublishEachRowOnce, whatever their conditions, and whatever is written
// meanwhile. The stream keeps one message of each document: that a row was published only its sequence says.
func TestRepairsThatAreKilledAtRandomPublishEachRowOnce(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	rnd := rand.New(rand.NewPCG(seed, 0))
	ctx, cfg, s, db := limited(t, onePerSubject, "", 5)
	db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'f', 'a', n, '{}' FROM generate_series(1, 5) n`)
	accept, said := "slot_missing", fmt.Sprint("seed ", seed)
	for range 5 {
		where := fmt.Sprintf("doc_id IN ('e', '%c') AND counter < 6 AND %d >> counter::int & 1 = 1",
			'e'+rnd.IntN(2), rnd.IntN(64))
		do := killed
		if rnd.IntN(2) == 0 {
			do = killedInside
		}
		do(t, ctx, cfg, Options{Accept: accept, Where: where})
		accept = "repair_unfinished"
		db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, 'a', $2, '{}')",
			[]string{"dd", "e", "f"}[rnd.IntN(3)], 6+rnd.IntN(20)) // the slot brings it
		seq, _ := last(t, ctx, s)
		said += fmt.Sprintf("\n%s: %d", where, seq)
	}
	report, err := run(ctx, cfg, Options{Accept: accept, Where: "doc_id IN ('dd', 'e', 'f')"})
	if seq, _ := last(t, ctx, s); err != nil || seq != rows+10 {
		t.Errorf("%s\nthe stream ends at %d: %+v, %v", said, seq, report, err)
	}
}

// TestWhatTheLimitsHaveTakenSinceIsNotPublishedAgain: a killed repair has pushed it out of the stream, it
// comes behind what that has published, and the condition holds for it too. In the middle it is missing among
// what is still to be published.
func TestWhatTheLimitsHaveTakenSinceIsNotPublishedAgain(t *testing.T) {
	t.Parallel()
	for _, inside := range []bool{false, true} {
		t.Run(fmt.Sprint("in the middle: ", inside), func(t *testing.T) {
			t.Parallel()
			ctx, cfg, s, db := limited(t, func(c *jetstream.StreamConfig) { c.MaxMsgs = rows }, "", 0)
			db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
				SELECT 'c', 'a', n, '{}' FROM generate_series(1, 3) n`)
			o := Options{Accept: "slot_missing", Where: "doc_id IN ('c', 'd')"}
			if inside {
				killedInside(t, ctx, cfg, o)
			} else {
				killed(t, ctx, cfg, o)
			}
			o.Accept = "repair_unfinished"
			report, err := run(ctx, cfg, o)
			if inside {
				f := outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
				if !strings.Contains(f.Message, "3 rows ") { // two that were never there, and one that was
					t.Error(f)
				}
				o.Where = "doc_id = 'd' AND counter > 1"
				report, err = run(ctx, cfg, o)
			}
			if err != nil || report.Published != 0 {
				t.Fatalf("%+v, %v", report, err)
			}
			if inside {
				_, err = run(ctx, cfg, Options{Accept: codeMissing, Where: "doc_id = 'c'"})
			}
			if seq, key := last(t, ctx, s); err != nil || seq != rows+3 || !strings.HasSuffix(key, "3") {
				t.Errorf("%d, %s: %v", seq, key, err)
			}
		})
	}
}

// TestAnOlderBuildDidNotSayWhatItHadFound: what it has replaced is not published again all the same.
func TestAnOlderBuildDidNotSayWhatItHadFound(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := limited(t, onePerSubject, "", 0)
	db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'd', 'a', n, '{}' FROM generate_series(21, 23) n`)
	o := Options{Accept: "slot_missing", Where: "counter >= 20"}
	killedInside(t, ctx, cfg, o)
	l, err := backfill.Open(ctx, cfg, quiet)
	must.Succeed(t, err)
	defer l.Close()
	rec, revision, err := l.Store.Load(ctx)
	must.Succeed(t, err)
	rec.Begun.Attempts[0].Found = nil
	_, err = l.Store.Save(ctx, rec, revision)
	must.Succeed(t, err)
	o.Accept = "repair_unfinished"
	report, err := run(ctx, cfg, o)
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 2 || seq != rows+3 || !strings.HasSuffix(key, "23") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestARowThatCameWithoutWALIsNotTakenForOneThatIsGone: it was attached with a partition, and sorts before
// what the killed repair has published last.
func TestARowThatCameWithoutWALIsNotTakenForOneThatIsGone(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := limited(t, onePerSubject, "", 4)
	o := Options{Accept: "slot_missing", Where: "doc_id IN ('dd', 'e') AND actor_id = 'a'"}
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('dd', 'b', 1, '{}')")
	killedInside(t, ctx, cfg, o)
	o.Accept = "repair_unfinished"
	killedInside(t, ctx, cfg, o)
	db.Exec("UPDATE outbox SET actor_id = 'a' WHERE doc_id = 'dd'") // the WAL has no insert of it
	_, err := run(ctx, cfg, o)
	outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
	o.Where = "doc_id = 'e' AND counter > 2"
	report, err := run(ctx, cfg, o)
	if seq, _ := last(t, ctx, s); err != nil || report.Published != 2 || seq != rows+4 {
		t.Fatalf("%d: %+v, %v", seq, report, err)
	}
}

// TestAForeignMessageThatIsGoneHidesNoRow: it is not one that the killed repair has published, as the newest
// one tells.
func TestAForeignMessageThatIsGoneHidesNoRow(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, asItIs, "", 4)
	o := Options{Accept: "slot_missing", Where: "doc_id = 'e'"}
	killedInside(t, ctx, cfg, o)
	nc, err := nats.Connect(cfg.NATS.URL, nats.Timeout(time.Minute))
	must.Succeed(t, err)
	defer nc.Close()
	info, err := s.Info(ctx)
	must.Succeed(t, err)
	_, err = nc.Request(strings.TrimSuffix(info.Config.Subjects[0], ">")+"outbox.g", nil, time.Minute)
	must.Succeed(t, err)
	o.Accept = "repair_unfinished"
	killedInside(t, ctx, cfg, o)
	must.Succeed(t, s.DeleteMsg(ctx, rows+2))
	report, err := run(ctx, cfg, o)
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 2 || seq != rows+5 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestOfTwoForeignMessagesOneMayBeGone behind the newest one of a killed repair: it may as well be a row of
// that, and nobody can tell.
func TestOfTwoForeignMessagesOneMayBeGone(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, asItIs, "", 4)
	o := Options{Accept: "slot_missing", Where: "doc_id = 'e'"}
	killedInside(t, ctx, cfg, o)
	nc, err := nats.Connect(cfg.NATS.URL, nats.Timeout(time.Minute))
	must.Succeed(t, err)
	defer nc.Close()
	info, err := s.Info(ctx)
	must.Succeed(t, err)
	for range 2 {
		_, err = nc.Request(strings.TrimSuffix(info.Config.Subjects[0], ">")+"outbox.g", nil, time.Minute)
		must.Succeed(t, err)
	}
	must.Succeed(t, s.DeleteMsg(ctx, rows+2))
	o.Accept = "repair_unfinished"
	report, err := run(ctx, cfg, o)
	if f := outbox.FaultOf(err); f == nil || f.Code != codeRemoved || !strings.Contains(f.Message, "1 row ") {
		t.Fatalf("%+v, %v", report, err)
	}
	o.Where = "doc_id = 'e' AND counter > 2"
	report, err = run(ctx, cfg, o)
	if err != nil || report.Published != 2 {
		t.Fatalf("%+v, %v", report, err)
	}
	report, err = run(ctx, cfg, Options{Accept: codeMissing, Where: "doc_id = 'e'"})
	if seq, key := last(t, ctx, s); err != nil || seq != rows+6 || !strings.HasSuffix(key, "2") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestWhatAnEmptyStreamHasLostIsLostForTheNextRepairToo: that published other rows, so the stream is not
// empty any more.
func TestWhatAnEmptyStreamHasLostIsLostForTheNextRepairToo(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, asItIs, "", 4)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter < 3"})
	must.Succeed(t, s.Purge(ctx)) // as if the broker had lost it and kept the count
	o := Options{Accept: "repair_unfinished", Where: "doc_id = 'e' AND counter = 4"}
	killed(t, ctx, cfg, o)
	o.Where = "doc_id = 'e'"
	report, err := run(ctx, cfg, o)
	if seq, key := last(t, ctx, s); err != nil || report.Published != 3 || seq != rows+6 ||
		!strings.HasSuffix(key, "3") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestAnEarlierConditionMayBeOneNoMore: what it names was dropped. If nothing of that repair is gone, the
// next one need not know its rows.
func TestAnEarlierConditionMayBeOneNoMore(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(*jetstream.StreamConfig){
		"all of it is there": asItIs, "some of it is gone": onePerSubject,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cfg, s, db := limited(t, set, "", 4)
			db.Exec("CREATE TABLE wanted AS SELECT n FROM generate_series(1, 2) n")
			killed(t, ctx, cfg, Options{Accept: "slot_missing",
				Where: "doc_id = 'e' AND counter IN (SELECT n FROM public.wanted)"})
			db.Exec("DROP TABLE wanted")
			o := Options{Accept: "repair_unfinished", Where: "doc_id = 'e'"}
			report, err := run(ctx, cfg, o)
			if name != "all of it is there" {
				f := outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
				if !strings.Contains(f.Message, "3 rows ") || !strings.Contains(f.Message, `"e"`) {
					t.Error(f)
				}
				o.Where = "false"
				_, err = run(ctx, cfg, o)
				must.Succeed(t, err)
				report, err = run(ctx, cfg, Options{Accept: codeMissing,
					Where: "doc_id = 'e' AND counter > 2"})
			}
			seq, key := last(t, ctx, s)
			if err != nil || report.Published != 2 || seq != rows+4 || !strings.HasSuffix(key, "4") {
				t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
			}
		})
	}
}

// TestConditionsThatTheRecordHasNoRoomForAreRefused before anything is changed. A shorter one does.
func TestConditionsThatTheRecordHasNoRoomForAreRefused(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, asItIs, "", 4)
	long := "doc_id = 'e' AND counter < 3 /* " + strings.Repeat("<", 90<<10) + " */" // as \u003c
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: long})
	o := Options{Accept: "repair_unfinished", Where: strings.Replace(long, "3", "4", 1)}
	_, err := run(ctx, cfg, o)
	if seq, _ := last(t, ctx, s); seq != rows+2 {
		t.Errorf("the stream ends at %d", seq)
	}
	outboxdb.WantFault(t, err, outbox.Usage, "flags")
	o.Where = "doc_id = 'e'"
	report, err := run(ctx, cfg, o)
	if err != nil || report.Published != 2 {
		t.Errorf("%+v, %v", report, err)
	}
}

// TestARepairThatWasKilledBeforeItPublishedKnowsWhatItFound: the limits have taken one of that since.
func TestARepairThatWasKilledBeforeItPublishedKnowsWhatItFound(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, asItIs, "", 3)
	o := Options{Accept: "slot_missing", Where: "doc_id IN ('d', 'e')"}
	killedAt(t, ctx, cfg, "publishing 3", o)
	must.Succeed(t, s.DeleteMsg(ctx, 1))
	o.Accept = "repair_unfinished"
	_, err := run(ctx, cfg, o)
	outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
	o.Where = "doc_id = 'd' AND counter > 1"
	report, err := run(ctx, cfg, o)
	if err != nil || report.Published != 0 {
		t.Fatalf("%+v, %v", report, err)
	}
	report, err = run(ctx, cfg, Options{Accept: codeMissing, Where: "doc_id = 'e'"})
	if err != nil || report.Published != 3 {
		t.Errorf("%+v, %v", report, err)
	}
}
