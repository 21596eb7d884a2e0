package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
)

// What a handler does to the payload neither the next attempt nor the parked event sees.
func TestThePayloadIsTheHandlersOwn(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	src.publish(s.events(1, 1)...)
	cfg := w.config(src)
	cfg.MaxAttempts = 3
	var mu sync.Mutex
	var seen []string
	w.start(w.consumer(cfg), func(_ context.Context, _ pgx.Tx, e *Event) error {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, string(e.Data))
		copy(e.Data, "XXXX")
		return errors.New("refused")
	})
	var data []byte
	await.Until(t, "the parked event", func() error {
		return w.mine.QueryRow(t.Context(), "SELECT data FROM outflow_parked").Scan(&data)
	})
	mu.Lock()
	defer mu.Unlock()
	if fmt.Sprint(seen) != "[id-1 id-1 id-1]" || string(data) != "id-1" {
		t.Errorf("the attempts saw %v, %q is parked", seen, data)
	}
}

// A dead letter has no payload: a handler is not given one unless it is made for that.
func TestADeadLetterIsParkedOrGoesToItsOwnHandler(t *testing.T) {
	t.Parallel()
	for _, own := range []bool{false, true} {
		t.Run(fmt.Sprint("own=", own), func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := s.events(4, 1)
			all[1].Header.Set(deadLetterHeader, "too large")
			all[1].Data = []byte(`{"doc_id":"d0"}`)
			src.publish(all...)
			cfg := w.config(src)
			cfg.MaxAttempts, cfg.ParkAfter, cfg.ParkLimit = 50, time.Hour, 1
			wanted, parked := all[:1], 3
			if own {
				wanted, parked, cfg.DeadLetters = all, 0, handler
			}
			w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
				if e.DeadLetter != "" {
					t.Errorf("the handler was given %v", e)
				}
				return handler(ctx, tx, e)
			})
			await.Until(t, "parked events", func() (err error) {
				var n int
				if err = w.mine.QueryRow(
					t.Context(),
					"SELECT count(*) FROM outflow_parked",
				).Scan(
					&n,
				); n != parked {
					err = fmt.Errorf("%d, %w", n, errors.Join(err, errors.New("not yet")))
				}
				return err
			})
			w.await(wanted)
		})
	}
}

// Transactions of many events lock many rows: where they deadlock, smaller ones follow, so that few do.
func TestTransactionsThatConflictGetSmaller(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(4000, 300)
	src.publish(all...)
	w.exec("CREATE TABLE shared (id int PRIMARY KEY, n int NOT NULL); " +
		"INSERT INTO shared SELECT g, 0 FROM generate_series(0, 9) g")
	w.exec(
		`DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = 20', current_database()); END$$`,
	)
	w.pool.Reset()
	cfg := w.config(src)
	var conflicts atomic.Int32
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if err := handler(ctx, tx, e); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "UPDATE shared SET n = n + 1 WHERE id = $1", e.seq%10)
		if conflict(err) {
			conflicts.Add(1)
		}
		return err
	})
	w.await(all)
	var sum int
	if err := w.mine.QueryRow(
		t.Context(),
		"SELECT sum(n) FROM shared",
	).Scan(
		&sum,
	); err != nil ||
		sum != len(all) {
		t.Errorf("the shared rows add up to %d, %v", sum, err)
	}
	// Eight partitions of 150 events: without that each of their batches deadlocks, one after the other.
	if n := conflicts.Load(); n > 150 {
		t.Errorf("%d deadlocks", n)
	}
	t.Logf("%d deadlocks", conflicts.Load())
}

func TestABatchHalvesAtAConflictAndGrowsWhenItIsCalm(t *testing.T) {
	t.Parallel()
	b := batchSize{now: 64, most: 64, calm: calmFirst}
	after := func(n int) int {
		for range n {
			b.committed()
		}
		return b.now
	}
	b.conflicted(64)
	b.conflicted(3) // there were no more
	first := b.now
	got := []int{first, after(4*calmFirst - 1), after(1), after(8 * calmFirst), after(1 << 20)}
	if fmt.Sprint(got) != "[1 1 2 8 64]" {
		t.Errorf("sizes %v", got)
	}
}

