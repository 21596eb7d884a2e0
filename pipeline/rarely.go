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

// rarely logs one kind of thing: the first one at once, then one a minute at most, with the number of those
// before it that were not logged. It belongs to the loop's goroutine.
type rarely struct {
	logged     time.Time // last
	suppressed uint64    // since then
}

func (r *rarely) say(log *slog.Logger, level slog.Level, what string, args ...any) {
	now := time.Now()
	if now.Sub(r.logged) < rarelyEvery {
		r.suppressed++
		return
	}
	if r.suppressed > 0 {
		args = append(args, "not_logged", r.suppressed)
	}
	log.Log(context.Background(), level, what, args...)
	r.logged, r.suppressed = now, 0
}
