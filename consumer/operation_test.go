package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

// read is up to where the newest reader has read.
func (s *memoryStream) read() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reader == nil {
		return 0
	}
	return s.reader.at
}

// No more is read than MaxInFlight and MaxBytes say, and no more than 16 times that beyond an event that is
// held up.
func TestNoMoreIsReadThanTheLimitsAllow(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*Config)
		events int
		bound  int // messages that are read beyond what is done
	}{
		"messages": {func(c *Config) { c.MaxInFlight = 10 }, 100, 10},
		"bytes":    {func(c *Config) { c.MaxBytes = 10 * (eventOverhead + 300) }, 100, 20},
		"ahead":    {func(c *Config) { c.MaxInFlight, c.Partitions = 10, 8 }, 300, aheadOf * 10},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := []*stream.Message{s.event("slow")}
			for range c.events {
				all = append(all, s.event("quick"))
			}
			cfg := w.config(src)
			cfg.Partitions, cfg.Batch = 1, 4
			c.change(&cfg)
			consumer := w.consumer(cfg)
			if p, q := partitionHash("slow")%8, partitionHash("quick")%8; p == q {
				t.Fatal("want documents of different partitions")
			}
			src.publish(all...)
			var handled, most atomic.Int64
			release := make(chan struct{})
			r := w.start(consumer, func(ctx context.Context, tx pgx.Tx, e *Event) error {
				if e.Document == "slow" {
					<-release
				}
				defer handled.Add(1)
				most.Store(max(most.Load(), int64(src.read())-handled.Load()))
				return handler(ctx, tx, e)
			})
			full := func() bool { // the dispatcher waits in room, with one more message in its hand
				n := int(src.read())
				return n > 1 && (name == "bytes" || n == c.bound+1)
			}
			if !await.True(full) {
				t.Errorf("%d messages are read", src.read())
			}
			close(release)
			w.await(all)
			r.stopped()
			if name != "ahead" && int(most.Load()) > c.bound+1 {
				t.Errorf("%d messages were read and not done, want %d at most", most.Load(), c.bound+1)
			}
		})
	}
}

// A handler that does not return within StopTimeout is cut off, and what it did is not there.
func TestAHandlerIsCutOffAfterStopTimeout(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(5, 1)
	src.publish(all...)
	cfg := w.config(src)
	cfg.StopTimeout, cfg.Timeout = 20*time.Millisecond, time.Hour
	entered := make(chan struct{})
	var once sync.Once
	r := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if err := handler(ctx, tx, e); err != nil {
			return err
		}
		once.Do(func() { close(entered) })
		<-ctx.Done()
		return ctx.Err()
	})
	<-entered
	r.stopped()
	w.exactly(nil)
	w.readAll(w.config(src), all)
}

// TestATransactionOutlivesCallsThatDoNotUseIt: each call takes as long as it may and asks the database for
// nothing, so the events of one transaction take longer than that may be idle. Also of those that are
// released.
func TestATransactionOutlivesCallsThatDoNotUseIt(t *testing.T) {
	t.Parallel()
	for _, of := range []string{"pgx", "database/sql", "released"} {
		t.Run(of, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			cfg := w.config(src)
			cfg.Partitions, cfg.Timeout = 1, 100*time.Millisecond
			c := w.consumer(cfg)
			if of == "database/sql" {
				c = w.sqlConsumer(w.sql(), cfg)
			}
			var refuses atomic.Bool
			var calls atomic.Int64
			refuses.Store(of == "released")
			w.start(c, func(context.Context, pgx.Tx, *Event) error {
				if refuses.Load() {
					return Poison(errors.New("not now"))
				}
				time.Sleep(1500 * time.Millisecond) // it ignores its context, but does not hang
				calls.Add(1)
				return nil
			})
			src.publish(s.events(5, 1)...)
			if of == "released" {
				w.awaitOffsets(5)
				refuses.Store(false)
				w.exec("UPDATE outflow_parked SET release = 'retry' WHERE cause = 'poison'")
			}
			await.Until(t, "all events to be done", func() (err error) {
				var parked int
				err = w.mine.QueryRow(t.Context(), "SELECT count(*) FROM outflow_parked").Scan(&parked)
				if at := w.offsets(); err == nil && (parked > 0 || len(at) != 1 || at[0] != 5) {
					err = fmt.Errorf("%d are parked, marks %v", parked, at)
				}
				return err
			})
			if n := calls.Load(); n != 5 {
				t.Errorf("%d calls for 5 events", n)
			}
		})
	}
}

