package pipeline

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// gapSettings wait ten seconds for a missing counter.
var gapSettings = relay.Settings{
	Sort: outbox.ByGap, MaxEvents: 1000, MaxBytes: 1 << 20,
	Gap: relay.Gap{Bound: 10 * time.Second, Cold: 5 * time.Millisecond, Memory: 100, First: 1},
}

func TestAnOpenGapIsShownAndGivenUpOnce(t *testing.T) {
	inBubble(t, gapSettings, 0, func(t *testing.T, w *harness) {
		var log strings.Builder
		reg := prometheus.NewRegistry()
		w.js.gaps = "of a process that was killed"
		pr := w.running(options{registry: reg, log: &log})
		w.insert("d", "a:1")
		w.until(10*time.Second, "its names are gone", func() bool { return w.js.gaps == "[]" })
		w.insert("d", "a:3")
		w.insert("d", "a:4")
		w.until(500*time.Millisecond, "the gap is shown", func() bool { return pr.p.Status().OpenGaps == 1 })
		gap := pr.p.Status().Gaps[0]
		if gap.Doc != "d" || gap.Actor != "a" || gap.Missing != "2" || gap.Waiting != 2 {
			t.Errorf("the gap is %+v", gap)
		}
		w.until(10*time.Second, "its name is beside the record", func() bool {
			return strings.Contains(w.js.gaps, `"doc_id":"d","actor_id":"a"`) &&
				strings.Contains(w.js.gaps, `"missing":"2"`)
		})
		w.published() // the heartbeat that ends the wait is ours: nobody else writes
		w.until(time.Second, "the gap is gone", func() bool { return pr.p.Status().OpenGaps == 0 })
		w.until(10*time.Second, "its name is gone", func() bool { return w.js.gaps == "[]" })
		if n := metric(t, reg, "gaps_given_up_total"); n != 1 {
			t.Errorf("%v gaps were given up", n)
		}
		if n := strings.Count(log.String(), "missing=2"); n != 1 {
			t.Errorf("the log names the gap %d times:\n%s", n, log.String())
		}
		w.insert("d", "a:2")
		w.published()
		w.until(time.Second, "it is late", func() bool { return metric(t, reg, "late_events_total") == 1 })
		w.insert("d", "a:3")
		w.insert("d", "a:1")
		w.until(time.Second, "a repeat and a reset are counted", func() bool {
			return metric(t, reg, "late_events_total") == 3 && metric(t, reg, "gap_repeats_total") == 1 &&
				metric(t, reg, "gap_resets_total") == 1
		})
		for _, counter := range []string{"counter=2", "counter=3", "counter=1"} {
			if n := strings.Count(log.String(), "doc_id=d actor_id=a "+counter); n != 1 {
				t.Errorf("the log names %s %d times:\n%s", counter, n, log.String())
			}
		}
		w.published()
		w.wantSameStream()
	})
}

func TestTheLogNamesAllThatIsGivenUpAndLateUpToALimit(t *testing.T) {
	set := gapSettings
	set.Gap.Memory = 1000
	inBubble(t, set, 0, func(t *testing.T, w *harness) {
		var log strings.Builder
		w.running(options{log: &log})
		round := func(begin, n int, counter string) {
			for i := range n {
				w.insert(fmt.Sprint("d", begin+i), counter)
			}
			w.published()
			w.sleep(2 * time.Second)
		}
		named := func(what string, want int) {
			t.Helper()
			if n := strings.Count(log.String(), what); n != want {
				t.Errorf("the log says %s %d times, not %d:\n%s", what, n, want, log.String())
			}
		}
		round(0, 100, "a:1")
		round(0, gapLines-2, "a:3")
		round(0, gapLines-2, "a:2")
		named("reason=bound", gapLines-2)
		named("a counter came that was waited for no longer", gapLines-2)
		named("not_logged", 0)
		round(50, 50, "a:3")
		named("reason=bound", gapLines)
		w.sleep(rarelyEvery)
		named("more gaps were given up than the log names\" component=pipeline not_logged=48", 1)
		round(0, 1, "a:5")
		named("reason=bound", gapLines+1)
		named("not_logged", 1)
		w.wantSameStream()
	})
}

