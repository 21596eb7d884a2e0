package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// pgCrash ends PostgreSQL and starts it again: kill, immediate or fast.
func pgCrash(mode string, weight int, does string) *fault {
	return &fault{
		name: "postgres." + mode, does: does, weight: weight, holds: []resource{thePostgres}, shared: true,
		fits: func(s *shape) bool { return s.ownPostgres },
		plan: func(r *rand.Rand, _ *shape) Params {
			return Params{Hold: between(r, 0, 500*time.Millisecond)}
		},
		inject: func(ctx context.Context, a *injection) error {
			begun := time.Now()
			var err error
			if mode == "kill" {
				err = a.w.pg.Kill()
			} else {
				err = a.w.pg.Stop(mode)
			}
			if err != nil {
				return fmt.Errorf("%s of PostgreSQL: %w", mode, err)
			}
			if took := time.Since(begun); took > walSenderTimeout {
				a.note("the stop took %v", took.Round(time.Millisecond))
			}
			_ = pause(ctx, a.Hold) // it is started in any case
			return a.w.pg.Start(context.WithoutCancel(ctx))
		},
	}
}

// pgTerminate ends the session that streams to outflow.
var pgTerminate = &fault{
	name: "postgres.terminate", does: "pg_terminate_backend of the walsender", weight: 6,
	plan: func(r *rand.Rand, _ *shape) Params { return Params{} },
	inject: func(ctx context.Context, a *injection) error {
		if err := terminateWalsender(ctx, a); err != nil {
			if !errors.Is(err, errMissed) { // which is noted anyway
				a.note("%v", err)
			}
			return errMissed
		}
		return nil
	},
}

func terminateWalsender(ctx context.Context, a *injection) error {
	var n int
	err := a.w.query(ctx, []any{&n}, `SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots
		WHERE slot_name = $1 AND active_pid IS NOT NULL`, a.v.slot)
	if err == nil && n == 0 {
		err = errMissed
	}
	return err
}
