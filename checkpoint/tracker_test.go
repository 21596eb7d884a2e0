package checkpoint

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// tracked is a tracker of a session that starts at one stored checkpoint (0/1000, 5) of a stream of 5
// messages, and its clock.
type tracked struct {
	*Tracker
	t   *testing.T
	now time.Time
}

func track(t *testing.T, change func(s *Start)) *tracked {
	p := at(0x1000, 5, time.Hour)
	s := Start{Checkpoint: p.Checkpoint, LastSeq: 5, End: 5, Confirmed: 0x1000,
		Checkpoints: []StoredCheckpoint{p}}
	if change != nil {
		change(&s)
	}
	return &tracked{NewTracker(config, s, epoch), t, epoch}
}

// window makes a window of n messages that ends at due.
func (k *tracked) window(due outbox.LSN, n int) {
	k.Made(n)
	k.Window(relay.Checkpoint{Due: due, Settings: settings, Timeline: 1})
}

func (k *tracked) marker(due outbox.LSN) bool {
	return k.Keepalive(relay.Checkpoint{Due: due, Settings: settings, Timeline: 1})
}

// store takes a snapshot and has it stored at once; it returns its checkpoints.
func (k *tracked) store() string {
	k.t.Helper()
	if !k.Pending() {
		k.t.Fatal("nothing to store")
	}
	s := k.BeginSave(k.now)
	if _, err := record(s.Checkpoints...).Encode(); err != nil {
		k.t.Fatal(err)
	}
	k.Saved(k.now)
	return text(s)
}

func text(s Update) string {
	var out []string
	for _, p := range s.Checkpoints {
		out = append(out, fmt.Sprintf("%v:%d", p.Due, p.Seq))
	}
	return strings.Join(out, " ")
}

func (k *tracked) want(what string, got, want any) {
	k.t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		k.t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}

func TestWindowsCountWhenAcknowledged(t *testing.T) {
	t.Parallel()
	k := track(t, nil)
	k.want("unacknowledged at first", k.Unacknowledged(), false)
	k.window(0x2000, 3)
	k.window(0x3000, 2)
	k.want("newest", k.Newest().Due, "0/1000")
	k.Acked(7)
	k.want("newest after a part", k.Newest().Due, "0/1000")
	k.want("pending after a part", k.Pending(), false)
	k.Acked(8)
	k.want("newest after the first", fmt.Sprint(k.Newest().Due, k.Newest().Seq), "0/2000 8")
	k.want("unacknowledged", k.Unacknowledged(), true)
	k.Acked(10)
	k.want("newest after both", fmt.Sprint(k.Newest().Due, k.Newest().Seq), "0/3000 10")
	k.want("unacknowledged after both", k.Unacknowledged(), false)
	k.Acked(9)
	k.want("and after an older acknowledgement", k.Unacknowledged(), false)
	k.want("stored", k.store(), "0/1000:5 0/2000:8 0/3000:10")
	k.want("pending after stored", k.Pending(), false)
}

func TestWhatIsThereMakesNoCheckpoint(t *testing.T) {
	t.Parallel()
	// Five messages are there from the checkpoint on, sequences 6 to 10, and 11 and 12 are a hole.
	k := track(t, func(s *Start) {
		s.AlreadyStored, s.End, s.LastSeq, s.Holes = 5, 10, 12,
			[]Range{{11, 12}}
	})
	k.want("marker before", k.marker(0x1800), false)
	k.window(0x2000, 3)
	k.want("a window of what is there", k.Newest().Seq, 5)
	k.want("marker before the check", k.marker(0x2800), false)
	k.want("pending before the check", k.Pending(), false)
	k.window(0x3000, 2)
	k.want("the window that ends it", fmt.Sprint(k.Newest().Due, k.Newest().Seq), "0/3000 12")
	k.window(0x4000, 4)
	k.Acked(16)
	k.want("the first new one", k.Newest().Seq, 16)
	k.want("stored", k.store(), "0/1000:5 0/3000:12 0/4000:16")
}

func TestPlacesThatTheRecordGoesBeyond(t *testing.T) {
	t.Parallel()
	// The start is not at the newest checkpoint, so that messages are made again.
	k := track(t, func(s *Start) {
		s.AlreadyStored, s.LastSeq, s.End = 4, 9, 9
		s.Checkpoints = append(s.Checkpoints, at(0x2000, 9, time.Minute))
	})
	k.window(0x1800, 2)
	k.window(0x2000, 2)
	k.want("newest", k.Newest().Due, "0/2000")
	k.want("pending", k.Pending(), false)
	k.window(0x2800, 1)
	k.Acked(10)
	k.want("newest after a new one", fmt.Sprint(k.Newest().Due, k.Newest().Seq), "0/2800 10")
}

