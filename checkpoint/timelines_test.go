package checkpoint

import (
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// A promotion at 0/2800 unless said otherwise; the newest message (of the checkpoint at 0/2800 or before) was
// made from timeline 1.
func TestAStartAfterAPromotionIsResolved(t *testing.T) {
	t.Parallel()
	const end = outbox.LSN(0x2800)
	marker := func(due outbox.LSN) StoredCheckpoint { return at(due, 12, 10*time.Second) }
	base := func() Readings {
		r := readings()
		r.Server.History = promoted(end)
		r.Stream.Newest = &outbox.Header{Pos: outbox.Position{LSN: 0x2100}, Of: 1, Due: 0x2200, Thru: 0x2200,
			Timeline: 1}
		r.Record = record(at(0x1000, 5, 300*time.Second), at(0x2000, 9, 200*time.Second),
			at(0x2200, 12, 100*time.Second), marker(0x3000))
		return r
	}
	for _, c := range []struct {
		name        string
		change      func(r *Readings)
		start       outbox.LSN
		checkpoints []outbox.LSN
		code        string // "": it starts
		rng         string
	}{
		{"a checkpoint beyond the switch counts as it", func(r *Readings) {}, 0x2000,
			[]outbox.LSN{0x1000, 0x2000, 0x2200, end}, "", ""},
		{"the only one at or above confirmed", func(r *Readings) { r.Slot.Confirmed = end }, end,
			[]outbox.LSN{0x1000, 0x2000, 0x2200, end}, "", ""},
		{"confirmed beyond the switch", func(r *Readings) { r.Slot.Confirmed = end + 1 }, 0, nil,
			"slot_ahead", "0/2800 to 0/5000"},
		{"several beyond it are one", func(r *Readings) {
			r.Record.Checkpoints = append(r.Record.Checkpoints, marker(0x3100))
		}, 0x2000,
			[]outbox.LSN{0x1000, 0x2000, 0x2200, end}, "", ""},
		{"one at it and one beyond", func(r *Readings) {
			r.Record.Checkpoints[2].Due = end
		}, 0x2000, []outbox.LSN{0x1000, 0x2000, end}, "", ""},
		{"those of the new timeline", func(r *Readings) { r.Record.Checkpoints[3] = on(2, marker(0x3000)) },
			0x2000, []outbox.LSN{0x1000, 0x2000, 0x2200, 0x3000}, "", ""},
		{"one at it that took events beyond it", func(r *Readings) {
			r.Record.Checkpoints[2].Due, r.Record.Checkpoints[2].PublishedAhead =
				end, []outbox.Position{{LSN: end + 1}}
			r.Record.Checkpoints = r.Record.Checkpoints[:3]
		}, 0x2000, []outbox.LSN{0x1000, 0x2000, end}, "", ""},
		{"one at it that took events, and one beyond that knows them", func(r *Readings) {
			r.Record.Checkpoints[2].Due, r.Record.Checkpoints[2].PublishedAhead =
				end, []outbox.Position{{LSN: end + 1}}
		}, 0, nil, "timeline_lost", "0/2800 to 0/3000"},
		{"the oldest lies beyond it, and nothing to compare with", func(r *Readings) {
			r.Record = record(at(0x2900, 5, time.Minute), on(2, at(0x3000, 9, time.Minute)),
				on(2, at(0x3100, 12, time.Minute)))
			r.Stream.NewestSeq, r.Stream.Newest = 0, nil
		}, 0x3100, []outbox.LSN{end, 0x3000, 0x3100}, "", ""},
		{"the checkpoint beyond it is lost with the end of the stream", func(r *Readings) {
			newest(r, 11)
			r.Record.Checkpoints[2].Seq = 11
		}, 0x2000, []outbox.LSN{0x1000, 0x2000, 0x2200}, "", ""},
		{"the switch lies beyond all", func(r *Readings) { r.Server.History = promoted(0x4000) }, 0x2000,
			[]outbox.LSN{0x1000, 0x2000, 0x2200, 0x3000}, "", ""},
		{"other settings beyond the switch", func(r *Readings) {
			r.Record.Checkpoints[3].Settings.Horizon = 0
		}, 0x2000,
			[]outbox.LSN{0x1000, 0x2000, 0x2200}, "", ""},
		{"nothing to compare with", func(r *Readings) { r.Stream.NewestSeq, r.Stream.Newest = 0, nil }, end,
			[]outbox.LSN{0x1000, 0x2000, 0x2200, end}, "", ""},
		{"a promotion before the oldest checkpoint", func(r *Readings) {
			r.Server.History = promoted(0x800)
			newest(r, 12)
		}, 0, nil, "timeline_lost", "0/800 to 0/2000"},

		{"events of the branch are taken", func(r *Readings) {
			r.Record.Checkpoints[3].PublishedAhead = []outbox.Position{{LSN: 0x3001}}
		}, 0, nil, "timeline_lost", "0/2800 to 0/3000"},
		{"messages of the branch", func(r *Readings) {
			newest(r, 13)
			r.Record.Checkpoints = append(r.Record.Checkpoints, at(0x3100, 13, 0))
		}, 0, nil,
			"timeline_lost", "0/2800 to 0/3100"},
		{"messages of the branch, and the slot begins on the new timeline", func(r *Readings) {
			newest(r, 13)
			r.Record.Checkpoints = append(r.Record.Checkpoints, at(0x3100, 13, 0))
			r.Slot.Confirmed = 0x4000
		}, 0, nil, "timeline_lost", "0/2800 to 0/4000"},
		{"the slot is lost", func(r *Readings) { r.Slot.Invalidation = "wal_removed" }, 0, nil,
			"slot_invalidated", "0/2800 to 0/5000"},
		{"an unknown timeline", func(r *Readings) { r.Record.Checkpoints[3].Timeline = 3 }, 0, nil,
			"timeline_unknown", "0/3000 to 0/5000"},

		{"the newest event is on the branch", func(r *Readings) {
			r.Stream.Newest.Pos.LSN, r.Stream.Newest.Thru = end+1, end+1
		}, 0, nil,
			"timeline_lost", "0/2800 to 0/2801"},
		{"an event at the switch is not", func(r *Readings) {
			r.Stream.Newest.Pos.LSN, r.Stream.Newest.Thru = end, end
		}, 0x2000,
			[]outbox.LSN{0x1000, 0x2000, 0x2200, end}, "", ""},
		{"the newest window was closed on the branch", func(r *Readings) { r.Stream.Newest.Thru = end + 1 },
			0, nil, "timeline_lost", "0/2800 to 0/2801"},
		{"the newest window was closed after the promotion, a checkpoint shows it", func(r *Readings) {
			r.Stream.Newest.Thru = 0x2900
			r.Record.Checkpoints[3] = on(2, marker(0x2900))
			r.Slot.Confirmed = 0x2900
		}, 0x2900, []outbox.LSN{0x1000, 0x2000, 0x2200, 0x2900}, "", ""},
		{"the newest window was closed beyond the switch, the comparison shows where", func(r *Readings) {
			r.Stream.Newest.Thru = 0x2900
			r.Record.Checkpoints = r.Record.Checkpoints[:2]
		}, 0x2000, []outbox.LSN{0x1000, 0x2000}, "", ""},
		{"nothing shows where", func(r *Readings) {
			r.Stream.Newest.Thru = 0x2900
			r.Record.Checkpoints, r.Slot.Confirmed = r.Record.Checkpoints[:3], 0x2200
		}, 0, nil, "timeline_lost", "0/2800 to 0/2900"},
		{"the newest event is on the branch, the comparison would show it", func(r *Readings) {
			r.Stream.Newest.Pos.LSN, r.Stream.Newest.Thru = end+1, end+1
			r.Record.Checkpoints = r.Record.Checkpoints[:2]
		}, 0, nil, "timeline_lost", "0/2800 to 0/2801"},
		{"the newest event is at the switch, its window was closed beyond", func(r *Readings) {
			r.Stream.Newest.Pos.LSN, r.Stream.Newest.Thru = end, 0x2900
			r.Record.Checkpoints = r.Record.Checkpoints[:2]
		}, 0x2000, []outbox.LSN{0x1000, 0x2000}, "", ""},
		{"the same, and a checkpoint shows that it was after the promotion", func(r *Readings) {
			r.Stream.Newest.Pos.LSN, r.Stream.Newest.Thru = end, 0x2900
			r.Record.Checkpoints[3] = on(2, marker(0x2900))
		}, 0x2000, []outbox.LSN{0x1000, 0x2000, 0x2200, 0x2900}, "", ""},
		{"an event of the branch, and a checkpoint on the new timeline", func(r *Readings) {
			r.Stream.Newest.Pos.LSN, r.Stream.Newest.Thru = end+1, 0x2900
			r.Record.Checkpoints[3] = on(2, marker(0x2900))
		}, 0, nil, "timeline_lost", "0/2800 to 0/2900"},
		{"the first checkpoint behind it shows where its window was closed", func(r *Readings) {
			r.Stream.Newest.Thru = 0x2900
			r.Record.Checkpoints = append(r.Record.Checkpoints[:2], marker(0x2900), on(2, marker(0x3000)))
		}, 0, nil, "timeline_lost", "0/2800 to 0/2900"},
		{"a checkpoint before it, of the branch, shows nothing", func(r *Readings) {
			r.Stream.Newest.Thru = 0x2A00
			r.Record.Checkpoints = append(r.Record.Checkpoints[:2], at(0x2900, 11, 0))
		}, end, []outbox.LSN{0x1000, 0x2000, end}, "", ""},
		{"nor does one whose message is lost", func(r *Readings) {
			r.Stream.Newest.Thru = 0x2900
			r.Record.Checkpoints = append(r.Record.Checkpoints[:2], at(0x2900, 13, 0))
		}, 0x2000, []outbox.LSN{0x1000, 0x2000}, "", ""},
		{"nor does one at the switch", func(r *Readings) {
			r.Stream.Newest.Thru = 0x2900
			r.Record.Checkpoints = append(r.Record.Checkpoints[:2], marker(end))
		}, 0x2000, []outbox.LSN{0x1000, 0x2000, end}, "", ""},
		{"an event of the branch, beyond the WAL", func(r *Readings) {
			r.Stream.Newest.Pos.LSN, r.Stream.Newest.Thru = end+1, 0x6000
		}, 0, nil, "timeline_lost", "0/2800 to 0/6000"},
		{"closed after the promotion, at the end of the WAL", func(r *Readings) {
			r.Stream.Newest.Thru = 0x5000
			r.Record.Checkpoints = r.Record.Checkpoints[:2]
		}, 0x2000, []outbox.LSN{0x1000, 0x2000}, "", ""},
		{"closed after the promotion and behind it", func(r *Readings) {
			r.Stream.Newest.Thru = 0x5001
			r.Record.Checkpoints = r.Record.Checkpoints[:2]
		}, 0, nil, "server_behind", "0/5000 to 0/5001"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := base()
			c.change(&r)
			s, err := Resolve(config, r)
			if c.code != "" {
				refused(t, err, c.code, outbox.Gap, c.rng, []string{anewCure})
				return
			}
			must.Succeed(t, err)
			var due []outbox.LSN
			for _, p := range s.Checkpoints {
				due = append(due, p.Due)
			}
			if s.Checkpoint.Due != c.start || len(due) != len(c.checkpoints) {
				t.Fatalf("starts at %v of %v, want %v of %v", s.Checkpoint.Due, due, c.start, c.checkpoints)
			}
			for i := range due {
				if due[i] != c.checkpoints[i] {
					t.Fatalf("checkpoints %v, want %v", due, c.checkpoints)
				}
			}
			if _, err := record(s.Checkpoints...).Encode(); err != nil {
				t.Fatalf("the checkpoints can't be stored: %v", err)
			}
		})
	}
}