// TestATransactionThatTheServerEndsIsMadeSmaller: the database ends each one in the midst of its third call,
// as with transaction_timeout. That is the last one before the commit, or another follows. One of the calls
// takes 200 ms: a transaction of less than 100 ms is not looked after.
func TestATransactionThatTheServerEndsIsMadeSmaller(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ n, slow int }{{4, 3}, {9, 3}, {9, 1}} {
		t.Run(fmt.Sprintf("%d events, call %d is slow", c.n, c.slow), func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			cfg, reg := w.config(src), prometheus.NewRegistry()
			cfg.Partitions, cfg.Registerer = 1, reg
			var newest pgx.Tx
			n, calls := c.n, 0
			src.publish(s.events(1, 1)...)
			w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
				if e.seq == 1 { // alone
					src.publish(s.events(n-1, 1)...)
					await.True(func() bool { return src.read() == uint64(n) })
				}
				now := tx.(handlerTx).Tx
				if calls++; now != newest {
					newest, calls = now, 1
				}
				if calls == c.slow {
					time.Sleep(200 * time.Millisecond)
				}
				if calls != 3 {
					return nil
				}
				_, err := w.mine.Exec(ctx, "SELECT pg_terminate_backend($1, 60000)", tx.Conn().PgConn().PID())
				return err
			})
			w.awaitOffsets(int64(n))
			if sessions := gather(t, reg)["outflow_consumer_sessions_total consumer=orders"]; sessions != 1 {
				t.Errorf("%v sessions", sessions)
			}
		})
	}
}

// TestAReleaseThatTheServerEndsIsMadeSmaller: so are the steps of a release.
func TestAReleaseThatTheServerEndsIsMadeSmaller(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	cfg, reg := w.config(src), prometheus.NewRegistry()
	cfg.Partitions, cfg.Registerer = 1, reg
	var refuses atomic.Bool
	refuses.Store(true)
	var newest pgx.Tx
	calls := 0
	src.publish(s.events(3, 1)...)
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, _ *Event) error {
		if refuses.Load() {
			return Poison(errors.New("not now"))
		}
		if calls++; tx.(handlerTx).Tx != newest {
			newest, calls = tx.(handlerTx).Tx, 1
		}
		if calls < 3 {
			return nil
		}
		_, err := w.mine.Exec(ctx, "SELECT pg_terminate_backend($1, 60000)", tx.Conn().PgConn().PID())
		return err
	})
	w.awaitOffsets(3)
	refuses.Store(false)
	w.exec("UPDATE outflow_parked SET release = 'retry' WHERE cause = 'poison'")
	await.Until(t, "the release", func() error {
		var n int
		err := w.mine.QueryRow(t.Context(), "SELECT count(*) FROM outflow_parked").Scan(&n)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d are parked", n)
		}
		return err
	})
	if sessions := gather(t, reg)["outflow_consumer_sessions_total consumer=orders"]; sessions != 1 {
		t.Errorf("%v sessions", sessions)
	}
}

// TestAReleasedEventWhoseTransactionTheServerEndsHasFailed: one call takes longer than a transaction may.
func TestAReleasedEventWhoseTransactionTheServerEndsHasFailed(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	cfg, reg := w.config(src), prometheus.NewRegistry()
	cfg.Partitions, cfg.MaxAttempts, cfg.Registerer = 1, 2, reg
	src.publish(s.events(1, 1)...)
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, _ *Event) error {
		_, err := w.mine.Exec(ctx, "SELECT pg_terminate_backend($1, 60000)", tx.Conn().PgConn().PID())
		time.Sleep(200 * time.Millisecond)
		return err
	})
	w.awaitOffsets(1)
	w.exec("UPDATE outflow_parked SET release = 'retry'")
	await.Until(t, "it to be parked again", func() error {
		var attempts int
		var release string
		err := w.mine.QueryRow(t.Context(), "SELECT attempts, release FROM outflow_parked").
			Scan(&attempts, &release)
		if err == nil && (attempts != 4 || release != "") {
			err = fmt.Errorf("%d attempts, %q", attempts, release)
		}
		return err
	})
	if sessions := gather(t, reg)["outflow_consumer_sessions_total consumer=orders"]; sessions != 1 {
		t.Errorf("%v sessions", sessions)
	}
}

