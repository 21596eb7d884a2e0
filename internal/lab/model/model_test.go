// Package model tries the rules of ordering, publishing and recovery together: the real reorder.Buffer, checkpoint.Resolve,
// Tracker and Proof against a PostgreSQL, a JetStream and a network made of slices, which lose, delay and forget as the real ones
// may. It holds tests only.
package model

import (
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/outbox"
)

var (
	trials = flag.Int("model.trials", 5000, "trials of the model")
	seed   = flag.Uint64("model.seed", 1, "the first trial's seed")
)

const maxTaken = 6 // 512 in the product: small, so that it is met

// live runs sessions until one ends by itself.
func live(w *world, kill float64) (lives int, err error) {
	for {
		k := kill
		if lives >= 200 {
			k = 0
		}
		lives++
		if err := w.run(k); err == nil || !errors.Is(err, errKilled) && !errors.Is(err, errRestart) || lives > 3000 {
			return lives, err
		}
		w.between()
	}
}

func check(t *testing.T, seed uint64, w *world, want []message) {
	t.Helper()
	var got []message
	for _, m := range w.messages {
		if m != nil {
			got = append(got, *m)
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("seed %d: the stream of %d messages differs from the undisturbed one of %d", seed, len(got), len(want))
	}
	r, _, err := w.readings()
	if err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	if top := r.Record.Checkpoints[len(r.Record.Checkpoints)-1]; top.Due < w.confirmed || top.Seq != uint64(len(w.messages)) {
		t.Fatalf("seed %d: at the end the record's newest place is %v, %d; confirmed is %v", seed, top.Due, top.Seq, w.confirmed)
	}
}

func complete(t *testing.T, seed uint64, wal []*input, stream []message) {
	t.Helper()
	seen := map[outbox.Position]int{}
	for _, m := range stream {
		seen[m.header.Pos]++
	}
	events := 0
	for _, in := range wal {
		for i := range in.events {
			events++
			if n := seen[outbox.Position{LSN: in.lsn, Index: uint32(i)}]; n != 1 {
				t.Fatalf("seed %d: event %v-%d is in the undisturbed stream %d times", seed, in.lsn, i, n)
			}
		}
	}
	if events != len(stream) {
		t.Fatalf("seed %d: %d messages of %d events", seed, len(stream), events)
	}
}

// TestRandomFaults: most WALs are short, as those find most; whatever dies, is late, dropped, lost or removed, the stream is the undisturbed one, and a place from which to
// go on is left (Resolve would say otherwise).
func TestRandomFaults(t *testing.T) {
	t.Parallel()
	n := *trials
	if testing.Short() {
		n /= 10
	}
	var lives, lost, refused, holes int
	begun := time.Now()
	seeds.Each(t, "model.seed", "model.trials", n, func(s uint64) {
		rnd := rand.New(rand.NewPCG(s, 0))
		wal, first := makeWAL(rnd, 4+rnd.IntN(pick(rnd, 8, 8, 8, 16, 56))), makeSettings(rnd)
		want := undisturbed(wal, first, maxTaken)
		complete(t, s, wal, want)
		w := newWorld(wal, first, pick(rnd, 0, 10, 60), rnd, buffer)
		l, err := live(w, 0.02)
		if err != nil {
			t.Fatalf("seed %d, life %d: %v", s, l, err)
		}
		check(t, s, w, want)
		lives, lost, refused, holes = lives+l, lost+w.lost, refused+w.refused, holes+w.holes
	})
	t.Logf("%d trials, %.0f a second: %d lives, %d messages refused, %d lost by the broker, %d lost tails that left a hole",
		n, float64(n)/time.Since(begun).Seconds(), lives, refused, lost, holes)
	if lost == 0 || refused == 0 || holes == 0 {
		t.Fatal("the faults did not happen")
	}
}

// TestKilledAtEveryStep kills one process at every step that it takes, and its successor at another one.
func TestKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	n := uint64(12)
	if testing.Short() {
		n = 3
	}
	kills := 0
	for s := *seed; s < *seed+n; s++ {
		rnd := rand.New(rand.NewPCG(s, 1))
		wal, first := makeWAL(rnd, 20), makeSettings(rnd)
		want := undisturbed(wal, first, maxTaken)
		for at := 1; ; at++ {
			w := newWorld(wal, first, 10, rand.New(rand.NewPCG(s, uint64(at))), buffer)
			w.killIn = at
			lives, err := live(w, 0)
			if err != nil {
				t.Fatalf("seed %d, killed at step %d, life %d: %v", s, at, lives, err)
			}
			check(t, s, w, want)
			if w.killIn > 0 {
				break // it was finished before
			}
			kills++
		}
	}
	t.Logf("%d kills", kills)
}
