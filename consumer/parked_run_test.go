package consumer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// refusals are the events that a handler refuses for now.
type refusals struct {
	mu  sync.Mutex
	ids map[string]error
}

func (r *refusals) set(id string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.ids, id)
	} else {
		r.ids[id] = err
	}
}

func (r *refusals) clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.ids)
}

// handler has the effect of an event that is not refused.
func (r *refusals) handler(ctx context.Context, tx pgx.Tx, e *Event) error {
	if err := handler(ctx, tx, e); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ids[e.ID]
}

// TestParkingAtRandomKeepsTheOrderOfEachDocument parks, retries and skips at random, while events come,
// instances crash, connections break and the number of partitions changes: at the end each event that was not
// skipped has had its effect once, in the order of its document.
func TestParkingAtRandomKeepsTheOrderOfEachDocument(t *testing.T) {
	t.Parallel()
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	for i := range uint64(max(1, *trials/3)) {
		t.Run(fmt.Sprint("seed-", first+i), func(t *testing.T) {
			t.Parallel()
			parkingAtRandom(t, rand.New(rand.NewPCG(first+i, 2)))
		})
	}
}

func parkingAtRandom(t *testing.T, rnd *rand.Rand) {
	w, s, src, refused := newHarness(t), &publisher{}, newMemoryStream(), &refusals{ids: map[string]error{}}
	var all []*stream.Message
	publish := func(n int) {
		for range n {
			m := s.event(fmt.Sprintf("d%d", rnd.IntN(7)))
			if all = append(all, m); rnd.IntN(8) == 0 {
				refused.set(string(m.Data), errors.New("refused"))
			}
			src.publish(m)
		}
	}
	operator, skipped, parked := NewParked(w.mine, ""), map[string]bool{}, 0
	work := func() {
		documents, err := operator.List(t.Context(), "", 100)
		if err != nil {
			t.Fatal(err)
		}
		parked = max(parked, len(documents))
		for _, d := range documents {
			switch {
			case d.Release != "" || rnd.IntN(2) == 0:
			case rnd.IntN(3) == 0:
				if err := operator.Skip(t.Context(), "orders", d.Document); err != nil {
					t.Fatal(err)
				}
				skipped[d.First.ID] = true
			default:
				if rnd.IntN(3) > 0 {
					refused.set(d.First.ID, nil)
				}
				if err := operator.Retry(t.Context(), "orders", d.Document); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	config := func() Config {
		cfg := w.config(src)
		cfg.MaxAttempts, cfg.Partitions, cfg.Batch = 2, 1+rnd.IntN(4), 1+rnd.IntN(8)
		return cfg
	}
	begin := func(cfg Config) *running {
		c := w.consumer(cfg)
		c.cfg.poll = 5 * time.Millisecond
		return w.start(c, refused.handler)
	}
	publish(40)
	for step := range 12 {
		cfg := config()
		cfg.hooks.Crash = (&crashAt{n: 1 + rnd.IntN(80), answers: true}).at
		r := begin(cfg)
		for range 1 + rnd.IntN(5) {
			publish(rnd.IntN(12))
			time.Sleep(time.Duration(rnd.IntN(30)) * time.Millisecond)
			if rnd.IntN(4) == 0 {
				w.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
					WHERE datname = current_database() AND application_name <> 'test' AND random() < 0.3`)
			}
			work()
		}
		r.stop()
		if err := r.ends(); err != nil && !errors.Is(err, errCrash) {
			t.Fatalf("step %d: Run: %v", step, err)
		}
		w.expire()
	}
	m := s.event("last")
	all = append(all, m, s.event("last"))
	refused.set(string(m.Data), errors.New("refused"))
	src.publish(all[len(all)-2:]...)
	r := begin(config())
	if !await.True(func() bool {
		documents, err := operator.List(t.Context(), "orders", 100)
		return err == nil && slices.ContainsFunc(documents, func(d ParkedDocument) bool {
			return d.Document == "last" && d.Events == 2
		})
	}) {
		t.Fatal("what is refused is not parked")
	}
	refused.clear()
	if !await.True(func() bool {
		documents, err := operator.List(t.Context(), "orders", 100)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range documents {
			if d.Release == "" {
				if err := operator.Retry(t.Context(), "orders", d.Document); outbox.FaultOf(err) == nil &&
					err != nil {
					t.Fatal(err)
				}
			}
		}
		var effects int
		if err := w.mine.QueryRow(t.Context(), `SELECT coalesce(sum(n), 0) FROM effect`).Scan(
			&effects); err != nil {
			t.Fatal(err)
		}
		return len(documents) == 0 && effects >= len(all)-len(skipped)
	}) {
		t.Fatalf("%d events, of which %d were skipped, are not done: %v", len(all), len(skipped), w.effects())
	}
	r.stopped()
	w.exactly(slices.DeleteFunc(slices.Clone(all), func(m *stream.Message) bool {
		return skipped[string(m.Data)]
	}))
	t.Logf("%d events, up to %d documents parked, %d events skipped", len(all), parked, len(skipped))
}

// TestAReleasedEventThatHaltsIsTold: it holds its partition, as any event does.
func TestAReleasedEventThatHaltsIsTold(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(1, 1)
	src.publish(all...)
	c := w.consumer(w.config(src))
	c.cfg.poll = 20 * time.Millisecond
	var advice atomic.Pointer[func(error) error]
	says := func(a func(error) error) { advice.Store(&a) }
	says(Poison)
	w.start(c, func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if a := *advice.Load(); a != nil {
			return a(errors.New("not now"))
		}
		return handler(ctx, tx, e)
	})
	w.awaitOffsets(1)
	says(Halt)
	w.exec("UPDATE outflow_parked SET release = 'retry'")
	failing := func(want bool) {
		t.Helper()
		await.Until(t, "the state", func() error {
			st := c.State()
			if is := len(st.Failing) == 1 && st.Failing[0].Held && st.Err != nil; is != want {
				return fmt.Errorf("%v, %v", st.Failing, st.Err)
			}
			return nil
		})
	}
	failing(true)
	says(nil)
	w.await(all)
	failing(false)
}

// TestTheStateNamesTheAttemptOfAReleaseThatIsDue: an attempt that has to wait does not count.
func TestTheStateNamesTheAttemptOfAReleaseThatIsDue(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	src.publish(s.events(1, 1)...)
	c := w.consumer(w.config(src))
	c.cfg.poll, c.cfg.MaxAttempts = 20*time.Millisecond, 1000
	var advice atomic.Pointer[func(error) error]
	says := func(a func(error) error) { advice.Store(&a) }
	says(Poison)
	called := make(chan int)
	w.start(c, func(ctx context.Context, _ pgx.Tx, e *Event) error {
		select {
		case called <- e.Attempt:
		case <-ctx.Done():
		}
		return (*advice.Load())(errors.New("not now"))
	})
	if n := <-called; n != 1 {
		t.Fatalf("attempt %d", n)
	}
	w.awaitOffsets(1)
	says(func(err error) error { return err })
	w.exec("UPDATE outflow_parked SET release = 'retry'")
	for i, want := range []int{2, 3, 4, 4} {
		if i == 2 {
			says(Halt)
		}
		if n := <-called; n != want {
			t.Fatalf("attempt %d, want %d", n, want)
		}
		next := want + 1
		if i >= 2 {
			next = want
		}
		await.Until(t, "the state", func() error {
			if f := c.State().Failing; len(f) != 1 || f[0].Attempt != next {
				return fmt.Errorf("%v, want attempt %d", f, next)
			}
			return nil
		})
	}
}

// TestAPartitionThatWaitsHoldsUpNoReleasesOfOthers: more of its documents are to be released than are read at
// a time, and the first one has to wait.
func TestAPartitionThatWaitsHoldsUpNoReleasesOfOthers(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	cfg := w.config(src)
	cfg.Partitions = 2
	const n = 3 * maxReleases
	src.publish(s.events(n, n)...)
	var goes atomic.Int64 // the other partition
	goes.Store(-1)
	c := w.consumer(cfg)
	c.cfg.poll = 20 * time.Millisecond
	w.start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
		switch p := goes.Load(); {
		case p < 0:
			return Poison(errors.New("not now"))
		case int64(partitionOf(e.hash, 2)) != p:
			return Halt(errors.New("not yet"))
		}
		return nil
	})
	w.awaitOffsets(n)
	var ord, p int64
	must.Succeed(t, w.mine.QueryRow(t.Context(), `SELECT ord, hash % 2 FROM outflow_parked
		ORDER BY ord DESC LIMIT 1`).Scan(&ord, &p))
	goes.Store(p)
	w.exec(fmt.Sprintf("UPDATE outflow_parked SET release = 'retry' WHERE hash %% 2 <> %d OR ord = %d", p,
		ord))
	await.Until(t, "the release", func() error {
		var is bool
		err := w.mine.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM outflow_parked WHERE ord = $1)", ord).
			Scan(&is)
		if err == nil && is {
			err = errors.New("it is parked")
		}
		return err
	})
}
