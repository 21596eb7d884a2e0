// Package gclimit tells Go's garbage collector how much memory the process may take up: what the ordering
// settings let it hold, and a fixed share. Without it the collector lets the heap grow to twice of what is
// live before it looks.
package gclimit

import (
	"math"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/reorder"
)

// Fixed is what is live beside the buffer, and the room to work in: messages in flight, as they are written
// (8 MiB) and as they are kept until they are acknowledged (up to twice that), blocks of WAL data on their
// way in (1.5 MiB), those of a merge (2 MiB), connections, pages, stacks.
const Fixed = 32 << 20

// interval is how often the limiter looks at what is live.
const interval = 200 * time.Millisecond

// Limit returns the memory that Go may take up with these settings: what the buffer holds at most and an
// eighth of that, so that the collector does not run without end when the buffer is full; four messages of
// the largest size, which is how many copies of one there can be on its way; and [Fixed].
func Limit(s relay.Settings, maxPayload int) int64 {
	held := reorder.MaxWeight(s)
	if held > math.MaxInt64/4 {
		return math.MaxInt64 // no limit
	}
	return held + held/8 + 4*int64(maxPayload) + Fixed
}

// Start returns a function that sets the limit whenever other settings are in force: to that of these or of
// the configured ones, whichever is higher. Where the environment has GOMEMLIMIT the operator decides, and
// the function does nothing.
//
// Ids and further columns are in no setting: with large ones more is live than the limit, and the collector
// would run without end. So from the first call until stop the limit follows what is live: that, a fourth of
// it and [Fixed], if that is more than the settings say.
func Start(configured relay.Settings, maxPayload int) (inForce func(relay.Settings), stop func()) {
	if os.Getenv("GOMEMLIMIT") != "" {
		return func(relay.Settings) {}, func() {}
	}
	l := new(limiter)
	done := make(chan struct{})
	go l.follow(done)
	set := func(s relay.Settings) { l.base(max(Limit(configured, maxPayload), Limit(s, maxPayload))) }
	return set, sync.OnceFunc(func() { close(done) })
}

// limiter keeps the limit above what is live.
type limiter struct {
	mu    sync.Mutex
	least int64 // what the settings say
	set   int64 // what was set last; 0: nothing yet
}

func (l *limiter) base(least int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.least, l.set = least, least
	debug.SetMemoryLimit(least)
}

func (l *limiter) follow(done <-chan struct{}) {
	defer crash.Guard()
	ticks := time.NewTicker(interval)
	defer ticks.Stop()
	for {
		select {
		case <-done:
			return
		case <-ticks.C:
			l.look(live())
		}
	}
}

func (l *limiter) look(live int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.set == 0 {
		return
	}
	// To set a limit stops the world for a moment: small changes are not worth it.
	want := max(l.least, live+live/4+Fixed)
	if want > l.set || want < l.set-l.set/8 || want == l.least && want != l.set {
		l.set = want
		debug.SetMemoryLimit(want)
	}
}

// live is how many bytes the last collection found to be in use.
func live() int64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return int64(min(sample[0].Value.Uint64(), math.MaxInt64/4))
}
