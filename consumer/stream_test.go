package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
)

func (w *harness) onStream(js jetstream.JetStream, change func(*Config)) *Consumer {
	w.t.Helper()
	cfg := w.config(nil)
	if change != nil {
		change(&cfg)
	}
	c, err := New(js, Postgres(w.pool), cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	c.cfg.confirm, c.cfg.interval = time.Millisecond, 50*time.Millisecond
	return c
}

// Somebody deletes the consumer with which an instance reads, or all of the stream's.
func TestAnInstanceGoesOnWhenItsReaderIsDeleted(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(50, 7)
	publish(t, js, all...)
	r := w.start(w.onStream(js, nil), handler)
	w.await(all)
	for range 3 {
		for name := range readers(t, js) {
			if err := js.DeleteConsumer(t.Context(), "OUTBOX", name); err != nil {
				t.Fatal(err)
			}
		}
		more := s.events(30, 7)
		publish(t, js, more...)
		all = append(all, more...)
		w.await(all)
	}
	r.stopped()
	w.exactly(all)
	for name := range readers(t, js) {
		t.Errorf("consumer %s is left", name)
	}
}

// TestWhatADeletedReaderHadHandedOutStaysHandedOut: messages that have come and wait for a slow handler are
// no gap if retention takes them, also where the server has removed the idle consumer that brought them.
func TestWhatADeletedReaderHadHandedOutStaysHandedOut(t *testing.T) {
	t.Parallel()
	js, _ := realStream(t, jetstream.StreamConfig{})
	publish(t, js, (&publisher{}).events(5, 1)...)
	src := &streamSource{js: js, stream: "OUTBOX", filters: []string{"outbox.d0"}, name: "orders"}
	r, err := src.Open(t.Context(), 0)
	must.Succeed(t, err)
	defer r.Close()
	_, err = r.Read(t.Context())
	must.Succeed(t, err)
	await.Until(t, "all to be handed out", func() error {
		if n := r.Buffered(); n != 4 {
			return fmt.Errorf("%d have come", n)
		}
		return nil
	})
	for _, deleted := range []bool{false, true} {
		if deleted {
			must.Succeed(t, js.DeleteConsumer(t.Context(), "OUTBOX", r.(*streamReader).name))
		}
		if handed, err := r.Check(t.Context()); handed != 5 || err != nil {
			t.Errorf("deleted: %t: handed out up to %d, %v", deleted, handed, err)
		}
	}
}

// readers are the consumers of the stream, by name.
func readers(t *testing.T, js jetstream.JetStream) map[string]*jetstream.ConsumerInfo {
	t.Helper()
	st, err := js.Stream(t.Context(), "OUTBOX")
	if err != nil {
		t.Fatal(err)
	}
	all, list := map[string]*jetstream.ConsumerInfo{}, st.ListConsumers(t.Context())
	for info := range list.Info() {
		all[info.Name] = info
	}
	if list.Err() != nil {
		t.Fatal(list.Err())
	}
	return all
}

func TestRunGoesOnWhenNATSRestarts(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	server := natstest.Process(t)
	connect := func() jetstream.JetStream {
		nc, err := nats.Connect(server.URL(), nats.Timeout(time.Minute), nats.MaxReconnects(-1),
			nats.ReconnectWait(20*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		return js
	}
	js := connect()
	if _, err := js.CreateStream(t.Context(),
		jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>"}}); err != nil {
		t.Fatal(err)
	}
	all := s.events(200, 9)
	publish(t, js, all...)
	r := w.start(w.onStream(js, func(c *Config) { c.Batch = 2 }), handler)
	for range 3 {
		if !await.True(func() bool { return len(w.effects()) > 0 }) {
			t.Fatal("nothing is read")
		}
		if err := server.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := server.Start(); err != nil {
			t.Fatal(err)
		}
		more := s.events(100, 9)
		publish(t, connect(), more...)
		all = append(all, more...)
	}
	w.await(all)
	r.stopped()
	w.exactly(all)
}

func TestAFilterLeavesTheOtherSubjectsOut(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(40, 4)
	publish(t, js, all...)
	var mine []*stream.Message
	for _, m := range all {
		if m.Subject == "outbox.d1" || m.Subject == "outbox.d2" {
			mine = append(mine, m)
		}
	}
	filter := func(c *Config) { c.Filters = []string{"outbox.d2", "outbox.d1"} }
	r := w.start(w.onStream(js, filter), handler)
	w.await(mine)
	w.awaitOffsets(40) // it moves on over what it does not see
	r.stopped()
	if err := w.start(w.onStream(js, nil), handler).ends(); !errors.Is(err, ErrFilter) {
		t.Errorf("Run: %v", err)
	}
	stream, err := js.Stream(t.Context(), "OUTBOX")
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	more := s.event("d1")
	publish(t, js, more)
	r = w.start(w.onStream(js, filter), handler)
	w.await(append(mine, more))
	r.stopped()
}

// TestWithoutADatabaseASessionKeepsWhatTheOneBeforeHasDone: an instance that waits for another layout begins
// one session after the other, and each is over before the offsets are due to be written. None repeats
// events.
func TestWithoutADatabaseASessionKeepsWhatTheOneBeforeHasDone(t *testing.T) {
	t.Parallel()
	js, _ := realStream(t, jetstream.StreamConfig{})
	s, w := &publisher{}, &harness{t: t}
	var mu sync.Mutex
	var had []uint64
	run := func(partitions int) *running {
		t.Helper()
		c, err := New(js, JetStream(), Config{Name: "orders", Stream: "OUTBOX", Partitions: partitions,
			Lease: time.Minute, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
		if err != nil {
			t.Fatal(err)
		}
		return w.start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
			mu.Lock()
			defer mu.Unlock()
			had = append(had, e.Sequence)
			return nil
		})
	}
	var want []uint64
	next := func(n int) {
		t.Helper()
		publish(t, js, s.events(n, 1)...)
		for range n {
			want = append(want, uint64(len(want)+1))
		}
	}
	handled := func() {
		t.Helper()
		await.Until(t, "the events", func() error {
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(had, want) {
				return fmt.Errorf("%v", had[:min(len(had), len(want)+1)])
			}
			return nil
		})
	}
	for partitions := 1; partitions <= 3; partitions++ {
		next(3)
		r := run(partitions)
		handled()
		next(1) // behind the barrier
		handled()
		r.stopped()
	}
}

// TestAHoleAtTheEndOfAStreamIsToldByTheNextMessage: a server keeps the last sequence when it loses the newest
// messages, and when somebody deletes them. A consumer that had not read them can't tell which it was, until
// the next message comes. Where nothing at all is left they do not come again.
func TestAHoleAtTheEndOfAStreamIsToldByTheNextMessage(t *testing.T) {
	t.Parallel()
	for _, archive := range []Archive{nil, newMemoryArchive(newMemoryStream())} {
		for _, then := range []string{"another event", "they come again", "all is purged"} {
			t.Run(fmt.Sprint(then, archive != nil), func(t *testing.T) {
				t.Parallel()
				w, s := newHarness(t), &publisher{}
				js, _ := realStream(t, jetstream.StreamConfig{})
				consumer := func() *Consumer {
					return w.onStream(js, func(c *Config) { c.Archive = archive })
				}
				all := s.events(9, 3)
				publish(t, js, all[:6]...)
				r := w.start(consumer(), handler)
				w.await(all[:6])
				w.awaitOffsets(6)
				r.stopped()
				publish(t, js, all[6:]...)
				st, err := js.Stream(t.Context(), "OUTBOX")
				if err != nil {
					t.Fatal(err)
				}
				for seq := uint64(7); seq <= 9 && err == nil; seq++ {
					err = st.DeleteMsg(t.Context(), seq)
				}
				if err == nil && then == "all is purged" {
					err = st.Purge(t.Context())
				}
				if err != nil {
					t.Fatal(err)
				}
				if info, err := st.Info(t.Context()); err != nil || info.State.LastSeq != 9 {
					t.Fatalf("%+v, %v", info, err)
				}
				r = w.start(consumer(), handler)
				next := s.event("d1")
				if then != "all is purged" {
					await.Until(t, "a pull", func() error {
						all := readers(t, js)
						for _, info := range all {
							if info.NumWaiting > 0 {
								return nil
							}
						}
						return fmt.Errorf("%d consumers", len(all))
					})
					if then == "they come again" {
						next.Header.Set(outbox.HeaderLost, "7")
					}
					publish(t, js, next)
				}
				if then == "they come again" {
					w.await(append(all[:6:6], next))
					r.stopped()
					return
				}
				err = r.ends()
				if !errors.Is(err, ErrGap) || !strings.Contains(err.Error(), "sequences 7 to 9 are") {
					t.Errorf("Run: %v", err)
				}
				w.exactly(all[:6])
			})
		}
	}
}

// Without a database: at least once, in order.
func TestWithoutADatabaseEventsComeAtLeastOnceInOrder(t *testing.T) {
	t.Parallel()
	js, _ := realStream(t, jetstream.StreamConfig{})
	s := &publisher{}
	all := s.events(120, 6)
	publish(t, js, all...)
	var mu sync.Mutex
	had := map[string][]string{}
	h := func(_ context.Context, tx pgx.Tx, e *Event) error {
		if tx != nil {
			return errors.New("a transaction")
		}
		mu.Lock()
		defer mu.Unlock()
		if e.ID == "id-7" {
			return Poison(errors.New("no"))
		}
		had[e.Document] = append(had[e.Document], e.ID)
		return nil
	}
	w := &harness{t: t}
	cfg := Config{Name: "orders", Stream: "OUTBOX", Lease: 300 * time.Millisecond}
	run := func(cfg Config) *running {
		c, err := New(js, JetStream(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		return w.start(c, h)
	}
	if err := run(cfg).ends(); !errors.Is(err, ErrPoison) || !strings.Contains(err.Error(), "OnPoison") {
		t.Errorf("Run: %v", err)
	}
	var poisoned []string
	cfg.OnPoison = func(_ context.Context, e *Event, _ error) error {
		mu.Lock()
		defer mu.Unlock()
		poisoned = append(poisoned, e.ID)
		return nil
	}
	crash := cfg
	crash.hooks.Crash = (&crashAt{n: 40}).at
	if err := run(crash).ends(); !errors.Is(err, errCrash) {
		t.Errorf("Run: %v", err)
	}
	// allHad waits until each document has had its newest event.
	allHad := func() {
		t.Helper()
		await.Until(t, "the events", func() error {
			mu.Lock()
			defer mu.Unlock()
			for d := range 6 {
				if l := had[fmt.Sprintf("d%d", d)]; len(l) == 0 ||
					l[len(l)-1] != fmt.Sprintf("id-%d", s.n-5+d) {
					return fmt.Errorf("%v", had)
				}
			}
			return nil
		})
	}
	r := run(cfg)
	allHad()
	r.stopped()
	for d := range 6 { // first appearances are complete and in order
		list := slices.Clone(had[fmt.Sprintf("d%d", d)])
		seen, n := map[string]bool{}, 0
		for _, id := range list {
			if seen[id] {
				continue
			}
			seen[id] = true
			if n++; d == 0 && n == 2 {
				n++ // id-7
			}
			if want := fmt.Sprintf("id-%d", (n-1)*6+d+1); id != want {
				t.Fatalf("document d%d: %s, want %s: %v", d, id, want, list)
			}
		}
	}
	if !slices.Contains(poisoned, "id-7") {
		t.Errorf("OnPoison was given %v", poisoned)
	}
	// After a clean stop nothing comes again; only where the machine stood still for longer than the lease,
	// the stop could not say how far it was. What came again of a document would come before its next event.
	for try := 1; ; try++ {
		before := map[string][]string{}
		for document, ids := range had {
			before[document] = slices.Clone(ids)
		}
		more := s.events(6, 6)
		publish(t, js, more...)
		r = run(cfg)
		allHad()
		r.stopped()
		again := false
		for d, m := range more {
			document := fmt.Sprintf("d%d", d)
			again = again || !slices.Equal(had[document], append(before[document], string(m.Data)))
		}
		if !again {
			return
		}
		if try == 5 {
			t.Fatal("after a clean stop events came again, each time")
		}
	}
}

// TestAStreamThatIsMadeAnewUnderAReaderEndsRun: the stream is deleted, made anew and filled while an instance
// waits for a slow handler. Its next reader would begin within the new stream, behind events that nobody has
// read.
func TestAStreamThatIsMadeAnewUnderAReaderEndsRun(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	publish(t, js, s.events(3, 1)...)
	entered, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	c := w.onStream(js, func(cfg *Config) { cfg.MaxInFlight = 1 })
	c.cfg.interval = time.Second // nothing is inspected for five of them
	r := w.start(c, func(ctx context.Context, tx pgx.Tx, e *Event) error {
		once.Do(func() { close(entered); <-release })
		return handler(ctx, tx, e)
	})
	<-entered
	st, err := js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	config := st.CachedInfo().Config
	must.Succeed(t, js.DeleteStream(t.Context(), "OUTBOX"))
	createStream(t, js, config)
	for range 10 {
		publish(t, js, s.event("new"))
	}
	close(release)
	if err := r.ends(); !errors.Is(err, ErrStream) {
		t.Errorf("Run: %v", err)
	}
	if effect := w.effects()["new"]; effect != "" {
		t.Errorf("events of the new stream had their effect: %s", effect)
	}
}
