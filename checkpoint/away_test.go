package checkpoint

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// awayReadings are those of a healthy set-up whose rows are another server's: positions there are far beyond
// this server's WAL.
func awayReadings() (Config, Readings) {
	r, c := readings(), config
	c.Mapping.Control, c.Mapping.Subscription = "public.outflow_control", "home"
	r.Record.Mapping = c.Mapping
	r.Record.Publication.Subscription = "pg_16500,1,2"
	r.Publication.Subscription = "pg_16500,1,2"
	for i := range r.Record.Checkpoints {
		p := &r.Record.Checkpoints[i]
		p.Read, p.Due = p.Due, p.Due+0xA0000
	}
	r.Stream.Newest = &outbox.Header{Pos: outbox.Position{LSN: 0xA2F00, Index: 2}, N: 2, Of: 3, Due: 0xA3000,
		Thru: 0xA3000, Timeline: 1}
	return c, r
}

// trackAway tracks another server's rows, from its 0xA1000 on, which came at 0x1000 here.
func trackAway(t *testing.T) *tracked {
	p := at(0xA1000, 5, time.Hour)
	p.Read = 0x1000
	return track(t, func(s *Start) { s.Checkpoint, s.Checkpoints = p.Checkpoint, []StoredCheckpoint{p} })
}

// TestAHomesPositionsAreNotComparedWithThisServers: slot, end of WAL and timelines speak of the server that
// is read, checkpoints and messages of the home.
func TestAHomesPositionsAreNotComparedWithThisServers(t *testing.T) {
	t.Parallel()
	c, r := awayReadings()
	doc, err := r.Record.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if r.Record, err = Decode(doc); err != nil {
		t.Fatal(err)
	}
	start, err := Resolve(c, r)
	if err != nil || start.Checkpoint.Start() != 0x2000 || start.Checkpoint.Published() != 0xA2000 {
		t.Errorf("%+v, %v", start.Checkpoint, err)
	}
	for _, wrong := range []struct {
		code   string
		change func(r *Readings)
	}{
		{"slot_ahead", func(r *Readings) { r.Slot.Confirmed = 0x3001 }},
		{"server_behind", func(r *Readings) { r.Server.WALEnd = 0x2FFF }},
		{"timeline_lost", func(r *Readings) { r.Server.History = promoted(0x2FFF) }},
		{CodePublication, func(r *Readings) { r.Publication.Subscription = "pg_16500,1,3" }},
		{CodePublication, func(r *Readings) { r.Publication.Hidden = &outbox.Fault{Message: "is to skip"} }},
		{"mapping_changed", func(r *Readings) {
			rec := *r.Record
			rec.Mapping.Subscription = "other"
			r.Record = &rec
		}},
	} {
		_, r := awayReadings()
		wrong.change(&r)
		_, err := Resolve(c, r)
		if f := outbox.FaultOf(err); f == nil || f.Code != wrong.code {
			t.Errorf("%s: %v", wrong.code, err)
		} else if f.Class == outbox.Gap && strings.Contains(f.Hint, "outflow repair") {
			t.Errorf("%s: there is no repair for it: %s", wrong.code, f.Hint)
		}
	}
	for cluster, anew := range map[int]string{0: "`outflow uninstall --with-stream` and `outflow init`",
		2: "`outflow uninstall` and `outflow init`"} { // uninstall refuses to remove a stream that is shared
		c, r := awayReadings()
		c.Cluster, r.Slot = cluster, relay.SlotState{}
		_, err := Resolve(c, r)
		if f := outbox.FaultOf(err); f == nil || !strings.Contains(f.Hint, anew) {
			t.Errorf("cluster %d: %v", cluster, err)
		}
	}
	if _, r := awayReadings(); r.Server.History.Timeline == 1 {
		r.Server.History = promoted(0x3000)
		if _, err := Resolve(c, r); err != nil {
			t.Errorf("a promotion behind all that was read: %v", err)
		}
	}
}

