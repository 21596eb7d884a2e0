package streamretain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	operatearchive "github.com/outflowhq/outflow/internal/operate/archive"
	"github.com/outflowhq/outflow/internal/operate/consumeradmin"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	streams "github.com/outflowhq/outflow/sink/stream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// world is a stream with a record that the test writes, and a database of consumers.
type world struct {
	t      *testing.T
	nc     *nats.Conn
	js     jetstream.JetStream
	s      jetstream.Stream
	store  *checkpoint.Store
	cfg    config.Config
	o      Options
	in     []postgres.Target // the databases of consumers
	record uint64            // its revision
	gap    *relay.Settings
	base   uint64
	repair string
}

func newWorld(t *testing.T, url string, replicas int) *world {
	t.Helper()
	nc, err := nats.Connect(url, nats.Timeout(time.Minute))
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	w := &world{t: t, nc: nc}
	w.js, err = jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	must.Succeed(t, err)
	w.s, err = w.js.CreateStream(t.Context(), streamConfig(replicas))
	must.Succeed(t, err)
	w.store = checkpoint.NewStore(jsapi.New(nc, ""),
		checkpoint.StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	must.Succeed(t, w.store.EnsureBucket(t.Context(), replicas, jetstream.FileStorage))
	w.cfg, err = config.Load(config.Args{"nats.url": url, "stream": "OUTBOX", "slot": "outflow",
		"retain.stream.messages": "1"}, nil)
	must.Succeed(t, err)
	return w
}

func streamConfig(replicas int) jetstream.StreamConfig {
	return jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>"}, AllowDirect: true,
		Replicas: replicas}
}

// publish publishes messages of n documents in turn. Each is a window of its own.
func (w *world) publish(n int) {
	w.t.Helper()
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	for seq := info.State.LastSeq + 1; seq <= info.State.LastSeq+uint64(n); seq++ {
		at := outbox.LSN(seq * 16)
		h := outbox.Header{Pos: outbox.Position{LSN: at}, Of: 1, Due: at, Thru: at, Timeline: 1,
			Counter: outbox.Counter{First: int64(seq), Span: 1}}
		if w.gap != nil {
			h.Sort = outbox.ByGap
		}
		_, err := w.js.PublishMsg(w.t.Context(), &nats.Msg{Subject: fmt.Sprintf("outbox.d%d", seq%5),
			Header: nats.Header{outbox.HeaderName: {h.String()}}, Data: fmt.Appendf(nil, `{"n": %d}`, seq)})
		must.Succeed(w.t, err)
	}
}

// confirm writes a record whose confirmed checkpoint is at a sequence.
func (w *world) confirm(seq uint64) {
	w.t.Helper()
	at := func(seq uint64) checkpoint.StoredCheckpoint {
		p := relay.Checkpoint{Due: outbox.LSN(seq * 16), Seq: seq, Settings: w.cfg.Reorder.Settings(),
			Timeline: 1}
		if w.gap != nil {
			p.Settings, p.Remembered = *w.gap, w.gap.Gap.Memory
		}
		return checkpoint.StoredCheckpoint{Checkpoint: p, Since: time.Now()}
	}
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	w.record, err = w.store.Save(w.t.Context(), &checkpoint.Record{
		Version: 2, Slot: "outflow", Database: "d", SystemID: "1", Stream: "OUTBOX", Created: info.Created,
		Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Actor: "a", Counter: "c",
			Key: "seq_key", Payload: "payload"},
		Publication: checkpoint.PublicationSeen{PublicationIdentity: relay.PublicationIdentity{
			OID: 16401, Xmin: 730, RelOID: 16402, RelXmin: 730}, Seen: 1},
		Checkpoints: []checkpoint.StoredCheckpoint{at(seq), at(seq + 5)}, Base: w.base, Repairing: w.repair,
	}, w.record)
	must.Succeed(w.t, err)
}

// database makes a database of consumers, and returns its URL.
func (w *world) database() string {
	w.t.Helper()
	url := pgtest.Database(w.t, pgtest.Server(w.t))
	w.in = append(w.in, postgres.Target{URL: url, Setting: "--database"})
	return url
}