func TestAMarkerMovesTheCheckpointOnceAllIsAcknowledged(t *testing.T) {
	t.Parallel()
	k := track(t, nil)
	k.window(0x2000, 3)
	k.want("while one is unacknowledged", k.marker(0x2100), false)
	k.Acked(8)
	k.want("after it", k.marker(0x2100), true)
	k.want("not beyond the newest checkpoint", k.marker(0x2100), false)
	k.want("the next", k.marker(0x2200), true)
	k.want("stored", k.store(), "0/1000:5 0/2000:8 0/2200:8") // 0/2100 was replaced
	k.want("behind a stored one", k.marker(0x2300), true)
	k.want("and another", k.marker(0x2400), true)
	k.want("stored", k.store(), "0/1000:5 0/2000:8 0/2200:8 0/2400:8")
	k.Made(1)
	k.want("while a message is unacknowledged", k.marker(0x2500), false)
	k.Acked(9)
	k.want("behind it", k.marker(0x2500), true)
	k.want("stored", k.store(), "0/1000:5 0/2000:8 0/2200:8 0/2400:8 0/2500:9")
	k.want("one before a message", k.marker(0x2600), true)
	k.Made(1)
	k.Acked(10)
	k.want("one behind it", k.marker(0x2700), true)
	k.want("stored, both", k.store(), "0/1000:5 0/2000:8 0/2200:8 0/2400:8 0/2500:9 0/2600:9 0/2700:10")
}

// Where all checkpoints are at one message, the confirmed one is the oldest that is kept: none makes a
// message to compare.
func TestMarkersBeforeTheFirstMessage(t *testing.T) {
	t.Parallel()
	k := track(t, nil)
	k.marker(0x2000)
	k.store()
	k.now = k.now.Add(config.DurableAfter)
	k.Confirmed(k.Confirmable(k.now))
	k.marker(0x3000)
	k.want("stored", k.store(), "0/2000:5 0/3000:5")
}

func TestMarkersInASilentOutbox(t *testing.T) {
	t.Parallel()
	k := track(t, nil)
	k.window(0x2000, 1)
	k.Acked(6)
	for due := outbox.LSN(0x3000); due < 0x9000; due += 0x100 {
		k.want("a marker", k.marker(due), true)
		k.store()
		k.now = k.now.Add(k.SaveInterval())
		k.Confirmed(k.Confirmable(k.now))
	}
	k.want("confirmed", k.confirmed > 0x4000, true)
	// it is the newest of a smaller seq: what makes the newest message again
	k.want("the oldest stays", k.checkpoints[0].Due, "0/1000")
}

// Between two snapshots only what the next one needs is kept: the two newest, and the newest of a smaller
// seq.
func TestUnsavedPlacesAreThinned(t *testing.T) {
	t.Parallel()
	k := track(t, nil)
	seq := uint64(5)
	for due := outbox.LSN(0x2000); due < 0x9000; due += 0x100 {
		seq++
		k.window(due, 1)
		k.Acked(seq)
		if len(k.checkpoints) > 4 {
			t.Fatalf("%d checkpoints are held", len(k.checkpoints))
		}
	}
	k.want("a marker", k.marker(0x9000), true)
	k.want("stored", k.store(), fmt.Sprintf("0/1000:5 0/8E00:%d 0/8F00:%d 0/9000:%d", seq-1, seq, seq))
}

// What comes while a snapshot is on its way to the store neither takes from it nor counts as stored with it.
func TestPlacesDuringASave(t *testing.T) {
	t.Parallel()
	k := track(t, nil)
	k.window(0x2000, 1)
	k.window(0x3000, 1)
	k.Acked(7)
	s := k.BeginSave(k.now)
	k.want("snapshot", text(s), "0/1000:5 0/2000:6 0/3000:7")
	for i := range 4 {
		k.window(outbox.LSN(0x4000+i), 1)
		k.Acked(uint64(8 + i))
	}
	k.want("pending while it is stored", k.Pending(), false)
	k.now = k.now.Add(time.Second)
	k.Saved(k.now)
	k.want("pending after it", k.Pending(), true)
	k.now = k.now.Add(config.DurableAfter)
	k.want("confirmable", k.Confirmable(k.now), "0/3000")
	k.want("the next", k.store(), "0/1000:5 0/2000:6 0/3000:7 0/4002:10 0/4003:11")
}

