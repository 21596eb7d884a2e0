package torture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// attack carries out a schedule.
type attack struct {
	w     *harness
	plan  []Entry
	begun time.Time

	locks sync.Map // name of what is held: chan struct{}

	mu      sync.Mutex
	tally   map[string]*Tally
	leftOut int
	catchUp time.Duration
}

// injection is one fault that is being carried out.
type injection struct {
	Params
	w    *harness
	v    *victim // nil: all
	note func(format string, args ...any)
}

const (
	// overlap is how many faults on one victim may be under way or not recovered from at a time.
	overlap = 3
	// recoverLimit is how long a recovery is waited for while the attack goes on; the end of the run decides.
	recoverLimit = 90 * time.Second
	drainEvery   = 5 * time.Second
	leastRows    = 100
)

// run writes and attacks, until the schedule is over and everything has caught up. A failure of outflow ends
// it early and is not an error; an error says that the run is worth nothing.
func (a *attack) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := a.w
	w.mu.Lock()
	w.broken = cancel
	w.mu.Unlock()
	var err error
	if w.load, err = newLoad(w); err != nil {
		return err
	}
	loadCtx, stopLoad := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLoad()
	loaded := make(chan error, 1)
	go func() { loaded <- w.load.run(loadCtx) }()

	draining, stopDraining := context.WithCancel(ctx)
	drained := make(chan struct{})
	go func() { defer close(drained); w.truth.drain(draining, drainEvery) }()
	defer func() { stopDraining(); <-drained }()

	a.begun = time.Now()
	w.screen.begin(a.begun)
	g, gctx := errgroup.WithContext(ctx)
	for v := sharedByVictim; v < len(w.victims); v++ {
		g.Go(func() error { return a.line(gctx, v) })
	}
	g.Go(func() error { return a.watchLoad(gctx, loaded) })
	lines := g.Wait()
	w.load.stop()
	// An interrupted run ends at once; so does one that has failed.
	if w.failed() != nil || ctx.Err() != nil {
		stopLoad()
	}
	if lines != nil && w.failed() == nil {
		return lines
	}
	if err := a.loadEnd(loaded); err != nil && w.failed() == nil {
		return err
	}
	if w.failed() == nil {
		a.settle(ctx)
	}
	if w.failed() == nil {
		for _, v := range w.everybody() {
			v.end()
		}
	}
	if w.failed() == nil {
		return context.Cause(ctx)
	}
	return nil
}

// watchLoad lasts as long as the attack, with or without faults, unless the load fails: that ends it. It
// keeps the load's answer.
func (a *attack) watchLoad(ctx context.Context, loaded chan error) error {
	end := make(<-chan time.Time)
	switch {
	case a.w.o.Kills == 0:
		end = time.After(a.w.o.Duration)
	case len(a.plan) > 0:
		end = time.After(a.plan[len(a.plan)-1].At)
	}
	select {
	case err := <-loaded:
		loaded <- err
		return err
	case <-ctx.Done():
	case <-end:
		// A machine that stood still all the time has attacked nothing.
		await(ctx, catchUpLimit, func() bool {
			return len(loaded) > 0 || a.w.load.committed.Load() >= leastRows
		})
	}
	return nil
}

func (a *attack) loadEnd(loaded chan error) error {
	select {
	case err := <-loaded:
		return err
	case <-time.After(catchUpLimit):
		return fmt.Errorf("the writers do not end within %v", catchUpLimit)
	}
}