// stored makes a consumer of two partitions with offsets in a schema.
func (w *world) stored(url, schema, name string, offsets ...int) {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), url)
	must.Succeed(w.t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	_, err = conn.Exec(w.t.Context(), "CREATE SCHEMA IF NOT EXISTS "+schema+"; SET search_path = "+schema+";"+
		consumer.Tables(""))
	must.Succeed(w.t, err)
	_, err = conn.Exec(w.t.Context(), `INSERT INTO outflow_consumer (name, stream, filters, keying, partitions,
		epoch) VALUES ($1, 'OUTBOX', '{>}', 'outbox.{doc_id}', $2, 1) ON CONFLICT DO NOTHING`, name, len(offsets))
	must.Succeed(w.t, err)
	for p, seq := range offsets {
		_, err = conn.Exec(w.t.Context(), `INSERT INTO outflow_mark (name, source, partition, owner, epoch, seq,
				due, n, lsn, i, holed) VALUES ($1, 'live', $2, NULL, 1, $3, '0/10', 0,
				('0/' || to_hex($3::bigint * 16))::pg_lsn, 0, false)
			ON CONFLICT (name, source, partition) DO UPDATE SET seq = EXCLUDED.seq, lsn = EXCLUDED.lsn`, name, p, seq)
		must.Succeed(w.t, err)
	}
}

func (w *world) run(apply bool) (*Report, error) {
	w.t.Helper()
	o := w.o
	o.Apply = apply
	o.Readers = func(ctx context.Context, api *jsapi.Client) ([]streamretain.Reader, error) {
		return consumeradmin.Readers(ctx, api, "OUTBOX", w.in)
	}
	return Run(w.t.Context(), w.cfg, slog.New(slog.DiscardHandler), o)
}

// goes runs plan and apply, which must agree that all up to a sequence goes, and that what holds the rest
// says all of the words.
func (w *world) goes(to uint64, words ...string) *Report {
	w.t.Helper()
	first := w.first()
	plan, err := w.run(false)
	must.Succeed(w.t, err)
	if now := w.first(); now != first {
		w.t.Fatalf("after a plan the stream begins at %d", now)
	}
	did, err := w.run(true)
	must.Succeed(w.t, err)
	text := strings.Join(did.Lines(), "\n")
	if to < first {
		if plan.GoesTo != 0 || did.GoesTo != 0 || w.first() != first {
			w.t.Errorf("%d and %d went:\n%s", plan.GoesTo, did.GoesTo, text)
		}
	} else if plan.GoesTo != to || did.GoesTo != to || w.first() != to+1 || plan.Gone != did.Gone ||
		did.Gone > to-first+1 {
		w.t.Errorf("to %d, %d of %d messages went, want %d, and the stream begins at %d:\n%s", did.GoesTo,
			did.Gone, plan.Gone, to, w.first(), text)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			w.t.Errorf("it does not say %q:\n%s", word, text)
		}
	}
	return did
}

func (w *world) first() uint64 {
	w.t.Helper()
	info, err := w.s.Info(w.t.Context())
	must.Succeed(w.t, err)
	return info.State.FirstSeq
}

func (w *world) wantFault(err error, code string) {
	w.t.Helper()
	if f := outbox.FaultOf(err); f == nil || f.Code != code {
		w.t.Fatalf("got %v, want code %s", err, code)
	}
}

// archived archives everything that is confirmed.
func (w *world) archived() {
	w.t.Helper()
	_, err := operatearchive.Run(w.t.Context(), w.cfg, slog.New(slog.DiscardHandler),
		operatearchive.Options{Now: true})
	must.Succeed(w.t, err)
}

