package gclimit

import (
	"math"
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
)

func settings(maxEvents int, maxBytes int64) relay.Settings {
	return relay.Settings{MaxEvents: maxEvents, MaxBytes: maxBytes}
}

func TestTheLimitIsComputedFromTheSettings(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	for _, c := range []struct {
		events     int
		bytes      int64
		maxPayload int
		want       int64
	}{
		// the defaults: an event weighs 376 bytes more than it counts
		{65536, 64 * mib, mib, (64*mib+65536*376)*9/8 + 36*mib},
		{1 << 30, 64 * mib, mib, (64+376)*mib*9/8 + 36*mib},
		{1, 1, 64 * mib, 288 * mib},
		{math.MaxInt, math.MaxInt64, mib, math.MaxInt64},
		{math.MaxInt, math.MaxInt64 / 16, mib, math.MaxInt64},
	} {
		if got := Limit(settings(c.events, c.bytes), c.maxPayload); got < c.want || got-c.want > mib {
			t.Errorf("max_events %d, max_bytes %d: %d, want %d", c.events, c.bytes, got, c.want)
		}
	}
}

// Not parallel: the limit is the process's.
func TestLimitFollowsTheSettings(t *testing.T) {
	old := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(old)
	small, large := settings(1000, 1<<20), settings(1000, 1<<30)
	t.Setenv("GOMEMLIMIT", "")
	set, stop := Start(small, 1<<20)
	defer stop()
	for _, inForce := range []relay.Settings{small, large, small} {
		set(inForce)
		if got, want := debug.SetMemoryLimit(-1), Limit(inForce, 1<<20); got != want {
			t.Errorf("max_bytes %d: limit %d, want %d", inForce.MaxBytes, got, want)
		}
	}
	stop()
	set, stop = Start(large, 1<<20)
	defer stop()
	set(small)
	if got, want := debug.SetMemoryLimit(-1), Limit(large, 1<<20); got != want {
		t.Errorf("configured larger than in force: %d, want %d", got, want)
	}
	t.Setenv("GOMEMLIMIT", "1GiB")
	debug.SetMemoryLimit(old)
	stop()
	set, _ = Start(small, 1<<20)
	set(small)
	if got := debug.SetMemoryLimit(-1); got != old {
		t.Errorf("the operator's limit became %d", got)
	}
}

// More is live than the settings say: the limit follows, and comes back. Not parallel.
func TestLimitFollowsWhatIsLive(t *testing.T) {
	old := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(old)
	t.Setenv("GOMEMLIMIT", "")
	s := settings(1000, 1<<20)
	set, stop := Start(s, 1<<20)
	defer stop()
	set(s)
	least := Limit(s, 1<<20)
	await := func(what string, reached func(limit int64) bool) {
		t.Helper()
		for begun := time.Now(); ; {
			runtime.GC()
			limit := debug.SetMemoryLimit(-1)
			if reached(limit) {
				return
			}
			if time.Since(begun) > 3*time.Minute {
				t.Fatalf("%s: the limit is %d", what, limit)
			}
		}
	}
	large := make([]byte, 2*least)
	await("as much again is live", func(limit int64) bool { return limit > 2*least+least/4 })
	runtime.KeepAlive(large)
	large = nil
	await("little is live", func(limit int64) bool { return limit == least })
}
