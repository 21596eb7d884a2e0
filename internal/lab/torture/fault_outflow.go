package torture

import (
	"context"
	"math/rand/v2"
	"time"
)

// takeOver is how long an instance may take to get the slot and be proved, under all that goes on at the same
// time.
const takeOver = 20 * time.Second

// kill is kill -9 at a random moment.
var kill = &fault{
	name: "outflow.kill", does: "kill -9 of outflow at a random moment", weight: 34,
	holds: []resource{theOutflows}, kills: true,
	plan: func(r *rand.Rand, _ *shape) Params {
		return Params{Hold: between(r, 0, 400*time.Millisecond), Standby: r.IntN(8) == 0}
	},
	inject: func(ctx context.Context, a *injection) error {
		i := a.v.target(ctx, a.Standby)
		if i == nil {
			return errMissed
		}
		i.kill()
		return again(ctx, a, i)
	},
}

// again starts an instance after a while.
func again(ctx context.Context, a *injection, i *instance) error {
	err := pause(ctx, a.Hold)
	if startErr := i.start(); startErr != nil {
		return startErr
	}
	return err
}

// term is SIGTERM: the stop must be a clean one.
var term = &fault{
	name: "outflow.term", does: "SIGTERM of outflow: it must end with exit code 0", weight: 10,
	holds: []resource{theOutflows},
	plan: func(r *rand.Rand, _ *shape) Params {
		return Params{Hold: between(r, 0, 300*time.Millisecond), Standby: r.IntN(6) == 0}
	},
	inject: func(ctx context.Context, a *injection) error {
		i := a.v.target(ctx, a.Standby)
		if i == nil {
			return errMissed
		}
		i.term()
		return again(ctx, a, i)
	},
}

// zombie is an instance that sleeps while another one takes over, and wakes up in the belief that it is still
// the one.
var zombie = &fault{
	name: "outflow.zombie", does: "SIGSTOP of the outflow that publishes, another takes over, SIGCONT",
	weight: 5, holds: []resource{theOutflows},
	plan: func(r *rand.Rand, s *shape) Params {
		what := []string{byTerminate, byTerminate, andSuccessr, byTimeout}[r.IntN(4)]
		if !s.ownPostgres && what == byTimeout { // it may be a minute there
			what = byTerminate
		}
		return Params{Hold: between(r, 0, time.Second), What: what}
	},
	inject: func(ctx context.Context, a *injection) error {
		var sleeper *instance
		if !await(ctx, takeOver/4, func() bool { sleeper = a.v.holder(ctx); return sleeper != nil }) {
			return errMissed
		}
		if err := sleeper.pause(); err != nil {
			return errMissed // it has just ended
		}
		if a.What != byTimeout {
			if err := terminateWalsender(ctx, a); err != nil {
				a.note("the walsender could not be terminated: %v", err)
			}
		}
		var successor *instance
		ok := await(ctx, takeOver, func() bool {
			successor = a.v.holder(ctx)
			return successor != nil && successor != sleeper
		})
		err := pause(ctx, a.Hold)
		if ok && a.What == andSuccessr {
			successor.kill()
		}
		if resumeErr := sleeper.resume(); resumeErr != nil {
			return resumeErr
		}
		if ok && a.What == andSuccessr {
			if startErr := successor.start(); startErr != nil {
				return startErr
			}
		}
		if err == nil && !ok {
			a.note("nobody took over within %v", takeOver)
		}
		return err
	},
}

const (
	byTimeout   = "timeout"   // the server ends the sleeper's session after wal_sender_timeout
	byTerminate = "terminate" // pg_terminate_backend does
	andSuccessr = "terminate, successor killed"
)

// resettings starts an instance with other ordering settings, which it keeps.
var resettings = &fault{
	name: "outflow.settings",
	does: "an instance starts with other ordering settings, of either mode (the last victim " +
		"only; its order is judged by the WAL alone)",
	weight: 3, holds: []resource{theOutflows},
	fits: func(s *shape) bool { return s.victims > 1 },
	plan: func(r *rand.Rand, _ *shape) Params {
		return Params{Settings: environOf(anySettings(r)), Standby: r.IntN(2) == 0}
	},
	inject: func(ctx context.Context, a *injection) error {
		i := a.v.target(ctx, a.Standby)
		if i == nil {
			return errMissed
		}
		i.term()
		i.settings = a.Settings
		a.v.resetted.Store(true)
		return i.start()
	},
}