// TestWhoIsBehindHoldsTheFront: the record, the archive, durables, consumers in databases and in the bucket.
// Each is named.
func TestWhoIsBehindHoldsTheFront(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.cfg.Archive.URL = "file://" + t.TempDir()
	url := w.database()
	w.publish(100)
	w.goes(0, "there is no checkpoint record")
	w.confirm(10)
	w.goes(0, "archive: up to 0 may go", "1 to 99 wait for it")
	w.archived()
	w.goes(10, "the confirmed checkpoint is at 10", "11 to 99 wait for it")
	w.confirm(90)
	w.goes(10, "archived up to 10")
	w.archived()

	// a durable that has acknowledged some, one with a filter, one that nobody has ever read
	durable := w.durable("some", "")
	w.acknowledge(durable, 20)
	w.goes(29, "consumer some", "it has acknowledged everything up to 30")
	w.acknowledge(durable, 20)
	rare := w.durable("rare", "outbox.d0")
	w.acknowledge(rare, 1) // 30, then 35 is the next one
	w.goes(33, "consumer rare", "nothing up to 34")
	w.acknowledge(rare, 14)

	w.stored(url, "app", "texts", 60, 45)
	w.goes(44, "consumer texts", "its oldest offset is 45", "schema app")
	w.stored(url, "app", "texts", 60, 60)
	other := w.database()
	w.stored(other, "public", "search", 48, 70)
	w.goes(47, "consumer search", "its oldest offset is 48")
	w.stored(other, "public", "search", 70, 70)
	w.goes(49, "consumer some", "it has acknowledged everything up to 50")

	// whom nobody waits for
	w.cfg.Retain.Stream.IgnoreConsumers = []string{"some", "texts"}
	w.goes(69, "consumer texts is not waited for", "its oldest offset is 60",
		"consumer some is not waited for")
	w.repair = "slot_missing"
	w.confirm(95)
	w.stored(other, "public", "search", 90, 90)
	w.goes(69, "outflow repair --accept slot_missing has not finished")
	w.repair = ""
	w.confirm(95)
	w.goes(89, "consumer search")
}

// durable makes a durable consumer that begins at the stream's first message.
func (w *world) durable(name, filter string) jetstream.Consumer {
	w.t.Helper()
	c, err := w.s.CreateConsumer(w.t.Context(), jetstream.ConsumerConfig{Durable: name, FilterSubject: filter,
		AckPolicy: jetstream.AckExplicitPolicy})
	must.Succeed(w.t, err)
	return c
}

// acknowledge reads and acknowledges so many messages.
func (w *world) acknowledge(c jetstream.Consumer, n int) {
	w.t.Helper()
	for range n {
		m, err := c.Next(jetstream.FetchMaxWait(time.Minute))
		must.Succeed(w.t, err)
		must.Succeed(w.t, m.DoubleAck(w.t.Context()))
	}
}

// TestHowMuchGoes: by number, age and size, and nothing where none is set.
func TestHowMuchGoes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.publish(40)
	w.confirm(40)
	w.cfg.Retain.Stream.Messages = 0
	w.goes(0, "none of retain.stream.age, size and messages is set: nothing goes", "up to 39 may go")
	w.cfg.Retain.Stream.Messages = 30
	w.goes(10)
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 35))
	w.publish(1)
	w.confirm(41)
	w.goes(10) // 30 are left
	w.cfg.Retain.Stream.Messages = 0

	info, err := w.s.Info(t.Context())
	must.Succeed(t, err)
	tenth := int64(info.State.Bytes / info.State.Msgs * 10)
	w.cfg.Retain.Stream.Size = int64(info.State.Bytes) - tenth
	before := info.State.Bytes
	_, err = w.run(true)
	must.Succeed(t, err)
	info, err = w.s.Info(t.Context())
	must.Succeed(t, err)
	if got := int64(before - info.State.Bytes); got < tenth || got > tenth*12/10 {
		t.Errorf("%d bytes went, want %d", got, tenth)
	}
	w.cfg.Retain.Stream.Size = 0

	m, err := w.s.GetMsg(t.Context(), 30)
	must.Succeed(t, err)
	last, err := w.js.Publish(t.Context(), "outbox.now", nil)
	must.Succeed(t, err)
	newest, err := w.s.GetMsg(t.Context(), last.Sequence)
	must.Succeed(t, err)
	if got, err := w.older(m.Time); err != nil || got != 29 {
		t.Errorf("older than message 30: %d, %v", got, err)
	}
	if got, err := w.older(newest.Time.Add(time.Hour)); err != nil || got != last.Sequence {
		t.Errorf("older than the end: %d, %v", got, err)
	}
	w.cfg.Retain.Stream.Age = time.Nanosecond
	w.confirm(41)
	w.goes(41)
}

// TestTheNewestMessageStays: after a repair all are confirmed. An empty stream would be one that has lost its
// end, to a start and to doctor.
func TestTheNewestMessageStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.database()
	w.publish(10)
	w.confirm(10)
	w.cfg.Retain.Stream.Messages, w.cfg.Retain.Stream.Age = 0, 1
	w.goes(9, "10 is the newest message")
	w.goes(9, "10 is the newest message")
	w.publish(5)
	w.goes(10)
}

