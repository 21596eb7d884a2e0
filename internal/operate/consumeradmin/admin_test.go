package consumeradmin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is a stream of 20 messages and a consumer of 4 partitions in a database of its own.
type world struct {
	*Admin
	t    *testing.T
	url  string
	live jetstream.Stream
}

func newWorld(t *testing.T) *world {
	t.Helper()
	nc, js := natstest.Connect(t, natstest.Server(t).URL())
	api := jsapi.New(nc, "")
	w := &world{t: t, url: pgtest.Database(t, pgtest.Server(t))}
	var err error
	w.live, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX",
		Subjects: []string{"outbox.>"}})
	must(t, err)
	for n := range 20 {
		w.publish(js, fmt.Sprintf("outbox.d%d", n%5), n+1)
	}
	w.Admin = &Admin{Stream: "OUTBOX", JS: js, API: api, DB: w.connect(), From: "--database"}
	w.exec(consumer.Tables(""))
	w.exec(`INSERT INTO outflow_consumer (name, stream, filters, keying, partitions, epoch)
		VALUES ('texts', 'OUTBOX', '{>}', 'outbox.{doc_id}', 4, 7)`)
	for p, seq := range []int{10, 14, 18, 12} {
		w.exec(`INSERT INTO outflow_mark (name, source, partition, owner, epoch, seq, due, n, lsn, i, holed)
			VALUES ('texts', 'live', $1, NULL, $1 + 4, $2::int8, '0/10', $2, '0/20', 0, $1 IN (0, 2)),
				('texts', 'replay', $1, NULL, $1 + 4, 0, '0/0', 0, '0/0', 0, false)`, p, seq)
	}
	return w
}

func (w *world) publish(js jetstream.JetStream, subject string, n int) {
	w.t.Helper()
	at := outbox.LSN(n * 16)
	h := outbox.Header{Pos: outbox.Position{LSN: at}, Of: 1, Due: at, Thru: at, Timeline: 1}
	_, err := js.PublishMsg(w.t.Context(), &nats.Msg{Subject: subject, Data: []byte("{}"),
		Header: nats.Header{outbox.HeaderName: {h.String()}}})
	must(w.t, err)
}

func (w *world) connect() *pgx.Conn {
	w.t.Helper()
	c, err := pgx.ParseConfig(w.url)
	must(w.t, err)
	c.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // as the commands do
	conn, err := pgx.ConnectConfig(w.t.Context(), c)
	must(w.t, err)
	w.t.Cleanup(func() { conn.Close(context.Background()) }) //nolint:errcheck // the test is over
	return conn
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	_, err := w.DB.Exec(w.t.Context(), sql, args...)
	must(w.t, err)
}

func (w *world) text(sql string) (text string) {
	w.t.Helper()
	must(w.t, w.DB.QueryRow(w.t.Context(), "SELECT coalesce(string_agg(x, ' '), '') FROM ("+sql+
		") AS t (x)").Scan(&text))
	return text
}

// runs makes an instance that works on partitions, as its rows say.
func (w *world) runs(instance string, partitions ...int) {
	w.t.Helper()
	w.exec(`INSERT INTO outflow_member (name, instance, joined, expires)
		VALUES ('texts', $1, now(), now() + interval '1 hour')`, instance)
	w.exec(`UPDATE outflow_mark SET owner = $1 WHERE partition = ANY($2)`, instance, partitions)
}

// park parks an event of a document.
func (w *world) park(document string, seq int) {
	w.t.Helper()
	w.exec(`INSERT INTO outflow_parked (name, document, hash, source, seq, subject, headers, data, published_at,
		position, event_id, cause) VALUES ('texts', $1, 0, 'live', $2, 'outbox.' || $1, '{}', '', now(), $3,
		'', 'poison')`, document, seq, outbox.Position{LSN: outbox.LSN(seq * 16)}.String())
}

func wantFault(t *testing.T, err error, code string, words ...string) {
	t.Helper()
	f := outbox.FaultOf(err)
	if f == nil || f.Code != code {
		t.Errorf("%v, want %s", err, code)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%v does not say %q", err, word)
		}
	}
}

