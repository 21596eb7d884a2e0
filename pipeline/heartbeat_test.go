package pipeline

import (
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func TestOneHeartbeatAfterOneHorizon(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		w.running(options{})
		w.sleep(time.Second)
		begun := time.Now()
		w.write(1)
		w.published()
		w.sleep(10 * time.Second)
		if n := len(w.pg.ticks); n != 1 {
			t.Fatalf("%d ticks", n)
		}
		if d := w.pg.ticks[0].Sub(begun); d < 20*time.Millisecond || d > 25*time.Millisecond {
			t.Errorf("the tick came after %v", d)
		}
		w.wantSameStream()
	})
}

func TestNoHeartbeatWhileInputsComeIn(t *testing.T) {
	inBubble(t, relay.Settings{Horizon: 100 * time.Millisecond, MaxEvents: 1000, MaxBytes: 1 << 20}, 0,
		func(t *testing.T, w *harness) {
			w.running(options{})
			var last time.Time
			for range 40 { // less than half a horizon apart: they close each other's windows
				w.write(1)
				last = time.Now()
				w.sleep(30 * time.Millisecond)
			}
			if n := len(w.pg.ticks); n != 0 {
				t.Errorf("%d ticks while inputs came in", n)
			}
			w.published()
			if n := len(w.pg.ticks); n == 0 || w.pg.ticks[0].Sub(last) < 50*time.Millisecond {
				t.Errorf("ticks at %v, the last input at %v", w.pg.ticks, last)
			}
			w.wantSameStream()
		})
}

// What is no input closes no window: however much of it others write, an event is published a horizon later.
func TestHeartbeatWhileOthersWrite(t *testing.T) {
	for name, m := range map[string]logical{
		"another prefix":     {prefix: "another", content: "x"},
		"malformed settings": {prefix: relay.SettingsPrefix, content: "v=2 slot=outflow x"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, relay.Settings{Horizon: 100 * time.Millisecond, MaxEvents: 1000, MaxBytes: 1 << 20},
				0,
				func(t *testing.T, w *harness) {
					w.running(options{})
					w.write(1)
					begun := time.Now()
					for len(w.js.messages) == 0 && time.Since(begun) < 5*time.Second {
						w.with(func() { w.pg.commit(nil, m) })
						w.sleep(5 * time.Millisecond)
					}
					if d := time.Since(begun); d > 200*time.Millisecond {
						t.Errorf("published after %v", d)
					}
					w.wantSameStream()
				})
		})
	}
}

// A heartbeat that is slow to come back is followed by another one, one horizon later at the earliest.
func TestOneHeartbeatPerHorizon(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		w.running(options{})
		w.write(1)
		w.sleep(5 * time.Millisecond)
		w.with(func() { w.pg.delay = 300 * time.Millisecond })
		w.published()
		if n := len(w.pg.ticks); n < 5 {
			t.Errorf("%d ticks", n)
		}
		for i := 1; i < len(w.pg.ticks); i++ {
			if d := w.pg.ticks[i].Sub(w.pg.ticks[i-1]); d < 20*time.Millisecond {
				t.Errorf("two ticks within %v", d)
			}
		}
	})
}

// Before a session is proved it writes nothing, however long it holds events.
func TestNoHeartbeatBeforeTheTailCheck(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		pr := w.running(options{settings: defaults})
		for range 5 {
			w.write(4)
			w.published()
			w.sleep(1500 * time.Millisecond)
		}
		pr.kill()
		w.until(time.Minute, "the slot is free", func() bool { return w.pg.active == nil })
		w.with(func() { w.pg.delay = 200 * time.Millisecond })
		ticks := len(w.pg.ticks)
		other := defaults
		other.Horizon = 10 * time.Millisecond
		pr = w.run(options{settings: other})
		w.until(time.Minute, "comparing", func() bool { return pr.p.Status().State == StateComparing })
		begun := time.Now()
		w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
		if d := time.Since(begun); d < 100*time.Millisecond {
			t.Fatalf("proved after %v: too soon to show anything", d)
		}
		if len(w.pg.ticks) != ticks || len(w.pg.changes) != 0 {
			t.Errorf("%d ticks, %d changes of settings before the proof", len(w.pg.ticks)-ticks,
				len(w.pg.changes))
		}
	})
}

func TestWithoutHeartbeatsNothingIsWritten(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		w.running(options{noHeartbeats: true})
		w.write(1)
		w.sleep(10 * time.Second)
		if len(w.pg.ticks) != 0 || len(w.js.messages) != 0 {
			t.Errorf("%d ticks, %d messages", len(w.pg.ticks), len(w.js.messages))
		}
		w.with(func() { w.pg.commit(nil, logical{prefix: relay.HeartbeatPrefix}) }) // somebody else's
		w.published()
		w.wantSameStream()
	})
}

// A heartbeat that could not be written is tried again a second later, and drops no session.
func TestAHeartbeatThatFailedIsTriedAgain(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.with(func() { w.pg.writeFails = 2 })
		begun := time.Now()
		w.write(1)
		w.published()
		if d := time.Since(begun); d < 2*time.Second || d > 2500*time.Millisecond || len(pr.opens) != 1 {
			t.Errorf("published after %v in %d sessions", d, len(pr.opens))
		}
	})
}

// While a heartbeat is being written, the loop waits for it and for nothing else; no second one is asked for.
func TestASlowHeartbeatHoldsUpNothing(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.with(func() { w.pg.writeDelay = 3 * time.Second })
		w.write(1)
		w.sleep(time.Second)
		var rounds int
		w.with(func() { rounds = pr.broker().pub.rounds })
		w.sleep(time.Second)
		w.with(func() { rounds = pr.broker().pub.rounds - rounds })
		if rounds > 20 {
			t.Errorf("the loop went round %d times in a second with nothing to do", rounds)
		}
		w.published()
		if len(w.pg.ticks) != 1 {
			t.Errorf("%d ticks", len(w.pg.ticks))
		}
	})
}

// Where nothing is held nothing is remembered of what came in.
func TestReceiveTimesAreForgotten(t *testing.T) {
	first := relay.Settings{MaxEvents: 1000, MaxBytes: 1 << 20}
	inBubble(t, first, 0, func(t *testing.T, w *harness) {
		pr := &process{w: w, pg: w.pg}
		pr.writer = &writer{pr}
		w.mu.Unlock()
		defer w.mu.Lock()
		conns, err := pr.open(t.Context(), options{})
		must.Succeed(t, err)
		defer conns.Close()
		cp := relay.Checkpoint{Settings: first, Timeline: timeline}
		s := newSession(t.Context(), New(Config{Scratch: memory{}}), conns, checkpoint.Readings{},
			checkpoint.Start{
				Checkpoint: cp, Checkpoints: []checkpoint.StoredCheckpoint{{Checkpoint: cp}},
			}, nil, 0)
		defer s.close()
		for i := range 3000 {
			s.in.lastData = time.Now()
			must.Succeed(t, s.buffer.Append(&relay.Event{Doc: "d", Actor: "a", Key: "k"}))
			if err := s.in.commit(&relay.Commit{LSN: outbox.LSN(i + 1), Kind: relay.Events,
				Events: 1}); err != nil {
				t.Fatal(err)
			}
			must.Succeed(t, s.closeWindow())
			if s.out.window != nil {
				for more := true; more; {
					more, err = s.out.window.Next(&s.out.event)
					must.Succeed(t, err)
				}
				s.windowDone()
			}
			time.Sleep(2 * time.Millisecond)
		}
		if n := cap(s.in.received.queue); n > 64 {
			t.Errorf("room for %d times", n)
		}
	})
}
