package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// pgCrash ends PostgreSQL and starts it again: kill, immediate or fast.
type pgCrash struct{ mode string }

func (f pgCrash) about() about {
	weight := 2
	if f.mode == "kill" {
		weight = 5
	}
	does := map[string]string{
		"kill":      "kill -9 of PostgreSQL, then crash recovery",
		"immediate": "immediate stop of PostgreSQL, then crash recovery",
		"fast":      "fast stop of PostgreSQL: it waits for walsenders, which must not hold it up",
	}
	return about{name: "postgres." + f.mode, does: does[f.mode], weight: weight,
		holds: []resource{thePostgres}, shared: true}
}
func (pgCrash) fits(s *shape) bool { return s.ownPostgres }
func (pgCrash) plan(r *rand.Rand, _ *shape) Params {
	return Params{Hold: between(r, 0, 500*time.Millisecond)}
}

func (f pgCrash) inject(ctx context.Context, a *injection) error {
	begun := time.Now()
	var err error
	if f.mode == "kill" {
		err = a.w.pg.Kill()
	} else {
		err = a.w.pg.Stop(f.mode)
	}
	if err != nil {
		return fmt.Errorf("%s of PostgreSQL: %w", f.mode, err)
	}
	if took := time.Since(begun); took > walSenderTimeout {
		a.note("the stop took %v", took.Round(time.Millisecond))
	}
	_ = pause(ctx, a.Hold) // it is started in any case
	return a.w.pg.Start(context.WithoutCancel(ctx))
}

// pgTerminate ends the session that streams to outflow.
type pgTerminate struct{}

func (pgTerminate) about() about {
	return about{name: "postgres.terminate", does: "pg_terminate_backend of the walsender", weight: 6}
}
func (pgTerminate) fits(*shape) bool                   { return true }
func (pgTerminate) plan(r *rand.Rand, _ *shape) Params { return Params{} }

func (pgTerminate) inject(ctx context.Context, a *injection) error {
	if err := terminateWalsender(ctx, a); err != nil {
		if !errors.Is(err, errMissed) { // which is noted anyway
			a.note("%v", err)
		}
		return errMissed
	}
	return nil
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
