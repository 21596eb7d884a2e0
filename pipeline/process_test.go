package pipeline

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/prometheus/client_golang/prometheus"
)

// A second process waits, is ready, and takes over when the slot is free.
func TestAStandbyTakesOverWhenTheSlotIsFree(t *testing.T) {
	for name, kill := range map[string]bool{"after a kill": true, "after a stop": false} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
				owner := w.running(options{})
				w.write(5)
				standby := w.run(options{})
				w.until(time.Second, "standby", func() bool {
					return standby.p.Status().State == StateStandby
				})
				w.sleep(time.Minute)
				s := standby.p.Status()
				if s.State != StateStandby || !s.Ready() || !s.Alive(time.Now()) || len(standby.opens) != 1 ||
					len(w.started) != 1 {
					t.Fatalf("%+v, %d sessions, %d starts", s, len(standby.opens), len(w.started))
				}
				w.write(5)
				if kill {
					owner.kill()
				} else if err := owner.stop(); err != nil {
					t.Error(err)
				}
				w.until(time.Minute, "the slot is free", func() bool {
					return w.pg.active == nil || w.pg.active == standby.postgres()
				})
				free := time.Now()
				w.until(time.Minute, "running", func() bool {
					return standby.p.Status().State == StateRunning
				})
				if d := w.started[1].at.Sub(free); d > 250*time.Millisecond {
					t.Errorf("taken over after %v", d)
				}
				w.write(5)
				w.published()
				w.wantSameStream()
			})
		})
	}
}

// A run whose time is up stops as one that is told to.
func TestStopWhenTimeIsUp(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		pr := w.running(options{limit: 30 * time.Second})
		for range 2 { // the next record is due in minutes
			w.write(3)
			w.published()
		}
		w.until(time.Minute, "the end", pr.over)
		checkpoints := w.record().Checkpoints
		if seq := checkpoints[len(checkpoints)-1].Seq; pr.err != nil || seq != uint64(len(w.js.messages)) {
			t.Errorf("%v, recorded up to %d of %d", pr.err, seq, len(w.js.messages))
		}
		w.wantSameStream()
	})
}

// A standby that is told to stop stops.
func TestAStandbyThatIsToldToStopStops(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		w.running(options{})
		standby := w.run(options{})
		w.until(time.Second, "standby", func() bool { return standby.p.Status().State == StateStandby })
		begun := time.Now()
		if err := standby.stop(); err != nil || time.Since(begun) > time.Second {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	})
}

// A clean stop: what is in flight is acknowledged, the newest checkpoint is recorded, the last confirmation
// goes out, replication ends in order.
func TestAStopLeavesNothingInFlight(t *testing.T) {
	inBubble(t, relay.Settings{MaxEvents: 1000, MaxBytes: 1 << 20}, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.write(1)
		w.sleep(20 * time.Millisecond)
		w.with(func() { w.js.latency = 500 * time.Millisecond })
		w.write(100)
		w.until(time.Second, "everything is sent", func() bool { return pr.broker().pub.last == 101 })
		if n := len(w.js.messages); n != 1 {
			t.Fatalf("%d messages are there too soon", n)
		}
		begun := time.Now()
		must.Succeed(t, pr.stop())
		if d := time.Since(begun); d < 900*time.Millisecond || d > 3*time.Second {
			t.Errorf("it took %v", d)
		}
		end := w.pg.wal[len(w.pg.wal)-1].end
		checkpoints := w.record().Checkpoints
		if top := checkpoints[len(checkpoints)-1]; len(w.js.messages) != 101 || top.Seq != 101 ||
			top.Due != end {
			t.Errorf("%d messages, the newest checkpoint is %v, %d, the WAL ends at %v", len(w.js.messages),
				top.Due, top.Seq, end)
		}
		if w.stops != 1 || w.pg.confirmed != end || w.pg.active != nil {
			t.Errorf("%d ended in order, confirmed %v of %v", w.stops, w.pg.confirmed, end)
		}
		if s := pr.p.Status(); s.State != StateStopped || s.Ready() || s.Alive(time.Now()) {
			t.Errorf("%+v", s)
		}
		w.wantSameStream()
	})
}