func TestOnlyDurableCheckpointsAreConfirmed(t *testing.T) {
	t.Parallel()
	k := track(t, func(s *Start) {
		s.Checkpoints = []StoredCheckpoint{at(0x1000, 3, time.Hour), at(0x1100, 4, 100*time.Second),
			at(0x1200, 5, -time.Hour)}
	})
	k.want("at first", k.Confirmable(k.now), "0/1000")
	k.now = epoch.Add(50*time.Second - 1)
	k.want("before the second is old enough", k.Confirmable(k.now), "0/1000")
	k.now = epoch.Add(50 * time.Second)
	k.want("when it is", k.Confirmable(k.now), "0/1100")
	k.window(0x2000, 1)
	k.Acked(6)
	k.store()
	k.now = epoch.Add(150*time.Second - 1)
	k.want("a time in the future counts as now", k.Confirmable(k.now), "0/1100")
	k.now = epoch.Add(150 * time.Second)
	k.want("and is old enough then", k.Confirmable(k.now), "0/1200")
	k.now = epoch.Add(200*time.Second - 1)
	k.want("its own, before", k.Confirmable(k.now), "0/1200")
	k.now = epoch.Add(200 * time.Second)
	k.want("its own", k.Confirmable(k.now), "0/2000")
	k.Confirmed(0x2000)
	k.Confirmed(0x1200)
	k.want("an earlier now", k.Confirmable(epoch), "0/2000")
	k.window(0x3000, 1)
	k.Acked(7)
	k.want("what is before the confirmed one goes, but for one of a smaller seq", k.store(),
		"0/2000:6 0/3000:7")
}

// A checkpoint that is not in the record, or whose snapshot is not acknowledged, is not confirmable however
// old it is.
func TestOnlyWhatIsStoredIsConfirmable(t *testing.T) {
	t.Parallel()
	k := track(t, nil)
	k.window(0x2000, 1)
	k.Acked(6)
	k.now = k.now.Add(time.Hour)
	k.want("not in a snapshot", k.Confirmable(k.now), "0/1000")
	k.BeginSave(k.now)
	k.now = k.now.Add(time.Hour)
	k.want("not acknowledged", k.Confirmable(k.now), "0/1000")
	k.Saved(k.now)
	k.want("just acknowledged", k.Confirmable(k.now), "0/1000")
	k.now = k.now.Add(config.DurableAfter)
	k.want("old enough", k.Confirmable(k.now), "0/2000")
	k.window(0x3000, 1)
	k.Acked(7)
	s := k.BeginSave(k.now)
	if since := s.Checkpoints[1].Since; !since.Equal(epoch.Add(2 * time.Hour)) {
		t.Fatalf("the record's time is %v, want the acknowledgement's", since)
	}
}

// A clock that is ahead, ours or the broker's, makes no checkpoint older than the other one says.
func TestAgeByTwoClocks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name         string
		ours, broker time.Duration // the checkpoint's age; broker 0: the record does not say
		silent       bool          // the broker does not say what its clock shows
		want         outbox.LSN
	}{
		{"both old", 200 * time.Second, 160 * time.Second, false, 0x2000},
		{"ours is ahead", time.Hour, 149 * time.Second, false, 0x1000},
		{"the broker's is ahead", 149 * time.Second, time.Hour, false, 0x1000},
		{"the broker's went back", time.Hour, -time.Minute, false, 0x1000},
		{"a record without", 200 * time.Second, 0, false, 0x2000},
		{"a broker without", 200 * time.Second, time.Second, true, 0x2000},
	} {
		broker := epoch.Add(17 * time.Minute) // its clock is another one
		k := track(t, func(s *Start) {
			p := at(0x2000, 5, c.ours)
			if c.broker != 0 {
				p.Broker = broker.Add(-c.broker)
			}
			s.Checkpoints, s.Asked = append(s.Checkpoints, p), epoch
			if !c.silent {
				s.Broker = broker
			}
		})
		k.want(c.name, k.Confirmable(k.now), c.want)
	}

	// What is stored is stored by both clocks. The broker was asked before it answered: its time is not put
	// too early.
	k := track(t, func(s *Start) { s.Asked, s.Broker = epoch.Add(-time.Second), epoch.Add(17*time.Minute) })
	k.window(0x2000, 1)
	k.Acked(6)
	k.now = epoch.Add(10 * time.Second)
	s := k.BeginSave(k.now)
	k.want("sent, by the broker's clock", s.Checkpoints[1].Broker.Sub(epoch), 17*time.Minute+11*time.Second)
	k.now = epoch.Add(12 * time.Second)
	k.Saved(k.now)
	k.window(0x3000, 1)
	k.Acked(7)
	s = k.BeginSave(k.now)
	k.want("stored, by the broker's clock", s.Checkpoints[1].Broker.Sub(epoch), 17*time.Minute+13*time.Second)
	k.want("one that was there without", s.Checkpoints[0].Broker.IsZero(), true)

	k = track(t, nil) // a broker that does not say
	k.window(0x2000, 1)
	k.Acked(6)
	k.BeginSave(k.now)
	k.Saved(k.now)
	k.want("stored, by no clock of the broker's", k.BeginSave(k.now).Checkpoints[1].Broker.IsZero(), true)
}