// Several checkpoints beyond a switch point are one, which has been in the record since the oldest of them
// was.
func TestSwitchPointKeepsTheOldestTime(t *testing.T) {
	t.Parallel()
	r := readings()
	r.Server.History = promoted(0x2800)
	r.Stream.Newest.Pos.LSN, r.Stream.Newest.Thru = 0x2100, 0x2200
	r.Record = record(at(0x1000, 5, 300*time.Second), at(0x3000, 12, 100*time.Second),
		at(0x3100, 12, time.Second))
	s, err := Resolve(config, r)
	must.Succeed(t, err)
	if p := s.Checkpoints[1]; len(s.Checkpoints) != 2 || p.Due != 0x2800 || p.Timeline != 1 ||
		!p.Since.Equal(epoch.Add(-100*time.Second)) {
		t.Fatalf("got %+v", s.Checkpoints)
	}
}

// Of the events that a checkpoint beyond the switch point held, those at or below it are held again, and the
// others are on the branch that is gone.
func TestHoldsBeyondASwitchPointAreDropped(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end   outbox.LSN
		holds int
		start outbox.LSN
	}{
		"both below":  {0x2A00, 2, 0x2800},
		"one beyond":  {0x2880, 1, 0x2800},
		"both beyond": {0x2804, 0, 0x2804},
	} {
		r := readings()
		p := holding(at(0x3000, 12, 10*time.Second), 0x2800, 0)
		p.Holds = append(p.Holds, relay.Hold{Sequence: 2, Oldest: outbox.Position{LSN: 0x2900}})
		r.Record = record(at(0x1000, 12, 300*time.Second), p)
		r.Stream.Newest.Pos.LSN, r.Stream.Newest.Due, r.Stream.Newest.Thru = 0x900, 0x1000, 0x1000
		r.Server.History = promoted(c.end)
		start, err := Resolve(config, r)
		if err != nil {
			t.Fatal(err)
		}
		got := start.Checkpoints[1]
		if got.Due != c.end || len(got.Holds) != c.holds || got.Start() != c.start {
			t.Errorf("%s: %+v", name, got)
		}
		if len(r.Record.Checkpoints[1].Holds) != 2 {
			t.Errorf("%s: the record was changed", name)
		}
	}
}
