package pipeline

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// intruded lets a stranger publish when a session's publisher begins: what the stream held has been read, and
// nothing is sent yet.
type intruded struct{ JetStream }

func (b intruded) Publisher(last, lost, fence uint64) Publisher {
	l := b.JetStream.(*brokerConn)
	l.lock()
	l.js.intrude()
	l.unlock()
	return b.JetStream.Publisher(last, lost, fence)
}

// noticed makes sure that the process ends by the stranger, having gone on in no way, and that the next one
// stops as well, also when his message was removed.
func (w *harness) noticed(pr *process) {
	w.t.Helper()
	w.until(time.Minute, "the end", func() bool { return pr.over() || w.js.resumed > 0 })
	f := outbox.FaultOf(pr.err)
	if f == nil || f.Code != "foreign_message" || f.From == 0 || f.To < f.From || w.js.resumed > 0 {
		w.t.Errorf("it ended with %v, and went on %d times", pr.err, w.js.resumed)
	}
	if rec := w.record(); rec.Stopped != "foreign_message" {
		w.t.Errorf("the record says %q", rec.Stopped)
	}
	for i, m := range w.js.messages {
		if m.stranger && i < len(w.js.messages)-1 {
			w.js.messages[i] = nil
		}
	}
	if f := w.run(options{}).ends(time.Minute); f == nil || f.Code != "foreign_message" {
		w.t.Errorf("the next one ended with %v", f)
	}
}

// A stranger takes the first sequence of a session, between the reading of the stream and the first message.
// Where nobody may watch, the refusal of that message leads to his.
func TestStrangerBeforeTheFirstMessage(t *testing.T) {
	for name, c := range map[string]struct {
		deaf bool
		wait int // rows that are there to publish
	}{"watched": {false, 10}, "watched, nothing to publish": {false, 0}, "not watched": {true, 10}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 10*time.Second, func(t *testing.T, w *harness) {
				pr := w.running(options{})
				w.write(3)
				w.published()
				must.Succeed(t, pr.stop())
				w.write(c.wait)
				w.js.deaf = c.deaf
				w.noticed(w.run(options{open: func(l *Conns) { l.JetStream = intruded{l.JetStream} }}))
				if n := len(w.js.messages); !c.deaf && n > 4+c.wait {
					t.Errorf("%d messages", n)
				}
			})
		})
	}
}

// A stranger publishes while no connection watches, and what the last one still had on its way comes in
// behind him: the stream's end looks right.
func TestStrangerBeforeLateMessages(t *testing.T) {
	for name, kill := range map[string]bool{"the session is kept": false, "a kill": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, relay.Settings{MaxEvents: 1000, MaxBytes: 1 << 20}, 10*time.Second,
				func(t *testing.T, w *harness) {
					pr := w.running(options{})
					w.write(3)
					w.published()
					w.until(time.Minute, "it is recorded", func() bool {
						r := w.record()
						return r.Checkpoints[len(r.Checkpoints)-1].Seq == 3
					})
					w.with(func() { w.js.latency = 50 * time.Millisecond })
					w.write(20)
					w.until(time.Second, "they are on their way", func() bool {
						return len(pr.broker().wire) >= 19
					})
					w.with(func() {
						w.js.down = time.Now().Add(5 * time.Second)
						pr.broker().cut(false)
						w.js.intrude()
					})
					if kill {
						pr.kill()
					}
					w.until(time.Minute, "they came behind him", func() bool {
						return len(w.js.messages) >= 22 && len(pr.broker().wire) == 0
					})
					if last := w.js.messages[len(w.js.messages)-1]; last.stranger ||
						!w.js.messages[3].stranger {
						t.Fatal("it shows nothing")
					}
					if kill {
						pr = w.run(options{})
					}
					w.noticed(pr)
				})
		})
	}
}

