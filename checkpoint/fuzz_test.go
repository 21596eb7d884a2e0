package checkpoint

import (
	"errors"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// FuzzResolve starts from any record and any readings. No panic; an error is a fault that says what to do, or
// ErrStandby; a start is one that the rules allow, and the tracker and the check that go on from it take any
// further course.
func FuzzResolve(f *testing.F) {
	doc, err := record(at(0x1000, 5, 300*time.Second), on(1, at(0x2000, 9, 200*time.Second)),
		at(0x3000, 12, 10*time.Second)).Encode()
	if err != nil {
		f.Fatal(err)
	}
	holed := record(at(0x1000, 5, 300*time.Second), at(0x3000, 12, 10*time.Second))
	holed.Holes = []Range{{7, 8}, {10, 10}}
	withHoles, err := holed.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(doc, uint64(12), uint64(12), uint64(0x1000), uint64(0x5000), uint64(0x3000), uint64(0))
	f.Add(doc, uint64(12), uint64(10), uint64(0x1000), uint64(0x5000), uint64(0x2800), uint64(0))
	f.Add(doc, uint64(7), uint64(7), uint64(0x3000), uint64(0x5000), uint64(0x1800), uint64(0x2000))
	f.Add(withHoles, uint64(12), uint64(0), uint64(0x1000), uint64(0x5000), uint64(0), uint64(0))
	gap, err := record(at(0x1000, 5, 300*time.Second), holding(at(0x2000, 9, 200*time.Second), 0x1800, 4),
		holding(at(0x3000, 12, 10*time.Second), 0x1800, 7)).Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(gap, uint64(12), uint64(12), uint64(0x1800), uint64(0x5000), uint64(0x3000), uint64(0))
	f.Add(gap, uint64(12), uint64(8), uint64(0x1800), uint64(0x5000), uint64(0x2800), uint64(0))
	f.Add(gap, uint64(12), uint64(9), uint64(0x1000), uint64(0x5000), uint64(0x2000), uint64(0x2800))
	f.Fuzz(func(t *testing.T, doc []byte, last, newest, confirmed, end, thru, left uint64) {
		rec, err := Decode(doc)
		if err != nil {
			return
		}
		r := readings()
		r.Record = rec
		r.Slot.Confirmed, r.Server.WALEnd = outbox.LSN(confirmed), outbox.LSN(end)
		r.Stream.LastSeq, r.Stream.NewestSeq, r.Stream.Newest = last, min(newest, last), nil
		if r.Stream.NewestSeq > 0 {
			r.Stream.Newest = &outbox.Header{Pos: outbox.Position{LSN: outbox.LSN(thru / 2)}, Of: 1,
				Due: outbox.LSN(thru), Thru: outbox.LSN(thru), Timeline: 1}
		}
		if left > 0 {
			r.Server.History = promoted(outbox.LSN(left))
		}
		start, err := Resolve(config, r)
		if err != nil {
			if fault := outbox.FaultOf(err); !errors.Is(err, ErrStandby) &&
				(fault == nil || fault.Code == "" || fault.Hint == "" || fault.From > fault.To) {
				t.Fatalf("%v (%+v)", err, fault)
			}
			return
		}
		switch {
		case len(start.Checkpoints) == 0:
			t.Fatal("a start without a checkpoint")
		case start.Checkpoint.Start() < start.Confirmed:
			t.Fatalf("from %v, below what is confirmed, %v", start.Checkpoint.Start(), start.Confirmed)
		case start.Checkpoint.Seq > start.End || start.End > start.LastSeq ||
			start.AlreadyStored > start.End-start.Checkpoint.Seq:
			t.Fatalf("%d messages to be made again from sequence %d to %d, the last is %d",
				start.AlreadyStored, start.Checkpoint.Seq, start.End, start.LastSeq)
		}
		now := epoch
		tracker, check := NewTracker(config, start, now), NewTailCheck(config, start)
		for i := range min(start.AlreadyStored, 50) + 3 {
			lsn := start.Checkpoint.Due + outbox.LSN(i) + 1
			if lsn < start.Checkpoint.Due || check.Input(lsn) != nil {
				return
			}
			skip, err := check.Skip(&outbox.Header{Pos: outbox.Position{LSN: lsn}, Of: 1, Due: lsn,
				Thru: lsn})
			if err != nil {
				return
			}
			if skip == (i >= start.AlreadyStored) {
				t.Fatalf("message %d of %d: skip %t", i+1, start.AlreadyStored, skip)
			}
			tracker.Made(1)
			tracker.Window(relay.Checkpoint{Due: lsn, Settings: start.Checkpoint.Settings, Timeline: 1})
			if got := tracker.Confirmable(now); got > start.Checkpoints[len(start.Checkpoints)-1].Due &&
				got > start.Confirmed {
				t.Fatalf("%v may be confirmed, and nothing was acknowledged", got)
			}
		}
		tracker.Acked(start.LastSeq + 3)
		if _, err := rec.With(tracker.BeginSave(now), r.Publication, r.Server.WALEnd).Encode(); err != nil {
			t.Fatalf("what follows can't be stored: %v", err)
		}
	})
}