// line carries out what is planned for one victim, or for all.
func (a *attack) line(ctx context.Context, victim int) error {
	g, gctx := errgroup.WithContext(ctx)
	tokens := make(chan struct{}, overlap)
	if victim == sharedByVictim {
		tokens = make(chan struct{}, 1)
	}
	for i := range a.plan {
		e := &a.plan[i]
		if e.Victim != victim {
			continue
		}
		if pause(gctx, time.Until(a.begun.Add(e.At))) != nil {
			break
		}
		select {
		case tokens <- struct{}{}:
		case <-gctx.Done():
		}
		if gctx.Err() != nil {
			break
		}
		if a.late() {
			a.mu.Lock()
			a.leftOut++
			a.mu.Unlock()
			<-tokens
			continue
		}
		g.Go(func() error {
			defer func() { <-tokens }()
			return a.inject(gctx, e)
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return context.Cause(ctx)
}

// late: the duration is over; a machine that is too slow leaves the rest out.
func (a *attack) late() bool {
	return a.w.o.Kills == 0 && time.Since(a.begun) > a.w.o.Duration
}

// inject carries out one entry and waits until what it did is recovered from.
func (a *attack) inject(ctx context.Context, e *Entry) error {
	release, err := a.hold(ctx, e)
	if err != nil {
		return nil //nolint:nilerr // the attack is over
	}
	victims := a.w.victims
	s := &injection{Params: e.Params, w: a.w, note: func(format string, args ...any) {
		a.w.screen.note(e, format, args...)
	}}
	if e.Victim != sharedByVictim {
		s.v = a.w.victims[e.Victim]
		victims = victims[e.Victim : e.Victim+1]
	}
	a.w.screen.injected(e)
	before := published(victims)
	err = e.kind.inject(ctx, s)
	release()
	switch {
	case errors.Is(err, errMissed):
		a.count(e.kind, func(t *Tally) { t.Missed++ })
		s.note("nothing to strike at")
		return nil
	case err != nil && ctx.Err() != nil:
		return nil // the attack is over
	case err != nil:
		return fmt.Errorf("%s: %w", e.Fault, err)
	}
	ended, want := time.Now(), a.w.load.committed.Load()
	recovered := await(ctx, recoverLimit, func() bool {
		return !slices.ContainsFunc(victims, func(v *victim) bool { return !v.caughtUp(want) })
	})
	a.count(e.kind, func(t *Tally) {
		t.Injected++
		if e.Fault == "nats.kill" && a.w.o.Replicas > 1 && e.Params.Node == 0 {
			t.leaders++
		}
		t.Events += max(0, published(victims)-before)
		if recovered {
			t.recovered = append(t.recovered, time.Since(ended))
		} else if ctx.Err() == nil {
			t.Unrecovered++
			s.note("not caught up after %v, under all that went on", recoverLimit)
		}
	})
	return nil
}

func published(victims []*victim) (n int64) {
	for _, v := range victims {
		n += v.published.Load()
	}
	return n
}

func (a *attack) count(kind *fault, do func(*Tally)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.tally[kind.name]
	if t == nil {
		t = &Tally{Fault: kind.name}
		a.tally[kind.name] = t
	}
	do(t)
}

// hold waits for what the fault must have for itself.
func (a *attack) hold(ctx context.Context, e *Entry) (release func(), err error) {
	var names []string
	for _, r := range e.kind.holds {
		if r == theLink {
			r += resource(" " + e.Params.Side)
		}
		names = append(names, string(r)+" of "+e.who())
	}
	slices.SortFunc(names, cmp.Compare) // all in one order: nobody waits for each other
	var held []chan struct{}
	release = func() {
		for _, h := range held {
			<-h
		}
	}
	for _, n := range names {
		l, _ := a.locks.LoadOrStore(n, make(chan struct{}, 1))
		lock := l.(chan struct{})
		select {
		case lock <- struct{}{}:
			held = append(held, lock)
		case <-ctx.Done():
			release()
			return nil, context.Cause(ctx)
		}
	}
	return release, nil
}

// settle waits until everything that was committed is published everywhere. No fault is left.
func (a *attack) settle(ctx context.Context) {
	begun := time.Now()
	var rows int64
	if err := a.w.surely(ctx, []any{&rows}, "SELECT count(*) FROM "+quoted(a.w.table)); err != nil {
		a.w.fail("count the rows: %v", err)
		return
	}
	rows += a.w.load.messages.Load() // which no table has; the load has ended
	a.w.screen.event("the attack is over: %d events are committed, everything must catch up within %v", rows,
		catchUpLimit)
	behind := func() (names []string) {
		for _, v := range a.w.everybody() {
			if !v.caughtUp(rows) {
				names = append(names, fmt.Sprintf("%s has %d of %d messages; the log of %v ends with:\n%s",
					v.slot, v.published.Load(), rows, v.instances[0], v.instances[0].tail()))
			}
		}
		return names
	}
	// As long as something comes it goes on: what a slow machine needs is not a failure.
	for more, last := true, int64(-1); more && ctx.Err() == nil && a.w.failed() == nil; {
		if await(ctx, catchUpLimit, func() bool { return len(behind()) == 0 || a.w.failed() != nil }) ||
			ctx.Err() != nil {
			break
		}
		now := published(a.w.everybody())
		if more, last = now != last, now; !more || time.Since(begun) > catchUpMost {
			a.w.fail("not everything caught up within %v: %s", time.Since(begun).Round(time.Second), behind())
		}
	}
	a.catchUp = time.Since(begun)
}