// older is what the search by age finds.
func (w *world) older(than time.Time) (uint64, error) {
	w.t.Helper()
	sc, err := wiring.Broker(w.cfg, slog.New(slog.DiscardHandler))
	must.Succeed(w.t, err)
	conn, err := wiring.Connect(w.t.Context(), w.cfg, sc)
	must.Succeed(w.t, err)
	defer conn.Close()
	c := &command{cfg: w.cfg, conn: conn}
	s, err := c.stream(w.t.Context())
	must.Succeed(w.t, err)
	return c.olderThan(w.t.Context(), s, than)
}

// TestAConsumerThatLagsGoesOnAfterThePurge: one of package consumer, that runs. While its database is not
// known nothing goes; then all before its oldest offset does, and it reads the rest without a gap.
func TestAConsumerThatLagsGoesOnAfterThePurge(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.publish(60)
	w.confirm(60)
	url := pgtest.Database(t, pgtest.Server(t))
	var done []uint64
	// runs the consumer up to a message, which fails
	run := func(until uint64, meanwhile func()) {
		t.Helper()
		pool, err := pgxpool.New(t.Context(), url)
		must.Succeed(t, err)
		defer pool.Close()
		c, err := consumer.New(w.js, consumer.Postgres(pool), consumer.Config{Name: "texts", Stream: "OUTBOX",
			Partitions: 1, Batch: 1, MaxAttempts: 1000, Log: slog.New(slog.DiscardHandler)})
		must.Succeed(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended, stuck := make(chan error, 1), make(chan struct{}, 1)
		go func() {
			ended <- c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
				if e.Sequence == until {
					select {
					case stuck <- struct{}{}:
					default:
					}
					return errors.New("stuck")
				}
				done = append(done, e.Sequence)
				return nil
			})
		}()
		select {
		case <-stuck:
		case err := <-ended:
			t.Fatalf("the consumer ended: %v", err)
		}
		meanwhile()
		stop()
		must.Succeed(t, <-ended)
	}
	run(25, func() {
		w.goes(0, "consumer texts", "its offsets are not in a database that was looked at")
		w.in = []postgres.Target{{URL: url, Setting: "--database"}}
		w.goes(23, "its oldest offset is 24")
	})
	w.goes(23, "its oldest offset is 24") // also while it does not run
	run(60, func() { w.goes(58, "its oldest offset is 59") })
	want := make([]uint64, 59)
	for i := range want {
		want[i] = uint64(i + 1)
	}
	if !slices.Equal(done, want) {
		t.Errorf("done: %v", done)
	}
}

// TestGapModeFindsWhatItRemembers: what a start reads back from the stream is still there.
func TestGapModeFindsWhatItRemembers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.gap = &relay.Settings{Sort: outbox.ByGap, MaxEvents: relay.DefaultMaxEvents,
		MaxBytes: relay.DefaultMaxBytes, Gap: relay.Gap{Bound: relay.DefaultBound, Cold: relay.DefaultCold,
			Memory: 20, First: relay.DefaultFirst}}
	w.publish(100)
	w.confirm(70)
	w.goes(50, "gap mode remembers the 20 messages before a checkpoint")
	api := jsapi.New(w.nc, "")
	remembers := func() error {
		rec, _, err := w.store.Load(t.Context())
		must.Succeed(t, err)
		start := checkpoint.Start{Checkpoint: rec.Checkpoints[0].Checkpoint}
		found, err := start.Recent(t.Context(), streams.New(api, "OUTBOX",
			slog.New(slog.DiscardHandler)).Recent)
		must.Succeed(t, err)
		return checkpoint.Config{Stream: "OUTBOX"}.CheckMemory(start, len(found))
	}
	must.Succeed(t, remembers())
	must.Succeed(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(52)))
	w.wantFault(remembers(), "memory_lost")
	// where it may come into force: configured, and the record is one of another mode yet
	w.gap = nil
	w.confirm(95)
	w.cfg.Reorder.Mode, w.cfg.Reorder.Memory = config.ModeGap, 15
	w.goes(80, "gap mode remembers the 15 messages")
	// behind a repair it may have to look back to the stream's beginning
	w.base = 85
	w.confirm(95)
	w.goes(0, "memory: up to 0 may go")
}

