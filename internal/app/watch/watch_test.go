package watch

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestMain(m *testing.M) {
	natstest.RunChild()
	goleak.VerifyTestMain(pgtest.Tests(m))
}

// watcher runs one until the test ends.
func watcher(t *testing.T, pgURL, slot, natsURL, user string, waits ...func(bool) string) *Watcher {
	t.Helper()
	cfg := config.Config{Postgres: config.Postgres{URL: pgURL}, Slot: slot, Stream: "OUTBOX",
		Subject: outbox.DefaultSubject,
		NATS:    config.NATS{URL: natsURL, User: user, Password: map[bool]string{true: "pass"}[user != ""]}}
	cfg.Sink.MaxPayload = 1 << 20
	watched := Config{Config: cfg}
	if len(waits) > 0 {
		watched.Waits = waits[0]
	}
	w := New(watched)
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer close(over)
		w.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-over
	})
	return w
}

func (w *Watcher) eventually(t *testing.T, what string, ok func(Reading) bool) (r Reading) {
	t.Helper()
	await.Until(t, what, func() error {
		if r = w.Reading(); !ok(r) {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	return r
}

// outboxStream makes a stream of three messages with two durable consumers and an ephemeral one; the second
// durable has acknowledged one message.
func outboxStream(t *testing.T, url string, options ...nats.Option) jetstream.JetStream {
	t.Helper()
	_, js := natstest.Connect(t, url, options...)
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX",
		Subjects: []string{"outbox.>"}, MaxBytes: 1 << 20})
	must.Succeed(t, err)
	for range 3 {
		_, err = js.Publish(t.Context(), "outbox.a", []byte("{}"))
		must.Succeed(t, err)
	}
	for _, name := range []string{"audit", "search", ""} {
		c, err := js.CreateConsumer(t.Context(), "OUTBOX", jetstream.ConsumerConfig{Durable: name})
		must.Succeed(t, err)
		if name == "search" {
			m, err := c.Next()
			must.Succeed(t, err)
			must.Succeed(t, m.DoubleAck(t.Context()))
		}
	}
	return js
}

// Each side is read whatever the other does: also while that neither answers nor goes away. Figures of a side
// that is away stay, with the time at which they were read.
func TestASideThatHangsDoesNotDelayTheOther(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	d.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", d.Slot)
	ns := natstest.Process(t)
	js := outboxStream(t, ns.URL(), nats.MaxReconnects(-1))
	w := watcher(t, d.URL, d.Slot, ns.URL(), "")
	r := w.eventually(t, "both sides", func(r Reading) bool {
		return !r.Slot.At.IsZero() && !r.Stream.At.IsZero() && !r.ConsumerList.At.IsZero()
	})
	if s := r.Slot; !s.Exists || s.Active || s.WALStatus != "reserved" || s.Safe != nil ||
		s.Retained != uint64(r.Postgres.WALEnd-s.Restart) || s.Confirmed == 0 || r.Postgres.Standby ||
		r.Postgres.Version == "" || r.Postgres.Host == "" {
		t.Errorf("PostgreSQL: %+v, %+v", r.Postgres, s)
	}
	if s := r.Stream; !s.Exists || s.Messages != 3 || s.LastSeq != 3 || s.MaxBytes != 1<<20 ||
		r.NATS.Storage == 0 || r.NATS.StorageLimit != 0 || r.NATS.Version == "" {
		t.Errorf("NATS: %+v, %+v", r.NATS, s)
	}
	if c := r.Consumers; len(c) != 2 || c[0].Name != "audit" || c[0].Pending != 3 || c[1].Name != "search" ||
		c[1].Pending != 2 || c[1].AckFloor != 1 || r.ConsumersLeftOut != 0 {
		t.Errorf("consumers: %+v", c)
	}

	must.Succeed(t, ns.Pause())
	hung := w.eventually(t, "NATS does not answer", func(r Reading) bool { return r.NATS.Error != "" })
	if hung.Stream.Messages != 3 || len(hung.Consumers) != 2 || hung.Stream.At.IsZero() ||
		!hung.Stream.At.Before(hung.Stream.FailingSince) {
		t.Errorf("figures of a stream that can't be read: %+v", hung.Stream)
	}
	d.Exec("SELECT pg_logical_emit_message(false, 'x', repeat('x', 100000))")
	w.eventually(t, "what is kept for the slot grows", func(r Reading) bool {
		return r.Slot.Retained > hung.Slot.Retained+100_000 && r.Slot.Error == "" && r.NATS.Error != ""
	})
	must.Succeed(t, ns.Resume())
	w.eventually(t, "NATS answers again", func(r Reading) bool {
		return r.NATS.Error == "" && r.Stream.At.After(hung.Stream.At) && r.ConsumerList.Error == ""
	})
	d.Exec("SELECT pg_drop_replication_slot($1)", d.Slot)
	w.eventually(t, "the slot is gone", func(r Reading) bool {
		return !r.Slot.Exists && r.Slot.Retained == 0
	})
	must.Succeed(t, js.DeleteStream(t.Context(), "OUTBOX"))
	w.eventually(t, "the stream is gone, and its consumers with it", func(r Reading) bool {
		return !r.Stream.Exists && len(r.Consumers) == 0 && r.NATS.Error == ""
	})
}

// While NATS takes nothing, PostgreSQL is where others can read at what a process waits: until it does not
// any more, or has ended.
func TestWhatAProcessWaitsAtIsReadByOthers(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	ns := natstest.Server(t)
	var code atomic.Value
	code.Store("no_storage")
	run := watcher(t, d.URL, d.Slot, ns.URL(), "", func(held bool) string {
		if held {
			t.Error("nobody has the slot")
		}
		return code.Load().(string)
	})
	other := watcher(t, d.URL, d.Slot, ns.URL(), "")
	waits := func(want string) func(Reading) bool {
		return func(r Reading) bool { return !r.Slot.At.IsZero() && r.Slot.WaitsAt == want }
	}
	other.eventually(t, "it waits", waits("no_storage"))
	run.eventually(t, "it knows", waits("no_storage"))
	code.Store(strings.Repeat("x", 63))
	other.eventually(t, "there is no room for that code", waits(""))
	code.Store("account_full")
	other.eventually(t, "it waits at something else", waits("account_full"))
	code.Store("")
	other.eventually(t, "it goes on", waits(""))
}

// It stays one of the instances, under its own name.
func TestOneThatWaitsIsAnInstance(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	w := watcher(t, d.URL, d.Slot, natstest.Server(t).URL(), "", func(bool) string { return "no_storage" })
	w.eventually(t, "it is listed", func(r Reading) bool {
		return len(r.Instances) == 1 && r.Instances[0].Own &&
			strings.HasPrefix(r.Instances[0].Name, postgres.NamePrefix(d.Slot))
	})
}

// There is room for each code at which run may wait, whatever the slot, and no slot's name is another one's.
func TestALongSlotHasRoomForWhatAProcessWaitsAt(t *testing.T) {
	t.Parallel()
	of := map[string]string{}
	for n := range 63 {
		for _, end := range []string{"a", "b"} {
			slot := strings.Repeat("s", n) + end
			for _, f := range finding.All() {
				name := postgres.WaitsName(slot, f.Code)
				if slices.Contains(f.Classes, outbox.Transient) && name == "" {
					t.Errorf("slot of %d bytes: no room for %s", n+1, f.Code)
				}
				if other, taken := of[name]; name != "" && taken && other != slot {
					t.Errorf("%s is also of slot %s", name, other)
				}
				of[name] = slot
			}
		}
	}
}

// Whoever may connect may take that name, and the connection of a host that is gone stays for hours.
func TestOnlyAProcessThatIsThereWaits(t *testing.T) {
	t.Parallel()
	ctx, d := t.Context(), outboxdb.New(t, pgtest.Server(t))
	connect := func(name string) *pgx.Conn {
		c, err := pgx.ParseConfig(d.URL)
		must.Succeed(t, err)
		c.RuntimeParams["application_name"] = name
		conn, err := pgx.ConnectConfig(ctx, c)
		must.Succeed(t, err)
		t.Cleanup(func() { postgres.Close(conn) })
		return conn
	}
	for _, code := range []string{"stream_missing", "zzz", "a"} {
		connect(postgres.WaitsPrefix(d.Slot) + code)
	}
	conn := connect("")
	if w, err := ReadWaiting(ctx, conn, d.Slot); err != nil || w.Code != "" {
		t.Errorf("%+v, %v: run does not wait at that", w, err)
	}
	connect(postgres.WaitsPrefix(d.Slot) + "no_storage")
	if w, err := ReadWaiting(ctx, conn, d.Slot); err != nil || w.Code != "no_storage" {
		t.Errorf("%+v, %v", w, err)
	}
	await.Until(t, "it says nothing any more", func() error {
		if w, err := readWaiting(ctx, conn, d.Slot, time.Second); err != nil || w.Code != "" {
			return fmt.Errorf("%+v, %w", w, err)
		}
		return nil
	})
}

// A list comes in pages: a consumer that is made meanwhile moves another one onto the next page as well. Two
// series of one consumer would be an error instead of all metrics.
func TestAConsumerOnTwoPagesIsOne(t *testing.T) {
	t.Parallel()
	var all []Consumer
	for i := range MaxConsumers + 10 {
		all = append(all, Consumer{Name: fmt.Sprintf("c%03d", i), Pending: uint64(i)})
	}
	all = append(all, Consumer{Name: "c109", Pending: 110})
	kept, over := farthestBehind(all)
	if len(kept) != MaxConsumers || over != 10 || kept[0].Name != "c010" || kept[98].Name != "c108" ||
		kept[99].Name != "c109" {
		t.Errorf("%d consumers from %+v to %+v, %d left out", len(kept), kept[0], kept[len(kept)-1], over)
	}
}

// The instances of a consumer of package consumer read by themselves, each with a reader that says whose it
// is: they are one consumer, as far as the one that is farthest behind. A durable of that name goes before
// them: two series of one name would be an error instead of all metrics.
func TestTheReadersOfAConsumerAreOne(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	js := outboxStream(t, ns.URL())
	for i, of := range []string{"texts", "texts", "search"} {
		c, err := js.CreateConsumer(t.Context(), "OUTBOX", jetstream.ConsumerConfig{
			AckPolicy: jetstream.AckNonePolicy, Metadata: map[string]string{"outflow.consumer": of}})
		must.Succeed(t, err)
		for range i {
			_, err := c.Next()
			must.Succeed(t, err)
		}
	}
	w := New(Config{Config: config.Config{Stream: "OUTBOX", NATS: config.NATS{URL: ns.URL()}}})
	side := &natsSide{w: w}
	defer side.close()
	must.Succeed(t, side.read(t.Context()))
	r := w.Reading()
	if c := r.Consumers; len(c) != 3 || c[1].Name != "search" || c[1].Readers != 0 || c[2].Name != "texts" ||
		c[2].Readers != 2 || c[2].Pending != 3 || c[2].AckFloor != 0 || r.ConsumersLeftOut != 0 {
		t.Errorf("%+v", c)
	}
}

// Of more consumers than one reading asks for, those that are farthest behind are found nevertheless, by the
// time that all parts of the list were read.
func TestTheFarthestBehindOfVeryManyConsumersAreFound(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	js := outboxStream(t, ns.URL())
	const parts, size = 3, 256 // a page of the server
	for i := range (parts-1)*size + 10 {
		_, err := js.CreateConsumer(t.Context(), "OUTBOX", jetstream.ConsumerConfig{
			Durable: fmt.Sprintf("c%04d", i), MemoryStorage: true, DeliverPolicy: jetstream.DeliverNewPolicy})
		must.Succeed(t, err)
	}
	_, err := js.CreateConsumer(t.Context(), "OUTBOX", jetstream.ConsumerConfig{Durable: "z"})
	must.Succeed(t, err)
	w := New(Config{Config: config.Config{Stream: "OUTBOX", NATS: config.NATS{URL: ns.URL()}}})
	side := &natsSide{w: w, size: size}
	defer side.close()
	behind := func() (names []string) {
		must.Succeed(t, side.read(t.Context()))
		for _, c := range w.Reading().Consumers {
			if c.Pending == 3 {
				names = append(names, c.Name)
			}
		}
		return names
	}
	all := []string{"audit", "z"}
	for range parts * listEvery {
		behind()
	}
	if got := behind(); !slices.Equal(got, all) {
		t.Errorf("the farthest behind: %v", got)
	}
	r := w.Reading()
	if len(r.Consumers) != MaxConsumers || r.ConsumersLeftOut < (parts-1)*size+10+3-MaxConsumers {
		t.Errorf("%d consumers, %d left out", len(r.Consumers), r.ConsumersLeftOut)
	}
	side = &natsSide{w: w, size: size, once: true}
	defer side.close()
	if got := behind(); !slices.Equal(got, all) {
		t.Errorf("the farthest behind in the only reading: %v", got)
	}
	must.Succeed(t, js.DeleteConsumer(t.Context(), "OUTBOX", "z"))
	for range parts * listEvery {
		behind()
	}
	if got := behind(); !slices.Equal(got, all[:1]) {
		t.Errorf("one is gone: %v", got)
	}
}

// Without the right to list consumers everything else is read, and the list says why it is not.
func TestConsumersTakeARight(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.Users = []*server.User{{Username: "all", Password: "pass"}, {Username: "some", Password: "pass",
			Permissions: &server.Permissions{Publish: &server.SubjectPermission{
				Allow: []string{"$JS.API.INFO", "$JS.API.STREAM.INFO.OUTBOX"}}}}}
	}})
	outboxStream(t, ns.URL(), nats.UserInfo("all", "pass"))
	w := watcher(t, "postgres://127.0.0.1:1/none", "none", ns.URL(), "some")
	first := w.eventually(t, "no list of consumers", func(r Reading) bool {
		return r.ConsumerList.Error != ""
	})
	r := w.eventually(t, "the stream is read again", func(r Reading) bool {
		return r.Stream.At.After(first.Stream.At)
	})
	if !r.ConsumerList.At.IsZero() || r.Stream.Messages != 3 || r.NATS.Error != "" ||
		!r.Postgres.At.IsZero() || r.Postgres.Error == "" {
		t.Errorf("%+v", r)
	}
}

// The rate is that of some minutes, and there is none before there is a time to measure over, or across a
// change to a server that is behind.
func TestTheRateOfWALIsThatOfSomeMinutes(t *testing.T) {
	var rate walRate
	begun := time.Now()
	at := func(s int, end outbox.LSN) float64 {
		rate.add(end, begun.Add(time.Duration(s)*time.Second))
		return rate.perSecond()
	}
	if got := at(0, 1000) + at(2, 3000); got != 0 {
		t.Errorf("%v after two seconds", got)
	}
	for s := 4; s <= 1000; s += 2 {
		if got := at(s, outbox.LSN(1000+1000*s)); s >= 10 && got != 1000 {
			t.Fatalf("%v after %d s", got, s)
		}
	}
	if n := len(rate.samples); n > 40 {
		t.Errorf("%d samples", n)
	}
	for s := 1002; s <= 1400; s += 2 {
		at(s, 1001000)
	}
	if got := at(1402, 1001000); got != 0 {
		t.Errorf("%v, and nothing was written for minutes", got)
	}
	if got := at(1404, 10); got != 0 {
		t.Errorf("%v on another server", got)
	}
}
