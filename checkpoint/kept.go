package checkpoint

import (
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Kept is the WAL that a slot keeps for the sake of a home whose rows are read on this server: it could be
// confirmed if the home had confirmed its own.
type Kept struct {
	Bytes uint64 `json:"bytes"`
	// since when the oldest of it is kept for that reason alone; zero: nothing is
	Since time.Time `json:"since,omitzero"`
}

// longKept is more than a home takes that publishes: its watermarks come once a second.
const longKept = 15 * time.Minute

// Long reports whether WAL is kept for so long that the home has stopped, or is not heard.
func (k Kept) Long(now time.Time) bool { return !k.Since.IsZero() && now.Sub(k.Since) >= longKept }

// add takes a checkpoint of the record into account, in their order. It could be confirmed from free on.
func (k *Kept) add(p relay.Checkpoint, from *outbox.LSN, home outbox.LSN, free, now time.Time) {
	switch {
	case p.Published() <= home || *from == 0:
		*from = p.Start()
	case !free.After(now):
		if k.Since.IsZero() {
			k.Since = free.Round(0)
		}
		k.Bytes = outbox.Distance(*from, p.Start())
	}
}

// Kept returns what the session's slot keeps for the home's sake, when the broker was known to be alive.
func (t *Tracker) Kept(heard time.Time) (k Kept) {
	if t.limit == 0 {
		return k
	}
	var from outbox.LSN
	for i := range t.checkpoints {
		if p := &t.checkpoints[i]; p.state == inStore {
			k.add(p.Checkpoint, &from, t.limit, p.storedAt.Add(t.durable), heard)
		}
	}
	return k
}

// Kept returns what the record's slot keeps for the home's sake, by the clock that says now. durable is
// sink.durable_after.
func (r *Record) Kept(durable time.Duration, now time.Time) (k Kept) {
	home := r.Checkpoints[len(r.Checkpoints)-1].Home.LSN
	if home == 0 {
		return k
	}
	var from outbox.LSN
	for _, p := range r.Checkpoints {
		k.add(p.Checkpoint, &from, home, p.Since.Add(durable), now)
	}
	return k
}