// A handler that runs longer than the lease keeps it.
func TestLongHandlerKeepsTheLease(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(5, 1)
	src.publish(all...)
	entered, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	cfg := w.config(src)
	cfg.Lease = 2 * time.Second
	slow := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		once.Do(func() { close(entered) })
		select {
		case <-release:
		case <-ctx.Done():
			return ctx.Err()
		}
		return handler(ctx, tx, e)
	})
	<-entered
	r := w.start(w.consumer(cfg), handler)
	var first, now time.Time
	expires := func() (at time.Time) {
		if err := w.mine.QueryRow(t.Context(), `SELECT expires FROM outflow_member
			ORDER BY joined LIMIT 1`).Scan(&at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	if first = expires(); !await.True(func() bool { now = expires(); return now.Sub(first) > cfg.Lease }) {
		t.Errorf("the lease is not renewed: %v, %v", first, now)
	}
	close(release)
	w.await(all)
	slow.stopped()
	r.stopped()
	w.exactly(all)
}

// A handler that commits ends Run, and the error says what may be missing.
func TestAHandlerThatCommitsEndsRun(t *testing.T) {
	t.Parallel()
	for name, commit := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"and chains": func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, "COMMIT AND CHAIN")
			if err != nil {
				return err
			}
			rows.Close()
			return rows.Err()
		},
		"and begins": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "COMMIT; BEGIN")
			return err
		},
		"done": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Conn().Exec(ctx, "COMMIT")
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := s.events(20, 1)
			src.publish(all...)
			cfg := w.config(src)
			cfg.Batch = 10
			err := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
				if e.seq == 1 && !await.True(func() bool { return src.read() == 20 }) {
					return Poison(errors.New("nothing is read"))
				}
				if err := handler(ctx, tx, e); err != nil || e.seq != 12 {
					return err
				}
				return commit(ctx, tx)
			}).ends()
			if !errors.Is(err, ErrHandler) {
				t.Fatalf("Run: %v", err)
			}
			last := w.offsets()[partitionHash("d0")%8]
			w.exactly(all[:12])
			if last > 12 && !strings.Contains(err.Error(), fmt.Sprintf(" to %d", last)) {
				t.Errorf("the mark is at %d: %v", last, err)
			}
		})
	}
}