// Each message that is made again and can have been in flight is compared, not the last one alone. What can't
// be read is no difference.
func TestDivergenceInTheMiddle(t *testing.T) {
	for name, c := range map[string]struct {
		happens func(w *harness)
		code    string // "": it goes on
	}{
		"another message": {func(w *harness) {
			other := *w.js.messages[5]
			other.header.Pos.Index++
			w.js.messages[5] = &other
		}, "divergence"},
		"one comes twice": {func(w *harness) { w.js.messages[5] = w.js.messages[4] }, "divergence"},
		"one is removed":  {func(w *harness) { w.js.messages[5] = nil }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, relay.Settings{MaxEvents: 1000, MaxBytes: 1 << 20}, 10*time.Second,
				func(t *testing.T, w *harness) {
					pr := w.running(options{})
					w.write(2)
					w.published()
					w.until(time.Minute, "it is recorded", func() bool {
						r := w.record()
						return r.Checkpoints[len(r.Checkpoints)-1].Seq == 2
					})
					w.with(func() { w.js.saves = saveNever })
					w.write(8)
					w.published()
					pr.kill()
					w.with(func() { c.happens(w) })
					pr = w.run(options{})
					if c.code != "" {
						if f := pr.ends(time.Minute); f == nil || f.Code != c.code {
							t.Errorf("it ended with %v", pr.err)
						}
						return
					}
					w.write(1)
					w.published()
				})
		})
	}
}

// TestAStrangersMessageIsNoticedWheneverItComes: whatever dies, is late or dropped, a stranger's message is
// noticed, whenever it comes.
func TestAStrangersMessageIsNoticedWheneverItComes(t *testing.T) {
	collect := onOneP(t)
	n := trials(1500)
	between := 0
	seeds.Each(t, "pipeline.seed", "pipeline.trials", n, func(seed uint64) {
		if strange(t, seed) {
			between++
		}
		collect()
	})
	t.Logf("%d of %d were not the newest message", between, n)
	if n >= 300 && between == 0 {
		t.Error("all strangers' messages were the newest one")
	}
}

// strange runs one schedule into which a stranger publishes. between: his message is not the newest.
func strange(t *testing.T, seed uint64) (between bool) {
	synctest.Test(t, func(t *testing.T) {
		s := newSchedule(t, seed, short)
		s.planFaults()
		s.js.sound = true
		in := uint64(0)
		intrude := func() {
			if in == 0 {
				s.js.intrude()
				in = uint64(len(s.js.messages))
			}
		}
		delay :=
			time.Duration(s.rnd.Int64N(int64(pick(s.rnd, time.Nanosecond, 3*time.Millisecond, time.Second))))
		s.plan = append(s.plan, planned{1 + s.rnd.IntN(s.span),
			func() { time.AfterFunc(delay, func() { s.with(intrude) }) }})
		slices.SortStableFunc(s.plan, func(a, b planned) int { return cmp.Compare(a.after, b.after) })
		s.with(func() {
			for i := range pick(s.rnd, 1, 1, 2) {
				s.spawn(i)
			}
		})
		s.write(seed)
		time.Sleep(time.Second)
		s.with(intrude)
		err := s.allEnd()
		for _, pr := range s.everyone() {
			if !pr.over() {
				pr.kill()
			}
		}
		time.Sleep(time.Minute) // what is still on its way arrives
		var n int
		s.with(func() { n = len(s.js.messages) })
		between = in < uint64(n)
		if err != nil {
			t.Errorf(
				"seed %d, a stranger at %d of %d: %v\nagain: go test ./pipeline -run TestAStranger "+
					"-pipeline.seed=%d -pipeline.trials=2\n%s",
				seed,
				in,
				n,
				err,
				seed,
				s.trace(80),
			)
		}
	})
	return between
}

// allEnd waits until all processes have ended by the stranger.
func (s *schedule) allEnd() error {
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		waits := false
		var ended error
		s.with(func() {
			for _, pr := range s.alive {
				if !pr.over() || pr.dead || pr.stopping {
					waits = true // or another one comes in its place
				} else if f := outbox.FaultOf(pr.err); f == nil || f.Code != "foreign_message" {
					ended = errors.Join(ended, fmt.Errorf("it ended with %w", pr.err))
				}
			}
		})
		if ended != nil || !waits {
			return ended
		}
		if time.Since(begun) > 10*time.Minute {
			return fmt.Errorf("nobody noticed: %+v", s.alive[0].p.Status())
		}
	}
}