// What does not come within the stop timeout is not waited for.
func TestAStopWaitsNoLongerThanItsTimeout(t *testing.T) {
	inBubble(t, relay.Settings{MaxEvents: 1000, MaxBytes: 1 << 20}, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{stop: 3 * time.Second})
		w.write(10)
		w.published()
		w.with(func() { w.js.paused = time.Now().Add(time.Hour) })
		w.write(10)
		w.sleep(100 * time.Millisecond)
		begun := time.Now()
		if err := pr.stop(); err != nil {
			t.Error(err)
		}
		if d := time.Since(begun); d < 2900*time.Millisecond || d > 3100*time.Millisecond {
			t.Errorf("it took %v", d)
		}
		if w.stops != 1 {
			t.Error("replication did not end in order")
		}
		w.with(func() { w.js.paused = time.Time{} })
		w.sleep(time.Hour)
		w.running(options{})
		w.published()
		w.wantSameStream()
	})
}

// A stop before anything is connected, and one in the middle of a start, end at once.
func TestAStopDuringAStartEndsAtOnce(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		for i := range 40 {
			pr := w.run(options{})
			w.sleep(time.Duration(i) * 150 * time.Microsecond)
			begun := time.Now()
			if err := pr.stop(); err != nil || time.Since(begun) > 50*time.Millisecond {
				t.Errorf("stopped after %d: %v after %v", i, err, time.Since(begun))
			}
		}
		w.with(func() { w.pg.down = time.Now().Add(time.Hour) })
		pr := w.run(options{})
		w.sleep(10 * time.Second)
		begun := time.Now()
		if err := pr.stop(); err != nil || time.Since(begun) > 50*time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	})
}

// The pauses between sessions lie between 50 and 400 ms, and grow.
func TestPausesBetweenSessionsGrow(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		for range 3 { // a proved session begins them anew
			n, cut := len(pr.opens), time.Now()
			w.with(func() {
				w.pg.down = time.Now().Add(time.Minute)
				pr.postgres().cut(true)
			})
			w.sleep(time.Minute)
			opens := pr.opens[n:]
			if d := opens[0].Sub(cut); d > 102*time.Millisecond {
				t.Errorf("the first attempt after %v", d)
			}
			if len(opens) < 60_000/405 {
				t.Errorf("%d attempts in a minute", len(opens))
			}
			for i := 1; i < len(opens); i++ {
				d := opens[i].Sub(opens[i-1]) - time.Millisecond // opening takes one
				if d < 50*time.Millisecond || d > 400*time.Millisecond || i > 3 && d < 150*time.Millisecond {
					t.Errorf("pause %d: %v", i, d)
				}
			}
			w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
			if d := pr.opens[len(pr.opens)-1].Sub(w.pg.down); d > 401*time.Millisecond {
				t.Errorf("connected after %v", d)
			}
		}
	})
	for attempt := range 100 {
		for range 100 {
			if d := backoff(attempt, rand.N); d < backoffMin || d > backoffMax || attempt == 0 &&
				d > 2*backoffMin {
				t.Fatalf("attempt %d: %v", attempt, d)
			}
		}
	}
}

// The states and what probes make of them.
func TestProbesSeeTheStateOfTheSession(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		stopped(t, w)
		w.with(func() {
			w.pg.down = time.Now().Add(time.Second)
			w.pg.delay = 100 * time.Millisecond
		})
		pr := w.run(options{})
		if s := pr.p.Status(); s.Ready() || !s.Alive(time.Now()) {
			t.Errorf("%+v", s)
		}
		w.until(time.Second, "waiting", func() bool { return pr.p.Status().State == StateWaiting })
		if s := pr.p.Status(); s.Ready() || !s.Alive(time.Now()) || s.Error != errDown.Error() {
			t.Errorf("%+v", s)
		}
		w.until(time.Minute, "comparing", func() bool { return pr.p.Status().State == StateComparing })
		w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
		w.sleep(time.Minute)
		if s := pr.p.Status(); !s.Ready() || !s.Alive(time.Now()) || s.Error != "" ||
			s.Lag(time.Now()) > time.Second {
			t.Errorf("%+v", s)
		}
		w.with(func() { w.js.down = time.Now().Add(time.Hour) })
		w.with(func() { pr.broker().cut(true) })
		w.until(time.Second, "not ready", func() bool {
			s := pr.p.Status()
			return !s.Ready() && s.Error != ""
		})
		for range 25 {
			if s := pr.p.Status(); s.State != StateAway || s.Ready() || !s.Alive(time.Now()) ||
				s.Lag(time.Now()) > time.Minute {
				t.Errorf("%+v", s)
			}
			w.sleep(time.Second)
		}
		if s := pr.p.Status(); s.Lag(time.Now()) < 24*time.Second {
			t.Errorf("lag %v while the broker is away", s.Lag(time.Now()))
		}
		w.until(10*time.Second, "waiting", func() bool { return pr.p.Status().State == StateWaiting })
		w.sleep(time.Minute)
		if s := pr.p.Status(); s.Ready() || !s.Alive(time.Now()) || s.Lag(time.Now()) < time.Minute {
			t.Errorf("%+v; an outage of the broker is no hanging process", s)
		}
	})
}

