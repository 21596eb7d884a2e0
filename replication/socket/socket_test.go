package socket

import (
	"testing"
	"time"
)

func TestManySmallReadsAreGathered(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		bytes int // of a read
		every time.Duration
		much  bool
	}{
		"1,000 commits a second":   {150, time.Second / 3000, false},
		"8,000 commits a second":   {150, time.Second / 24000, true},
		"rows of one transaction":  {300, 20 * time.Microsecond, true},
		"small reads, much apart":  {30, time.Millisecond, false},
		"what gathered during nap": {1500, 150 * time.Microsecond, true},
		"large reads":              {64 << 10, 2 * time.Millisecond, true},
		"one large value":          {1 << 20, time.Minute, false},
	} {
		now := time.Unix(1000, 0)
		r := rate{since: now}
		for range 200 {
			now = now.Add(test.every)
			r.add(test.bytes, now)
		}
		if r.much != test.much {
			t.Errorf("%s: much is %t", name, r.much)
		}
		now = now.Add(time.Second) // a pause ends it
		r.add(test.bytes, now)
		if r.much && test.bytes < 1<<20 {
			t.Errorf("%s: still much after a pause", name)
		}
	}
}
