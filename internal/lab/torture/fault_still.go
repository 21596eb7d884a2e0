package torture

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// stillFor is how long something stands still: mostly shorter than an acknowledgement is waited for and than
// wal_sender_timeout (5 s both), else longer.
func stillFor(r *rand.Rand) time.Duration {
	if r.IntN(3) > 0 {
		return between(r, 500*time.Millisecond, 3*time.Second)
	}
	return between(r, walSenderTimeout+500*time.Millisecond, walSenderTimeout+3*time.Second)
}

// outflowPause is a machine that stands still: nobody ends the session of the one that sleeps but time.
var outflowPause = &fault{
	name: "outflow.pause", does: "SIGSTOP of outflow for up to 8 s (an acknowledgement is waited for 5 " +
		"s, as is outflow by PostgreSQL), SIGCONT",
	weight: 4, holds: []resource{theOutflows}, gap: 12 * time.Second,
	plan: func(r *rand.Rand, _ *shape) Params {
		return Params{Hold: stillFor(r), Standby: r.IntN(6) == 0}
	},
	inject: func(ctx context.Context, a *injection) error {
		i := a.v.target(ctx, a.Standby)
		if i == nil {
			return errMissed
		}
		if err := i.pause(); err != nil {
			return errMissed // it has just ended
		}
		_ = pause(ctx, a.Hold) // it goes on in any case
		return i.resume()
	},
}

// outflowLeave is a clean stop of a whole installation, whatever goes on around it.
var outflowLeave = &fault{
	name: "outflow.leave", does: "SIGTERM of all outflows of a victim at once: they must end with exit " +
		"code 0, whatever else strikes",
	weight: 3, holds: []resource{theOutflows}, gap: 10 * time.Second,
	plan: func(r *rand.Rand, _ *shape) Params {
		return Params{Hold: between(r, 0, time.Second)}
	},
	inject: func(ctx context.Context, a *injection) error {
		begun := time.Now()
		a.v.each((*instance).term)
		if took := time.Since(begun); took > leaveIn {
			a.note("the stop took %v", took.Round(time.Millisecond))
		}
		return a.v.all(pause(ctx, a.Hold))
	},
}

// leaveIn is what a clean stop should take at most: stop_timeout, and what follows it.
const leaveIn = 15 * time.Second

// outflowAway is an outage of a whole installation while much is written: the backlog is caught up with
// afterwards.
var outflowAway = &fault{
	name: "outflow.away", does: "no outflow of a victim runs for up to 8 s, while five times as much " +
		"is written, large transactions among it",
	weight: 2, holds: []resource{theOutflows}, gap: 20 * time.Second,
	plan: func(r *rand.Rand, _ *shape) Params {
		return Params{Hold: between(r, 2*time.Second, 8*time.Second),
			What: []string{"killed", "stopped"}[r.IntN(2)]}
	},
	inject: func(ctx context.Context, a *injection) error {
		if a.What == "killed" {
			a.v.each((*instance).kill)
		} else {
			a.v.each((*instance).term)
		}
		a.w.load.hurry(rush)
		a.w.load.spill()
		err := pause(ctx, a.Hold)
		a.w.load.hurry(-rush)
		a.w.backlogs.Add(1)
		return a.v.all(err)
	},
}

// rush is how many times as much is written while an installation is away.
const rush = 5

// each does something to all instances at the same time.
func (v *victim) each(do func(*instance)) {
	var all sync.WaitGroup
	for _, i := range v.instances {
		all.Go(func() { do(i) })
	}
	all.Wait()
}

// pgPause freezes PostgreSQL.
var pgPause = &fault{
	name: "postgres.pause", does: "SIGSTOP of PostgreSQL, every process of it, for up to 8 s, SIGCONT",
	weight: 3, holds: []resource{thePostgres}, shared: true, gap: 15 * time.Second,
	fits: func(s *shape) bool { return s.ownPostgres },
	plan: func(r *rand.Rand, _ *shape) Params { return Params{Hold: stillFor(r)} },
	inject: func(ctx context.Context, a *injection) error {
		err := a.w.pg.Pause()
		if err == nil {
			_ = pause(ctx, a.Hold) // it goes on in any case
		}
		if resumeErr := a.w.pg.Resume(); resumeErr != nil {
			return resumeErr
		}
		return err
	},
}

// natsFreeze freezes all servers of a victim for longer than anybody waits for them.
var natsFreeze = &fault{
	name: "nats.freeze", does: "SIGSTOP of all NATS servers of a victim for longer than half a minute, " +
		"SIGCONT (once in a run of two minutes or more)",
	weight: 1, holds: []resource{theNATS}, most: 1,
	fits: func(s *shape) bool { return s.ownNATS && s.minutes },
	plan: func(r *rand.Rand, _ *shape) Params {
		return Params{Hold: between(r, 31*time.Second, 35*time.Second)}
	},
	inject: func(ctx context.Context, a *injection) error {
		var err error
		for _, n := range a.v.nats.nodes {
			if err == nil {
				err = n.Pause()
			}
		}
		if err == nil {
			_ = pause(ctx, a.Hold) // they go on in any case
		}
		for _, n := range a.v.nats.nodes {
			if resumeErr := n.Resume(); err == nil {
				err = resumeErr
			}
		}
		return err
	},
}
