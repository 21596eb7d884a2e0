package pipeline

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

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
		owns := func(when string, owner int, epoch uint64) {
			t.Helper()
			s.with(func() {
				if rec := s.record(); rec.Owner != owner || rec.Epoch != epoch {
					t.Errorf("%s: cluster %d has epoch %d", when, rec.Owner, rec.Epoch)
				}
			})
		}
		s.spawn(0, 10*time.Second)
		s.spawn(1, 10*time.Second)
		s.write(3)
		time.Sleep(time.Hour)
		owns("an idle home", 1, 1)
		s.procs[0].kill()
		time.Sleep(7 * time.Second)
		owns("not silent for long", 1, 1)
		time.Sleep(5 * time.Second)
		owns("silent", 2, 2)
		time.Sleep(time.Hour)
		owns("an idle owner elsewhere", 2, 2)
		s.with(func() { s.spawn(0, 10*time.Second) })
		time.Sleep(5 * time.Second)
		owns("the home is back", 1, 3)
		if state := s.procs[1].p.Status().State; state != StateStandby {
			t.Errorf("the other one is %s", state)
		}
		s.stop()
	})
}

// closing is a session of an owner elsewhere that has published all that it can, and holds an event at
// 0x3000.
func closing(t *testing.T, now time.Time) *session {
	cfg := checkpoint.Config{DurableAfter: time.Minute}
	start := checkpoint.Start{Checkpoint: relay.Checkpoint{Due: 0x1000, Seq: 7, Read: 0x9000}, LastSeq: 7,
		End: 7, Thru: 0x2000}
	start.Checkpoints = []checkpoint.StoredCheckpoint{{Checkpoint: start.Checkpoint, Since: now}}
	s := &session{p: &Pipeline{maximumDelay: 10 * time.Second}, conns: &Conns{Checkpoint: cfg},
		thru: thruOf(start),
		buffer: reorder.New(reorder.Config{Settings: defaults, Start: 0x1000, Due: 0x1000,
			Scratch: memory{}}),
		tracker: checkpoint.NewTracker(cfg, start, now), questions: newWorker(), verified: true,
		asked: now.Add(-time.Minute), heard: now, monitor: monitor{walEnd: 0x9500}}
	s.in = &input{shared: true, away: newAway(start.Checkpoint), decoder: decoder.New(awayDecoder()),
		seen: 0x3000, lastInput: now.Add(-10 * time.Second)}
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
		"nobody asks for it":          func(s *session) { s.p.maximumDelay = 0 },
		"the stream is nobody else's": func(s *session) { s.in.shared = false },
		"this is the home":            func(s *session) { s.in.away = nil },
		"nothing is held": func(s *session) {
			s.buffer.Discard()
			s.buffer = reorder.New(reorder.Config{})
		},
		"the home is not silent": func(s *session) {
			s.in.lastInput = now.Add(-9 * time.Second)
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
