package pipeline

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
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
		pr := w.running(options{registry: reg, log: &log})
		w.insert("d", "a:1")
		w.insert("d", "a:3")
		w.insert("d", "a:4")
		w.until(500*time.Millisecond, "the gap is shown", func() bool { return pr.p.Status().OpenGaps == 1 })
		gap := pr.p.Status().Gaps[0]
		if gap.Doc != "d" || gap.Actor != "a" || gap.Missing != "2" || gap.Waiting != 2 {
			t.Errorf("the gap is %+v", gap)
		}
		w.published() // the heartbeat that ends the wait is ours: nobody else writes
		w.until(time.Second, "the gap is gone", func() bool { return pr.p.Status().OpenGaps == 0 })
		if n := metric(t, reg, "gaps_given_up_total"); n != 1 {
			t.Errorf("%v gaps were given up", n)
		}
		if n := strings.Count(log.String(), "missing=2"); n != 1 {
			t.Errorf("the log names the gap %d times:\n%s", n, log.String())
		}
		w.insert("d", "a:2")
		w.published()
		w.until(time.Second, "it is late", func() bool { return metric(t, reg, "late_events_total") == 1 })
		w.wantSameStream()
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
