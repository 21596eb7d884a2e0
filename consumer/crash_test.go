package consumer

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
)

var (
	trials = flag.Int("consumer.trials", 6, "runs of TestRandomFaultsChangeNoEffect")
	seed   = flag.Uint64("consumer.seed", 0, "of TestRandomFaultsChangeNoEffect; 0: the time")
)

// crashAt crashes at the n-th point that is reached, from 1.
type crashAt struct {
	mu      sync.Mutex
	n       int
	answers bool // that of a commit may be lost too
	dead    bool // what comes after it crashes, too: Run goes on after an answer that was lost
}

var errCrash = errors.New("crash")

func (c *crashAt) at(at stream.Point, _ uint64) error {
	if at == stream.AtCommit && !c.answers {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n--; c.n == 0 || c.n < 0 && c.dead {
		return errCrash
	}
	return nil
}

// TestACrashAnywhereHasNoEffectTwice crashes at the first point, goes on and crashes at the second, and so
// on, until nothing is left to crash at.
func TestACrashAnywhereHasNoEffectTwice(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 5} {
		t.Run(fmt.Sprint("batch-", batch), func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := s.events(60, 9)
			src.publish(all...)
			cfg := w.config(src)
			cfg.Partitions, cfg.Batch = 3, batch
			crashes := 0
			for n := 1; ; n++ {
				cfg.hooks.Crash = (&crashAt{n: n}).at
				r := w.start(w.consumer(cfg), handler)
				crashed := false
				if !await.True(func() bool {
					select {
					case <-r.ended:
						crashed = true
					default:
						return len(w.offsets()) == 3 && fmt.Sprint(w.effects()) == fmt.Sprint(want(all))
					}
					return true
				}) {
					t.Fatalf("neither crashed nor done: %v", w.effects())
				}
				w.expire()
				if r.stop(); !crashed && r.ends() == nil {
					break
				}
				if !errors.Is(r.err, errCrash) { // it may crash behind the last effect
					t.Fatalf("Run: %v", r.err)
				}
				crashes++
			}
			w.exactly(all)
			if crashes < 10 {
				t.Errorf("%d crashes", crashes)
			}
		})
	}
}

// TestACommitWhoseAnswerIsLostIsFound loses the answer of every commit: the session ends, and the next one
// finds that it is committed.
func TestACommitWhoseAnswerIsLostIsFound(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(16, 5)
	src.publish(all...)
	cfg := w.config(src)
	cfg.Partitions = 2
	cfg.hooks.Crash = func(at stream.Point, _ uint64) error {
		if at == stream.AtCommit {
			return errCrash
		}
		return nil
	}
	cfg.Batch = 4
	r := w.start(w.consumer(cfg), handler)
	w.await(all)
	r.stopped()
	w.exactly(all)
}

// TestRandomFaultsChangeNoEffect does whatever can happen, at random, and compares the effects with those of
// one undisturbed run.
func TestRandomFaultsChangeNoEffect(t *testing.T) {
	t.Parallel()
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	for i := range uint64(*trials) {
		t.Run(fmt.Sprint("seed-", first+i), func(t *testing.T) {
			t.Parallel()
			randomFaults(t, rand.New(rand.NewPCG(first+i, 1)))
		})
	}
}

func randomFaults(t *testing.T, rnd *rand.Rand) {
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	var all []*stream.Message       // the sequence that outflow publishes
	var published []*stream.Message // what is in the stream by now, without what the broker lost
	publish := func(n int) {
		for range n {
			all = append(all, s.event(fmt.Sprintf("d%d", rnd.IntN(12))))
		}
		src.publish(all[len(published):]...)
		published = all
	}
	publish(60)
	lossy := true // one loss at a time, and the next when all is back
	for step := range 14 {
		cfg := w.config(src)
		cfg.Partitions, cfg.Batch = 1+rnd.IntN(5), 1+rnd.IntN(6)
		cfg.hooks.Crash = (&crashAt{n: 1 + rnd.IntN(60), answers: true}).at
		instances := []*running{w.start(w.consumer(cfg), handler)}
		if rnd.IntN(3) == 0 { // another one
			cfg.hooks.Crash = (&crashAt{n: 1 + rnd.IntN(60), answers: true}).at
			instances = append(instances, w.start(w.consumer(cfg), handler))
		}
		publish(rnd.IntN(30))
		for range rnd.IntN(4) {
			time.Sleep(time.Duration(rnd.IntN(15)) * time.Millisecond)
			switch rnd.IntN(5) {
			case 0: // the lease seems to end
				w.expire()
			case 1:
				src.change(func() { src.steal = 1 })
			case 2:
				w.exec(
					`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
						AND application_name <> 'test' AND random() < 0.3`)
			case 3, 4:
				publish(rnd.IntN(10))
			}
		}
		for _, r := range instances {
			r.stop()
			if err := r.ends(); err != nil && !errors.Is(err, errCrash) {
				t.Fatalf("step %d: Run: %v", step, err)
			}
		}
		w.expire()
		if lossy && rnd.IntN(4) == 0 { // the broker loses its end, back or with a hole, while nobody reads
			src.mu.Lock()
			// of an empty stream outflow assumes that it was purged
			last, n := src.last, min(len(src.held)-1, 1+rnd.IntN(25))
			src.mu.Unlock()
			if n < 1 {
				continue
			}
			published = published[:len(published)-n]
			src.lose(last-uint64(n)+1, rnd.IntN(2) == 0)
			lossy = false
		} else if rnd.IntN(4) == 0 { // all is well again, and what was read may be removed
			publish(1)
			r := w.start(w.consumer(w.config(src)), handler)
			w.await(all)
			r.stopped()
			w.expire()
			if lossy = true; rnd.IntN(2) == 0 {
				src.removeTo(slices.Min(w.offsets()))
			}
		}
	}
	publish(5)
	r := w.start(w.consumer(w.config(src)), handler)
	w.await(all)
	r.stopped()
	w.exactly(all)
}
