package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
)

// shares are how many partitions each instance has, ascending.
func (w *harness) shares() []int {
	w.t.Helper()
	rows, err := w.mine.Query(w.t.Context(), `SELECT count(m.partition)::int FROM outflow_member i LEFT JOIN
		outflow_mark m ON m.name = i.name AND m.owner = i.instance AND source = 'live'
		GROUP BY i.instance ORDER BY 1`)
	if err != nil {
		w.t.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		w.t.Fatal(err)
	}
	return all
}

// owners are the instances that have the partitions.
func (w *harness) owners() map[int]string {
	w.t.Helper()
	rows, err := w.mine.Query(w.t.Context(), `SELECT partition, owner FROM outflow_mark WHERE source = 'live'`)
	must.Succeed(w.t, err)
	owners := map[int]string{}
	var partition int
	var owner string
	_, err = pgx.ForEachRow(rows, []any{&partition, &owner}, func() error {
		owners[partition] = owner
		return nil
	})
	must.Succeed(w.t, err)
	return owners
}

// sticky fails if a partition has moved between instances that had some before and have some now.
func (w *harness) sticky(before map[int]string) {
	w.t.Helper()
	now := w.owners()
	has := func(owners map[int]string, instance string) bool {
		return slices.Contains(slices.Collect(maps.Values(owners)), instance)
	}
	for p, owner := range now {
		if was := before[p]; was != "" && was != owner && has(before, owner) && has(now, was) {
			w.t.Errorf("partition %d moved from %s to %s, and neither came nor left", p, was, owner)
		}
	}
}

func (w *harness) awaitShares(want ...int) {
	w.t.Helper()
	var got []int
	if !await.True(func() bool { got = w.shares(); return slices.Equal(got, want) }) {
		w.t.Fatalf("the instances have %v partitions, want %v", got, want)
	}
}

// Instances share the partitions evenly, also when one comes or leaves, and events are handled all the time.
// They keep what they have, but for what one that comes has to get.
func TestInstancesShareThePartitions(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	var all []*stream.Message
	publish := func() {
		more := s.events(40, 20)
		all = append(all, more...)
		src.publish(more...)
	}
	var instances []*running
	cfg := w.config(src)
	cfg.Lease = time.Hour // partitions move where leases end, as on a machine that stands still
	come := func() { instances = append(instances, w.start(w.consumer(cfg), handler)) }
	var owners map[int]string
	for _, want := range [][]int{{8}, {4, 4}, {2, 3, 3}} {
		publish()
		come()
		w.awaitShares(want...)
		w.sticky(owners)
		owners = w.owners()
	}
	publish()
	w.await(all)
	for _, want := range [][]int{{4, 4}, {8}} {
		publish()
		instances[0].stopped()
		instances = instances[1:]
		w.awaitShares(want...)
		w.sticky(owners)
		owners = w.owners()
		publish()
		w.await(all)
	}
}

// With more instances than partitions some stand by, and take over when one leaves.
func TestMoreInstancesThanPartitionsStandBy(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(20, 10)
	src.publish(all...)
	cfg := w.config(src)
	cfg.Partitions = 2
	var instances []*running
	for range 3 {
		instances = append(instances, w.start(w.consumer(cfg), handler))
	}
	w.awaitShares(0, 1, 1)
	instances[0].stopped()
	w.awaitShares(1, 1)
	more := s.events(20, 10)
	src.publish(more...)
	w.await(append(all, more...))
}