func TestMoreWaitsThanACheckpointListsAreTold(t *testing.T) {
	set := gapSettings
	set.Gap.Bound, set.Gap.Cold = time.Hour, time.Hour
	inBubble(t, set, 0, func(t *testing.T, w *harness) {
		var log strings.Builder
		pr := w.running(options{log: &log})
		for i := range relay.MaxHolds {
			w.insert(fmt.Sprint("d", i), "a:3")
		}
		w.until(time.Second, "all wait", func() bool { return pr.p.Status().OpenGaps == relay.MaxHolds })
		w.sleep(2 * unlistedFor)
		if since := pr.p.Status().Unlisted; !since.IsZero() {
			t.Errorf("no checkpoint lists them since %v", since)
		}
		recorded := w.record().Checkpoints
		w.insert("d", "a:3")
		w.until(time.Second, "the status says so", func() bool { return !pr.p.Status().Unlisted.IsZero() })
		w.sleep(unlistedFor + 2*time.Second)
		if n := strings.Count(log.String(), "open_gaps=513"); n != 1 {
			t.Errorf("the log says so %d times:\n%s", n, log.String())
		}
		if now := w.record().Checkpoints; now[len(now)-1].Due != recorded[len(recorded)-1].Due {
			t.Errorf("a checkpoint at %v is recorded", now[len(now)-1].Due)
		}
		w.insert("d", "a:1")
		w.insert("d", "a:2")
		w.until(time.Second, "a checkpoint lists them again", func() bool {
			return pr.p.Status().Unlisted.IsZero()
		})
	})
}

func TestAHeldEventOfTheLastSessionIsReleasedWithoutTraffic(t *testing.T) {
	inBubble(t, gapSettings, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.insert("d", "a:1")
		w.insert("d", "a:3")
		w.until(5*time.Second, "a checkpoint holds it", func() bool {
			all := w.record().Checkpoints
			return len(all[len(all)-1].Holds) == 1
		})
		pr.kill()
		w.running(options{})
		w.published()
		w.wantSameStream()
	})
}

// Nothing that is read again says how late it is at the server: a heartbeat is written at once, not only when
// the event has waited once more.
func TestAWaitThatEndedWhileOutflowWasDownEndsAtTheStart(t *testing.T) {
	set := gapSettings
	set.Gap.Bound = 10 * time.Minute
	inBubble(t, set, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.insert("d", "a:1")
		w.insert("d", "a:3")
		w.sleep(8 * time.Minute) // all before the held event is confirmed
		pr.kill()
		w.sleep(5 * time.Minute)
		w.running(options{})
		w.until(time.Second, "it is released", func() bool { return len(w.js.messages) == 2 })
		w.published()
		w.wantSameStream()
	})
}

// A server that reads a large transaction sends nothing for long, heartbeats neither: more are no use.
func TestFewHeartbeatsAreWrittenThatNobodyReads(t *testing.T) {
	inBubble(t, gapSettings, 0, func(t *testing.T, w *harness) {
		w.running(options{})
		w.insert("d", "a:1")
		w.insert("d", "a:3")
		w.sleep(time.Second)
		w.pg.delay = time.Minute
		w.sleep(40 * time.Second)
		if n := len(w.pg.ticks); n == 0 || n > 40 {
			t.Errorf("%d heartbeats", n)
		}
		w.pg.delay = 0
		w.published()
		w.wantSameStream()
	})
}

func TestAStartThatReadsALargeMemoryIsAlive(t *testing.T) {
	inBubble(t, gapSettings, 0, func(t *testing.T, w *harness) {
		w.js.recall = stalled + 20*time.Second
		pr := w.run(options{})
		for range 3 {
			w.sleep(stalled / 2)
			if s := pr.p.Status(); s.State != StateConnecting || !s.Alive(time.Now()) {
				t.Fatalf("%+v", s)
			}
		}
		w.sleep(w.js.recall - stalled)
		if s := pr.p.Status(); s.State != StateRunning || !s.Alive(time.Now()) {
			t.Errorf("%+v", s)
		}
	})
}

func TestMemoryThatWasRemovedEndsInAGap(t *testing.T) {
	inBubble(t, gapSettings, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		for _, key := range []string{"a:1", "a:2", "a:3", "a:4"} {
			w.insert("d", key)
		}
		w.published()
		w.until(10*time.Second, "a checkpoint remembers them", func() bool {
			all := w.record().Checkpoints
			return all[len(all)-1].Remembered == 4
		})
		if err := pr.stop(); err != nil {
			t.Fatal(err)
		}
		w.js.removed = 2
		if f := w.run(options{}).ends(time.Minute); f == nil || f.Code != codeMemoryLost ||
			f.Class != outbox.Gap {
			t.Errorf("ended with %+v", f)
		}
	})
}

// TestEachReasonOfAGapIsCounted: whatever has ended a wait is a series of its own, and documented.
func TestEachReasonOfAGapIsCounted(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	m := newMetrics(reg)
	m.addGaps(reorder.GapCounts{Bound: 1, Cold: 2, Size: 3, Settings: 4, Cut: 5})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		if f.GetName() != "gaps_given_up_total" {
			continue
		}
		for _, s := range f.GetMetric() {
			reason := s.GetLabel()[0].GetValue()
			got[reason] = s.GetCounter().GetValue()
			if !strings.Contains(f.GetHelp(), "("+reason+")") {
				t.Errorf("%q does not say what %s is", f.GetHelp(), reason)
			}
		}
	}
	if want := map[string]float64{"bound": 1, "cold": 2, "size": 3, "settings": 4, "cut": 5}; !maps.Equal(got,
		want) {
		t.Errorf("counted %v, want %v", got, want)
	}
}