// TestTheFactsAreReadAgain: what has changed since they were read first counts.
func TestTheFactsAreReadAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	url := w.database()
	w.publish(50)
	w.confirm(50)
	w.stored(url, "public", "texts", 40)
	at := func(point string, do func()) {
		w.o.Hit = func(p string) {
			if p == point {
				do()
			}
		}
	}
	at("stream.verified", func() { w.stored(url, "public", "texts", 10) })
	if r, err := w.run(true); err != nil || r.GoesTo != 9 || w.first() != 10 {
		t.Fatalf("%+v, %v", r, err)
	}
	w.stored(url, "public", "texts", 40)
	at("stream.verified", func() {
		w.repair = "slot_missing"
		w.confirm(50)
	})
	if r, err := w.run(true); err != nil || r.GoesTo != 0 || w.first() != 10 {
		t.Fatalf("%+v, %v", r, err)
	}
	w.repair = ""
	w.confirm(50)
	at("stream.verified", func() {
		must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
		var err error
		w.s, err = w.js.CreateStream(t.Context(), streamConfig(1))
		must.Succeed(t, err)
		w.publish(50)
	})
	_, err := w.run(true)
	w.wantFault(err, "stream_recreated")
	if w.first() != 1 {
		t.Errorf("the new stream begins at %d", w.first())
	}
	w.o.Hit = nil
	w.goes(0, "the checkpoint record is of another stream")
}

// TestAnApplyThatSleptReadsTheFactsAgain: a process that somebody stopped right before the purge must not go
// by what was true then, and one that never gets that far in time removes nothing.
func TestAnApplyThatSleptReadsTheFactsAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	url := w.database()
	w.publish(50)
	w.confirm(50)
	w.stored(url, "public", "texts", 40)
	var slept time.Duration
	w.o.now = func() time.Time { return time.Now().Add(slept) }
	w.o.Hit = func(point string) {
		if point == "stream.checked" && slept == 0 {
			slept = time.Hour
			w.stored(url, "public", "texts", 10)
		}
	}
	if r, err := w.run(true); err != nil || r.GoesTo != 9 || w.first() != 10 {
		t.Fatalf("%+v, %v, and the stream begins at %d", r, err, w.first())
	}
	w.stored(url, "public", "texts", 40)
	w.o.Hit = func(string) { slept += time.Hour }
	if r, err := w.run(true); err == nil || r.GoesTo != 0 || w.first() != 10 {
		t.Fatalf("%+v, %v, and the stream begins at %d", r, err, w.first())
	}
}

// TestAKillAtAnyStepLosesNothing: killed at each point and run again, the same has gone as without a kill.
func TestAKillAtAnyStepLosesNothing(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"stream.verified", "stream.checked", "stream.purged"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, natstest.Server(t).URL(), 1)
			w.cfg.Archive.URL = "file://" + t.TempDir()
			w.publish(30)
			w.confirm(20)
			w.archived()
			w.o.Hit = func(p string) {
				if p == point {
					panic("killed")
				}
			}
			killed := func() (killed bool) {
				defer func() { killed = recover() != nil }()
				_, err := w.run(true)
				must.Succeed(t, err)
				return false
			}()
			if !killed {
				t.Fatal("it was not killed")
			}
			w.o.Hit = nil
			if point == "stream.purged" {
				w.goes(0)
			} else {
				w.goes(20)
			}
			if w.first() != 21 {
				t.Errorf("the stream begins at %d", w.first())
			}
			w.archived() // there is no gap
		})
	}
}

// TestWhatTheArchiveHasLostStays: the segments are read back before.
func TestWhatTheArchiveHasLostStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	dir := t.TempDir()
	w.cfg.Archive.URL = "file://" + dir
	w.publish(40)
	for _, seq := range []uint64{10, 30} {
		w.confirm(seq)
		w.archived()
	}
	objects, err := filepath.Glob(filepath.Join(dir, "v1", "*", "*.zst"))
	must.Succeed(t, err)
	if len(objects) != 2 {
		t.Fatal(objects)
	}
	must.Succeed(t, os.Rename(objects[1], objects[1]+".away"))
	_, err = w.run(true)
	w.wantFault(err, "archive_damaged")
	w.cfg.Retain.Stream.Messages = 31 // only what the first segment has
	w.goes(9)
	w.cfg.Retain.Stream.Messages = 1
	must.Succeed(t, os.Rename(objects[1]+".away", objects[1]))
	w.goes(30)
	w.wantFault(archive.SameAs(t.Context(), jsapi.New(w.nc, ""), "OUTBOX", 35, archive.Hash{}),
		"archive_differs")
}

