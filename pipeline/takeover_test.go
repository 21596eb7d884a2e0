package pipeline

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// TestASilentOwnerIsSuspected: an owner that has nothing to do renews the record, so nobody takes its stream.
// One that is gone is suspected when it has been silent for maximumDelay, and a home that is back goes on at
// once.
func TestASilentOwnerIsSuspected(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSharing(t, 1, defaults, 2*time.Second)
		s.spawn(0, 10*time.Second)
		s.spawn(1, 10*time.Second)
		s.write(3)
		time.Sleep(time.Hour)
		s.owns("an idle home", 1, 1)
		s.procs[0].kill()
		time.Sleep(7 * time.Second)
		s.owns("not silent for long", 1, 1)
		time.Sleep(5 * time.Second)
		s.owns("silent", 2, 2)
		time.Sleep(time.Hour)
		s.owns("an idle owner elsewhere", 2, 2)
		s.with(func() { s.spawn(0, 10*time.Second) })
		time.Sleep(5 * time.Second)
		s.owns("the home is back", 1, 3)
		if state := s.procs[1].p.Status().State; state != StateStandby {
			t.Errorf("the other one is %s", state)
		}
		s.stop()
	})
}

// publishing is a home that has published, and another cluster that stands by. Nothing fails by itself.
func publishing(t *testing.T) *sharing {
	s := newSharing(t, 1, defaults, 0)
	s.calm = true
	s.spawn(0, 10*time.Second)
	s.spawn(1, 10*time.Second)
	s.write(3)
	time.Sleep(time.Minute)
	return s
}

// TestACutDoesNotWaitAgainForWhatTheTakeOverHasWaitedFor: a home is gone, and its database with it. What it
// had left open is in the stream when the time for a suspicion has passed once.
func TestACutDoesNotWaitAgainForWhatTheTakeOverHasWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := publishing(t)
		s.with(func() {
			s.procs[0].dies()
			s.pg.commit([]row{{"d", "x", "x:000001", "{}"}})
			s.pg.down = time.Now().Add(time.Hour)
		})
		time.Sleep(15 * time.Second)
		if err := s.completeElsewhere(); err != nil || s.cuts != 1 {
			t.Errorf("%d cuts: %v", s.cuts, err)
		}
		s.stop()
		if err := s.check(false); err != nil {
			t.Error(err)
		}
	})
}

