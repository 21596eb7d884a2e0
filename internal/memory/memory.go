// Package memory tells Go's garbage collector how much memory the process may take up: what the ordering settings let it hold, and a
// fixed share. Without it the collector lets the heap grow to twice of what is live before it looks.
package memory

import (
	"math"
	"os"
	"runtime/debug"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// Fixed is what is live beside the buffer, and the room to work in: messages in flight (8 MiB), blocks of WAL data on their way in,
// those of a merge (2 MiB), connections, pages, stacks.
const Fixed = 20 << 20

// Limit returns the memory that Go may take up with these settings: what the buffer holds at most and an eighth of that, so that the
// collector does not run without end when the buffer is full; four messages of the largest size, which is how many copies of one
// there can be on its way; and [Fixed].
func Limit(s outbox.Settings, maxPayload int) int64 {
	held := reorder.MaxWeight(s)
	if held > math.MaxInt64/4 {
		return math.MaxInt64 // no limit
	}
	return held + held/8 + 4*int64(maxPayload) + Fixed
}

// Limiter returns a function that sets the limit whenever other settings are in force: to that of these or of the configured ones,
// whichever is higher. Where the environment says GOMEMLIMIT it is the operator who decides, and the function does nothing.
func Limiter(configured outbox.Settings, maxPayload int) func(outbox.Settings) {
	if os.Getenv("GOMEMLIMIT") != "" {
		return func(outbox.Settings) {}
	}
	return func(inForce outbox.Settings) {
		debug.SetMemoryLimit(max(Limit(configured, maxPayload), Limit(inForce, maxPayload)))
	}
}
