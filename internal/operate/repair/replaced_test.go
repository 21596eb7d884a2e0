package repair

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
)

// limited is an installation of archived without its archive and slot, with limits on its stream, and with
// rows of a document that are missing: their counters are these.
func limited(t *testing.T, set func(*jetstream.StreamConfig), payload string, counters int) (context.Context,
	config.Config, jetstream.Stream, *outboxdb.DB) {
	t.Helper()
	ctx, cfg, s, db := archived(t, 1, rows)
	cfg.Archive.URL = ""
	with := s.CachedInfo().Config
	set(&with)
	update(t, ctx, cfg, with)
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'e', 'a', n, to_jsonb($2::text) FROM generate_series(1, $1::int) n`, counters, payload)
	return ctx, cfg, s, db
}

// update gives the stream another configuration.
func update(t *testing.T, ctx context.Context, cfg config.Config, with jetstream.StreamConfig) {
	t.Helper()
	nc, err := nats.Connect(cfg.NATS.URL, nats.Timeout(time.Minute))
	must.Succeed(t, err)
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	must.Succeed(t, err)
	_, err = js.UpdateStream(ctx, with)
	must.Succeed(t, err)
}

// run is Run by somebody who knows by which conditions earlier repairs were begun.
func run(ctx context.Context, cfg config.Config, o Options) (*Report, error) {
	if l, err := backfill.Open(ctx, cfg, quiet); err == nil {
		if rec, _, err := l.Store.Load(ctx); err == nil && rec != nil && rec.Begun != nil {
			for _, a := range rec.Begun.Attempts {
				o.EarlierWhere = append(o.EarlierWhere, a.Where)
			}
		}
		l.Close()
	}
	return Run(ctx, cfg, quiet, o)
}

// killed is a repair that ends while it waits for what it has published to be durable.
func killed(t *testing.T, ctx context.Context, cfg config.Config, o Options) {
	t.Helper()
	killedAt(t, ctx, cfg, "sink.durable_after", o)
}

// killedAt is a repair that ends as soon as it says that.
func killedAt(t *testing.T, ctx context.Context, cfg config.Config, says string, o Options) {
	t.Helper()
	ctx, kill := context.WithCancel(ctx)
	line := progress.New(progress.Config{Stderr: until(says, kill)})
	cfg.Sink.DurableAfter = time.Minute
	if report, err := run(progress.With(ctx, line), cfg, o); err == nil || ctx.Err() == nil {
		t.Fatalf("it was not killed: %+v, %v", report, err)
	}
}

// last is the last sequence of a stream, and the key of the newest message.
func last(t *testing.T, ctx context.Context, s jetstream.Stream) (uint64, string) {
	t.Helper()
	info, err := s.Info(ctx)
	must.Succeed(t, err)
	m, err := s.GetMsg(ctx, info.State.LastSeq)
	must.Succeed(t, err)
	return info.State.LastSeq, outbox.HeaderKey(m.Header.Get(outbox.HeaderName))
}

// TestWhatAKilledRepairPublishedIsNotPublishedAgain, though the stream has replaced it since: behind what
// came after it, it would be the newest of its document.
func TestWhatAKilledRepairPublishedIsNotPublishedAgain(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, onePerSubject, "", 4)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter IN (2, 3)"})
	report, err := run(ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'e'"})
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 2 || seq != rows+4 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestAKilledRepairKnowsItsRowsNoMore: some were deleted since, and nobody can tell how far it came.
func TestAKilledRepairKnowsItsRowsNoMore(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := limited(t, onePerSubject, "", 4)
	run := func(where string) (*Report, error) {
		return run(ctx, cfg, Options{Accept: "repair_unfinished", Where: where})
	}
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter < 4"})
	db.Exec("DELETE FROM outbox WHERE doc_id = 'e' AND counter = 1")
	_, err := run("doc_id = 'e'")
	f := outboxdb.WantFault(t, err, outbox.Fatal, codeRemoved)
	if !strings.Contains(f.Message, "published 2 events") || !strings.Contains(f.Message, "1 row ") {
		t.Error(f)
	}
	report, err := run("doc_id = 'e' AND counter > 2")
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 1 || seq != rows+4 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestTheNewestMessageTellsOfRowsThatWereDeleted: if it is none of those that are gone, they are known.
func TestTheNewestMessageTellsOfRowsThatWereDeleted(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := limited(t, onePerSubject, "", 4)
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('dd', 'a', 1, '{}')")
	where := "doc_id IN ('dd', 'e')"
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: where + " AND counter < 4"})
	db.Exec("DELETE FROM outbox WHERE doc_id = 'dd'")
	report, err := run(ctx, cfg, Options{Accept: "repair_unfinished", Where: where})
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 1 || seq != rows+5 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestWhatTwoKilledRepairsPublishedIsNotPublishedAgain: the second one has replaced all that was left of what
// the first one had published.
func TestWhatTwoKilledRepairsPublishedIsNotPublishedAgain(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, onePerSubject, "", 4)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter < 3"})
	killed(t, ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'e' AND counter < 4"})
	report, err := run(ctx, cfg, Options{Accept: "repair_unfinished", Where: "doc_id = 'e'"})
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 1 || seq != rows+4 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestWhatWasPublishedIsNotForgottenWhileTheSlotIsMade, if that takes long and the repair is killed there.
func TestWhatWasPublishedIsNotForgottenWhileTheSlotIsMade(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, onePerSubject, "", 4)
	o := Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter < 3", NewSlot: true}
	killed(t, ctx, cfg, o)
	o.Accept = "repair_unfinished"
	killedAt(t, ctx, cfg, "making slot", o)
	o.Where = "doc_id = 'e'"
	report, err := run(ctx, cfg, o)
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 2 || seq != rows+4 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestTheNewestOfAKilledRepairMayBeNamed: what comes before it is left out by the condition.
func TestTheNewestOfAKilledRepairMayBeNamed(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, _ := limited(t, onePerSubject, "", 4)
	killed(t, ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e' AND counter IN (2, 3)"})
	report, err := run(ctx, cfg, Options{Accept: "repair_unfinished",
		Where: "doc_id = 'e' AND counter > 2"})
	seq, key := last(t, ctx, s)
	if err != nil || report.Published != 1 || seq != rows+3 || !strings.HasSuffix(key, "4") {
		t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
	}
}

// TestAnEarlierRepairMayHavePublishedThere: what is gone of that says nothing of the killed one, whether or
// not something of it is left.
func TestAnEarlierRepairMayHavePublishedThere(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ earlier, where string }{
		{"doc_id = 'f'", "doc_id = 'e' AND counter > 2"},
		{"doc_id = 'e' AND counter < 3", "doc_id = 'e' AND counter > 2"},
	} {
		t.Run(c.earlier, func(t *testing.T) {
			t.Parallel()
			ctx, cfg, s, db := limited(t, onePerSubject, "", 4)
			db.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload)
				SELECT 'f', 'a', n, '{}' FROM generate_series(1, 2) n`)
			report, err := run(ctx, cfg, Options{Accept: "slot_missing", Where: c.earlier})
			if err != nil || report.Published != 2 {
				t.Fatalf("%+v, %v", report, err)
			}
			nc, err := nats.Connect(cfg.NATS.URL, nats.Timeout(time.Minute))
			must.Succeed(t, err)
			defer nc.Close()
			info, err := s.Info(ctx)
			must.Succeed(t, err)
			ingress := strings.TrimSuffix(info.Config.Subjects[0], ">")
			_, err = nc.Request(ingress+"outbox.g", nil, time.Minute)
			must.Succeed(t, err)
			o := Options{Accept: "foreign_message", Where: c.where}
			killed(t, ctx, cfg, o)
			o.Accept = "repair_unfinished"
			report, err = run(ctx, cfg, o)
			seq, key := last(t, ctx, s)
			if err != nil || report.Published != 0 || seq != rows+5 || !strings.HasSuffix(key, "4") {
				t.Errorf("%d, %s: %+v, %v", seq, key, report, err)
			}
		})
	}
}