// An event that conflicts again and again is no failure, but it is told.
func TestAnEventThatConflictsForeverIsTold(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(3, 1)
	src.publish(all...)
	cfg := w.config(src)
	var log syncBuffer
	cfg.Log, cfg.MaxAttempts = slog.New(slog.NewTextHandler(&log, nil)), 1
	var calls atomic.Int32
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if e.seq == 2 && calls.Add(1) <= 20 {
			return &pgconn.PgError{Code: "40001"}
		}
		return handler(ctx, tx, e)
	})
	w.await(all)
	if n := strings.Count(log.String(), "again and again"); n != 2 { // 8 and 16
		t.Errorf("it was told %d times: %s", n, log.String())
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// A stop in the middle of a batch commits what is done of it.
func TestAStopCommitsWhatIsDone(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(40, 1)
	src.publish(all...)
	cfg := w.config(src)
	var newest atomic.Pointer[running]
	started := make(chan struct{})
	r := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		<-started
		if e.seq == 1 && !await.True(func() bool { return src.read() == 40 }) {
			return Poison(errors.New("nothing is read"))
		}
		if e.seq == 7 {
			newest.Load().stop()
		}
		return handler(ctx, tx, e)
	})
	newest.Store(r)
	close(started)
	if err := r.ends(); err != nil {
		t.Fatal(err)
	}
	w.exactly(all[:7])
	w.readAll(cfg, all)
}

// What all events need may be down for longer than the attempts last: that parks nothing.
func TestAnOutageParksNothing(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(40, 10)
	src.publish(all...)
	cfg := w.config(src)
	cfg.MaxAttempts, cfg.ParkAfter = 2, time.Hour
	var calls atomic.Int32
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if calls.Add(1) <= 200 {
			return errors.New("connection refused")
		}
		return handler(ctx, tx, e)
	})
	w.await(all)
}

// By default, that may be down for nearly a quarter of an hour.
func TestAnOutageParksNothingByDefault(t *testing.T) {
	t.Parallel()
	for outage, parks := range map[time.Duration]bool{14 * time.Minute: false, 16 * time.Minute: true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			src := newMemoryStream().publish((&publisher{}).events(40, 10)...)
			var done, parked atomic.Int32
			count := func(n *atomic.Int32) error {
				if n.Add(1); done.Load()+parked.Load() == 40 {
					cancel()
				}
				return nil
			}
			c, err := New(nil, Memory(), Config{Name: "orders", hooks: stream.Hooks{Source: src},
				Log:      slog.New(slog.DiscardHandler),
				OnPoison: func(context.Context, *Event, error) error { return count(&parked) }})
			must.Succeed(t, err)
			begun := time.Now()
			must.Succeed(t, c.Run(ctx, func(context.Context, pgx.Tx, *Event) error {
				if time.Since(begun) < outage {
					return errors.New("connection refused")
				}
				return count(&done)
			}))
			if n := parked.Load(); (n > 0) != parks {
				t.Errorf("an outage of %v: %d events are parked", outage, n)
			}
		})
	}
}

// TestSessionsThatEndKeepNoEventFromBeingParked: each session has time for one attempt.
func TestSessionsThatEndKeepNoEventFromBeingParked(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	src.publish(s.events(1, 1)...)
	cfg := w.config(src)
	cfg.MaxAttempts, cfg.ParkAfter, cfg.Backoff = 3, 300*time.Millisecond, Backoff{First: time.Minute}
	w.start(w.consumer(cfg), func(context.Context, pgx.Tx, *Event) error { return errors.New("no") })
	await.Until(t, "the event to be parked", func() error {
		w.exec("UPDATE outflow_mark SET owner = NULL") // what ends a session is no matter
		var attempts int
		err := w.mine.QueryRow(t.Context(), "SELECT attempts FROM outflow_parked").Scan(&attempts)
		if err == nil && attempts < 3 {
			t.Errorf("it was parked after %d attempts", attempts)
		}
		return err
	})
}

