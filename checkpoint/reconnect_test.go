package checkpoint

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// What was on its way into the record when the broker went, and is not there, is stored with the next
// snapshot.
func TestWhatDidNotReachTheRecordIsStoredWithTheNext(t *testing.T) {
	t.Parallel()
	k := track(t, nil)
	k.window(0x2000, 3)
	k.Acked(8)
	k.BeginSave(k.now)
	k.window(0x3000, 2)
	k.Acked(10)
	k.want("pending while it is stored", k.Pending(), false)
	k.Unsaved()
	k.now = k.now.Add(time.Hour)
	k.want("confirmable", k.Confirmable(k.now), "0/1000")
	s := k.BeginSave(k.now)
	k.want("what was new is of now, what was stored is as old as it was",
		fmt.Sprint(k.now.Sub(s.Checkpoints[0].Since), k.now.Sub(s.Checkpoints[1].Since)), "2h0m0s 0s")
	k.Unsaved()
	k.want("stored", k.store(), "0/1000:5 0/2000:8 0/3000:10")
	k.want("confirmable at once", k.Confirmable(k.now), "0/1000")
	k.want("confirmable later", k.Confirmable(k.now.Add(config.DurableAfter)), "0/3000")

	k = track(t, nil)
	k.window(0x2000, 3)
	k.Acked(8)
	k.BeginSave(k.now)
	k.Unsaved()
	k.want("pending without anything more", k.Pending(), true)
}

// After the broker was away a checkpoint is as old as a start would take it for, and never older than it was.
func TestACheckpointIsNotYoungerAfterTheBrokerWasAway(t *testing.T) {
	t.Parallel()
	const old = 200 * time.Second
	for name, c := range map[string]struct {
		age    time.Duration // of the checkpoint, by this process's clock
		broker time.Duration // what the broker's clock says, from epoch; below 0: nothing
		wall   time.Duration // what this machine's clock says, against its monotonic one
		want   outbox.LSN
	}{
		"as before":               {old, old, 0, 0x2000},
		"the broker says less":    {old, old - 60*time.Second, 0, 0x1000},
		"this clock was set back": {old, old, -60 * time.Second, 0x1000},
		"both say more":           {old / 2, 2 * old, time.Hour, 0x1000},
		"the broker says nothing": {old, -1, 0, 0x2000},
	} {
		k := track(t, func(s *Start) { s.Asked, s.Broker = epoch, epoch })
		k.window(0x2000, 3)
		k.Acked(8)
		k.store()
		k.now = epoch.Add(c.age)
		broker := time.Time{}
		if c.broker >= 0 {
			broker = epoch.Add(c.broker)
		}
		for i := range k.checkpoints { // as if the wall clock had been set
			if k.checkpoints[i].state == inStore {
				k.checkpoints[i].since = k.checkpoints[i].since.Add(-c.wall)
			}
		}
		k.Reconnected(k.now, broker, k.now)
		k.want(name, k.Confirmable(k.now), c.want)
		k.want(name+", at the latest", k.Confirmable(k.now.Add(config.DurableAfter)), "0/2000")
	}
}

func TestARecordThatWasStoredLateIsTheSame(t *testing.T) {
	t.Parallel()
	wrote := func() *Record {
		r := record(at(0x1000, 5, 300*time.Second), at(0x2000, 9, 10*time.Second),
			at(0x3000, 12, 10*time.Second))
		r.Checkpoints[2].Broker = epoch.Add(-10 * time.Second)
		return r
	}
	for name, c := range map[string]struct {
		change func(r *Record) *Record
		want   bool
	}{
		"the same":    {func(r *Record) *Record { return r }, true},
		"stored late": {func(r *Record) *Record { r.StoredAt(epoch); return r }, true},
		"none":        {func(*Record) *Record { return nil }, false},
		"earlier": {func(r *Record) *Record {
			r.Checkpoints[2].Since = r.Checkpoints[2].Since.Add(-1)
			return r
		}, false},
		"an old one later": {func(r *Record) *Record { r.Checkpoints[0].Since = epoch; return r },
			false},
		"another sequence": {func(r *Record) *Record { r.Checkpoints[2].Seq++; return r }, false},
		"one less": {func(r *Record) *Record { r.Checkpoints = r.Checkpoints[1:]; return r },
			false},
		"a hole": {func(r *Record) *Record { r.Holes = []Range{{6, 7}}; return r }, false},
		"stopped": {func(r *Record) *Record { r.Stopped = "foreign_message"; return r },
			false},
		"another seen publication": {func(r *Record) *Record { r.Publication.Seen++; return r }, false},
		"earlier by the broker": {func(r *Record) *Record {
			r.Checkpoints[2].Broker = r.Checkpoints[2].Broker.Add(-1)
			return r
		}, false},
	} {
		r, loaded := wrote(), c.change(wrote())
		before := fmt.Sprint(r, loaded)
		if got := r.Is(loaded); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
		if fmt.Sprint(r, loaded) != before {
			t.Errorf("%s: they were changed", name)
		}
	}
	// none to compare, and none older
	for _, r := range []*Record{record(), record(at(0x1000, 5, time.Second), at(0x2000, 5, time.Second))} {
		r.Creating = len(r.Checkpoints) == 0
		loaded := *r
		loaded.Checkpoints = slices.Clone(r.Checkpoints)
		if loaded.StoredAt(epoch); !r.Is(&loaded) {
			t.Errorf("a record of %d checkpoints is another one", len(r.Checkpoints))
		}
	}
}