// TestOffsetsInJetStreamCount: those of a consumer without a database, and an ephemeral consumer of anybody.
func TestOffsetsInJetStreamCount(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.publish(60)
	w.confirm(60)
	c, err := consumer.New(w.js, consumer.JetStream(), consumer.Config{Name: "texts", Stream: "OUTBOX",
		Partitions: 3, MaxAttempts: 1000, Log: slog.New(slog.DiscardHandler)})
	must.Succeed(t, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var least atomic.Uint64
	must.Succeed(t, c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
		if e.Document != "d2" {
			return nil
		}
		if least.Store(e.Sequence); e.Sequence == 32 {
			stop()
			return errors.New("stuck")
		}
		return nil
	}))
	r, err := w.run(false)
	must.Succeed(t, err)
	text := strings.Join(r.Lines(), "\n")
	if r.MayGo >= least.Load()-1 || !strings.Contains(text, "bucket outflow-consumers-OUTBOX") {
		t.Errorf("up to %d may go, and the consumer is before %d:\n%s", r.MayGo, least.Load(), text)
	}
	w.cfg.Retain.Stream.IgnoreConsumers = []string{"texts"}
	e, err := w.s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Name: "passing",
		AckPolicy: jetstream.AckNonePolicy, InactiveThreshold: time.Hour})
	must.Succeed(t, err)
	for range 5 {
		_, err = e.Next(jetstream.FetchMaxWait(time.Minute))
		must.Succeed(t, err)
	}
	w.goes(4, "consumer passing: up to 4 may go")
}

// TestLimitsOfTheStreamAreNamed: with an archive they take away what is not archived.
func TestLimitsOfTheStreamAreNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	c := streamConfig(1)
	c.MaxAge, c.MaxBytes, c.MaxMsgs, c.MaxMsgsPerSubject = time.Hour, 1<<20, 1000, 500
	_, err := w.js.UpdateStream(t.Context(), c)
	must.Succeed(t, err)
	w.publish(1)
	if r, err := w.run(false); err != nil || len(r.Notes) != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	w.cfg.Archive.URL = "file://" + t.TempDir()
	w.goes(0, "archive_limits", "max_age 1h", "max_msgs 1000", "max_bytes 1048576",
		"max_msgs_per_subject 500")
	refuses := streamretain.Limits{MaxBytes: 10, MaxMsgs: 10, PerSubject: -1, Discard: "new"}
	if got := refuses.String(); got != "" {
		t.Errorf("a stream that refuses new messages has %q", got)
	}
}

// TestAReplicatedStream: with a node down that leads a consumer nothing is known of that one, and nothing
// goes.
func TestAReplicatedStream(t *testing.T) {
	t.Parallel()
	cluster := natstest.Cluster(t, 3)
	w := newWorld(t, cluster.URLs(), 3)
	w.publish(30)
	w.confirm(25)
	c, err := w.s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "lone", Replicas: 1,
		AckPolicy: jetstream.AckExplicitPolicy})
	must.Succeed(t, err)
	w.acknowledge(c, 10)
	w.goes(9, "consumer lone")
	info, err := c.Info(t.Context())
	must.Succeed(t, err)
	var node int
	_, err = fmt.Sscanf(info.Cluster.Leader, "node%d", &node)
	must.Succeed(t, err)
	cluster.Stop(node)
	_, err = cluster.WaitLeader("OUTBOX", time.Minute)
	must.Succeed(t, err)
	must.Succeed(t, cluster.WaitReady(time.Minute))
	await.Until(t, "the stream answers", func() error {
		_, err := w.s.Info(t.Context())
		return err
	})
	if r, err := w.run(true); err == nil || w.first() != 10 {
		t.Fatalf("nobody knows where consumer lone is: %+v, %v, and the stream begins at %d", r, err,
			w.first())
	} else {
		t.Log(err)
	}
	must.Succeed(t, cluster.Start(node))
	await.Until(t, "the consumer is back", func() error {
		_, err := c.Info(t.Context())
		return err
	})
	must.Succeed(t, cluster.WaitReady(time.Minute))
	w.acknowledge(c, 20)
	w.goes(25, "the confirmed checkpoint is at 25")
}
