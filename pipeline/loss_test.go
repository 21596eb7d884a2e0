package pipeline

import (
	"context"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// stopped is a state in which two windows were published and recorded, and nothing runs.
func stopped(t *testing.T, w *harness) {
	t.Helper()
	pr := w.running(options{})
	for range 3 {
		w.write(3)
		w.published()
		w.sleep(1200 * time.Millisecond)
	}
	must.Succeed(t, pr.stop())
}

// What shows a loss counts only when a recheck, on new connections, agrees.
func TestLossIsReadTwice(t *testing.T) {
	for name, c := range map[string]struct {
		replicated bool
		wait       time.Duration
		hole       bool
	}{
		"one server": {false, 5 * time.Second, false},
		"replicated": {true, 15 * time.Second, false},
		"hole":       {false, 5 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
				stopped(t, w)
				w.js.replicated = c.replicated
				if c.hole {
					w.js.messages[7], w.js.messages[8] = nil, nil
				} else {
					w.js.messages = w.js.messages[:7]
				}
				revisions := len(w.js.revisions)
				pr := w.running(options{})
				if n := len(pr.opens); n != 2 {
					t.Fatalf("%d sessions", n)
				}
				if d := pr.opens[1].Sub(pr.opens[0]); d < c.wait || d > c.wait+100*time.Millisecond {
					t.Errorf("read again after %v", d)
				}
				if len(w.js.revisions) == revisions {
					t.Error("the record was not written before the start")
				}
				w.until(time.Minute, "published", func() bool {
					return len(w.js.messages) == 9+2*b2i(c.hole)
				})
				w.wantSameStream()
			})
		})
	}
}

// Where the server that holds the stream is not the one that outflow is connected to, it can crash and come
// back without its end while the connection stays: then it is the look at the stream that notices.
func TestLossWithoutADisconnect(t *testing.T) {
	inBubble(t, defaults, 30*time.Second, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		for range 2 {
			w.write(3)
			w.published()
			w.sleep(1200 * time.Millisecond)
		}
		w.with(func() { w.js.messages = w.js.messages[:4] })
		w.until(time.Minute, "published again", func() bool { return len(w.js.messages) == 6 })
		if n := len(pr.opens); n < 3 {
			t.Errorf("%d sessions: a loss is read twice", n)
		}
		w.wantSameStream()
	})
}

// The same where the count does not go back.
func TestMissingMessagesWithoutADisconnect(t *testing.T) {
	inBubble(t, defaults, 30*time.Second, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		for range 2 {
			w.write(3)
			w.published()
			w.sleep(1200 * time.Millisecond)
		}
		w.with(func() { w.js.messages[4], w.js.messages[5] = nil, nil })
		w.until(time.Minute, "published again", func() bool { return len(w.js.messages) == 8 })
		w.sleep(time.Minute)
		if n := len(pr.opens); n < 3 || n > 4 {
			t.Errorf("%d sessions: a loss is read twice, and then it is over", n)
		}
		w.wantSameStream()
	})
}

// A stream that keeps the newest message of each subject only may never show its newest one while it is
// published to. That is no reason to start again, and what is stored becomes durable all the same.
func TestStreamThatMovesTooFast(t *testing.T) {
	inBubble(t, defaults, 10*time.Second, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.with(func() { w.js.moving = true })
		for range 10 {
			w.write(3)
			w.published()
			w.sleep(3 * time.Second)
		}
		if n := len(pr.opens); n != 1 {
			t.Errorf("%d sessions", n)
		}
		w.sleep(15 * time.Second)
		if s := pr.p.Status(); s.Confirmed < s.Published {
			t.Errorf("confirmed %v, published %v", s.Confirmed, s.Published)
		}
		w.wantSameStream()
	})
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// A reading that is not confirmed has no consequence.
func TestLossThatWasNone(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		stopped(t, w)
		all := w.js.messages
		w.js.messages = all[:7:7]
		checkpoints, revisions := len(w.record().Checkpoints), len(w.js.revisions)
		pr := w.run(options{})
		w.until(time.Minute, "a first reading", func() bool {
			return len(pr.opens) == 1 && pr.p.Status().State == StateWaiting
		})
		w.with(func() { w.js.messages = all })
		w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
		if len(w.js.messages) != 9 || len(w.js.revisions) != revisions ||
			len(w.record().Checkpoints) != checkpoints {
			t.Errorf("%d messages, %d new records", len(w.js.messages), len(w.js.revisions)-revisions)
		}
		w.write(3)
		w.published()
		w.wantSameStream()
	})
}

