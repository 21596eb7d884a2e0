// Package await is how tests wait for something that another process does: no longer than it takes to see
// that it won't happen, and longer on a machine that is slow or stands still.
package await

import (
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/lab/tier"
)

const (
	// between two checks at least, and at most: a check that takes long, as one that runs a program does, is
	// made less often, or the wait would keep a core from what is waited for
	least, most = 20 * time.Millisecond, 400 * time.Millisecond
	// what one check counts for at most, beside the pause before it: a machine that stands still doesn't use
	// up the wait
	step = 80 * time.Millisecond

	// Limit is how long a wait takes at most.
	Limit = 3 * time.Minute
	quiet = time.Minute      // in which nothing changes
	dead  = 30 * time.Second // in which nothing changes after a process has ended that should perhaps run
)

// T is what Until needs of a test.
type T interface {
	Helper()
	Fatalf(format string, args ...any)
}

// Until waits until check returns nil. It fails the test when check has returned the same error for a minute,
// after Limit in any case, and after half a minute when one of alive returns an error: the process that would
// have to bring it about has ended. (Or another one has, of a test that has several and expects that.)
func Until(t T, what string, check func() error, alive ...func() error) {
	t.Helper()
	if err := until(check, alive); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// True waits until ok returns true, as Until does, and tells whether it did.
func True(ok func() bool) bool {
	return until(func() error {
		if !ok() {
			return errNotYet
		}
		return nil
	}, nil) == nil
}

var errNotYet = errors.New("not yet")

func until(check func() error, alive []func() error) error {
	var last string
	var still time.Duration // without a change
	var pause time.Duration
	for begun, before := time.Now(), time.Now(); ; time.Sleep(pause) {
		asked := time.Now()
		err := check()
		if err == nil {
			return nil
		}
		now := time.Now()
		still += min(now.Sub(before), pause+step)
		before, pause = now, min(max(2*now.Sub(asked), least), most)
		if text := err.Error(); text != last {
			last, still = text, 0
		}
		if still > dead {
			for _, running := range alive {
				if ended := running(); ended != nil {
					return fmt.Errorf("%w (%w)", err, ended)
				}
			}
		}
		if still > quiet && !tier.Long() || time.Since(begun) > Limit {
			return fmt.Errorf("after %v: %w", time.Since(begun).Round(time.Millisecond), err)
		}
	}
}