// TestARecordOfAnothersRowsSaysWhereTheyAre: checkpoints without it, or with it at home, are no record.
func TestARecordOfAnothersRowsSaysWhereTheyAre(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]func(r *Record){
		"nowhere here":      func(r *Record) { r.Checkpoints[1].Read = 0 },
		"at home":           func(r *Record) { r.Mapping.Subscription, r.Publication.Subscription = "", "" },
		"no control table":  func(r *Record) { r.Mapping.Control = "" },
		"own ones as well":  func(r *Record) { r.Mapping.OwnOnly = true },
		"back at home":      func(r *Record) { r.Checkpoints[1].Due = r.Checkpoints[0].Due - 1 },
		"back here":         func(r *Record) { r.Checkpoints[1].Read = r.Checkpoints[0].Read - 1 },
		"no subscription":   func(r *Record) { r.Mapping.Subscription = "" },
		"an older document": nil,
	} {
		_, r := awayReadings()
		if change == nil {
			doc, err := r.Record.Encode()
			if err != nil {
				t.Fatal(err)
			}
			doc = []byte(strings.Replace(string(doc), `"v":7`, `"v":6`, 1))
			if _, err := Decode(doc); err == nil {
				t.Errorf("%s is accepted", what)
			}
			continue
		}
		change(r.Record)
		if _, err := r.Record.Encode(); err == nil {
			t.Errorf("%s is accepted", what)
		}
	}
}

// TestASilentHomeKeepsNoWAL: while nothing comes from the home, what else this server writes is confirmed.
func TestASilentHomeKeepsNoWAL(t *testing.T) {
	t.Parallel()
	k := trackAway(t)
	silent := func(read outbox.LSN) bool {
		return k.Keepalive(relay.Checkpoint{Due: 0xA1000, Read: read, Settings: settings, Timeline: 1})
	}
	if silent(0x1000) || !silent(0x2000) || !silent(0x3000) {
		t.Error("a checkpoint that goes on here alone does not count, or one that goes on nowhere does")
	}
	u := k.BeginSave(k.now)
	_, r := awayReadings()
	r.Record.Checkpoints = u.Checkpoints
	if _, err := r.Record.Encode(); err != nil {
		t.Fatal(err)
	}
	k.Saved(k.now)
	k.now = k.now.Add(time.Hour)
	if lsn := k.Confirmable(k.now); lsn != 0x3000 {
		t.Errorf("confirmed up to %v", lsn)
	}
}

