package await

import (
	"fmt"
	"os"
	"sync/atomic"
	"time"
)

// standstill is from when on a process that could not run counts as one that stood still.
const standstill = time.Second

// seen is when the last standstill of this process ended, in nanoseconds since 1970; 0: none was seen.
var seen atomic.Int64

// WatchMachine watches from now on, until the process ends, whether it stands still. Each standstill is a
// line that begins with "standstill:", which the report of a test run counts.
func WatchMachine() {
	go func() {
		for before := time.Now(); ; {
			time.Sleep(least)
			now := time.Now()
			if still := now.Sub(before); still > standstill {
				seen.Store(now.UnixNano())
				fmt.Fprintf(os.Stderr, "standstill: %v\n", still.Round(time.Millisecond))
			}
			before = now
		}
	}()
}

// StoodStill tells whether WatchMachine saw a standstill that ended within the last minutes.
func StoodStill(within time.Duration) bool {
	at := seen.Load()
	return at != 0 && time.Since(time.Unix(0, at)) < within
}
