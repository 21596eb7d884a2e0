package checkpoint

import (
	"bytes"
	"time"
)

// Unsaved notes that the last update is not in the record: its new checkpoints are stored with the next one.
// If it comes late all the same, that one is refused.
func (t *Tracker) Unsaved() {
	t.saving = false
	for i := range t.checkpoints {
		if p := &t.checkpoints[i]; p.state == sent {
			p.state = fresh
		}
	}
}

// Reconnected notes that the broker was away and is back, with everything that it had acknowledged. It may
// not have lived meanwhile, so each checkpoint is only as old as a start would take it for: by the times
// beside it, this process's clock and the broker's, which was asked at asked and said broker (zero: nothing).
func (t *Tracker) Reconnected(asked, broker, now time.Time) {
	t.asked, t.broker = asked, broker
	for i := range t.checkpoints {
		p := &t.checkpoints[i] // one that is not stored yet gets its time when it is
		stored := now.Add(-t.age(StoredCheckpoint{Since: p.since, Broker: p.broker}, now))
		if stored.After(p.storedAt) {
			p.storedAt = stored
		}
	}
}

// Is reports whether loaded, which [Store.Load] returned, is the record that was written as r, or that was
// loaded as r. The times of its newest checkpoints may be later then: see [Record.StoredAt].
func (r *Record) Is(loaded *Record) bool {
	if loaded == nil {
		return false
	}
	if r, loaded = r.AtHome(), loaded.AtHome(); len(loaded.Checkpoints) != len(r.Checkpoints) {
		return false
	}
	same := *loaded
	same.Checkpoints = append([]StoredCheckpoint(nil), loaded.Checkpoints...)
	if n := len(r.Checkpoints); n > 0 {
		added := r.Checkpoints[n-1].Since
		for i := n - 1; i >= 0 && r.Checkpoints[i].Since.Equal(added); i-- {
			p, wrote := &same.Checkpoints[i], r.Checkpoints[i]
			if p.Since.Before(wrote.Since) || p.Broker.Before(wrote.Broker) {
				return false
			}
			p.Since, p.Broker = wrote.Since, wrote.Broker
		}
	}
	a, err := r.Encode()
	if err != nil {
		return false
	}
	b, err := same.Encode()
	return err == nil && bytes.Equal(a, b)
}
