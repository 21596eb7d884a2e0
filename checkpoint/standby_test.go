package checkpoint

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestAnOwnerSaysWhatIsConfirmed: what is published at a checkpoint that it has found durable, and once more
// when nothing else is new. Where nobody shares the stream, nothing is said.
func TestAnOwnerSaysWhatIsConfirmed(t *testing.T) {
	t.Parallel()
	for _, clusters := range []bool{true, false} {
		k := track(t, func(s *Start) { s.Shared, s.Told, s.Checkpoints[0].Since = clusters, 0x1000, epoch })
		save := func() outbox.LSN {
			t.Helper()
			u := k.BeginSave(k.now)
			k.Saved(k.now)
			return u.Confirmed
		}
		k.window(0x2000, 3)
		k.Acked(8)
		if at := save(); at != 0 || k.Pending() {
			t.Errorf("%v is confirmed before anything is durable", at)
		}
		k.now = k.now.Add(config.DurableAfter)
		k.Confirmable(k.now)
		if k.Pending() != clusters {
			t.Errorf("shared %t: there is something to say: %t", clusters, k.Pending())
		}
		if at := save(); at != 0x2000 {
			t.Errorf("%v is confirmed", at)
		}
		k.Confirmable(k.now)
		if k.Pending() {
			t.Error("it is said again and again")
		}
	}
}