// A record that lists too many events published ahead gets along with fewer checkpoints: those go that were
// stored shortly after the one before them. What is confirmed, compared or not stored yet stays.
func TestTakenEventsAreThinned(t *testing.T) {
	t.Parallel()
	full := func(p StoredCheckpoint, n int) StoredCheckpoint {
		for i := range n {
			p.PublishedAhead = append(p.PublishedAhead, outbox.Position{LSN: p.Due + 1, Index: uint32(i)})
		}
		return p
	}
	const most = maxStoredAhead
	for name, c := range map[string]struct {
		checkpoints []StoredCheckpoint // that are in the record; the newest two are new
		want        string
	}{
		"just enough": {[]StoredCheckpoint{full(at(0x1000, 5, 90*time.Second), most/2),
			full(at(0x1100, 6, 80*time.Second), most/2)}, "0/1000:5 0/1100:6 0/2000:9 0/3000:9"},
		"one too many": {[]StoredCheckpoint{full(at(0x1000, 5, 90*time.Second), most/2),
			full(at(0x1100, 6, 80*time.Second), most/2+1), at(0x1200, 8, 70*time.Second)},
			"0/1000:5 0/1200:8 0/2000:9 0/3000:9"},
		"the one to compare with stays": {[]StoredCheckpoint{full(at(0x1000, 5, 90*time.Second), most/2),
			full(at(0x1100, 8, 80*time.Second), most)}, "0/1000:5 0/1100:8 0/2000:9 0/3000:9"},
		"so does one that lists nothing": {[]StoredCheckpoint{full(at(0x1000, 5, 90*time.Second), most),
			at(0x1100, 6, 89*time.Second), full(at(0x1200, 6, 80*time.Second), 1),
			at(0x1300, 8, time.Second)},
			"0/1000:5 0/1100:6 0/1300:8 0/2000:9 0/3000:9"},
		"the closest first": {[]StoredCheckpoint{full(at(0x1000, 5, 90*time.Second), most-2),
			full(at(0x1100, 6, 80*time.Second), 1), full(at(0x1200, 6, 75*time.Second), 1),
			full(at(0x1300, 6, 60*time.Second), 1), at(0x1400, 8, 50*time.Second)},
			"0/1000:5 0/1100:6 0/1300:6 0/1400:8 0/2000:9 0/3000:9"},
		"of two that are as close the older": {[]StoredCheckpoint{full(at(0x1000, 5, 90*time.Second), most-1),
			full(at(0x1100, 6, 80*time.Second), 1),
			full(at(0x1200, 6, 70*time.Second), 1), at(0x1300, 8, 50*time.Second)},
			"0/1000:5 0/1200:6 0/1300:8 0/2000:9 0/3000:9"},
	} {
		k := track(t, func(s *Start) { s.Checkpoints, s.LastSeq, s.End = c.checkpoints, 8, 8 })
		k.window(0x2000, 1)
		k.Acked(9)
		k.marker(0x3000)
		k.want(name, text(k.BeginSave(k.now)), c.want)
	}

	// The two newest stay, stored or not, and the confirmed one.
	k := track(t, func(s *Start) {
		s.Checkpoints = []StoredCheckpoint{at(0x1000, 3, 90*time.Second),
			full(at(0x1100, 4, 80*time.Second), most), full(at(0x1200, 5, 70*time.Second), most)}
		s.Confirmed = 0x1100
	})
	k.window(0x2000, 1)
	k.Acked(6)
	k.BeginSave(k.now)
	k.Saved(k.now)
	k.want("the newest two", text(k.BeginSave(k.now)), "0/1100:4 0/1200:5 0/2000:6")
}