// TestTheListShowsWhoWorksOnWhat: instances, what they work on and what nobody does, how far the slowest
// partition is, what the broker has lost, what is parked, and a change that is under way.
func TestTheListShowsWhoWorksOnWhat(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.runs("a-1", 0, 1)
	w.exec(`INSERT INTO outflow_member (name, instance, joined, expires) VALUES ('texts', 'gone-1',
		now() - interval '1 hour', now() - interval '1 minute')`)
	w.exec(`UPDATE outflow_mark SET owner = 'gone-1' WHERE partition = 2`)
	w.park("d1", 3)
	w.park("d2", 4)
	w.exec(`UPDATE outflow_consumer SET wanted_keying = keying, wanted_partitions = 8, barrier = 12`)
	all, err := w.List(t.Context())
	must(t, err)
	if len(all) != 1 {
		t.Fatalf("%+v", all)
	}
	c := all[0]
	if c.Name != "texts" || c.Offsets != InPostgres || c.Pending != 10 || c.Sequence != 10 || !c.Running ||
		c.Partitions != 4 || *c.Least != 10 || *c.Most != 18 || *c.Parked != 2 || *c.ParkedDocuments != 2 ||
		!slices.Equal(c.Unowned, []int{2, 3}) || !slices.Equal(c.Holed, []int{0, 2}) ||
		c.Keying != "outbox.{doc_id}" || c.Position == nil || *c.Change != (Change{8, c.Keying, 12, 2}) {
		t.Errorf("%+v", c)
	}
	if len(c.Members) != 2 || c.Members[0].Alive || !c.Members[1].Alive ||
		!slices.Equal(c.Members[1].Partitions, []int{0, 1}) {
		t.Errorf("members %+v", c.Members)
	}
	text := strings.Join(c.Lines(), "\n")
	for _, want := range []string{"instance gone-1, since", "did not renew itself since",
		"instance a-1, since", "works on partitions 0-1", "nobody works on partitions 2-3",
		"of partitions 0, 2", "on its way to 8 partitions (outbox.{doc_id}): 2 of 4 partitions"} {
		if !strings.Contains(text, want) {
			t.Errorf("%s\ndoes not say %q", text, want)
		}
	}
	w.exec(`UPDATE outflow_consumer SET filters = '{outbox.d1}'`)
	all, err = w.List(t.Context())
	must(t, err)
	if all[0].Pending != 2 {
		t.Errorf("lag %d of the filter, want 2", all[0].Pending)
	}
	if n := w.live.CachedInfo().State.Consumers; n != 0 {
		t.Errorf("%d consumers are left in JetStream", n)
	}
}