// TestWhatIsKnownOfAFailureEndsWithItsEvent: the first event of a stream that is made anew has its sequence,
// and one that was parked may come again. Each attempt is that of a session of its own.
func TestWhatIsKnownOfAFailureEndsWithItsEvent(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	src.publish(s.events(1, 1)...)
	cfg := w.config(src)
	cfg.Partitions, cfg.MaxAttempts, cfg.Backoff = 1, 3, Backoff{First: time.Minute}
	attempts := make(chan int, 10)
	w.start(w.consumer(cfg), func(_ context.Context, _ pgx.Tx, e *Event) error {
		attempts <- e.Attempt
		return errors.New("no")
	})
	fails := func(when string, want int, then func()) {
		t.Helper()
		await.Until(t, when, func() error {
			select {
			case got := <-attempts:
				if got != want {
					t.Errorf("%s: attempt %d, want %d", when, got, want)
				}
				return nil
			default:
				return errors.New("no attempt")
			}
		})
		then()
		w.exec("UPDATE outflow_mark SET owner = NULL") // the session ends
	}
	nothing := func() {}
	fails("at first", 1, nothing)
	fails("again", 2, nothing)
	fails("again", 3, func() {
		w.awaitOffsets(1)
		w.exec("DELETE FROM outflow_parked")
		w.exec("UPDATE outflow_mark SET seq = 0, due = '0/0', lsn = '0/0'")
	})
	fails("set back", 1, func() {
		src.change(func() {
			clear(src.held)
			src.created, src.last = src.created.Add(time.Hour), 0
		})
		src.publish(s.events(1, 1)...)
	})
	fails("made anew", 1, nothing)
	fails("again", 2, nothing)
}

// What the database refuses for its content will not pass.
func TestDataThatTheDatabaseRefusesIsNoOutage(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(4, 2)
	src.publish(all...)
	cfg := w.config(src)
	cfg.MaxAttempts, cfg.ParkAfter = 2, time.Hour
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if e.Document == "d1" {
			_, err := tx.Exec(ctx, "INSERT INTO effect VALUES ('d1', NULL, '')")
			return err
		}
		return handler(ctx, tx, e)
	})
	w.awaitOffsets(4)
	w.exactly([]*stream.Message{all[0], all[2]})
}

// Where one event after the other fails for good, few are parked; the others wait.
func TestNoMoreEventsAreParkedThanTheLimit(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(100, 50)
	src.publish(all...)
	cfg := w.config(src)
	cfg.ParkLimit, cfg.Partitions = 3, 1
	var mended atomic.Bool
	var refused atomic.Int32
	w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if !mended.Load() {
			refused.Add(1)
			return Poison(errors.New("refused"))
		}
		return handler(ctx, tx, e)
	})
	if !await.True(func() bool { return refused.Load() > 50 }) {
		t.Fatal("it does not try again")
	}
	mended.Store(true)
	if !await.True(func() bool { return w.offsets()[0] == 100 }) {
		t.Fatal("it does not go on")
	}
	var documents int
	if err := w.mine.QueryRow(t.Context(), "SELECT count(DISTINCT document) FROM outflow_parked").
		Scan(&documents); err != nil || documents != 3 {
		t.Errorf("%d documents are parked, %v", documents, err)
	}
}

// When a process dies in a statement, the server ends that: the next instance does not wait for it.
func TestAStatementEndsWithItsProcess(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	src.publish(s.events(1, 1)...)
	cfg := w.config(src)
	cfg.Timeout = time.Hour
	w.readAll(cfg, []*stream.Message{src.held[1]})
	instance := func() *postgres {
		c := w.consumer(cfg)
		opened, err := c.offsets.open(t.Context(), nil, &c.cfg)
		if err != nil {
			t.Fatal(err)
		}
		return opened.(*postgres)
	}
	dead, next := instance(), instance()
	st, err := dead.acquire(t.Context(), none)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := w.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	session := conn.Hijack()
	at := st.Offsets[live][0]
	if _, err := session.Exec(t.Context(), dead.beginQuery(1, live, 0, at, at)); err != nil {
		t.Fatal(err)
	}
	process, err := session.PgConn().Hijack()
	if err != nil {
		t.Fatal(err)
	}
	process.Frontend.SendQuery(&pgproto3.Query{String: "SELECT pg_sleep(3600)"})
	if err := errors.Join(process.Frontend.Flush(), process.Conn.Close()); err != nil {
		t.Fatal(err)
	}
	w.expire()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := next.acquire(ctx, none); err != nil {
		t.Errorf("the next instance: %v", err)
	}
	next.abandon()
	dead.abandon()
}

