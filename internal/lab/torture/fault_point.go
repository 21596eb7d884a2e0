package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/lab/failpoint"
	"github.com/outflowhq/outflow/internal/lab/oracle"
)

const (
	pointEnv = failpoint.Env + "="
	// pointLimit is how long a point may take to be reached.
	pointLimit = 4 * time.Second
)

// point lets outflow end itself, as kill -9 would, at a named point of its work.
var point = &fault{
	name: "outflow.point", does: "outflow ends as by kill -9 at a named point: before or after " +
		"publish, ack, record, confirm, tick, spill",
	weight: 16, holds: []resource{theOutflows}, kills: true,
	// plan chooses how often the point is passed before: seldom passed points soon, points of single messages
	// later.
	plan: func(r *rand.Rand, s *shape) Params {
		fit := slices.DeleteFunc(slices.Clone(points), func(name string) bool {
			return strings.HasPrefix(name, "memory.") && s.settings.Sort != oracle.ByGap
		})
		p := fit[r.IntN(len(fit))]
		name, _, _ := strings.Cut(p, ".")
		return Params{Hold: between(r, 0, 200*time.Millisecond),
			Point: fmt.Sprintf("%s:%d", p, 1+r.IntN(max(1, times[name])))}
	},
	inject: func(ctx context.Context, a *injection) error {
		i, err := only(a, pointEnv+a.Point)
		if err != nil {
			return err
		}
		if strings.HasPrefix(a.Point, "spill") {
			a.w.load.spill()
		}
		if !await(ctx, pointLimit, func() bool { return !i.running() }) {
			if ctx.Err() == nil {
				a.note("point %s was not reached within %v: killed", a.Point, pointLimit)
			}
			i.kill()
		}
		return a.v.all(again(ctx, a, i))
	},
}

// only starts an instance that is the only one of its victim, with further environment.
func only(a *injection, environ ...string) (*instance, error) {
	for _, i := range a.v.instances {
		i.kill()
	}
	i := a.v.instances[0]
	if err := i.start(environ...); err != nil {
		return nil, err
	}
	return i, nil
}

// all starts the instances that do not run; it passes on an error.
func (v *victim) all(err error) error {
	for _, i := range v.instances {
		if err == nil && !i.running() {
			err = i.start()
		}
	}
	return err
}

// spillFull is a full disk where large transactions spill.
var spillFull = &fault{
	name: "disk.full", does: "the disk is full where a transaction larger than the buffer spills",
	weight: 2, holds: []resource{theOutflows}, gap: 20 * time.Second,
	plan: func(r *rand.Rand, _ *shape) Params {
		return Params{Hold: between(r, 2*time.Second, 4*time.Second)}
	},
	inject: func(ctx context.Context, a *injection) error {
		i, err := only(a, pointEnv+failpoint.SpillFull+":1")
		if err != nil {
			return err
		}
		a.w.load.spill()
		err = pause(ctx, a.Hold)
		i.kill()
		return a.v.all(err)
	},
}

// times is how often a point may be passed before, for those that are passed often.
var times = map[string]int{
	"publish": 3000, "flush": 300, "ack": 200, "record": 3, "confirm": 3, "tick": 3, "spill": 2,
}

// points are the points of outflow's work at which it can end itself. A change of settings is left to its own
// fault: it comes at its start alone.
var points = slices.DeleteFunc(failpoint.Names(), func(name string) bool {
	return strings.HasPrefix(name, "change.")
})
