// Package torture is `outflow-lab torture`: servers and several outflows as processes of their own, a load of
// real traces, faults from a seeded schedule, and at the end a verdict by the judge of package oracle, which
// shares nothing with the streamer.
//
// What is attacked is a victim: a slot with two instances of outflow, a NATS (one server, or three), a
// stream, and a proxy on each connection. There may be several victims, attacked at the same time. The twin
// is an outflow that nobody touches, with a slot and a NATS server of its own: at the end its stream and the
// victims' must be the same, byte by byte. The schedule is a pure function of the options and the seed; when
// exactly a fault comes depends on the machine as well, so a repeated run is not the same to the microsecond.
package torture

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Options say what to do. The zero value of a number means its default, except where it says otherwise.
type Options struct {
	Seed     uint64        // of schedule and load; 0: a random one
	Duration time.Duration // of the attack; 0: 60 s, or until Kills are reached
	Kills    int           // > 0: the attack ends after so many kills of outflow
	// names and groups, comma-separated, with a minus in front to leave out; "" or "all": all that fit
	Faults   string
	Replicas int // of the victims' streams: 1, or 3 with three servers for each victim
	Victims  int // slots that are attacked

	Every      time.Duration // mean time between faults on one victim
	Operations int           // rows to write at most; 0: as many as the duration holds
	Rate       int           // rows per second, about
	Writers    int           // connections that write
	Mode       string        // reorder.mode; in gap mode the seed chooses bound, cold, memory and scope
	Horizon    time.Duration // reorder.horizon; 0 is 0
	Sort       string        // reorder.sort
	Source     string        // source: table, or both, and then many events are logical messages

	PostgresURL, NATSURL string // servers of somebody else; "": our own for the moment
	PGMajor              int    // of our own; 0: the best found

	DryRun bool // print the schedule and do nothing
	JSON   bool // print the report as JSON on Out, all else on Log
	Keep   bool // keep all files also after a good run

	Binary   string // the streamer
	Sabotage string // for tests of the harness: spoil a stream after the attack; see sabotage
	Out, Log io.Writer
}

// The defaults.
const (
	defaultDuration = 60 * time.Second
	defaultEvery    = 1500 * time.Millisecond
	defaultRate     = 600
	defaultWriters  = 8
	defaultVictims  = 2
)

// sourceBoth is the source of rows and messages.
const sourceBoth = string(relay.FromBoth)

// What the installations are made with.
const (
	durableAfter     = 2 * time.Second // so that confirmation follows closely and a lost tail is a small one
	walSenderTimeout = 5 * time.Second // as some platforms set it
	maxBytes         = 512 << 10       // a large transaction spills
	catchUpLimit     = 120 * time.Second
	catchUpMost      = 10 * time.Minute // of a machine so slow that something still comes after catchUpLimit
	longRun          = 5 * time.Minute  // from which on the outages are long ones
)

func (o *Options) complete() error {
	if o.Seed == 0 {
		o.Seed = rand.Uint64N(1e9) + 1
	}
	if o.Duration == 0 && o.Kills == 0 {
		o.Duration = defaultDuration
	}
	for _, d := range []struct {
		n   *int
		def int
	}{{&o.Rate, defaultRate}, {&o.Writers, defaultWriters}, {&o.Victims, defaultVictims}, {&o.Replicas, 1}} {
		if *d.n == 0 {
			*d.n = d.def
		}
	}
	if o.Every == 0 {
		o.Every = defaultEvery
	}
	if o.Source == "" {
		o.Source = relay.FromTable.String()
	}
	if o.Mode == "" {
		o.Mode = modeHorizon
	}
	if o.Sort == "" {
		o.Sort = outbox.BySeqKey.String()
	}
	for _, c := range []struct {
		ok   bool
		what string
	}{
		{o.Replicas == 1 || o.Replicas == 3, fmt.Sprintf("--replicas %d: it must be 1 or 3", o.Replicas)},
		{o.Duration >= 0 && o.Kills >= 0 && o.Operations >= 0,
			"--duration, --kills and --operations must not be negative"},
		{o.Every > 0 && o.Rate > 0 && o.Writers > 0 && o.Victims > 0,
			"--every, --rate, --writers and --victims must be above 0"},
		{o.Mode == modeHorizon || o.Mode == modeGap, fmt.Sprintf("--mode %s: it must be horizon or gap",
			o.Mode)},
		{o.Horizon >= 0, fmt.Sprintf("--horizon %v: it must not be negative", o.Horizon)},
		{o.Sort == "seq_key" || o.Sort == "commit", fmt.Sprintf("--sort %s: it must be seq_key or commit",
			o.Sort)},
		{o.Source == "table" || o.Source == sourceBoth, fmt.Sprintf("--source %s: it must be table or both "+
			"(what became of a commit is seen in the table)", o.Source)},
		{slices.Contains(sabotages, o.Sabotage), fmt.Sprintf("sabotage %q: it must be one of %q", o.Sabotage,
			sabotages)},
	} {
		if !c.ok {
			return usage(c.what, "See outflow-lab torture --help")
		}
	}
	return nil
}

func usage(message, hint string) error {
	return &outbox.Fault{Class: outbox.Usage, Code: "torture", Message: message, Hint: hint}
}

// Run attacks and judges. It returns whether the verdict is good; the error is an *outbox.Fault of class
// Fatal where the attack or the judgement could not be carried out, of class Usage for wrong options.
func Run(ctx context.Context, o Options) (good bool, err error) {
	if err := o.complete(); err != nil {
		return false, err
	}
	s := shapeOf(&o)
	kinds, err := choose(o.Faults, &s)
	if err != nil {
		return false, err
	}
	plan := schedule(&o, &s, kinds)
	p := newScreen(&o)
	p.head(&o, &s, kinds, plan)
	if o.DryRun {
		p.plan(plan)
		return true, nil
	}
	good, err = run(ctx, &o, &s, plan, p)
	if err != nil && ctx.Err() == nil && outbox.FaultOf(err) == nil {
		err = &outbox.Fault{Class: outbox.Fatal, Code: "torture", Message: "the run could not be carried out",
			Hint: "See docs/torture.md", Err: err}
	}
	return good, err
}

// run is one run from the start of the servers to the verdict.
func run(ctx context.Context, o *Options, s *shape, plan []Entry, p *screen) (good bool, err error) {
	w, err := newHarness(o, s, p)
	if err != nil {
		return false, err
	}
	defer func() {
		keep := o.Keep || err == nil && !good
		err = errors.Join(err, w.close(keep))
		if keep {
			p.line("\nkept: %s (logs, report, the servers' files); --seed %d repeats the schedule", w.dir,
				o.Seed)
		}
	}()
	if err := w.start(ctx); err != nil {
		return false, err
	}
	a := &attack{w: w, plan: plan, tally: map[string]*Tally{}}
	if err := a.run(ctx); err != nil {
		return false, err
	}
	r, err := a.judge(ctx)
	if err != nil {
		return false, err
	}
	if err := r.write(w.file("report.json")); err != nil {
		return false, err
	}
	p.report(r)
	return r.Good, nil
}

// pause waits, unless ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// await polls until done returns true, ctx ends, or the limit is over; it reports whether done did.
func await(ctx context.Context, limit time.Duration, done func() bool) bool {
	deadline := time.Now().Add(limit)
	for !done() {
		if time.Now().After(deadline) || pause(ctx, pollInterval) != nil {
			return false
		}
	}
	return true
}

const pollInterval = 20 * time.Millisecond

// ignoreGone drops the error that says that a process has ended already.
func ignoreGone(err error) error {
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}