// TestACutWaitsAnewBehindAFailure: while the own database is away, and until its rows come again, nothing of
// a home that lives is read. What the own record knows of it is not new when it is read again.
func TestACutWaitsAnewBehindAFailure(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]func(s *sharing){
		"the owner's database is away": func(s *sharing) {
			s.with(func() { s.procs[0].dies() })
			time.Sleep(time.Minute)
			s.owns("it has taken the stream", 2, 2)
			s.write(1)
			time.Sleep(5 * time.Second)
			s.with(func() {
				s.other.down = time.Now().Add(8 * time.Second)
				s.apart = s.other.down.Add(5 * time.Second)
				for _, u := range s.procs[1].ups {
					u.cut(true)
				}
			})
			time.Sleep(5 * time.Second)
			s.write(1)
			time.Sleep(10 * time.Second)
			if s.cuts > 0 {
				t.Error("the owner's database was away, and the home lives: it cuts")
			}
		},
		"who stands by starts again": func(s *sharing) {
			s.write(1)
			s.with(func() {
				s.procs[0].dies()
				s.pg.down = time.Now().Add(time.Hour)
			})
			time.Sleep(3 * time.Second)
			s.with(func() { s.procs[1].dies() })
			s.spawn(1, 10*time.Second)
			time.Sleep(15 * time.Second)
			if err := s.completeElsewhere(); err != nil || s.cuts != 1 {
				t.Errorf("it has started again: %d cuts: %v", s.cuts, err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := publishing(t)
				fails(s)
				s.stop()
				if err := s.check(false); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// closing is a session of an owner elsewhere that has published all that it can, and holds an event at
// 0x3000.
func closing(t *testing.T, now time.Time) *session {
	cfg := checkpoint.Config{DurableAfter: time.Minute}
	start := checkpoint.Start{Checkpoint: relay.Checkpoint{Due: 0x1000, Seq: 7, Read: 0x9000}, LastSeq: 7,
		End: 7, Thru: 0x2000}
	start.Checkpoints = []checkpoint.StoredCheckpoint{{Checkpoint: start.Checkpoint, Since: now}}
	s := &session{p: &Pipeline{cfg: Config{MaximumDelay: 10 * time.Second},
		input: newestInput{0x3000, now.Add(-10 * time.Second)}}, conns: &Conns{Checkpoint: cfg},
		thru: thruOf(start),
		buffer: reorder.New(reorder.Config{Settings: defaults, Start: 0x1000, Due: 0x1000,
			Scratch: memory{}}),
		tracker: checkpoint.NewTracker(cfg, start, now), questions: newWorker(), verified: true,
		asked: now.Add(-time.Minute), heard: now, monitor: monitor{walEnd: 0x9500}}
	s.in = &input{shared: true, away: newAway(start.Checkpoint), decoder: decoder.New(awayDecoder()),
		seen: 0x3000}
	s.in.away.passed(0x9500)
	t.Cleanup(s.questions.close)
	if err := s.buffer.Append(&relay.Event{Doc: "d", Key: "a:1"}); err != nil {
		t.Fatal(err)
	}
	if err := s.buffer.Commit(relay.Commit{Kind: relay.Events, Events: 1, LSN: 0x3000}); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestACutWaitsForAllBeforeIt: each of these alone is a reason not to cut.
func TestACutWaitsForAllBeforeIt(t *testing.T) {
	t.Parallel()
	now := time.Now()
	if !closing(t, now).mayCut(now) {
		t.Fatal("no cut")
	}
	at := closing(t, now)
	at.thru, at.in.seen = 0x3000, 0x3000
	if !at.mayCut(now) {
		t.Error("no cut at the input that closed the newest message")
	}
	for what, change := range map[string]func(s *session){
		"nobody asks for it":          func(s *session) { s.p.cfg.MaximumDelay = 0 },
		"the stream is nobody else's": func(s *session) { s.in.shared = false },
		"this is the home":            func(s *session) { s.in.away = nil },
		"nothing is held": func(s *session) {
			s.buffer.Discard()
			s.buffer = reorder.New(reorder.Config{})
		},
		"the home is not silent": func(s *session) {
			s.p.input.came = now.Add(-9 * time.Second)
		},
		"there is more to read":         func(s *session) { s.monitor.walEnd++ },
		"the stream's end was not made": func(s *session) { s.verified = false },
		"a cut is still to come": func(s *session) {
			s.in.cuts = []checkpoint.StoredCut{{LSN: 0x4000, Seq: 8}}
		},
		"a message is on its way":                 func(s *session) { s.tracker.Made(1) },
		"the record is being written":             func(s *session) { s.questions.busy = true },
		"the epoch may be lost":                   func(s *session) { s.asked = now.Add(-time.Minute + 1) },
		"another input closed the newest message": func(s *session) { s.thru = 0x3001 },
		"the newest message can't be read":        func(s *session) { s.thru = unknownThru },
		"the record is further": func(s *session) {
			s.tracker.Keepalive(relay.Checkpoint{Due: 0x3001, Read: 0x9600})
		},
	} {
		s := closing(t, now)
		change(s)
		if s.mayCut(now) {
			t.Errorf("%s: a cut all the same", what)
		}
	}
}

// TestThruOfTheNewestMessage: it is not known where the message can't be read, unless a repair made it.
func TestThruOfTheNewestMessage(t *testing.T) {
	t.Parallel()
	for want, start := range map[outbox.LSN]checkpoint.Start{
		0:              {},
		0x2000:         {LastSeq: 7, Thru: 0x2000},
		math.MaxUint64: {LastSeq: 7, Accepted: 6},
	} {
		if got := thruOf(start); got != want {
			t.Errorf("%v, want %v", got, want)
		}
	}
	if got := thruOf(checkpoint.Start{LastSeq: 7, Accepted: 7}); got != 0 {
		t.Errorf("accepted: %v", got)
	}
}

// owns fails the test if not this cluster has the stream, in this epoch.
func (s *sharing) owns(when string, owner int, epoch uint64) {
	s.t.Helper()
	s.with(func() {
		if rec := s.record(); rec.Owner != owner || rec.Epoch != epoch {
			s.t.Errorf("%s: cluster %d has epoch %d", when, rec.Owner, rec.Epoch)
		}
	})
}

// renews lets an owner that there is no process of write the record each second, for so long.
func (s *sharing) renews(d time.Duration) {
	for begun := time.Now(); time.Since(begun) < d; time.Sleep(time.Second) {
		s.with(func() {
			rec, before := s.newest()
			if rec.Owner < 3 {
				return
			}
			doc, err := rec.Encode()
			if err == nil {
				_, err = s.js.land(doc, rec, before)
			}
			s.broken = errors.Join(s.broken, err)
		})
	}
}

// TestAnOwnerThatHasFewerRowsIsSuspected: cluster 3 lives and has published all that it has of a home that is
// gone. Cluster 2 leaves the stream to it until it has read more.
func TestAnOwnerThatHasFewerRowsIsSuspected(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSharing(t, 1, defaults, 2*time.Second)
		s.calm = true
		s.spawn(0, 10*time.Second)
		s.spawn(1, 10*time.Second)
		s.write(3)
		time.Sleep(time.Minute)
		s.procs[0].kill()
		s.take(3)
		s.renews(10 * time.Minute)
		s.owns("it has all", 3, 2)
		s.write(3)
		s.renews(15 * time.Second)
		s.owns("it may still go on", 3, 2)
		s.renews(25 * time.Second)
		s.owns("it does not", 2, 3)
		time.Sleep(time.Minute)
		s.stop()
		if err := s.check(true); err != nil {
			t.Error(err)
		}
	})
}

// TestAnOwnerThatWaitsForAWindowIsNotSuspected: what a living owner holds is in no checkpoint either.
func TestAnOwnerThatWaitsForAWindowIsNotSuspected(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		slow := defaults
		slow.Horizon = 2 * time.Minute
		s := newSharing(t, 1, slow, 0)
		s.spawn(0, 10*time.Second)
		s.spawn(1, 10*time.Second)
		for range 2 {
			s.write(1)
			time.Sleep(4 * time.Minute)
		}
		s.owns("a living home", 1, 1)
		s.stop()
		if err := s.check(true); err != nil {
			t.Error(err)
		}
	})
}

// watched is a connection whose owner does something when it begins to watch who publishes: between the two
// readings of a start.
type watched struct {
	JetStream
	first func()
}

func (w *watched) Watch(ctx context.Context) error {
	w.first()
	return w.JetStream.Watch(ctx)
}

// TestWhoLosesTheStreamDuringItsStartStandsBy: that is no failure.
func TestWhoLosesTheStreamDuringItsStartStandsBy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSharing(t, 1, defaults, 0)
		reg, taken := prometheus.NewRegistry(), false
		var log strings.Builder
		s.procs[0] = s.run(options{cluster: 1, registry: reg, log: &log, open: func(c *Conns) {
			c.JetStream = &watched{c.JetStream, func() {
				if !taken {
					taken = true
					s.take(2)
				}
			}}
		}})
		s.spawn(1, 0)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		n, status, said := metric(t, reg, "failures_total"), s.procs[0].p.Status(), log.String()
		if n > 0 || !taken || status.State != StateStandby || status.Error != "" ||
			strings.Contains(said, "level=WARN") {
			t.Errorf("%v failures, %+v:\n%s", n, status, said)
		}
		s.stop()
	})
}

