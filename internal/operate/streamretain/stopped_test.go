package streamretain

import (
	"testing"
	"time"
	"unsafe"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// TestTheFactsAreReadAgain: what has changed since they were read first counts.
func TestTheFactsAreReadAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	url := w.database()
	w.publish(50)
	w.confirm(50)
	w.stored(url, "public", "texts", 40)
	at := func(point string, do func()) {
		w.o.Hit = func(p string) {
			if p == point {
				do()
			}
		}
	}
	at("stream.verified", func() { w.stored(url, "public", "texts", 10) })
	if r, err := w.run(true); err != nil || r.GoesTo != 9 || w.first() != 10 {
		t.Fatalf("%+v, %v", r, err)
	}
	w.stored(url, "public", "texts", 40)
	at("stream.verified", func() {
		w.repair = "slot_missing"
		w.confirm(50)
	})
	if r, err := w.run(true); err != nil || r.GoesTo != 0 || w.first() != 10 {
		t.Fatalf("%+v, %v", r, err)
	}
	w.repair = ""
	w.confirm(50)
	at("stream.verified", func() {
		must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
		var err error
		w.s, err = w.js.CreateStream(t.Context(), streamConfig(1))
		must.Succeed(t, err)
		w.publish(50)
	})
	_, err := w.run(true)
	w.wantFault(err, "stream_recreated")
	if w.first() != 1 {
		t.Errorf("the new stream begins at %d", w.first())
	}
	w.o.Hit = nil
	w.goes(0, "the checkpoint record is of another stream")
}

// TestAnApplyThatSleptReadsTheFactsAgain: a process that somebody stopped right before the purge, or with the
// whole machine, must not go by what was true then, and one that never gets that far in time removes nothing.
func TestAnApplyThatSleptReadsTheFactsAgain(t *testing.T) {
	t.Parallel()
	for _, suspended := range []bool{false, true} {
		w := newWorld(t, natstest.Server(t).URL(), 1)
		url := w.database()
		w.publish(50)
		w.confirm(50)
		w.stored(url, "public", "texts", 40)
		var slept time.Duration
		w.o.now = func() time.Time {
			now := time.Now().Add(slept)
			if suspended { // then the monotonic clock stands still, which is in the second field
				(*[2]int64)(unsafe.Pointer(&now))[1] -= int64(slept)
			}
			return now
		}
		w.o.Hit = func(point string) {
			if point == "stream.checked" && slept == 0 {
				slept = time.Hour
				w.stored(url, "public", "texts", 10)
			}
		}
		if r, err := w.run(true); err != nil || r.GoesTo != 9 || w.first() != 10 {
			t.Fatalf("suspended %v: %+v, %v, and the stream begins at %d", suspended, r, err, w.first())
		}
		w.stored(url, "public", "texts", 40)
		w.o.Hit = func(string) { slept += time.Hour }
		if r, err := w.run(true); err == nil || r.GoesTo != 0 || w.first() != 10 {
			t.Fatalf("suspended %v: %+v, %v, and the stream begins at %d", suspended, r, err, w.first())
		}
	}
}

// TestAKillAtAnyStepLosesNothing: killed at each point and run again, the same has gone as without a kill.
func TestAKillAtAnyStepLosesNothing(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"stream.verified", "stream.checked", "stream.purged"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, natstest.Server(t).URL(), 1)
			w.cfg.Archive.URL = "file://" + t.TempDir()
			w.publish(30)
			w.confirm(20)
			w.archived()
			w.o.Hit = func(p string) {
				if p == point {
					panic("killed")
				}
			}
			killed := func() (killed bool) {
				defer func() { killed = recover() != nil }()
				_, err := w.run(true)
				must.Succeed(t, err)
				return false
			}()
			if !killed {
				t.Fatal("it was not killed")
			}
			w.o.Hit = nil
			if point == "stream.purged" {
				w.goes(0)
			} else {
				w.goes(20)
			}
			if w.first() != 21 {
				t.Errorf("the stream begins at %d", w.first())
			}
			w.archived() // there is no gap
		})
	}
}