// SERIALIZABLE: transactions that conflict are tried again, and are no failures.
func TestSerializationConflictsAreTriedAgain(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(200, 20)
	src.publish(all...)
	cfg := w.config(src)
	cfg.Isolation, cfg.Batch, cfg.MaxAttempts = pgx.Serializable, 2, 1
	cfg.Lease = time.Hour // a session does not end because somebody stands still
	w.exec(`CREATE TABLE total (n int); INSERT INTO total VALUES (0)`)
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if err := handler(ctx, tx, e); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `UPDATE total SET n = n + 1`)
		return err
	})
	w.await(all)
	src.mu.Lock()
	opened := src.opened
	src.mu.Unlock()
	// the offset's row changes after the snapshot was taken
	err := pgx.BeginFunc(t.Context(), w.mine, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `UPDATE outflow_mark SET updated_at = now()`); err != nil {
			return err
		}
		more := s.event("d0")
		all = append(all, more)
		src.publish(more)
		if !await.True(func() bool {
			var waits bool
			err := w.mine.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
				WHERE datname = current_database()
				AND application_name = 'consumer' AND wait_event_type = 'Lock')`).Scan(&waits)
			return err == nil && waits
		}) {
			return errors.New("nobody waits for the mark")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	w.await(all)
	src.mu.Lock()
	defer src.mu.Unlock()
	if src.opened != opened {
		t.Error("a conflict at the mark ended the session")
	}
}

// Without a database an instance that can't renew its lease begins nothing more when the lease is over,
// whoever holds it then.
func TestALeaseThatCannotBeRenewedStopsNewEvents(t *testing.T) {
	t.Parallel()
	st := newDocumentStore(&memoryCell{},
		&Config{Name: "orders", Stream: "OUTBOX", Lease: 20 * time.Millisecond})
	if _, err := st.acquire(t.Context(), none); err != nil {
		t.Fatal(err)
	}
	st.doc.Offsets = map[string]offsets{live: {0: {}}}
	if !await.True(func() bool {
		return errors.Is(st.move(t.Context(), live, 0, offset{}, offset{}, nothing), errMoved)
	}) {
		t.Error("it goes on without a lease")
	}
}

// publishReplay publishes the first events of the stream again, as outflow replay does for consumer orders.
func publishReplay(t *testing.T, js jetstream.JetStream, events []*stream.Message) {
	t.Helper()
	createStream(t, js, jetstream.StreamConfig{Name: replayStream("OUTBOX"),
		Subjects: []string{"_outflow_replay.OUTBOX.>"}})
	publishReplayed(t, js, 0, events)
}

// createStream waits for the server to have removed the files of a stream of that name that was deleted.
func createStream(t *testing.T, js jetstream.JetStream, config jetstream.StreamConfig) {
	t.Helper()
	await.Until(t, "the stream", func() error {
		_, err := js.CreateStream(t.Context(), config)
		return err
	})
}

// publishReplayed publishes events again that follow the first ones of the stream.
func publishReplayed(t *testing.T, js jetstream.JetStream, first int, events []*stream.Message) {
	t.Helper()
	for i, m := range events {
		c := *m
		c.Header = nats.Header{"Outflow-Replay": {"r1"},
			"Outflow-Replay-Sequence": {strconv.Itoa(first + i + 1)}}
		maps.Copy(c.Header, m.Header)
		c.Subject = replayPrefix("OUTBOX", "orders") + m.Subject
		publish(t, js, &c)
	}
}

// The rest of a replay that was purged does not keep the live stream waiting.
func TestAPurgedReplayHoldsUpNoLiveEvent(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	publishReplay(t, js, s.events(20, 1))
	all := s.events(20, 3)
	publish(t, js, all...)
	stream, err := js.Stream(t.Context(), replayStream("OUTBOX"))
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	r := w.start(w.onStream(js, func(c *Config) { c.MaxInFlight, c.Batch = 1, 1 }),
		func(ctx context.Context, tx pgx.Tx, e *Event) error {
			once.Do(func() {
				if err := stream.DeleteMsg(ctx, 20); err != nil {
					t.Error(err)
				}
				if err := stream.Purge(ctx); err != nil {
					t.Error(err)
				}
			})
			if e.Replayed {
				return nil
			}
			return handler(ctx, tx, e)
		})
	w.await(all)
	r.stopped()
	w.exactly(all)
}

// TestAReplayOfWhatIsStillToComeAddsNoEffect: of a replay, only what the consumer has done by then has its
// effect once more; the rest comes from the stream anyway.
func TestAReplayOfWhatIsStillToComeAddsNoEffect(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(20, 3)
	publish(t, js, all[:12]...)
	first := w.start(w.onStream(js, nil), handler)
	w.await(all[:12])
	first.stopped()
	publish(t, js, all[12:]...)
	publishReplay(t, js, all)
	var mu sync.Mutex
	var replayed []uint64
	r := w.start(w.onStream(js, nil), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if !e.Replayed {
			return handler(ctx, tx, e)
		}
		mu.Lock()
		defer mu.Unlock()
		replayed = append(replayed, e.Sequence)
		return nil
	})
	w.await(all)
	r.stopped()
	w.exactly(all)
	slices.Sort(replayed)
	if len(replayed) != 12 || replayed[11] != 12 {
		t.Errorf("replayed are %v, want 1 to 12", replayed)
	}
}

// TestAReplayOfWhatComesAgainHasItsEffect: the broker lost what was done and kept its last sequence. It is
// done under its new sequences as well, whether a session has found that out before or not. So it is where
// retention has taken all that lay before.
func TestAReplayOfWhatComesAgainHasItsEffect(t *testing.T) {
	t.Parallel()
	for i := range 3 {
		found := i == 1
		w, s := newHarness(t), &publisher{}
		js, _ := realStream(t, jetstream.StreamConfig{})
		all := s.events(12, 3)
		publish(t, js, all...)
		first := w.start(w.onStream(js, nil), handler)
		w.await(all)
		w.awaitOffsets(12)
		first.stopped()
		st, err := js.Stream(t.Context(), "OUTBOX")
		for seq := uint64(9); seq <= 12 && err == nil; seq++ {
			err = st.DeleteMsg(t.Context(), seq)
		}
		must.Succeed(t, err)
		again := *all[8]
		again.Header = maps.Clone(again.Header)
		again.Header.Set(outbox.HeaderLost, "9")
		publish(t, js, append([]*stream.Message{&again}, all[9:]...)...)
		if i == 2 {
			must.Succeed(t, st.Purge(t.Context(), jetstream.WithPurgeSequence(13)))
		}
		if found {
			w.exec("UPDATE outflow_mark SET holed = true")
		}
		createStream(t, js, jetstream.StreamConfig{Name: replayStream("OUTBOX"),
			Subjects: []string{"_outflow_replay.OUTBOX.>"}})
		next := s.event("d1")
		publishReplayed(t, js, 12, append(all[8:12:12], next))
		publish(t, js, next)
		var mu sync.Mutex
		var replayed []uint64
		r := w.start(w.onStream(js, nil), func(ctx context.Context, tx pgx.Tx, e *Event) error {
			if !e.Replayed {
				return handler(ctx, tx, e)
			}
			mu.Lock()
			defer mu.Unlock()
			replayed = append(replayed, e.Sequence)
			return nil
		})
		all = append(all, next)
		w.await(all)
		r.stopped()
		w.exactly(all)
		slices.Sort(replayed)
		if !slices.Equal(replayed, []uint64{13, 14, 15, 16}) {
			t.Errorf("%d: replayed are %v, want 13 to 16", i, replayed)
		}
	}
}

// PostgreSQL is stopped, and killed, in the middle.
func TestRunGoesOnWhenPostgreSQLRestarts(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, 0)
	w, s, src := newHarnessIn(t, pgtest.Database(t, server)), &publisher{}, newMemoryStream()
	all := s.events(200, 12)
	src.publish(all...)
	cfg := w.config(src)
	cfg.Batch, cfg.MaxInFlight = 2, 20
	r := w.start(w.consumer(cfg), handler)
	for _, end := range []func() error{server.Kill, func() error { return server.Stop("fast") },
		func() error { return server.Stop("immediate") }} {
		n := len(all)
		if !await.True(func() bool { return src.read() > uint64(n-100) }) {
			t.Fatal("nothing is read")
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		more := s.events(200, 12)
		src.publish(more...)
		all = append(all, more...)
		if err := server.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.mine.Reset()
	}
	w.await(all)
	r.stopped()
	w.exactly(all)
}

// A replicated stream gets other leaders, by election and because a node goes.
func TestRunGoesOnWhenTheStreamLeaderChanges(t *testing.T) {
	t.Parallel()
	tier.OnlyLong(t, "a cluster of three takes up to a minute")
	cluster := natstest.Cluster(t, 3)
	nc, err := nats.Connect(cluster.URLs(), nats.Timeout(time.Minute), nats.MaxReconnects(-1),
		nats.ReconnectWait(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(),
		jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>"}, Replicas: 3}); err != nil {
		t.Fatal(err)
	}
	w, s := newHarness(t), &publisher{}
	var all []*stream.Message
	send := func(n int) { // each until it is there: an election refuses for a while
		for _, m := range s.events(n, 9) {
			msg := &nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data}
			if !await.True(func() bool {
				_, err := js.PublishMsg(t.Context(), msg, jetstream.WithMsgID(string(m.Data)))
				return err == nil
			}) {
				t.Fatal("the stream takes nothing")
			}
			all = append(all, m)
		}
	}
	send(100)
	r := w.start(w.onStream(js, func(c *Config) { c.Batch = 3 }), handler)
	for i, subject := range []string{"STREAM.LEADER.STEPDOWN.OUTBOX",
		"CONSUMER.LEADER.STEPDOWN.OUTBOX.orders", "", "STREAM.LEADER.STEPDOWN.OUTBOX"} {
		send(50)
		if subject != "" {
			// without a leader just now there is nothing to do
			_, _ = nc.Request("$JS.API."+subject, nil, 5*time.Second)
		} else if node, err := cluster.WaitLeader("OUTBOX", time.Minute); err != nil {
			t.Fatal(err)
		} else {
			cluster.Stop(node)
			send(50)
			if err := cluster.Start(node); err != nil {
				t.Fatal(err)
			}
		}
		send(50)
		t.Log("leader changed", i, len(all))
	}
	w.await(slices.Clone(all))
	r.stopped()
	w.exactly(all)
}