// TestWhatTheLimitsDiscardWhileARepairPublishesIsSaid, and it is published once.
func TestWhatTheLimitsDiscardWhileARepairPublishesIsSaid(t *testing.T) {
	t.Parallel()
	const of = 4
	room := func(c *jetstream.StreamConfig) { c.MaxBytes = 8 << 10 }
	o := Options{Accept: "slot_missing", Where: "doc_id = 'e'"}
	for name, kill := range map[string]bool{"at once": false, "after a kill": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cfg, s, _ := limited(t, room, strings.Repeat("x", 3<<10), of)
			o, published, says := o, uint64(of), "2 of the events that were published"
			if kill {
				killed(t, ctx, cfg, o)
				o.Accept, published, says = "repair_unfinished", 0, "2 events are in no message"
			}
			report, err := run(ctx, cfg, o)
			seq, key := last(t, ctx, s)
			if err != nil || report.Published != published || seq != rows+of || !strings.HasSuffix(key, "4") {
				t.Fatalf("%d, %s: %+v, %v", seq, key, report, err)
			}
			if text := strings.Join(report.Notes, "\n"); !strings.Contains(text, says) {
				t.Error(text)
			}
		})
	}
}

// TestMoreThanTheStreamKeepsIsNotPublished: it would push out everything, and its own first part.
func TestMoreThanTheStreamKeepsIsNotPublished(t *testing.T) {
	t.Parallel()
	few := func(c *jetstream.StreamConfig) { c.MaxMsgs = rows }
	ctx, cfg, s, _ := limited(t, few, "", rows+1)
	o := Options{Accept: "slot_missing", Where: "doc_id = 'e'"}
	for range 2 {
		_, err := run(ctx, cfg, o)
		outboxdb.WantFault(t, err, outbox.Fatal, "stream_limits")
	}
	if seq, _ := last(t, ctx, s); seq != rows {
		t.Errorf("the stream ends at %d", seq)
	}
	o.Where += " AND counter > 1"
	report, err := run(ctx, cfg, o)
	if err != nil || report.Published != rows {
		t.Errorf("%+v, %v", report, err)
	}
}

// TestRowsThatReplaceOneAnotherFit where the stream has room for the newest of each subject.
func TestRowsThatReplaceOneAnotherFit(t *testing.T) {
	t.Parallel()
	set := func(c *jetstream.StreamConfig) { c.MaxMsgs, c.MaxMsgsPerSubject = rows, 1 }
	ctx, cfg, s, _ := limited(t, set, "", rows+1)
	report, err := run(ctx, cfg, Options{Accept: "slot_missing", Where: "doc_id = 'e'"})
	if seq, _ := last(t, ctx, s); err != nil || report.Published != rows+1 || seq != 2*rows+1 {
		t.Errorf("%d: %+v, %v", seq, report, err)
	}
}