// Gaps end the run with the recheck, faults of the set-up with the first.
func TestFaultsOfTheStart(t *testing.T) {
	for name, c := range map[string]struct {
		do    func(w *harness)
		class outbox.Class
		code  string
		wait  time.Duration
	}{
		"slot lost": {func(w *harness) { w.pg.slot = relay.SlotState{} }, outbox.Gap, "slot_missing",
			5 * time.Second},
		"slot moved": {func(w *harness) { w.pg.grow(w.pg.end + 5000); w.pg.confirmed = w.pg.end },
			outbox.Gap, "slot_ahead", 5 * time.Second},
		"stream lost": {func(w *harness) { w.js.exists = false }, outbox.Gap, "stream_missing",
			5 * time.Second},
		"stream made anew": {func(w *harness) { w.js.created = time.Now() }, outbox.Gap, "stream_recreated",
			5 * time.Second},
		"replicated": {func(w *harness) { w.js.created, w.js.replicated = time.Now(), true },
			outbox.Gap, "stream_recreated", 15 * time.Second},
		"record lost": {func(w *harness) { w.js.revisions = nil }, outbox.Gap, "record_missing",
			5 * time.Second},
		"server from a copy": {func(w *harness) { w.pg.end -= 2000 }, outbox.Gap, "server_behind",
			5 * time.Second},
		"nothing there": {func(w *harness) {
			w.js.revisions, w.js.exists, w.pg.slot = nil, false, relay.SlotState{}
		}, outbox.Fatal, "not_initialised", 0},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
				stopped(t, w)
				w.with(func() { c.do(w) })
				pr := w.run(options{})
				f := pr.ends(time.Minute)
				if f == nil || f.Class != c.class || f.Code != c.code {
					t.Fatalf("ended with %v", pr.err)
				}
				if d := pr.opens[len(pr.opens)-1].Sub(pr.opens[0]); d < c.wait || d > c.wait+time.Second {
					t.Errorf("%d sessions in %v", len(pr.opens), d)
				}
				if pr.p.Status().State != StateStopped {
					t.Error(pr.p.Status().State)
				}
			})
		})
	}
}

// A gap that goes away before the recheck is none; a later one starts from the first reading again.
func TestGapThatWasNone(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		stopped(t, w)
		w.js.exists = false
		pr := w.run(options{})
		w.until(time.Minute, "a first reading", func() bool {
			return len(pr.opens) == 1 && pr.p.Status().State == StateWaiting
		})
		if code := pr.p.Status().Code; code != "" {
			t.Errorf("%s before it counts", code)
		}
		w.with(func() { w.js.exists = true })
		w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
		w.with(func() {
			w.js.exists = false
			pr.broker().cut(true)
		})
		again := time.Now()
		if f := pr.ends(time.Minute); f == nil || f.Code != "stream_missing" ||
			time.Since(again) < 5*time.Second {
			t.Errorf("ended after %v with %v", time.Since(again), pr.err)
		}
	})
}

// A clean reading takes back what the one before it showed, also where the process only becomes a standby.
func TestStandbyForgetsALoss(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		owner := w.running(options{})
		w.write(3)
		w.published()
		w.with(func() { w.js.exists = false })
		standby := w.run(options{})
		w.until(time.Minute, "a first reading", func() bool {
			return standby.p.Status().State == StateWaiting
		})
		w.with(func() { w.js.exists = true })
		w.until(time.Minute, "standby", func() bool { return standby.p.Status().State == StateStandby })
		w.sleep(time.Hour)
		w.with(func() { w.js.exists = false })
		owner.kill()
		w.until(time.Minute, "a new reading", func() bool { return len(standby.opens) == 3 })
		again := time.Now()
		if f := standby.ends(time.Minute); f == nil || f.Code != "stream_missing" ||
			time.Since(again) < 5*time.Second {
			t.Errorf("ended after %v with %v", time.Since(again), standby.err)
		}
	})
}

// Two readings that show different losses do not agree.
func TestReadingsOfDifferentLossesDoNotAgree(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		stopped(t, w)
		w.js.messages = w.js.messages[:7:7]
		pr := w.run(options{})
		w.until(time.Minute, "a first reading", func() bool {
			return len(pr.opens) == 1 && pr.p.Status().State == StateWaiting
		})
		w.with(func() { w.js.messages = w.js.messages[:6:6] })
		w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
		if n := len(pr.opens); n != 3 || pr.opens[2].Sub(pr.opens[1]) < 5*time.Second {
			t.Errorf("%d sessions", n)
		}
		w.published()
		w.wantSameStream()
	})
}

// Where the checkpoint moved while the slot was taken over, everything is read anew.
func TestCheckpointMovesDuringTakeover(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		first := w.running(options{})
		for range 3 {
			w.write(3)
			w.published()
			w.sleep(4 * time.Minute) // a record each
		}
		must.Succeed(t, first.stop())
		messages, revisions := w.js.messages, w.js.revisions
		for i, r := range revisions { // as it was while the last owner was still at work
			rec, err := checkpoint.Decode(r.doc)
			must.Succeed(t, err)
			if rec.Checkpoints[len(rec.Checkpoints)-1].Seq == 6 {
				w.js.messages, w.js.revisions = messages[:6:6], revisions[:i+1:i+1]
				break
			}
		}
		pr := w.running(options{open: func(l *Conns) {
			l.Source = &starting{l.Source.(*postgresConn), func() {
				w.js.messages, w.js.revisions = messages,
					revisions
			}}
		}})
		if n := len(pr.opens); n != 2 {
			t.Errorf("%d sessions", n)
		}
		w.write(3)
		w.published()
		w.wantSameStream()
	})
}

// starting does something when replication starts.
type starting struct {
	*postgresConn
	do func()
}

func (s *starting) Start(ctx context.Context, from outbox.LSN, binary bool) error {
	s.lock()
	s.do()
	s.unlock()
	return s.postgresConn.Start(ctx, from, binary)
}

// A stream that was emptied is read twice at each start anew: what one session was told is no recheck for the
// next.
func TestAnEmptiedStreamIsReadTwiceAtEachStart(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		stopped(t, w)
		w.js.removed = len(w.js.messages)
		pr := w.running(options{})
		if n := len(pr.opens); n != 2 {
			t.Errorf("%d sessions", n)
		}
		pr.broker().cut(true)
		w.sleep(time.Millisecond)
		w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
		if n := len(pr.opens); n != 4 {
			t.Errorf("%d sessions", n)
		}
		w.write(3)
		w.published()
		w.wantSameStream()
	})
}
