package pipeline

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

var wanted = relay.Settings{Horizon: 50 * time.Millisecond, Sort: outbox.ByCommit, MaxEvents: 500,
	MaxBytes: 1 << 20}

func foreign(horizon time.Duration) logical {
	s := defaults
	s.Horizon = horizon
	return logical{prefix: relay.SettingsPrefix, content: s.Content("outflow")}
}

// A session writes its settings once where others are in force, and again when it reads a change that is not
// its own.
func TestSettingsAreWrittenOnceWhereOthersAreInForce(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		w.running(options{settings: wanted})
		w.until(time.Second, "a change", func() bool { return len(w.pg.changes) == 1 })
		w.write(3)
		w.published()
		w.sleep(10 * time.Second)
		if len(w.pg.changes) != 1 || w.pg.changes[0] != wanted {
			t.Fatalf("changes: %v", w.pg.changes)
		}
		w.with(func() { w.pg.commit(nil, foreign(time.Millisecond)) })
		w.sleep(10 * time.Second)
		if len(w.pg.changes) != 2 || w.pg.changes[1] != wanted {
			t.Fatalf("changes: %v", w.pg.changes)
		}
		w.write(3)
		w.published()
		w.wantSameStream()
	})
}

func TestNoChangeOfTheSameSettings(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		w.running(options{})
		w.sleep(10 * time.Second)
		if len(w.pg.changes) != 0 {
			t.Errorf("changes: %v", w.pg.changes)
		}
	})
}

// While a change is on its way through the WAL no other is written: also when a foreign one that was there
// before is read.
func TestOneChangeOfSettingsIsUnderWayAtATime(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		w.with(func() {
			w.pg.delay = 300 * time.Millisecond
			w.pg.commit(nil, logical{prefix: "another", content: "x"})
		})
		w.run(options{settings: wanted})
		w.until(time.Second, "a start", func() bool { return len(w.started) == 1 })
		w.sleep(50 * time.Millisecond)
		w.with(func() { w.pg.commit(nil, foreign(time.Millisecond)) }) // before its own
		w.until(time.Minute, "a change", func() bool { return len(w.pg.changes) > 0 })
		w.sleep(10 * time.Second)
		if len(w.pg.changes) != 1 {
			t.Errorf("%d changes", len(w.pg.changes))
		}
	})
}

// It is not written before the WAL was read up to where it ended when the session started.
func TestChangeComesAfterCatchingUp(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		w.with(func() { w.pg.delay = 100 * time.Millisecond })
		w.write(10)
		w.with(func() {
			w.pg.commit(nil, logical{prefix: relay.SettingsPrefix, content: wanted.Content("outflow")})
		})
		w.run(options{settings: wanted})
		w.published()
		w.sleep(10 * time.Second)
		if len(w.pg.changes) != 0 {
			t.Errorf("changes: %v", w.pg.changes)
		}
	})
}

// A change that failed is tried again.
func TestAChangeOfSettingsThatFailedIsTriedAgain(t *testing.T) {
	for name, late := range map[string]bool{"not written": false, "written all the same": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
				w.pg.writeFails, w.pg.failsLate = 1, late
				w.running(options{settings: wanted})
				w.sleep(10 * time.Second)
				if late && len(w.pg.changes) > 1 || !late && len(w.pg.changes) != 1 {
					t.Errorf("changes: %v", w.pg.changes)
				}
				w.write(2)
				w.published()
				w.wantSameStream()
			})
		})
	}
}

// Whoever wants to know hears which settings are in force: those of the checkpoint at the start of a session,
// and each change that is read.
func TestTheSettingsInForceAreReported(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		var heard []relay.Settings
		pr := w.running(options{settings: wanted, inForce: func(s relay.Settings) {
			w.with(func() { heard = append(heard, s) })
		}})
		w.until(time.Second, "a change", func() bool { return len(heard) == 2 })
		if want := []relay.Settings{defaults, wanted}; !slices.Equal(heard, want) {
			t.Errorf("heard %v, want %v", heard, want)
		}
		if err := pr.stop(); err != nil {
			t.Error(err)
		}
	})
}

// Whoever changes the settings all the time neither stops the events nor makes the session write, log or take
// note of them as often.
func TestAFloodOfSettingsStopsNoEvents(t *testing.T) {
	for name, m := range map[string]logical{
		"changes":         foreign(10 * time.Millisecond),
		"unknown version": {prefix: relay.SettingsPrefix, content: "v=2 slot=outflow x"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
				reg := prometheus.NewRegistry()
				log, heard := new(strings.Builder), 0
				w.running(options{registry: reg, log: log, inForce: func(relay.Settings) {
					w.with(func() { heard++ })
				}})
				begun, lines := time.Now(), strings.Count(log.String(), "\n")
				for i := range 10_000 {
					if i%100 == 0 {
						w.write(1)
					}
					w.with(func() { w.pg.commit(nil, m) })
					w.sleep(time.Millisecond)
				}
				seconds := int(time.Since(begun).Seconds())
				if n := len(w.js.messages); n < 95 {
					t.Errorf("%d of 100 events published", n)
				}
				w.published()
				w.sleep(5 * time.Second)
				if n := len(w.pg.changes); n > seconds+2 {
					t.Errorf("%d changes written in %d s", n, seconds)
				}
				if heard > 12*seconds {
					t.Errorf("told %d times which settings are in force", heard)
				}
				if n := strings.Count(log.String(), "\n") - lines; n > 10 {
					t.Errorf("%d lines in the log", n)
				}
				name := "foreign_settings_total"
				if m.content[2] == '2' {
					name = "malformed_settings_total"
				}
				if got := metric(t, reg, name); got != 10_000 {
					t.Errorf("%s is %v", name, got)
				}
				w.wantSameStream()
			})
		})
	}
}
