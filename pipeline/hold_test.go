package pipeline

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// poisoned starts a process that holds a fault: a row that can't be published.
func (w *harness) poisoned(o options) *process {
	w.t.Helper()
	o.hold = true
	pr := w.running(o)
	w.write(5)
	w.published()
	w.with(func() {
		w.js.poison = "poison"
		w.pg.commit([]row{{"d", "a", "k", "poison"}})
	})
	w.write(5)
	w.until(time.Minute, "the fault", func() bool { return pr.p.Status().Fault != nil })
	return pr
}

// The slot is free while a fault is held, and nothing behind it is published by any attempt to start. With
// the cause gone it goes on by itself.
func TestAFaultIsHeldUntilItsCauseIsGone(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		var log bytes.Buffer
		told, found := 0, time.Time{}
		pr := w.poisoned(options{log: &log, failed: func(f *outbox.Fault, since time.Time) {
			if told++; told == 1 {
				found = time.Now()
			}
			if f.Code != "too_large" || w.pg.active != nil || !since.Equal(found) {
				t.Errorf("told of %v since %v, while the slot is held: %t", f, since, w.pg.active != nil)
			}
		}})
		first := pr.p.Status().Fault
		for range 600 {
			w.sleep(time.Second)
			s := pr.p.Status()
			if s.State != StateFault || s.Ready() || !s.Alive(time.Now()) || s.Fault.Code != "too_large" ||
				s.Fault.Hint == "" || strings.Contains(s.Fault.Message, s.Fault.Hint) ||
				s.Fault.Since != first.Since || s.Since != first.Since {
				t.Fatalf("%+v, %+v", s, s.Fault)
			}
		}
		synctest.Wait()
		if n := len(pr.opens); n != told || n < 19 || n > 22 || len(w.js.messages) != 5 {
			t.Errorf("%d sessions, told %d times, %d messages", n, told, len(w.js.messages))
		}
		for line, want := range map[string]int{"level=ERROR": 1, "code=too_large class=poison": 1,
			"session started": 1} {
			if n := strings.Count(log.String(), line); n != want {
				t.Errorf("%q %d times in the log", line, n)
			}
		}
		w.with(func() { w.js.poison = "" })
		w.published()
		w.until(time.Second, "the fault is gone", func() bool { return pr.p.Status().Fault == nil })
		if s := pr.p.Status(); s.State != StateRunning || s.Fault != nil || s.Error != "" {
			t.Errorf("%+v", s)
		}
		w.wantSameStream()
		must.Succeed(t, pr.stop())
	})
}

// A row that can't be published stands right behind one that was repaired: that is another fault, with its
// own line at level error and its own time.
func TestTheNextFaultOfACodeIsAnotherOne(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		var log bytes.Buffer
		var found []time.Time
		pr := w.running(options{hold: true, log: &log, failed: func(_ *outbox.Fault, since time.Time) {
			found = append(found, since)
		}})
		w.with(func() {
			w.js.poison = "one"
			w.pg.commit([]row{{"d", "a", "k1", "one"}, {"d", "a", "k2", "two"}})
		})
		w.until(time.Minute, "the first fault", func() bool { return pr.p.Status().Fault != nil })
		first := *pr.p.Status().Fault
		w.with(func() { w.js.poison = "two" })
		w.until(3*HoldPause, "the second fault", func() bool {
			return pr.p.Status().Fault.Message != first.Message
		})
		w.sleep(3 * HoldPause)
		synctest.Wait()
		if n := strings.Count(log.String(), "level=ERROR"); n != 2 {
			t.Errorf("%d lines at level error: %s", n, log.String())
		}
		if second := pr.p.Status().Fault; second.Code != first.Code || !second.Since.After(first.Since) ||
			!second.Since.Equal(found[len(found)-1]) {
			t.Errorf("%+v after %+v, told %v", second, first, found)
		}
	})
}

func TestAFaultThatIsHeldIsTriedWhenAskedFor(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		retry := make(chan struct{}, 1)
		pr := w.poisoned(options{retry: retry})
		w.with(func() { w.js.poison = "" })
		retry <- struct{}{}
		w.until(time.Second, "it runs", func() bool { return pr.p.Status().State == StateRunning })
	})
}

func TestAStopWhileAFaultIsHeldReturnsTheFault(t *testing.T) {
	for name, cut := range map[string]bool{"between attempts": false, "while NATS is away": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
				pr := w.poisoned(options{})
				if cut {
					w.with(func() { w.js.down = time.Now().Add(time.Hour) })
					w.sleep(2 * HoldPause)
				}
				if err := pr.stop(); outbox.ClassOf(err) != outbox.Poison {
					t.Errorf("%v", err)
				}
				if s := pr.p.Status(); s.State != StateStopped || s.Fault == nil {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// Two outflows hold the same fault: the one's attempts to start do not make the other a standby. When one of
// them publishes again, the other is its standby.
func TestBothOutflowsHoldAFault(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		one := w.poisoned(options{})
		two := w.run(options{hold: true})
		w.until(time.Minute, "both hold it", func() bool { return two.p.Status().Fault != nil })
		w.with(func() { w.js.latency = 300 * time.Millisecond }) // attempts take their time, and meet
		for range 3000 {
			w.sleep(100 * time.Millisecond)
			for i, pr := range []*process{one, two} {
				if s := pr.p.Status(); s.State != StateFault {
					t.Fatalf("%d: %+v", i, s)
				}
			}
		}
		w.with(func() { w.js.poison = "" })
		w.published()
		w.until(3*HoldPause, "one publishes, one stands by", func() bool {
			a, b := one.p.Status(), two.p.Status()
			return a.Ready() && b.Ready() && (a.State == StateStandby) != (b.State == StateStandby)
		})
	})
}

// unsaved is a store that refuses to write.
type unsaved struct {
	Store
	refuses *atomic.Bool
}

func (s unsaved) Save(ctx context.Context, r *checkpoint.Record, revision uint64) (uint64, error) {
	if s.refuses.Load() {
		return 0, errors.New("refused")
	}
	return s.Store.Save(ctx, r, revision)
}

// A fault that was seen to happen, of which nothing is left to be seen and which the record does not say, is
// held nevertheless; and recorded as soon as that is possible.
func TestAFaultThatIsNotRecordedIsHeld(t *testing.T) {
	inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
		var refuses atomic.Bool
		pr := w.running(options{hold: true, open: func(c *Conns) { c.Store = unsaved{c.Store, &refuses} }})
		w.write(3)
		w.published()
		w.sleep(5 * time.Second)
		was := w.pg.identity
		refuses.Store(true)
		w.with(func() { w.pg.identity.Hidden = &outbox.Fault{Code: "publication_partition"} })
		w.write(1)
		w.until(time.Minute, "the fault", func() bool { return pr.p.Status().Fault != nil })
		w.with(func() { w.pg.identity = was })
		for _, recorded := range []string{"", "publication_changed"} {
			refuses.Store(recorded == "")
			w.sleep(5 * time.Minute)
			if s := pr.p.Status(); s.State != StateFault || s.Fault.Code != "publication_changed" ||
				w.record().Stopped != recorded || len(w.js.messages) > 4 {
				t.Errorf("%+v; the record says %q", s, w.record().Stopped)
			}
		}
	})
}