// A loop that hangs is not alive.
func TestALoopThatHangsIsNotAlive(t *testing.T) {
	now := time.Now()
	for state, alive := range map[State]bool{StateRunning: false, StateComparing: false, StateAway: false,
		StateStandby: true, StateWaiting: false, StateStopped: false} {
		s := Status{State: state, Since: now.Add(-time.Minute), beat: now.Add(-time.Minute)}
		if s.Alive(now) != alive {
			t.Errorf("%s: alive %t", state, !alive)
		}
	}
}

func TestTheMetricsAreThoseOfTheSession(t *testing.T) {
	inBubble(t, defaults, time.Second, func(t *testing.T, w *harness) {
		reg := prometheus.NewRegistry()
		pr := w.running(options{registry: reg})
		w.write(12)
		w.published()
		w.sleep(time.Second)
		w.with(func() { pr.postgres().cut(true) })
		w.until(time.Minute, "a second session", func() bool {
			return len(pr.opens) == 2 && pr.p.Status().State == StateRunning
		})
		w.with(func() {
			w.pg.commit(nil, logical{prefix: relay.SettingsPrefix, content: "v=1 slot=outflow horizon=soon"})
		})
		w.insert("friendsforever", "a:000001") // late: its window is gone
		w.published()
		w.sleep(10 * time.Second)
		payload := 0
		for _, x := range w.pg.wal {
			for _, r := range x.rows {
				payload += len(r.payload)
			}
		}
		for name, want := range map[string]float64{
			"events_published_total": 13, "sent_bytes_total": float64(payload), "connect_attempts_total": 2,
			"sessions_total": 2, "failures_total": 1,
			"commit_to_ack_seconds": 13, "ticks_total": float64(len(w.pg.ticks)), "tick_errors_total": 0,
			"malformed_settings_total": 1, "late_events_total": 1,
		} {
			if got := metric(t, reg, name); got != want {
				t.Errorf("%s is %v, want %v", name, got, want)
			}
		}
		s := pr.p.Status()
		if n, known := s.Unpublished(); n != 0 || !known || s.Held != 0 || s.HeldBytes != 0 ||
			s.InFlight != 0 || s.InFlightBytes != 0 || s.Received != w.pg.end || s.Published != w.pg.end ||
			s.Confirmed != w.pg.confirmed || s.Age(time.Now()) != 0 || s.Lag(time.Now()) > idleInterval {
			t.Errorf("all is published: %+v", s)
		}
		w.with(func() { w.js.paused = time.Now().Add(4 * time.Second) })
		w.write(5)
		w.sleep(3 * time.Second)
		s = pr.p.Status()
		if n, age := s.Held+s.InFlight, s.Age(time.Now()).Seconds(); n != 5 || age < 2.9 || age > 3.1 {
			t.Errorf("%v events unpublished for %v s", n, age)
		}
		if got := s.Lag(time.Now()).Seconds(); got < 2.5 || got > 3.5 {
			t.Errorf("lag %v s", got)
		}
	})
}

// A lost connection is noticed at once, also where nothing is in flight. It ends the session, which closes
// the other one; that to PostgreSQL is kept for a while.
func TestALostConnectionIsNoticedAtOnce(t *testing.T) {
	for name, cut := range map[string]func(pr *process){
		"broker":   func(pr *process) { pr.broker().cut(true) },
		"postgres": func(pr *process) { pr.postgres().cut(true) },
	} {
		kept := 0
		if name == "broker" {
			kept = 1
		}
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
				pr := w.running(options{})
				w.sleep(time.Second)
				for range 20 {
					cut(pr)
					w.sleep(time.Millisecond)
					if s := pr.p.Status(); s.State == StateRunning || len(w.brokerConns()) > 0 ||
						len(w.postgresConns()) != kept {
						t.Fatalf("%s, %d connections to the broker, %d to the server", s.State,
							len(w.brokerConns()), len(w.postgresConns()))
					}
					w.write(1)
					w.published()
					w.until(time.Minute, "running", func() bool {
						return pr.p.Status().State == StateRunning
					})
					w.sleep(13 * time.Millisecond)
				}
				w.wantSameStream()
			})
		})
	}
}
