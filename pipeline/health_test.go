package pipeline

import (
	"errors"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// How much waits, and since when at most, is known through an outage of NATS, also to a process that is
// started in it. A standby leaves that to the active process.
func TestWhatWaitsIsKnownInAnOutage(t *testing.T) {
	inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
		// what the watcher does beside the pipeline
		status := func(pr *process) Status {
			w.with(func() {
				slot := relay.SlotState{Active: w.pg.active != nil, Confirmed: w.pg.confirmed}
				pr.p.Watched(w.pg.end, slot, time.Now())
			})
			return pr.p.Status()
		}
		pr := w.running(options{})
		w.write(3)
		w.published()
		standby := w.run(options{})
		w.until(time.Minute, "standby", func() bool { return standby.p.Status().State == StateStandby })
		w.sleep(time.Minute)
		if s := status(standby); s.Age(time.Now())+s.Lag(time.Now()) != 0 || s.Published != 0 || s.Holds() {
			t.Errorf("standby: %+v", s)
		} else if _, known := s.Unpublished(); known {
			t.Error("a standby says how much is not published")
		}
		standby.kill()

		w.cutBroker(pr, 3*time.Minute, true)
		w.sleep(10 * time.Second)
		if s := status(pr); s.Age(time.Now())+s.Lag(time.Now()) != 0 {
			t.Errorf("nothing was written since NATS failed: %+v", s)
		}
		begun := time.Now()
		w.write(5)
		wants := func(pr *process, state State) {
			t.Helper()
			s := status(pr)
			n, _ := s.Unpublished()
			if age := s.Age(time.Now()); s.State != state || n == 0 || age < time.Since(begun) ||
				age > time.Since(begun)+time.Second {
				t.Errorf("%s: %d bytes wait for %v, written %v ago: %+v", state, n, age, time.Since(begun), s)
			}
		}
		w.sleep(10 * time.Second)
		wants(pr, StateAway)
		w.sleep(time.Minute)
		wants(pr, StateWaiting)
		pr.kill()
		pr = w.run(options{})
		w.sleep(10 * time.Second)
		s := status(pr)
		if n, _ := s.Unpublished(); n == 0 {
			t.Error("a process that was started in the outage does not know that anything waits")
		}
		w.until(10*time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
		w.published()
		w.sleep(10 * time.Second)
		s = status(pr)
		if n, known := s.Unpublished(); n != 0 || !known || s.Age(time.Now()) != 0 ||
			s.Lag(time.Now()) > idleInterval {
			t.Errorf("all is published again: %+v", s)
		}
	})
}

// The lag of a process goes on where the last one's was: one that is started again and again shows it.
func TestLagSurvivesARestart(t *testing.T) {
	var h health
	h.init()
	if s := h.snapshot(); s.Lag(time.Now()) != 0 {
		t.Errorf("lag %v before anything was read", s.Lag(time.Now()))
	}
	now := time.Now()
	r := checkpoint.Readings{Server: relay.ServerState{WALEnd: 3000}, Record: &checkpoint.Record{
		Checkpoints: []checkpoint.StoredCheckpoint{
			{Checkpoint: relay.Checkpoint{Due: 1000}, Since: now.Add(-2 * time.Hour)},
			{Checkpoint: relay.Checkpoint{Due: 2000}, Since: now.Add(-time.Hour)},
		}}}
	h.read(&r, now)
	s := h.snapshot()
	if n, _ := s.Unpublished(); n != 1000 || s.Lag(now) != time.Hour || s.Age(now) != time.Hour {
		t.Errorf("%d bytes are not published, lag %v, age %v", n, s.Lag(now), s.Age(now))
	}
	r.Server.WALEnd = 2000
	h.read(&r, now)
	if s := h.snapshot(); s.Lag(now) != 0 {
		t.Errorf("lag %v, and all is published", s.Lag(now))
	}
}

// Under a steady load something is always held or in flight. What counts is whether what was there at the
// last look is published.
func TestLagUnderASteadyLoadIsThatOfTheLastLook(t *testing.T) {
	var h health
	h.init()
	now := time.Now()
	h.snap.CaughtUp = now.Add(-time.Hour)
	for i := range 10 {
		end := outbox.LSN(1000 * (i + 1))
		h.watched(end, &relay.SlotState{}, now)
		h.setGauges(&gauges{held: 1, received: end + 500, published: end + 100},
			now.Add(100*time.Millisecond))
		if s := h.snapshot(); s.Lag(now) != 0 {
			t.Fatalf("look %d: lag %v", i, s.Lag(now))
		}
		now = now.Add(2 * time.Second)
	}
}

// Who says nothing may have written something: an idle loop is not up to date for as long as the server is
// silent.
func TestLagGrowsWhileTheServerIsSilent(t *testing.T) {
	var h health
	h.init()
	now := time.Now()
	h.read(&checkpoint.Readings{Server: relay.ServerState{WALEnd: 1000}}, now)
	idle := &gauges{idle: true, received: 1000, published: 1000}
	for after, lag := range map[time.Duration]time.Duration{monitorInterval: 0, time.Hour: time.Hour} {
		h.snap.CaughtUp = now
		h.setGauges(idle, now.Add(after))
		if s := h.snapshot(); s.Lag(now.Add(after)) != lag {
			t.Errorf("lag %v, %v after the last reading", s.Lag(now.Add(after)), after)
		}
	}
}

// With a long horizon what one look sees is published only after the next look.
func TestLagOfALongHorizonIsThatOfALookThatWasReached(t *testing.T) {
	var h health
	h.init()
	now := time.Now()
	h.snap.CaughtUp = now
	for i := range 10 {
		end := outbox.LSN(1000 * (i + 1))
		h.watched(end, &relay.SlotState{}, now)
		h.setGauges(&gauges{held: 1, received: end, published: end - 500}, now)
		if s := h.snapshot(); s.Lag(now) > 2*monitorInterval {
			t.Fatalf("look %d: lag %v", i, s.Lag(now))
		}
		now = now.Add(monitorInterval)
	}
}

// TestTheCodeOfAnErrorIsThatOfItsFault: it goes when the error does.
func TestTheCodeOfAnErrorIsThatOfItsFault(t *testing.T) {
	h := &health{}
	h.init()
	for _, c := range []struct {
		state State
		err   error
		want  string
	}{
		{StateAway, &outbox.Fault{Code: "no_storage", Message: "m"}, "no_storage"},
		{StateWaiting, nil, "no_storage"},
		{StateWaiting, errors.New("x"), ""},
		{StateAway, &outbox.Fault{Code: "nats_lost"}, "nats_lost"},
		{StateWaiting, &outbox.Fault{Code: "stream_missing", Class: outbox.Gap}, ""},
		{StateRunning, nil, ""},
	} {
		if h.set(c.state, c.err); h.snapshot().Code != c.want {
			t.Errorf("%v after %v: %q", c.state, c.err, h.snapshot().Code)
		}
	}
}