// The application is told which partitions it has and has no longer.
func TestAnInstanceIsToldItsPartitions(t *testing.T) {
	t.Parallel()
	w, src := newHarness(t), newMemoryStream()
	src.publish((&publisher{}).events(1, 1)...)
	var mu sync.Mutex
	has := map[int]bool{}
	cfg := w.config(src)
	cfg.OnAssigned = func(_ context.Context, partitions []int) {
		mu.Lock()
		defer mu.Unlock()
		for _, p := range partitions {
			has[p] = true
		}
	}
	cfg.OnRevoked = func(_ context.Context, partitions []int) {
		mu.Lock()
		defer mu.Unlock()
		for _, p := range partitions {
			delete(has, p)
		}
	}
	told := func(want int) {
		t.Helper()
		n := 0
		if !await.True(func() bool {
			mu.Lock()
			defer mu.Unlock()
			n = len(has)
			return n == want
		}) {
			t.Fatalf("told of %d partitions, want %d", n, want)
		}
	}
	first := w.start(w.consumer(cfg), handler)
	told(8)
	second := w.start(w.consumer(w.config(src)), handler)
	told(4)
	second.stopped()
	told(8)
	first.stopped()
	told(0)
}

// While instances come, go, crash, lose their connections and their leases, and ask for other numbers of
// partitions, and while the broker loses its end, each document has its events once, in order.
func TestSharedPartitionsSurviveEverything(t *testing.T) {
	t.Parallel()
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	for i := range uint64(*trials) {
		t.Run(fmt.Sprint("seed-", first+i), func(t *testing.T) {
			t.Parallel()
			shared(t, rand.New(rand.NewPCG(first+i, 7)))
		})
	}
}

