package pipeline

import (
	"context"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/reorder"
)

// notices are what is logged rarely, whatever the number of sessions.
type notices struct {
	ignored      [decoder.IgnoredRow + 1]rarely // by what it is
	malformed    rarely                         // changes of settings
	ownChanges   rarely                         // that were read
	otherChanges rarely
	wroteChanges rarely
	gaps         rarely // that were given up
	unlisted     rarely // sequences that wait: more than a checkpoint lists
	late         [reorder.Reset + 1]rarely
}

// rarelyEvery is how often one thing is logged at most that others can make happen as often as they like.
const rarelyEvery = time.Minute

// rarely logs one kind of thing: the first ones at once, then none until a minute has passed since the first.
// The next one says how many before it were not logged. It belongs to the loop's goroutine.
type rarely struct {
	first      time.Time // of the minute
	logged     int       // since then
	suppressed uint64    // likewise
}

// say logs one a minute.
func (r *rarely) say(log *slog.Logger, level slog.Level, what string, args ...any) {
	r.sayUpTo(1, log, level, what, args...)
}

// sayUpTo logs as many a minute.
func (r *rarely) sayUpTo(most int, log *slog.Logger, level slog.Level, what string, args ...any) {
	now := time.Now()
	over := now.Sub(r.first) >= rarelyEvery
	if !over && r.logged >= most {
		r.suppressed++
		return
	}
	if over {
		if r.suppressed > 0 {
			args = append(args, "not_logged", r.suppressed)
		}
		r.first, r.logged, r.suppressed = now, 0, 0
	}
	r.logged++
	log.Log(context.Background(), level, what, args...)
}

// rest logs how many were left out, once the minute is over.
func (r *rarely) rest(log *slog.Logger, what string) {
	if r.suppressed > 0 && time.Since(r.first) >= rarelyEvery {
		log.Warn(what, "not_logged", r.suppressed)
		r.suppressed = 0
	}
}