func TestAnUnverifiedTailConfirmsNothing(t *testing.T) {
	t.Parallel()
	k := track(t, func(s *Start) {
		s.AlreadyStored, s.LastSeq, s.End = 4, 9, 9
		s.Checkpoints = append(s.Checkpoints, at(0x2000, 9, time.Hour))
	})
	k.want("before the check", k.Confirmable(k.now), "0/1000")
	k.Made(4)
	k.want("after it", k.Confirmable(k.now), "0/2000")
}

func TestWithoutDurableAfterACheckpointIsConfirmedAtOnce(t *testing.T) {
	t.Parallel()
	c := config
	c.DurableAfter = 0
	p := at(0x1000, 5, -time.Hour)
	k := &tracked{NewTracker(c, Start{Checkpoint: p.Checkpoint, LastSeq: 5, End: 5,
		Checkpoints: []StoredCheckpoint{p}}, epoch), t, epoch}
	k.want("interval", k.SaveInterval(), time.Second)
	k.want("a stored one", k.Confirmable(k.now), "0/1000")
	k.window(0x2000, 1)
	k.Acked(6)
	k.want("not stored", k.Confirmable(k.now), "0/1000")
	k.store()
	k.want("stored", k.Confirmable(k.now), "0/2000")
	k.window(0x3000, 1)
	k.Acked(7)
	k.store()
	k.want("whenever the broker was heard", k.Confirmable(k.now.Add(-time.Hour)), "0/3000")
}

func TestTheRecordIsSavedAtItsTimes(t *testing.T) {
	t.Parallel()
	k := track(t, func(s *Start) { s.Checkpoints[0].Since = epoch })
	in := func() string {
		d, ok := k.SaveIn(k.now)
		return fmt.Sprint(d, ok)
	}
	const interval = 150 * time.Second / 32
	k.want("interval", k.SaveInterval(), interval)
	k.want("nothing new", in(), "0s false")
	k.now = k.now.Add(time.Second)
	k.window(0x2000, 1)
	k.Acked(6)
	k.want("the last session stored a second ago", in(), fmt.Sprint(interval-time.Second, true))
	k.now = k.now.Add(time.Minute)
	k.want("the first at once, if that is long ago", in(), "0s true")
	k.store()
	k.want("nothing new", in(), "0s false")
	k.now = k.now.Add(time.Second)
	k.window(0x3000, 1)
	k.Acked(7)
	k.want("the next", in(), fmt.Sprint(interval-time.Second, true))
	k.want("but it may be stored at a clean stop", k.Pending(), true)
	k.now = k.now.Add(interval)
	k.want("and is due then", in(), "0s true")
}

// What a start found to be lost is in the record before anything is confirmed, and does not wait for its
// interval: until then only the memory of this session knows of it.
func TestWhatAStartFoundLostIsRecordedFirst(t *testing.T) {
	t.Parallel()
	k := track(t, func(s *Start) {
		s.Rewrite, s.LastSeq, s.End, s.AlreadyStored, s.Holes = true, 9, 7, 2, []Range{{3, 4}, {8, 9}}
		s.Checkpoints = []StoredCheckpoint{at(0x1000, 5, time.Hour), at(0x1100, 5, 200*time.Second),
			at(0x1200, 5, time.Second)}
	})
	k.want("must be stored", k.MustSave(), true)
	k.want("but not before the check", k.Pending(), false)
	k.Made(2)
	in, ok := k.SaveIn(k.now)
	k.want("then at once, though the last one is a second old", fmt.Sprint(in, ok), "0s true")
	k.want("nothing is confirmed before", k.Confirmable(k.now), "0/1000")
	s := k.BeginSave(k.now)
	k.want("snapshot", text(s)+fmt.Sprint(s.Holes), "0/1000:5 0/1100:5 0/1200:5[{8 9}]")
	k.want("until the store says so", fmt.Sprint(k.MustSave(), k.Confirmable(k.now)), "true 0/1000")
	k.Saved(k.now)
	k.want("and then no more", fmt.Sprint(k.MustSave(), k.Pending(), k.Confirmable(k.now)),
		"false false 0/1100")
}
