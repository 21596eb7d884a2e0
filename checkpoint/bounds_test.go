package checkpoint

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// busy runs a session for a long time, with a window every 10 ms and a marker now and then, and saves and
// confirms as the pipeline does. It returns the most checkpoints and events published ahead that were held or
// stored, and the greatest age of what was confirmed.
func busy(t *testing.T, durable time.Duration, taken, holds, windows int) (held, stored, listed int,
	lag time.Duration) {
	t.Helper()
	c := config
	c.DurableAfter = durable
	p := at(0x1000, 0, time.Hour)
	k := NewTracker(c, Start{Checkpoint: p.Checkpoint, Confirmed: p.Due, Checkpoints: []StoredCheckpoint{p}},
		epoch)
	now := epoch
	reached := map[outbox.LSN]time.Time{p.Due: epoch}
	var order []outbox.LSN
	largest := 0      // record, in bytes
	var ack time.Time // when the snapshot on its way will be acknowledged
	for i := range windows {
		now = now.Add(10 * time.Millisecond)
		due := outbox.LSN(0x2000 + 0x1000*i)
		if holds > 0 {
			due += 1 << 62
		}
		cp := relay.Checkpoint{Due: due, Settings: settings, Timeline: 1}
		for j := range taken {
			cp.PublishedAhead = append(cp.PublishedAhead, outbox.Position{LSN: due + 1 + outbox.LSN(j)})
		}
		if holds > 0 { // the oldest is held for a second
			cp.Settings, cp.From = gapSettings, due-0x1000*outbox.LSN(min(i, 100))-8
			for j := range holds { // as long as a hold's text can be
				cp.Holds = append(cp.Holds, relay.Hold{Sequence: uint64(j), Base: math.MinInt64,
					Oldest: outbox.Position{LSN: cp.From + 1, Index: math.MaxUint32 - 512 + uint32(j)}})
			}
		}
		k.Made(1)
		k.Window(cp)
		k.Acked(uint64(i + 1))
		if i%3 == 0 && taken == 0 && holds == 0 {
			k.Keepalive(relay.Checkpoint{Due: due + 0x100, Settings: settings, Timeline: 1})
		}
		reached[due], order = now, append(order, due)
		if !ack.IsZero() && !now.Before(ack) {
			k.Saved(now)
			ack = time.Time{}
		}
		if lsn := k.Confirmable(now); lsn > 0 {
			k.Confirmed(lsn)
			for len(order) > 0 && order[0] < lsn {
				delete(reached, order[0])
				order = order[1:]
			}
			if len(order) > 0 {
				lag = max(lag, now.Sub(reached[order[0]]))
			}
		}
		if in, ok := k.SaveIn(now); ok && in == 0 {
			s := k.BeginSave(now)
			if !slices.IsSortedFunc(s.Checkpoints, func(a, b StoredCheckpoint) int {
				return int(a.Due) - int(b.Due)
			}) {
				t.Fatal("checkpoints out of order")
			}
			n := 0
			for _, p := range s.Checkpoints {
				n += len(p.PublishedAhead) + len(p.Holds)
			}
			if doc, err := record(s.Checkpoints...).Encode(); err != nil || len(doc) > 1<<20*3/4 {
				t.Fatalf("a record of %d bytes, %v", len(doc), err)
			} else if len(doc) > largest {
				largest = len(doc)
			}
			stored, listed = max(stored, len(s.Checkpoints)), max(listed, n)
			ack = now.Add(25 * time.Millisecond)
		}
		held = max(held, len(k.checkpoints))
	}
	t.Logf("the largest record has %d bytes", largest)
	return held, stored, listed, lag
}

// The list is bounded by how many snapshots fit into durable_after, not by the number of windows.
func TestCheckpointsAreBoundedByDurableAfter(t *testing.T) {
	t.Parallel()
	for _, durable := range []time.Duration{0, 10 * time.Second, 150 * time.Second} {
		interval := max(time.Second, durable/32)
		bound := 3*int(durable/interval) + 10 // at most two newest and one of a smaller seq each time
		held, stored, _, lag := busy(t, durable, 0, 0, 40_000)
		t.Logf("durable_after %v: at most %d checkpoints held, %d stored, %v behind", durable, held,
			stored, lag)
		if held > bound {
			t.Errorf("durable_after %v: %d checkpoints held, want at most %d", durable, held, bound)
		}
		if lag > durable+3*interval {
			t.Errorf("durable_after %v: confirmed is %v behind", durable, lag)
		}
	}
}

// Nor does it grow where nothing is published and only markers come.
func TestCheckpointsAreBoundedWhereNothingIsPublished(t *testing.T) {
	t.Parallel()
	k := track(t, nil)
	k.window(0x2000, 1)
	k.Acked(6)
	held := 0
	for due := outbox.LSN(0x3000); due < outbox.LSN(tier.Size(0x10_0000)); due += 0x10 {
		k.marker(due)
		if in, ok := k.SaveIn(k.now); ok && in == 0 {
			k.store()
		}
		k.Confirmed(k.Confirmable(k.now))
		k.now = k.now.Add(time.Second)
		held = max(held, len(k.checkpoints))
	}
	t.Logf("at most %d checkpoints held", held)
	if held > 32+5 {
		t.Errorf("%d checkpoints held", held)
	}
}

// A record stays far below the size of a message, and confirming goes on, when each checkpoint lists as many
// events as it may.
func TestARecordStaysBelowTheSizeOfAMessage(t *testing.T) {
	t.Parallel()
	const durable = 150 * time.Second
	for _, c := range []struct{ taken, holds int }{{relay.MaxPublishedAhead, 0}, {0, relay.MaxHolds}} {
		held, stored, listed, lag := busy(t, durable, c.taken, c.holds, tier.Size(40_000))
		t.Logf("at most %d held, %d stored with %d taken events or holds, %v behind", held, stored,
			listed, lag)
		if listed > maxStoredAhead+4*relay.MaxPublishedAhead {
			t.Errorf("%d taken events or holds in a record", listed)
		}
		if lag > durable*5/4+time.Second { // the start lies a second behind the due
			t.Errorf("confirmed is %v behind", lag)
		}
	}
}
