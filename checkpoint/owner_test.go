package checkpoint

import (
	"bytes"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// shared is a record of a stream that clusters share, in its third epoch.
func shared() *Record {
	r := record(at(0x1000, 5, time.Hour), at(0x2000, 9, time.Minute))
	r.Mapping.Control = "public.outflow_control"
	r.Owner, r.Epoch, r.Cuts = 1, 3, []StoredCut{{0x1000, 6}, {0x1800, 8}}
	return r
}

func cutAt(lsn outbox.LSN, epoch uint64) relay.Stored {
	return relay.Stored{Seq: 10, Cut: &outbox.Cut{SystemID: 7361530121234511111, LSN: lsn, Epoch: epoch,
		Owner: 2}}
}

func TestARecordSaysWhoOwnsTheStream(t *testing.T) {
	t.Parallel()
	doc, err := shared().Encode()
	must.Succeed(t, err)
	if got, err := Decode(doc); err != nil || got.Version != clustersVersion || got.Owner != 1 ||
		got.Epoch != 3 || !slices.Equal(got.Cuts, shared().Cuts) {
		t.Fatalf("%+v, %v", got, err)
	}
	for name, change := range map[string]func(*Record){
		"no owner":         func(r *Record) { r.Owner = 0 },
		"owner too great":  func(r *Record) { r.Owner = outbox.MaxCluster + 1 },
		"no epoch":         func(r *Record) { r.Epoch = 0 },
		"a cut, no epoch":  func(r *Record) { r.Epoch, r.Owner = 0, 0 },
		"no control table": func(r *Record) { r.Mapping.Control = "" },
		"a cut twice":      func(r *Record) { r.Cuts[0].LSN = 0x1800 },
		"one sequence":     func(r *Record) { r.Cuts[0].Seq = 8 },
		"a cut below all":  func(r *Record) { r.Cuts[0].LSN = 0xFFF },
		"a cut before all": func(r *Record) { r.Cuts[0].Seq = 5 },
		"an accepted cut":  func(r *Record) { r.Base = 6 },
		"too many cuts": func(r *Record) {
			for i := range maxCuts {
				r.Cuts = append(r.Cuts, StoredCut{outbox.LSN(0x2000 + i), uint64(10 + i)})
			}
		},
	} {
		r := shared()
		change(r)
		if _, err := r.Encode(); err == nil {
			t.Error(name)
		}
	}
	_, err = Decode(bytes.Replace(doc, []byte(`"v":9`), []byte(`"v":8`), 1))
	refused(t, err, "record_corrupt", outbox.Gap, "", nil)
	if r := shared(); r.TakenBy(2).Epoch != 4 || r.TakenBy(2).Owner != 2 || r.Owner != 1 {
		t.Error("not the next epoch")
	}
}

// A cut goes with the checkpoints that it is behind. At its LSN there may be one on either side of it.
func TestARecordKeepsTheCutsThatAStartNeeds(t *testing.T) {
	t.Parallel()
	r := shared()
	for seq, want := range map[uint64][]StoredCut{5: r.Cuts, 6: r.Cuts[1:], 7: r.Cuts[1:], 8: nil, 9: nil} {
		got := r.With(Update{Checkpoints: []StoredCheckpoint{at(0x1000, seq, 0)}}, publication, 0x3000)
		if !slices.Equal(got.Cuts, want) || got.Epoch != 3 || got.Owner != 1 || len(r.Cuts) != 2 {
			t.Errorf("from %d: %+v", seq, got)
		}
	}
	home := shared()
	home.Mapping.OwnOnly = true
	_, elsewhere := awayReadings()
	own := elsewhere.Record
	own.Mapping = home.Mapping
	own.Mapping.OwnOnly, own.Mapping.Subscription = false, "home"
	for i := range own.Checkpoints {
		own.Checkpoints[i].Due -= 0xA0000 - 0x800 // the home's first checkpoint is not among what it knows
	}
	if got, err := own.Elsewhere(home); err != nil || got.Epoch != 3 || got.Owner != 1 ||
		got.Checkpoints[0].Due != 0x2000 || len(got.Cuts) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestACutIsRecordedOnceAndInOrder(t *testing.T) {
	t.Parallel()
	c, r := config, shared()
	next, err := c.WithCut(r, cutAt(0x2000, 3))
	if err != nil || len(next.Cuts) != 3 || next.Cuts[2] != (StoredCut{0x2000, 10}) || len(r.Cuts) != 2 {
		t.Fatalf("%+v, %v", next, err)
	}
	if again, err := c.WithCut(next, cutAt(0x2000, 3)); err != nil || again != next {
		t.Errorf("again: %+v, %v", again, err)
	}
	twice, behind := cutAt(0x2000, 3), cutAt(0x3000, 3)
	twice.Seq, behind.Seq = 11, 9
	anothers := cutAt(0x3000, 3)
	anothers.Cut.SystemID = 7
	for _, wrong := range []struct {
		name, code string
		to         *Record
		cut        relay.Stored
	}{
		{"another home's", CodeCutHome, r, anothers},
		{"below a checkpoint", CodeCutOrder, r, cutAt(0x1FFF, 3)},
		{"below the one before", CodeCutOrder, next, cutAt(0x1FFF, 3)},
		{"at the LSN of the one before", CodeCutOrder, next, twice},
		{"before a checkpoint", CodeCutOrder, r, behind},
		{"of an epoch to come", CodeCutOrder, r, cutAt(0x3000, 4)},
	} {
		if _, err := c.WithCut(wrong.to, wrong.cut); outbox.ClassOf(err) != outbox.Gap ||
			outbox.FaultOf(err).Code != wrong.code {
			t.Errorf("%s: %v", wrong.name, err)
		}
	}
}

// Two clusters that take the next epoch at the same time: one has it, and its cut is in no other's record.
func TestOneClusterTakesAnEpoch(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	ensure(ctx, t, s)
	_ = save(ctx, t, s, shared(), 0)
	_, _, err := s.Load(ctx)
	refused(t, err, "cluster_mode", outbox.Fatal, "", nil) // it shares the stream with nobody
	second := NewStore(jsapi.New(nc, ""), StoreConfig{Stream: "OUTBOX", Slot: "outflow", Cluster: 2})
	third := NewStore(jsapi.New(nc, ""), StoreConfig{Stream: "OUTBOX", Slot: "outflow", Cluster: 3})
	r, rev := load(ctx, t, second)
	taken := save(ctx, t, second, r.TakenBy(2), rev)
	if _, err := third.Save(ctx, r.TakenBy(3), rev); !errors.Is(err, ErrConflict) {
		t.Fatalf("taken twice: %v", err)
	}
	cut, err := config.WithCut(r, cutAt(0x2000, 3)) // what the former owner still knows
	must.Succeed(t, err)
	if _, err := third.Save(ctx, cut, rev); !errors.Is(err, ErrConflict) {
		t.Fatalf("a cut of a former owner: %v", err)
	}
	if r, rev := load(ctx, t, third); rev != taken || r.Owner != 2 || r.Epoch != 4 || len(r.Cuts) != 2 {
		t.Errorf("%+v at %d", r, rev)
	}
}