// TestARecordWithATallyHasAVersionOfItsOwn: an older outflow refuses it by that, and a record without one is
// what it was.
func TestARecordWithATallyHasAVersionOfItsOwn(t *testing.T) {
	t.Parallel()
	tally := relay.Tally{Since: 0x1000, Events: 5, Sum: 1 << 63}
	home := relay.Confirmed{LSN: 0xA1000, Timeline: 2}
	encode := func(change func(p *StoredCheckpoint), r *Record) (string, error) {
		change(&r.Checkpoints[2])
		doc, err := r.Encode()
		return string(doc), err
	}
	_, away := awayReadings()
	doc, err := encode(func(p *StoredCheckpoint) { p.Tally, p.Home = tally, home }, away.Record)
	if err != nil || !strings.HasPrefix(doc, `{"v":8,`) {
		t.Fatalf("%s, %v", doc, err)
	}
	rec, err := Decode([]byte(doc))
	if p := rec.Checkpoints[2]; err != nil || p.Tally != tally || p.Home != home {
		t.Errorf("%+v, %v", p, err)
	}
	if _, err := Decode([]byte(strings.Replace(doc, `"v":8`, `"v":7`, 1))); err == nil {
		t.Error("version 7 with a tally is accepted")
	}
	_, away = awayReadings()
	said := relay.Said{At: epoch, LSN: 0xA1000, Events: 5}
	doc, err = encode(func(p *StoredCheckpoint) { p.Said = said }, away.Record)
	if err != nil || !strings.HasPrefix(doc, `{"v":9,`) {
		t.Errorf("what a home has said: %s, %v", doc, err)
	}
	before := strings.Replace(doc, `"v":9`, `"v":8`, 1) // as it was written for a day
	if rec, err := Decode([]byte(before)); err != nil || rec.Checkpoints[2].Said != said {
		t.Errorf("%+v, %v", rec, err)
	}
	_, away = awayReadings()
	if doc, err := encode(func(*StoredCheckpoint) {}, away.Record); err != nil ||
		!strings.HasPrefix(doc, `{"v":7,`) || strings.Contains(doc, "tally") || strings.Contains(doc, `"home":{`) {
		t.Errorf("without: %s, %v", doc, err)
	}
	for what, change := range map[string]func(p *StoredCheckpoint){
		"counts from beyond itself": func(p *StoredCheckpoint) { p.Tally = relay.Tally{Since: 0xAF000} },
		"counts from nowhere":       func(p *StoredCheckpoint) { p.Tally = relay.Tally{Events: 1} },
		"no timeline":               func(p *StoredCheckpoint) { p.Home = relay.Confirmed{LSN: 1} },
	} {
		_, away := awayReadings()
		if _, err := encode(change, away.Record); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
	for what, change := range map[string]func(p *StoredCheckpoint){
		"a tally without a control table": func(p *StoredCheckpoint) { p.Tally = tally },
		"a home of its own":               func(p *StoredCheckpoint) { p.Home = home },
	} {
		if _, err := encode(change, readings().Record); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

// TestAPromotedHomeGoesOnCounting: a checkpoint that counts as the switch point counts the same events,
// unless events that it held went with the branch.
func TestAPromotedHomeGoesOnCounting(t *testing.T) {
	t.Parallel()
	for _, holds := range []bool{false, true} {
		r, c := readings(), config
		c.Mapping.Control, c.Mapping.OwnOnly = "public.outflow_control", true
		r.Record.Mapping = c.Mapping
		r.Server.History = promoted(0x2800)
		p := &r.Record.Checkpoints[2]
		p.Tally = relay.Tally{Since: 0x1000, Events: 5, Sum: 3}
		p.Seq = 9
		if holds {
			for i := range 2 {
				r.Record.Checkpoints[i].Settings = gapSettings
			}
			*p = holding(*p, 0x2100, 0)
		}
		r.Stream.LastSeq, r.Stream.NewestSeq, r.Stream.Messages = 9, 9, 9
		r.Stream.Newest.Pos.LSN, r.Stream.Newest.Due, r.Stream.Newest.Thru = 0x1F00, 0x2000, 0x2000
		start, err := Resolve(c, r)
		if err != nil {
			t.Fatal(err)
		}
		newest := start.Checkpoints[len(start.Checkpoints)-1]
		if newest.Due != 0x2800 || (newest.Tally == relay.Tally{}) != holds {
			t.Errorf("holds %t: %+v", holds, newest)
		}
	}
}

// TestAReaderThatStoppedAtACountStopsAgain, whatever the readings show.
func TestAReaderThatStoppedAtACountStopsAgain(t *testing.T) {
	t.Parallel()
	c, r := awayReadings()
	r.Record.Stopped = CodeHome
	_, err := Resolve(c, r)
	f := outbox.FaultOf(err)
	if f == nil || f.Code != CodeHome || f.Class != outbox.Gap || !strings.Contains(f.Message, "counted") {
		t.Errorf("%v", err)
	}
}

// TestACheckpointThatItsHomeHasConfirmedStays: nothing beyond it is confirmed, however durable it is, and it
// stays in the record among a bounded number.
func TestACheckpointThatItsHomeHasConfirmedStays(t *testing.T) {
	t.Parallel()
	k := trackAway(t)
	k.Limit(0xA1005)
	_, r := awayReadings()
	for i := range outbox.LSN(2 * maxLimited) {
		k.Keepalive(relay.Checkpoint{Due: 0xA1001 + i, Read: 0x1001 + i, Settings: settings,
			Timeline: 1})
		r.Record.Checkpoints = k.BeginSave(k.now).Checkpoints
		k.Saved(k.now)
		k.now = k.now.Add(time.Hour)
		k.Confirmed(k.Confirmable(k.now))
	}
	doc, err := r.Record.Encode()
	if err != nil {
		t.Fatal(err)
	}
	all := r.Record.Checkpoints
	if n := len(all); n > maxLimited || len(doc) > 1<<18 || all[0].Due > 0xA1005 {
		t.Errorf("%d checkpoints, from %v, of %d bytes", n, all[0].Due, len(doc))
	}
	if lsn := k.Confirmable(k.now); lsn != 0x1005 {
		t.Errorf("confirmed %v", lsn)
	}
	k.Limit(0xA1001) // it is never taken back
	k.Limit(0xAFFFF)
	if lsn := k.Confirmable(k.now); lsn != 0x1000+2*maxLimited {
		t.Errorf("confirmed %v when the home has confirmed all", lsn)
	}
}

// TestAHomesRecordIsReadElsewhere: each of its checkpoints begins where the newest own one at or below it
// does.
func TestAHomesRecordIsReadElsewhere(t *testing.T) {
	t.Parallel()
	both := func() (home, own *Record) {
		_, r := awayReadings() // at A1000, A2000 and A3000, of which 300, 200 and 10 seconds ago
		own = r.Record
		home = record(at(0xA0800, 1, time.Hour), at(0xA1000, 5, time.Minute), at(0xA2FFF, 9, time.Hour))
		home.Mapping = own.Mapping
		home.Mapping.OwnOnly, home.Mapping.Subscription = true, ""
		home.Slot, home.SystemID, home.Stream = "theirs", "1", "HOME"
		home.Holes = []Range{{7, 8}}
		home.Checkpoints[1].Tally = relay.Tally{Since: 1, Events: 2}
		return home, own
	}
	home, own := both()
	rec, err := own.Elsewhere(home)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(rec.Checkpoints); n != 2 || rec.Stream != "HOME" || rec.Slot != own.Slot ||
		rec.SystemID != own.SystemID || len(rec.Holes) != 1 || !rec.Mapping.Away() {
		t.Fatalf("%+v", rec)
	}
	first, second := rec.Checkpoints[0], rec.Checkpoints[1]
	if first.Due != 0xA1000 || first.Read != 0x1000 || first.Tally.Events != 2 || first.Seq != 5 ||
		!first.Since.Equal(home.Checkpoints[1].Since) {
		t.Errorf("%+v", first)
	}
	if second.Due != 0xA2FFF || second.Read != 0x2000 || !second.Since.Equal(own.Checkpoints[1].Since) {
		t.Errorf("%+v", second)
	}
	if _, err := rec.Encode(); err != nil {
		t.Error(err)
	}
	for what, change := range map[string]func(home, own *Record){
		"nothing so old":  func(home, _ *Record) { home.Checkpoints = home.Checkpoints[:1] },
		"another column":  func(home, _ *Record) { home.Mapping.Payload = "body" },
		"of no home":      func(home, own *Record) { *own = *home },
		"it has stopped":  func(_, own *Record) { own.Stopped = CodeHome },
		"it is repaired":  func(home, _ *Record) { home.Repairing = "slot_missing" },
		"two of one home": func(home, own *Record) { *home = *own },
	} {
		home, own := both()
		change(home, own)
		if rec, err := own.Elsewhere(home); err == nil {
			t.Errorf("%s: %+v", what, rec)
		}
	}
}

// TestWhatIsKeptForAHomeIsKnown: a session and its record say alike how much WAL could be confirmed if the
// home had confirmed its own, and since when.
func TestWhatIsKeptForAHomeIsKnown(t *testing.T) {
	t.Parallel()
	begun := time.Now()
	record := Record{}
	tr := &Tracker{durable: time.Minute}
	for i, at := range []outbox.LSN{100, 200, 300, 400} {
		p := relay.Checkpoint{Due: 0xA0000 + at, Read: at, Home: relay.Confirmed{LSN: 0xA0000 + 250}}
		stored := begun.Add(time.Duration(i) * 10 * time.Second)
		record.Checkpoints = append(record.Checkpoints, StoredCheckpoint{Checkpoint: p, Since: stored})
		tr.checkpoints = append(tr.checkpoints, trackedCheckpoint{Checkpoint: p, state: inStore,
			storedAt: stored})
	}
	free := begun.Add(80 * time.Second) // when the first one that the home has not confirmed gets durable
	check := func(home outbox.LSN, now time.Time, want Kept) {
		t.Helper()
		record.Checkpoints[3].Home.LSN, tr.limit = home, home
		for who, got := range map[string]Kept{
			"record": record.Kept(time.Minute, now), "session": tr.Kept(now),
		} {
			if got.Bytes != want.Bytes || !got.Since.Equal(want.Since) {
				t.Errorf("home %v: %s %+v, want %+v", home, who, got, want)
			}
		}
	}
	check(0xA0000+250, free.Add(-time.Second), Kept{})
	check(0xA0000+250, free, Kept{100, free})
	check(0xA0000+250, free.Add(time.Hour), Kept{200, free})
	check(0xA0000+400, free.Add(time.Hour), Kept{})
	check(0xA0000+50, free.Add(time.Hour), Kept{300, free.Add(-10 * time.Second)})
	check(0, free.Add(time.Hour), Kept{}) // it has said nothing
	k := Kept{1, free}
	if k.Long(free.Add(longKept-1)) || !k.Long(free.Add(longKept)) || (Kept{}).Long(free) {
		t.Error("what is kept for long, and what not")
	}
}

// TestWhatIsMadeElsewhereIsTheHomesAgain: what another cluster writes is the home's record, with what it has
// added.
func TestWhatIsMadeElsewhereIsTheHomesAgain(t *testing.T) {
	t.Parallel()
	_, r := awayReadings()
	own := r.Record
	home := record(at(0xA1000, 5, time.Hour), at(0xA2FFF, 9, time.Hour), at(0xA3000, 10, time.Hour))
	home.Mapping = own.Mapping
	home.Mapping.OwnOnly, home.Mapping.Subscription = true, ""
	home.Slot, home.SystemID, home.Stream, home.Owner, home.Epoch = "theirs", "1", "HOME", 2, 3
	for i := range home.Checkpoints {
		home.Checkpoints[i].Timeline = 4
	}
	rec, err := own.Elsewhere(home)
	must.Succeed(t, err)
	doc, err := rec.AtHome().Encode()
	must.Succeed(t, err)
	stored, err := Decode(doc)
	must.Succeed(t, err)
	if stored.Slot != "theirs" || stored.SystemID != "1" || stored.Mapping != home.Mapping ||
		stored.Publication != home.Publication || len(stored.Checkpoints) != 3 {
		t.Errorf("unchanged: %s", doc)
	}
	loaded, err := own.Elsewhere(stored)
	must.Succeed(t, err)
	if !rec.Is(loaded) {
		t.Error("what was stored is not what was written")
	}
	now := time.Now().UTC()
	young := func(due, read outbox.LSN, seq uint64, timeline uint32) StoredCheckpoint {
		p := at(due, seq, 0)
		p.Read, p.Timeline, p.Since = read, 1, now
		p.Home = relay.Confirmed{LSN: 0xA1000, Timeline: timeline}
		return p
	}
	// the newest one was lost, and has come again
	next := rec.With(Update{Checkpoints: append(rec.Checkpoints[:2:2], young(0xA3000, 0x3000, 10, 3),
		young(0xA4000, 0x4000, 11, 3), young(0xA4000, 0x4100, 11, 3), young(0xA5000, 0x5000, 12, 5))},
		own.Publication.PublicationIdentity, 0x5000).AtHome()
	if n := len(next.Checkpoints); n != 5 {
		t.Fatalf("%d checkpoints", n)
	}
	for i, timeline := range []uint32{4, 4, 4, 4, 5} {
		if p := next.Checkpoints[i]; p.Timeline != timeline || p.Read != 0 || p.Home != (relay.Confirmed{}) ||
			(i > 1) != p.Since.Equal(now) {
			t.Errorf("checkpoint %d: %+v", i, p)
		}
	}
	if _, err := next.Encode(); err != nil || rec.Is(next) {
		t.Errorf("not another record: %v", err)
	}
	cut, err := rec.CutAt(0xA4000, 5)
	if err != nil || cut != (outbox.Cut{SystemID: 1, Timeline: 5, LSN: 0xA4000, Epoch: 3, Owner: 2}) {
		t.Errorf("%v, %v", cut, err)
	}
	if _, err := config.WithCut(rec, relay.Stored{Seq: 11, Cut: &cut}); err != nil {
		t.Error(err)
	}
	cut.SystemID = 7361530121234511111
	_, err = config.WithCut(rec, relay.Stored{Seq: 11, Cut: &cut})
	refused(t, err, CodeCutHome, outbox.Gap, "0/A3000 to 0/A4000", nil)
}