// TestARecordSaysWhatIsConfirmed, which never goes back, unless the checkpoints do, and lies beyond none.
func TestARecordSaysWhatIsConfirmed(t *testing.T) {
	t.Parallel()
	r := shared()
	r.Confirmed = 0x1800
	doc, err := r.Encode()
	must.Succeed(t, err)
	if got, err := Decode(doc); err != nil || got.Confirmed != 0x1800 || got.TakenBy(2).Confirmed != 0x1800 {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, c := range []struct{ says, due, want outbox.LSN }{
		{0x1400, 0x2000, 0x1800}, {0x1C00, 0x2000, 0x1C00}, {0, 0x1200, 0x1200},
	} {
		u := Update{Checkpoints: []StoredCheckpoint{at(c.due, 9, 0)}, Confirmed: c.says}
		if got := r.With(u, publication, 0x3000); got.Confirmed != c.want {
			t.Errorf("%+v: %v", c, got.Confirmed)
		}
	}
	for name, change := range map[string]func(*Record){
		"beyond all": func(r *Record) { r.Confirmed = 0x2001 },
		"no epoch":   func(r *Record) { r.Epoch, r.Owner, r.Cuts = 0, 0, nil },
	} {
		r := shared()
		r.Confirmed = 0x1800
		change(r)
		if _, err := r.Encode(); err == nil {
			t.Error(name)
		}
	}
	alone := record(at(0x1000, 5, time.Hour))
	update := Update{Checkpoints: alone.Checkpoints, Confirmed: 0x1000}
	if got := alone.With(update, publication, 0); got.Confirmed != 0 {
		t.Errorf("nobody shares the stream, and %v is confirmed", got.Confirmed)
	}
}

// away are a home's record, and what another cluster keeps for itself.
func away() (home, own *Record) {
	_, r := awayReadings() // at A1000, A2000 and A3000, read at 1000, 2000 and 3000
	own = r.Record.WithoutStream()
	home = record(at(0xA1000, 5, time.Minute), at(0xA2800, 9, time.Second))
	home.Mapping = own.Mapping
	home.Mapping.OwnOnly, home.Mapping.Subscription = true, ""
	home.Slot, home.SystemID = "theirs", "7"
	home.Owner, home.Epoch, home.Confirmed = 2, 3, 0xA1000
	for i := range home.Checkpoints {
		home.Checkpoints[i].Timeline = uint32(3 + i)
	}
	return home, own
}

// TestAHomesRecordComesBackAsItWas: what is made of it elsewhere is undone, and what was added there says
// what the home's own would.
func TestAHomesRecordComesBackAsItWas(t *testing.T) {
	t.Parallel()
	home, own := away()
	rec, err := own.Elsewhere(home)
	must.Succeed(t, err)
	if back := rec.AtHome(); !home.Is(back) || rec.Confirmed != home.Confirmed {
		t.Fatalf("%+v", back)
	}
	if !home.Is(home.AtHome()) {
		t.Error("at home it is another one")
	}
	made := StoredCheckpoint{Checkpoint: relay.Checkpoint{Due: 0xA4000, Read: 0x4000, Seq: 12, Timeline: 1,
		Settings: settings, Home: relay.Confirmed{LSN: 0xA2000, Timeline: 6}}, Since: epoch}
	again := made // while the home is silent
	again.Read++
	lost := rec.Checkpoints[1] // its messages were, and are made again
	lost.Since = epoch
	next := rec.With(Update{Checkpoints: []StoredCheckpoint{rec.Checkpoints[0], lost, made, again},
		Confirmed: 0xA2800}, own.Publication.PublicationIdentity, 0x5000)
	back := next.AtHome()
	if _, err := back.Encode(); err != nil || len(back.Checkpoints) != 3 || back.Confirmed != 0xA2800 ||
		back.Publication != home.Publication || back.Slot != "theirs" {
		t.Fatalf("%+v, %v", back, err)
	}
	if p := back.Checkpoints[1]; !p.Since.Equal(epoch) || p.Timeline != 4 {
		t.Errorf("made again: %+v", p)
	}
	if p := back.Checkpoints[2]; p.Read != 0 || p.Home != (relay.Confirmed{}) || p.Timeline != 6 {
		t.Errorf("added: %+v", p)
	}
	kept := next.WithoutStream()
	if _, err := kept.Encode(); err != nil || kept.Epoch != 0 || len(kept.Checkpoints) != 4 {
		t.Fatalf("%+v, %v", kept, err)
	}
	if p := kept.Checkpoints[3]; p.Seq != 0 || p.Read != 0x4001 || p.Due != 0xA4000 {
		t.Errorf("kept: %+v", p)
	}
	if _, err := kept.Elsewhere(back); err != nil {
		t.Error(err)
	}
	gap := home.WithoutStream() // on both sides of a cut there is one
	gap.Checkpoints = append(gap.Checkpoints, gap.Checkpoints[1])
	if again := gap.WithoutStream(); !reflect.DeepEqual(again.Checkpoints, gap.Checkpoints[:2]) {
		t.Errorf("%+v", again.Checkpoints)
	}
}

// TestACutElsewhereIsOfItsHome, which the home's record says.
func TestACutElsewhereIsOfItsHome(t *testing.T) {
	t.Parallel()
	home, own := away()
	rec, err := own.Elsewhere(home)
	must.Succeed(t, err)
	cut := cutAt(0xA2800, 3)
	if _, err := config.WithCut(rec, cut); outbox.FaultOf(err) == nil ||
		outbox.FaultOf(err).Code != CodeCutHome {
		t.Errorf("another home's: %v", err)
	}
	cut.Cut.SystemID = 7
	if _, err := config.WithCut(rec, cut); err != nil {
		t.Error(err)
	}
	if own.homeID() != "" || home.homeID() != "7" {
		t.Errorf("own %q, home %q", own.homeID(), home.homeID())
	}
}

// TestWhatAClusterKeepsIsBesideTheRecord: in the same bucket, and no other slot's.
func TestWhatAClusterKeepsIsBesideTheRecord(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	ensure(ctx, t, s)
	_, own := away()
	store := func(cluster int) *Store {
		return NewStore(jsapi.New(nc, ""), StoreConfig{Stream: "OUTBOX", Slot: own.Slot, Cluster: cluster,
			Standby: true})
	}
	second, third := store(2), store(3)
	rev := save(ctx, t, second, own, 0)
	for who, other := range map[string]*Store{"the home": s, "another one": third} {
		if r, _, err := other.Load(ctx); r != nil || err != nil {
			t.Errorf("%s has it: %+v, %v", who, r, err)
		}
	}
	if _, err := second.Save(ctx, own, 0); !errors.Is(err, ErrConflict) {
		t.Errorf("it is not compared: %v", err)
	}
	if err := s.CheckAlone(ctx); err != nil {
		t.Errorf("it is taken for another slot's: %v", err)
	}
	must.Succeed(t, second.SaveEnd(ctx, End{Code: "divergence"}))
	if end, err := s.LastEnd(ctx); end != nil || err != nil {
		t.Errorf("the home has its end: %+v, %v", end, err)
	}
	if r, now := load(ctx, t, second); now != rev || !own.Is(r) {
		t.Errorf("%+v at %d", r, now)
	}
	must.Succeed(t, second.Remove(ctx, rev))
	if r, _ := load(ctx, t, second); r != nil {
		t.Errorf("%+v is left", r)
	}
}