func shared(t *testing.T, rnd *rand.Rand) {
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	var all []*stream.Message // what outflow publishes
	published := 0            // so many of them are in the stream, without what the broker lost
	publish := func(n int) {
		for range n {
			all = append(all, s.event(fmt.Sprintf("d%d", rnd.IntN(30))))
		}
		src.publish(all[published:]...)
		published = len(all)
	}
	publish(50)
	var instances []*running
	lossy := true // one loss at a time, and the next when all is back
	for range 40 {
		switch n := rnd.IntN(12); {
		case n < 3 && len(instances) < 5:
			cfg := w.config(src)
			cfg.Batch = 1 + rnd.IntN(6)
			if rnd.IntN(3) == 0 {
				cfg.Partitions = 1 + rnd.IntN(9)
			}
			if rnd.IntN(2) == 0 {
				cfg.hooks.Crash = (&crashAt{n: 1 + rnd.IntN(150), answers: true}).at
			}
			instances = append(instances, w.start(w.consumer(cfg), handler))
		case n == 3 && len(instances) > 0:
			i := rnd.IntN(len(instances))
			instances[i].stop()
			_ = instances[i].ends()
			instances = slices.Delete(instances, i, i+1)
		case n == 4:
			w.expire()
		case n == 5:
			src.change(func() { src.steal = 1 })
		case n == 6:
			w.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
				AND application_name <> 'test' AND random() < 0.3`)
		case n == 7 && lossy:
			src.mu.Lock()
			from, lost := src.last+1, 0
			for n := 1 + rnd.IntN(25); lost < n && lost < len(src.held)-1; {
				if from--; src.held[from] != nil {
					lost++
				}
			}
			// behind sequences that were left out, events have others than if the stream had gone back
			back := rnd.IntN(2) == 0 && from > src.left
			src.mu.Unlock()
			published -= lost
			src.lose(from, back)
			lossy = false
		default:
			publish(rnd.IntN(20))
		}
		if !lossy && published == len(all) {
			lossy = true
		}
		time.Sleep(time.Duration(rnd.IntN(40)) * time.Millisecond) // faults at any moment
	}
	publish(5)
	w.newest = w.start(w.consumer(w.config(src)), handler)
	w.await(all)
	for _, r := range instances {
		r.stop()
		_ = r.ends()
	}
	w.exactly(all)
}

// Another keying begins behind what is in the stream, whether an instance with the old one runs or not; each
// event has its effect once.
func TestAnotherKeyingBeginsAtABarrier(t *testing.T) {
	t.Parallel()
	for name, together := range map[string]bool{"after the old one": false, "beside the old one": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			total := 0
			publish := func(n int) {
				for range n {
					m := s.event("")
					m.Subject = fmt.Sprintf("outbox.d%d.x%d", total%7, total%5)
					src.publish(m)
					total++
				}
			}
			byID := func(ctx context.Context, tx pgx.Tx, e *Event) error {
				_, err := tx.Exec(ctx, `INSERT INTO effect VALUES ($1, 1, '') ON CONFLICT (document) DO UPDATE
					SET n = effect.n + 1`, e.ID)
				return err
			}
			once := func() {
				t.Helper()
				var events, effects int
				if !await.True(func() bool {
					err := w.mine.QueryRow(t.Context(), "SELECT count(*), coalesce(sum(n), 0) FROM effect").
						Scan(&events, &effects)
					return err == nil && events == total
				}) || effects != total {
					t.Fatalf("%d events have %d effects, want %d", events, effects, total)
				}
			}
			old := w.config(src)
			old.Subject = "outbox.{doc_id}.{x}"
			changed := w.config(src)
			changed.Subject = "outbox.{x}.{doc_id}"
			publish(40)
			first := w.start(w.consumer(old), byID)
			once()
			publish(20)
			if !together {
				first.stopped()
			}
			if err := w.start(w.consumer(changed), byID).ends(); !errors.Is(err, ErrKeying) {
				t.Fatalf("Run: %v", err)
			}
			changed.AcceptKeying = true
			second := w.start(w.consumer(changed), byID)
			if !await.True(func() bool {
				publish(3)
				var keying string
				err := w.mine.QueryRow(t.Context(), "SELECT keying FROM outflow_consumer").Scan(&keying)
				return err == nil && keying == changed.Subject
			}) {
				t.Fatal("the keying is still the old one")
			}
			publish(30)
			once()
			w.awaitShares(8)
			if together {
				first.stopped()
			}
			second.stopped()
			once()
		})
	}
}

// TestAnInstanceThatCannotWorkWithTheKeyingHasNoLease: without a database one instance has all partitions.
// One that waits for another keying must leave that to those that know the old one.
func TestAnInstanceThatCannotWorkWithTheKeyingHasNoLease(t *testing.T) {
	t.Parallel()
	s, src, offsets := &publisher{}, newMemoryStream(), Memory()
	w := &harness{t: t, log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	var mu sync.Mutex
	var had []string
	run := func(keying string) (*Consumer, *running) {
		cfg := w.config(src)
		cfg.Keying, cfg.AcceptKeying, cfg.Lease = keying, keying == "new", time.Hour
		cfg.Document = func(subject string, _ nats.Header) string { return subject }
		c, err := New(nil, offsets, cfg)
		must.Succeed(t, err)
		c.cfg.interval = 5 * time.Millisecond
		return c, w.start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
			mu.Lock()
			defer mu.Unlock()
			had = append(had, fmt.Sprint(keying, " ", e.Sequence))
			return nil
		})
	}
	handled := func(want ...string) {
		t.Helper()
		await.Until(t, "the events", func() error {
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(had, want) {
				return fmt.Errorf("%q", had)
			}
			return nil
		})
	}
	src.publish(s.events(1, 1)...)
	_, first := run("old")
	handled("old 1")
	first.stopped()
	src.publish(s.events(1, 1)...)
	waits, _ := run("new")
	await.Until(t, "the instance with the new keying", func() error {
		if st := waits.State(); st.Status != Standby {
			return fmt.Errorf("%v: %w", st.Status, st.Err)
		}
		return nil
	})
	run("old")
	handled("old 1", "old 2")
	src.publish(s.events(1, 1)...)
	handled("old 1", "old 2", "new 3")
}

// TestAnInstanceThatEndsGivesItsPartitionsBack: Run ends because somebody has to decide.
func TestAnInstanceThatEndsGivesItsPartitionsBack(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	for name, offsets := range map[string]Offsets{"database": Postgres(w.pool), "none": Memory()} {
		s, src := &publisher{}, newMemoryStream()
		has := map[int]bool{} // only Run's goroutine calls what writes it
		cfg := w.config(src)
		cfg.Lease = time.Hour
		cfg.OnAssigned = func(_ context.Context, partitions []int) {
			for _, p := range partitions {
				has[p] = true
			}
		}
		cfg.OnRevoked = func(_ context.Context, partitions []int) {
			for _, p := range partitions {
				delete(has, p)
			}
		}
		did := make(chan uint64, 10)
		handles := func(want uint64) {
			t.Helper()
			var seq uint64
			if !await.True(func() bool {
				select {
				case seq = <-did:
					return true
				default:
					return false
				}
			}) || seq != want {
				t.Fatalf("%s: %d is handled, want %d", name, seq, want)
			}
		}
		run := func() *running {
			c, err := New(nil, offsets, cfg)
			must.Succeed(t, err)
			c.cfg.confirm, c.cfg.interval = time.Millisecond, 5*time.Millisecond
			return w.start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
				did <- e.Sequence
				return nil
			})
		}
		src.publish(s.events(1, 1)...)
		r := run()
		handles(1)
		src.change(func() { src.last = 5 })
		src.publish(s.events(1, 1)...)
		if err := r.ends(); !errors.Is(err, ErrGap) {
			t.Fatalf("%s: Run: %v", name, err)
		}
		if len(has) > 0 {
			t.Errorf("%s: it was not told that it has no partitions any more: %v", name, has)
		}
		cfg.AcceptGap = true
		r = run()
		handles(6)
		r.stopped()
	}
}

// What an instance has claimed and another one has claimed since, it can't move, whatever both know of it.
func TestAnEarlierClaimMovesNothing(t *testing.T) {
	t.Parallel()
	w, src := newHarness(t), newMemoryStream()
	all := (&publisher{}).events(3, 3)
	src.publish(all...)
	r := w.start(w.consumer(w.config(src)), handler)
	w.await(all)
	r.stopped()
	claim := func() (store, *state) {
		c := w.consumer(w.config(src))
		st, err := c.offsets.open(t.Context(), nil, &c.cfg)
		must.Succeed(t, err)
		claimed, err := st.acquire(t.Context(), none)
		must.Succeed(t, err)
		t.Cleanup(st.abandon)
		return st, claimed
	}
	earlier, known := claim()
	w.expire()
	later, same := claim()
	if len(same.Offsets[live]) != 8 {
		t.Fatalf("claimed: %v", same.Offsets)
	}
	for _, p := range known.Offsets[live].partitions() {
		at := known.Offsets[live][p]
		if at != same.Offsets[live][p] {
			t.Fatalf("partition %d: %v and %v", p, at, same.Offsets[live][p])
		}
		if err := earlier.move(t.Context(), live, p, at, at, nothing); !errors.Is(err, errMoved) {
			t.Errorf("partition %d: the earlier claim moves it: %v", p, err)
		}
		if err := later.move(t.Context(), live, p, at, at, nothing); err != nil {
			t.Errorf("partition %d: the later claim does not move it: %v", p, err)
		}
	}
}

// cutStream is a stream that one instance can't reach while it is cut.
type cutStream struct {
	*memoryStream
	cut atomic.Bool
}

var errCut = errors.New("the stream can't be reached")

func (s *cutStream) State(ctx context.Context) (stream.State, error) {
	if s.cut.Load() {
		return stream.State{}, errCut
	}
	return s.memoryStream.State(ctx)
}

// An instance that does not reach the stream leaves its partitions to those that do, until it reaches it
// again.
func TestAnInstanceThatIsCutOffGivesItsPartitionsUp(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(40, 20)
	src.publish(all...)
	away := &cutStream{memoryStream: src}
	for _, from := range []stream.Source{away, src} {
		cfg := w.config(from)
		cfg.Lease = time.Hour // it is not what ends the claims
		w.start(w.consumer(cfg), handler)
	}
	w.awaitShares(4, 4)
	away.cut.Store(true)
	w.awaitShares(8)
	more := s.events(40, 20)
	src.publish(more...)
	w.await(append(all, more...))
	away.cut.Store(false)
	w.awaitShares(4, 4)
}