// TestARewindFencesWhoRuns: no offset rises, one that stays keeps what the broker has lost, what an instance
// does meanwhile is waited for and taken back too, and its next transaction finds another epoch.
func TestARewindFencesWhoRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.runs("a-1", 0, 1, 2, 3)
	w.park("d1", 11) // stays done
	w.park("d2", 12) // the stream does not have it any more: its only copy
	w.park("d3", 99) // the same
	w.park("d4", 13) // comes again
	must(t, w.live.DeleteMsg(t.Context(), 12))
	plan := &Plan{}
	r := Rewind{Name: "texts", To: "seq:12", Confirm: func(p *Plan) error { plan = p; return nil }}
	wantFault(t, w.Rewind(t.Context(), r), "consumer_running", "a-1", "--running")
	r.Running, r.DryRun = true, true
	before := w.text("SELECT m::text FROM outflow_mark m ORDER BY source, partition")
	must(t, w.Rewind(t.Context(), r))
	if now := w.text("SELECT m::text FROM outflow_mark m ORDER BY source, partition"); now != before {
		t.Errorf("a dry run has changed\n%s\nto\n%s", before, now)
	}
	if plan.Was != 18 || plan.To != 11 || !slices.Equal(plan.Running, []string{"a-1"}) {
		t.Errorf("%+v", plan)
	}

	other := w.connect() // an instance in the middle of a transaction
	tx, err := other.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), `UPDATE outflow_mark SET seq = 19 WHERE source = 'live' AND partition = 3`)
	must(t, err)
	r.DryRun = false
	done := make(chan error, 1)
	go func() { done <- w.Rewind(t.Context(), r) }()
	looker := w.connect()
	await.Until(t, "the rewind waits for the transaction", func() error {
		var waits bool
		err := looker.QueryRow(t.Context(), `SELECT count(*) > 0 FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&waits)
		if err == nil && !waits {
			err = errors.New("nobody waits for a lock")
		}
		return err
	})
	must(t, tx.Commit(t.Context()))
	must(t, <-done)
	const marks = `SELECT partition || ':' || seq || CASE WHEN holed THEN 'h' ELSE '' END FROM outflow_mark
		WHERE source = 'live' ORDER BY partition`
	if got := w.text(marks); got != "0:10h 1:11 2:11 3:11" {
		t.Errorf("marks %s", got)
	}
	if got := w.text(`SELECT DISTINCT concat_ws(',', epoch, coalesce(owner, 'nobody')) FROM outflow_mark`); got !=
		"8,nobody" {
		t.Errorf("epochs and owners %s, want one new epoch for all", got)
	}
	if got := w.text("SELECT replayed_to || ',' || epoch FROM outflow_consumer"); got != "19,8" {
		t.Errorf("replayed to, epoch %s", got)
	}
	if got := w.text("SELECT document FROM outflow_parked"); got != "d1 d2 d3" {
		t.Errorf("parked %s", got)
	}
}

// TestADeletionLeavesNothing: what is parked keeps a consumer from being deleted, an instance does, and a
// deletion that was killed half way is run again.
func TestADeletionLeavesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.runs("a-1", 0)
	w.park("d1", 3)
	replay, err := w.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX_replay",
		Subjects: []string{"_outflow_replay.OUTBOX.>"}})
	must(t, err)
	w.publish(w.JS, "_outflow_replay.OUTBOX.texts.outbox.d1", 1)
	w.publish(w.JS, "_outflow_replay.OUTBOX.other.outbox.d1", 1)
	_, err = w.live.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "texts",
		Metadata: map[string]string{metadataOffsets: InPostgres}})
	must(t, err)
	var plan *Deletion
	r := Delete{Name: "texts", Confirm: func(p *Deletion) error { plan = p; return nil }}
	wantFault(t, w.Delete(t.Context(), r), "consumer_running", "a-1")
	w.exec("DELETE FROM outflow_member")
	wantFault(t, w.Delete(t.Context(), r), "consumer_parked", "1 event parked")
	r.Force, r.DryRun = true, true
	must(t, w.Delete(t.Context(), r))
	if *plan != (Deletion{"texts", InPostgres, 4, 10, 1, 1, true, 1}) {
		t.Errorf("%+v", plan)
	}
	if got := w.text("SELECT name FROM outflow_consumer"); got != "texts" {
		t.Fatalf("a dry run leaves %q", got)
	}
	r.DryRun = false
	// Killed when NATS has nothing any more and the database everything.
	must(t, w.removeFromNATS(t.Context(), w.live, nil, "texts"))
	must(t, w.Delete(t.Context(), r))
	for _, table := range []string{"outflow_consumer", "outflow_mark", "outflow_member", "outflow_parked"} {
		if got := w.text("SELECT name FROM " + table); got != "" {
			t.Errorf("%s has %q", table, got)
		}
	}
	info, err := replay.Info(t.Context())
	must(t, err)
	if info.State.Msgs != 1 {
		t.Errorf("%d messages that were replayed are left, want that of the other consumer", info.State.Msgs)
	}
	wantFault(t, w.Delete(t.Context(), r), "consumer_missing")
}

// TestALayoutIsChangedByWhoRuns: the change is asked for once, shown by the same command run again, taken
// back with --cancel, refused while another one is under way, and waited for until the instances have done
// it.
func TestALayoutIsChangedByWhoRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	confirm := func(*LayoutPlan) error { return nil }
	ask := func(r Repartition) (*LayoutPlan, error) {
		r.Name, r.Confirm = "texts", confirm
		return w.Repartition(t.Context(), r)
	}
	for _, r := range []Repartition{{}, {Partitions: 8, Cancel: true}, {Partitions: -1}} {
		_, err := ask(r)
		wantFault(t, err, "consumer_layout")
	}
	p, err := ask(Repartition{Partitions: 4})
	must(t, err)
	if p.State != layoutDone {
		t.Errorf("what is so already: %+v", p)
	}
	p, err = ask(Repartition{Partitions: 8, DryRun: true})
	must(t, err)
	if p.State != layoutPlanned ||
		w.text("SELECT coalesce(barrier, -1)::text FROM outflow_consumer") != "-1" {
		t.Errorf("a dry run: %+v", p)
	}
	_, err = ask(Repartition{Cancel: true})
	wantFault(t, err, "consumer_layout", "nothing to take back")
	p, err = ask(Repartition{Partitions: 8}) // nobody runs: it is not waited for
	must(t, err)
	if p.State != layoutAsked || p.Wanted.Barrier != 18 || p.Wanted.Reached != 0 || p.Marks != 4 {
		t.Errorf("%+v", p) // the partition at 18 is holed
	}
	_, err = ask(Repartition{Partitions: 16})
	wantFault(t, err, "consumer_layout", "8 partitions", "--cancel")
	p, err = ask(Repartition{Cancel: true})
	must(t, err)
	if p.State != layoutCanceled {
		t.Errorf("%+v", p)
	}

	w.runs("a-1", 0, 1, 2, 3)
	waited, stop := context.WithCancel(t.Context())
	stop()
	_, err = w.Repartition(waited, Repartition{Name: "texts", Partitions: 8, Confirm: confirm})
	if err == nil {
		t.Error("a wait that was ended is no error")
	}
	instance := w.connect()
	done := make(chan error, 1)
	go func() {
		var err error
		p, err = ask(Repartition{Partitions: 8, Keying: ""})
		done <- err
	}()
	await.Until(t, "the change is asked for", func() error {
		tag, err := instance.Exec(t.Context(), `UPDATE outflow_mark SET seq = 18, holed = false
			WHERE source = 'live' AND EXISTS (SELECT FROM outflow_consumer WHERE barrier = 18)`)
		if err == nil && tag.RowsAffected() == 0 {
			err = errors.New("no barrier")
		}
		return err
	})
	_, err = instance.Exec(t.Context(), `UPDATE outflow_consumer SET partitions = 8, wanted_partitions = NULL,
		wanted_keying = NULL, barrier = NULL`)
	must(t, err)
	must(t, <-done)
	if p.State != layoutDone || p.Outcome() != "done: consumer texts has 8 partitions" {
		t.Errorf("%+v: %s", p, p.Outcome())
	}
}
