package pipeline

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// step is one thing that happened: a message was sent or stored, an acknowledgement came, the
// record was written, an LSN was confirmed. Faults are planned by step, so that they fall between any two of
// them; the steps of a run are its trace.
type step struct {
	at   time.Duration // since the harness began
	what string
	n    uint64
}

// planned is what is to happen right after a step.
type planned struct {
	after int
	do    func()
}

// step takes note of what happened, and lets happen what is planned after it. The lock is held.
func (w *harness) step(what string, n uint64) {
	if w.noise == nil {
		return
	}
	w.steps++
	w.traced = append(w.traced, step{time.Since(w.begun), what, n})
	for len(w.plan) > 0 && w.plan[0].after <= w.steps {
		do := w.plan[0].do
		w.plan = w.plan[1:]
		do()
	}
}

// noise makes a duration longer by a moment. No two things happen at the same time then: the order in which
// the Go runtime would let them happen is the one thing that a seed does not decide. Each connection has its
// own, so that two that are woken by the same event do not depend on who comes first. nil: everything takes
// as long as it says.
type noise struct{ *rand.Rand }

func newNoise(seed, of uint64) *noise { return &noise{rand.New(rand.NewPCG(seed, of))} }

func (n *noise) about(d time.Duration) time.Duration {
	if n == nil {
		return d
	}
	return d + time.Duration(1+n.IntN(9973))
}

// upTo is 0 to below d.
func (n *noise) upTo(d time.Duration) time.Duration {
	if n == nil || d == 0 {
		return 0
	}
	return time.Duration(n.Int64N(int64(d)))
}

// another is the noise of a part.
func (n *noise) another() *noise {
	if n == nil {
		return nil
	}
	return newNoise(n.Uint64(), n.Uint64())
}

// trace is what happened at the end of the run.
func (w *harness) trace(last int) string {
	var b strings.Builder
	from := max(0, len(w.traced)-last)
	for i, s := range w.traced[from:] {
		fmt.Fprintf(&b, "%6d %14v %s %d\n", from+i+1, s.at, s.what, s.n)
	}
	return b.String()
}

// nowhere takes metrics and keeps none.
type nowhere struct{}

func (nowhere) Register(prometheus.Collector) error  { return nil }
func (nowhere) MustRegister(...prometheus.Collector) {}
func (nowhere) Unregister(prometheus.Collector) bool { return true }
