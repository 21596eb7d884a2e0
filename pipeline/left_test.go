package pipeline

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestWhatIsLeftToOthersIsPassedOver: what the record says that others publish is not in the stream, all else
// is, in its order, through any number of starts and losses: also where a window is left in part.
func TestWhatIsLeftToOthersIsPassedOver(t *testing.T) {
	t.Parallel()
	left, kept := 0, 0
	seeds.Each(t, "pipeline.seed", "pipeline.trials", trials(20), func(seed uint64) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 12))
			load := &workload{rnd: rnd, counters: map[string]int{}, changes: true, horizon: true, docs: 3,
				sizes: []int{1, 1, 2, 5}}
			durable := pick(rnd, 0, 2*time.Second, 6*time.Second)
			w := newHarnessOf(t, seed, load.settings(), durable, homeDecoder())
			err := leavesSome(w, load)
			w.killAll()
			time.Sleep(time.Minute) // what is still on its way arrives
			if err != nil {
				t.Errorf("seed %d: %v", seed, err)
			}
			kept += len(w.stream())
			left += w.events() - len(w.stream())
		})
	})
	t.Logf("%d events left, %d published", left, kept)
	if left == 0 || kept == 0 {
		t.Errorf("%d events left, %d published", left, kept)
	}
}

// leavesSome runs a schedule in which others publish some events of a home that is down.
func leavesSome(w *harness, load *workload) (err error) {
	rnd := load.rnd
	write := func(n int) {
		for range n {
			w.with(func() { load.write(w.pg) })
			time.Sleep(time.Duration(rnd.IntN(int(20 * time.Millisecond))))
		}
	}
	last := func() *process { return w.procs[len(w.procs)-1] }
	w.run(options{})
	for range 1 + rnd.IntN(3) {
		write(rnd.IntN(30))
		time.Sleep(time.Duration(rnd.IntN(int(3 * time.Second))))
		write(rnd.IntN(10))
		last().kill()
		write(rnd.IntN(20))
		time.Sleep(time.Minute)
		w.with(func() { w.leave(rnd) })
		w.run(options{})
		for range rnd.IntN(4) {
			write(rnd.IntN(10))
			switch rnd.IntN(3) {
			case 0:
				last().kill()
				w.run(options{})
			case 1:
				w.with(func() { w.js.powerLoss(rnd.IntN(2) == 0, rnd.IntN(2) == 0) })
			case 2:
				w.with(w.pg.crash)
			}
			time.Sleep(time.Duration(rnd.IntN(int(4 * time.Second))))
		}
	}
	w.with(func() {
		for _, rows := range load.pending {
			w.pg.commit(rows)
		}
	})
	for begun := time.Now(); time.Since(begun) < 10*time.Minute; time.Sleep(time.Second) {
		if last().over() {
			return fmt.Errorf("it ended: %w", last().err)
		}
		w.with(func() { w.pg.commit(nil, logical{prefix: relay.HeartbeatPrefix}) })
		if err = w.compare(); err == nil {
			return nil
		}
	}
	return err
}

// leave leaves to others what the stream lacks of commits up to one of them.
func (w *harness) leave(rnd *rand.Rand) {
	var l relay.Left
	if q := w.js.newest(); q > 0 {
		h := &w.js.messages[q-1].header
		l.Due, l.N = h.Due, h.N
	}
	rec := w.record()
	least := outbox.LSN(0)
	if n := len(w.left); n > 0 {
		least = w.left[n-1].To
	}
	above := slices.DeleteFunc(slices.Clone(w.pg.wal), func(x *transaction) bool { return x.end <= least })
	if len(above) == 0 {
		return
	}
	l.To = above[rnd.IntN(len(above))].end
	rec, err := rec.NextHello(nil)
	must.Succeed(w.t, err)
	rec, err = rec.WithLeft(l, 0)
	must.Succeed(w.t, err)
	doc, err := rec.Encode()
	must.Succeed(w.t, err)
	_, err = w.js.land(doc, rec, w.js.revisions[len(w.js.revisions)-1].number)
	must.Succeed(w.t, err)
	w.js.revisions[len(w.js.revisions)-1].at = time.Now().Add(-time.Hour)
	w.left = append(w.left, l)
}