// loading is a store that does something before the record is loaded for the n-th time.
type loading struct {
	Store
	loads int
	at    func(n int)
}

func (s *loading) Load(ctx context.Context) (*checkpoint.Record, uint64, error) {
	s.loads++
	s.at(s.loads)
	return s.Store.Load(ctx)
}

// TestOfTwoThatSuspectAnOwnerTheSecondStandsBy: it has suspected somebody else, whenever it finds that out.
func TestOfTwoThatSuspectAnOwnerTheSecondStandsBy(t *testing.T) {
	t.Parallel()
	for load := 2; load <= 3; load++ { // before the record is read again, and before it is written
		synctest.Test(t, func(t *testing.T) {
			s := newSharing(t, 1, defaults, 0)
			reg, taken := prometheus.NewRegistry(), false
			s.with(func() {
				s.procs[1] = s.run(options{cluster: 2, maximumDelay: 10 * time.Second, registry: reg,
					open: func(c *Conns) {
						e, suspects := c.Store.(*Elsewhere), s.procs[1].p.silent > 0
						e.Home = &loading{Store: e.Home, at: func(n int) {
							if suspects && n == 2 && load == 2 && !taken {
								taken = true
								s.take(3)
							}
						}}
						e.Own = &written{e.Own, func() {
							if suspects && load == 3 && !taken {
								taken = true
								s.take(3)
							}
						}}
					}})
			})
			time.Sleep(15 * time.Second)
			s.owns("one was first", 3, 2)
			status := s.procs[1].p.Status()
			s.stop()
			if n := metric(t, reg, "failures_total"); n > 0 || !taken || status.State != StateStandby {
				t.Errorf("load %d: %v failures, %+v", load, n, status)
			}
		})
	}
}

