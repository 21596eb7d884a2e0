package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/outflowhq/outflow/internal/lab/failpoint"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
)

// clockLibrary finds libfaketime, where PostgreSQL is ours.
func clockLibrary(o *Options) string {
	if o.PostgresURL != "" {
		return ""
	}
	for _, dir := range []string{"/usr/lib/*", "/usr/lib*", "/usr/local/lib"} {
		// the only error is a bad pattern
		if found, _ := filepath.Glob(dir + "/faketime/libfaketime.so.1"); len(found) > 0 {
			return found[0]
		}
	}
	return ""
}

// clock moves PostgreSQL's clock: its programs are run with libfaketime, which reads from a file by how much.
type clock struct {
	installation pgserver.Installation
	file         string
}

// newClock makes an installation, in dir, that is the given one with another clock.
func newClock(dir, library string, i pgserver.Installation) (*clock, error) {
	c := &clock{installation: i, file: filepath.Join(dir, "offset")}
	c.installation.Bin = filepath.Join(dir, "bin")
	if err := os.MkdirAll(c.installation.Bin,
		0o755); err != nil { //nolint:gosec // PostgreSQL may run as another user
		return nil, err
	}
	if err := c.set(0); err != nil {
		return nil, err
	}
	programs, err := os.ReadDir(i.Bin)
	if err != nil {
		return nil, err
	}
	for _, p := range programs {
		if err := os.Symlink(filepath.Join(i.Bin, p.Name()),
			filepath.Join(c.installation.Bin, p.Name())); err != nil {
			return nil, err
		}
	}
	postgres := filepath.Join(c.installation.Bin, "postgres")
	if err := os.Remove(postgres); err != nil {
		return nil, err
	}
	script := fmt.Sprintf(`#!/bin/sh
export LD_PRELOAD='%s' FAKETIME_TIMESTAMP_FILE='%s' FAKETIME_CACHE_DURATION=1 FAKETIME_DONT_FAKE_MONOTONIC=1
exec '%s' "$@"
`, library, c.file, filepath.Join(i.Bin, "postgres"))
	if err := os.WriteFile(postgres, []byte(script), 0o755); err != nil { //nolint:gosec // the same
		return nil, err
	}
	// Not every library fits every machine.
	if out, err := exec.Command(postgres, "--version").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s does not work here: %w\n%s", library, err, out)
	}
	return c, nil
}

// set moves the clock away from the machine's. Each session notices within a second.
func (c *clock) set(offset time.Duration) error {
	next := c.file + ".next"
	if err := os.WriteFile(next, fmt.Appendf(nil, "%+.3f\n", offset.Seconds()),
		0o644); err != nil { //nolint:gosec // the same
		return err
	}
	return os.Rename(next, c.file)
}

// clockStep moves PostgreSQL's clock forth or back, and back again: commit times jump.
var clockStep = &fault{
	name: "clock.step", does: "PostgreSQL's clock steps by up to 10 s, forth or back, and returns " +
		"(needs libfaketime)",
	weight: 2, holds: []resource{thePostgresClock}, shared: true,
	fits: func(s *shape) bool { return s.clock != "" },
	plan: func(r *rand.Rand, _ *shape) Params {
		step := between(r, 10*time.Millisecond, 10*time.Second)
		if r.IntN(2) == 0 {
			step = -step
		}
		return Params{Step: step, Hold: between(r, time.Second, 3*time.Second)}
	},
	inject: func(ctx context.Context, a *injection) error {
		if err := a.w.clock.set(a.Step); err != nil {
			return err
		}
		_ = pause(ctx, a.Hold) // it goes back in any case
		return a.w.clock.set(0)
	},
}

// clockOutflow is an outflow on a machine whose clock is wrong: it holds the slot for a while, then the
// others take over what it wrote.
var clockOutflow = &fault{
	name: "clock.outflow", does: "the clock of one outflow's machine is up to an hour ahead or behind",
	weight: 3, holds: []resource{theOutflows},
	plan: func(r *rand.Rand, _ *shape) Params {
		step := between(r, time.Second, time.Hour).Round(time.Second)
		if r.IntN(2) == 0 {
			step = -step
		}
		return Params{Step: step, Hold: between(r, 500*time.Millisecond, 4*time.Second)}
	},
	inject: func(ctx context.Context, a *injection) error {
		i, err := only(a, fmt.Sprintf("%s%s:%v", pointEnv, failpoint.Clock, a.Step))
		if err != nil {
			return err
		}
		_ = await(ctx, a.Hold, func() bool { return i.state(ctx) == "running" })
		err = a.v.all(nil) // they stand by
		if err == nil {
			err = pause(ctx, a.Hold)
		}
		i.kill()
		return a.v.all(err)
	},
}