// An instance that freezes while it claims does not keep another one from renewing its lease, or from
// working.
func TestAFrozenInstanceStopsNobody(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(1, 1)
	src.publish(all...)
	cfg := w.config(src)
	r := w.start(w.consumer(cfg), handler)
	w.awaitOffsets(1)
	tx, err := w.mine.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context()) //nolint:errcheck // the test is over
	if _, err := tx.Exec(t.Context(), "SELECT FROM outflow_consumer FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	var joined, expires time.Time
	if !await.True(func() bool {
		err := w.mine.QueryRow(
			t.Context(),
			"SELECT joined, expires FROM outflow_member",
		).Scan(
			&joined,
			&expires,
		)
		return err == nil && expires.Sub(joined) > 3*cfg.Lease
	}) {
		t.Fatalf("the lease is not renewed: it expires %v after the start", expires.Sub(joined))
	}
	more := s.events(5, 1)
	src.publish(more...)
	w.await(append(all, more...))
	must.Succeed(t, tx.Rollback(t.Context()))
	r.stopped()
}

// Nor does one that freezes with the consumer's row locked: the server ends its transaction.
func TestAFrozenInstanceLosesTheConsumersRow(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	claim := func() (*postgres, error) {
		c := w.consumer(w.config(newMemoryStream()))
		opened, err := c.offsets.open(t.Context(), nil, &c.cfg)
		must.Succeed(t, err)
		s := opened.(*postgres)
		t.Cleanup(s.abandon)
		_, err = s.acquire(t.Context(), none)
		return s, err
	}
	s, err := claim()
	must.Succeed(t, err)
	if err := s.locked(t.Context(), func(tx pgx.Tx) error {
		await.Until(t, "another one that claims", func() error { _, err := claim(); return err })
		return nil
	}); err == nil {
		t.Error("the frozen one has committed")
	}
}

// A pool in which the leases would use up all connections is refused before that.
func TestAPoolThatIsTooSmallForItsConsumersIsRefused(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	for n := range 8 { // the pool has 8
		cfg := w.config(newMemoryStream().publish((&publisher{}).events(1, 1)...))
		cfg.Name = fmt.Sprint("c", n)
		r := w.start(w.consumer(cfg), handler)
		if n < 7 {
			await.Until(t, "the consumer", func() error {
				var owner string
				return w.mine.QueryRow(t.Context(), "SELECT instance FROM outflow_member WHERE name = $1",
					cfg.Name).Scan(&owner)
			})
			continue
		}
		if err := r.ends(); !errors.Is(err, ErrSetup) ||
			!strings.Contains(err.Error(), "8 connections for 8") {
			t.Errorf("Run: %v", err)
		}
	}
}

// Run that ends with an error gives the lease back: the next one need not wait until it ends.
func TestAFaultGivesTheLeaseBack(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	m := s.event("a")
	m.Header = nil
	src.publish(s.event("a"), m)
	cfg := w.config(src)
	cfg.Lease = time.Hour
	if err := w.start(w.consumer(cfg), handler).ends(); !errors.Is(err, ErrForeign) {
		t.Fatalf("Run: %v", err)
	}
	var owner *string
	if err := w.mine.QueryRow(
		t.Context(),
		"SELECT min(instance) FROM outflow_member",
	).Scan(
		&owner,
	); err != nil ||
		owner != nil {
		t.Errorf("the lease is still %v's, %v", *owner, err)
	}
}