// written is a store that does something before it is written.
type written struct {
	Store
	before func()
}

func (w *written) Save(ctx context.Context, rec *checkpoint.Record, last uint64) (uint64, error) {
	w.before()
	return w.Store.Save(ctx, rec, last)
}

// TestNoCutLiesBelowWhatClosedTheNewestMessage: what is left of the home's rows ends between a checkpoint and
// the tick that closed the window before it. The messages from that checkpoint on need nothing to be made
// again, so nothing but the newest message says that more was read.
func TestNoCutLiesBelowWhatClosedTheNewestMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		slow := defaults
		slow.Horizon = 10 * time.Second
		s := newSharing(t, 1, slow, 0)
		s.with(func() { s.calm, s.apart = true, time.Now().Add(time.Hour) })
		s.spawn(0, 3*time.Second)
		s.spawn(1, 3*time.Second)
		for i := range 2 {
			s.write(1)
			s.with(func() { s.copy(func(*transaction) bool { return false }) })
			if i == 0 {
				time.Sleep(5 * time.Second)
			}
		}
		time.Sleep(8 * time.Second)
		s.procs[0].kill()
		if n := len(s.stream()); n != 1 {
			t.Fatalf("%d messages, and one window is closed", n)
		}
		time.Sleep(time.Minute)
		s.owns("the home is gone", 2, 2)
		if s.cuts > 0 {
			t.Errorf("%d cuts", s.cuts)
		}
		s.with(func() {
			s.apart = time.Time{}
			s.spawn(0, 3*time.Second)
		})
		time.Sleep(time.Minute)
		s.stop()
		if err := s.check(true); err != nil {
			t.Error(err)
		}
	})
}

// TestALateCutLiesBehindWhatTheRecordKnows: in gap mode, a cut that the owner before had sent arrives when
// the next one has read more and stored nothing.
func TestALateCutLiesBehindWhatTheRecordKnows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		slow := gapSettings
		slow.Gap.Bound = time.Hour
		s := newSharing(t, 1, slow, 0)
		s.with(func() { s.calm = true })
		s.take(2)
		run := func() {
			s.procs[1] = s.run(options{cluster: 2})
			time.Sleep(10 * time.Second)
		}
		run()
		s.insert("d", "a:1")
		at := s.insert("d", "a:3").end
		time.Sleep(10 * time.Second)
		s.procs[1].kill()
		s.with(func() { s.pg.commit(nil, logical{prefix: relay.HeartbeatPrefix}) })
		s.take(2)
		run()
		s.procs[1].kill()
		s.with(func() {
			rec, _ := s.newest()
			cut, err := rec.CutAt(at, timeline)
			if cut.Epoch--; err != nil || len(s.js.messages) != 1 {
				t.Fatalf("%d messages: %v", len(s.js.messages), err)
			}
			s.js.messages = append(s.js.messages, &storedMessage{at: time.Now(), cut: &cut})
		})
		run()
		err := s.gaveUp()
		s.stop()
		if err = errors.Join(err, s.check(true)); err != nil {
			t.Error(err)
		}
	})
}
