package checkpoint

import (
	"errors"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func someCut(lsn outbox.LSN) *outbox.Cut {
	return &outbox.Cut{SystemID: 7361530121234511111, Timeline: 1, LSN: lsn, Epoch: 3, Owner: 2}
}

func TestACutAsTheNewestMessageIsNoStrangers(t *testing.T) {
	t.Parallel()
	r := readings()
	r.Stream.Newest, r.Stream.Cut = nil, someCut(0x3000)
	s, err := Resolve(config, r)
	must.Succeed(t, err)
	// a checkpoint below it would have the start make again what the cut has closed
	if s.Checkpoint.Seq != 12 || s.AlreadyStored != 0 || s.SystemID != r.Record.SystemID {
		t.Errorf("it starts at sequence %d, with %d to make again, of the home %q", s.Checkpoint.Seq,
			s.AlreadyStored, s.SystemID)
	}
	r.Stream.Cut.SystemID++
	_, err = Resolve(config, r)
	refused(t, err, "cut_home", outbox.Gap, "0/3000 to 0/5000", []string{"sequence 12 of stream OUTBOX",
		"7361530121234511112", "not of 7361530121234511111", "cluster 2", "outflow repair"})
	r.Record.Base = 12 // a repair has accepted it
	if _, err := Resolve(config, r); err != nil {
		t.Error(err)
	}
}

func TestACutBehindTheCheckpointIsRefused(t *testing.T) {
	t.Parallel()
	made := headers(3)
	event := func(seq uint64) relay.Stored { return relay.Stored{Seq: seq, Header: made[seq-6]} }
	cut := func(seq uint64, lsn outbox.LSN) relay.Stored { return relay.Stored{Seq: seq, Cut: someCut(lsn)} }
	for _, test := range []struct {
		code  string
		all   []relay.Stored
		words []string
	}{
		{"cut_ahead", []relay.Stored{event(6), cut(7, 0x1200), event(8)},
			[]string{"sequence 7 of stream OUTBOX", "checkpoint at 5", "0/1200", "cluster 2"}},
		{"cut_order", []relay.Stored{cut(6, 0x1200), event(7), cut(8, 0x1200)},
			[]string{"sequence 8 of stream OUTBOX", "sequence 6 before it", "0/1200"}},
		{"cut_home", []relay.Stored{cut(6, 0x1200), {Seq: 7, Cut: &outbox.Cut{SystemID: 9, LSN: 0x1300}}},
			[]string{"sequence 7", "identifier 9,"}},
		{"foreign_message", []relay.Stored{cut(6, 0x1200), {Seq: 7}}, []string{"sequence 7"}},
	} {
		p := check(3, made[2])
		p.start.SystemID = "7361530121234511111"
		refused(t, p.Stored(test.all), test.code, outbox.Gap, "0/1000 to 0/1200", test.words)
	}
}

// sharedReadings end with a cut, and with what it has closed if there are more than that.
func sharedReadings(cuts ...StoredCut) Readings {
	r := readings()
	r.Record.Mapping.Control = "public.outflow_control"
	r.Record.Owner, r.Record.Epoch, r.Record.Cuts = 2, 3, cuts
	return r
}

func sharedConfig() Config {
	c := config
	c.Mapping.Control, c.Cluster = "public.outflow_control", 2
	return c
}

// A cut as the newest message is recorded before anything follows it, and one that the record has is carried
// out: what is made again is compared up to it.
func TestARecordsCutsAreCarriedOut(t *testing.T) {
	t.Parallel()
	c := sharedConfig()
	resolve := func(change func(r *Readings), cuts ...StoredCut) (Start, error) {
		r := sharedReadings(cuts...)
		r.Stream.LastSeq, r.Stream.NewestSeq = 13, 13
		r.Stream.Newest, r.Stream.Cut = nil, someCut(0x3000)
		if change != nil {
			change(&r)
		}
		return Resolve(c, r)
	}
	s, err := resolve(nil)
	must.Succeed(t, err)
	if s.NewCut == nil || s.NewCut.Seq != 13 || !s.Shared {
		t.Errorf("not recorded: %+v", s)
	}
	s, err = resolve(nil, StoredCut{0x3000, 13})
	must.Succeed(t, err)
	// The newest checkpoint has its due, and is from before it.
	if s.NewCut != nil || s.Checkpoint.Seq != 12 || s.AlreadyStored != 1 || s.Thru != 0x3000 ||
		len(s.Cuts) != 1 {
		t.Errorf("recorded: %+v", s)
	}
	s, err = resolve(func(r *Readings) {
		r.Record.Checkpoints = append(r.Record.Checkpoints, at(0x3000, 13, 0))
		r.Slot.Confirmed = 0x3000
	})
	must.Succeed(t, err)
	if s.NewCut != nil || len(s.Cuts) != 0 { // a checkpoint behind it has it
		t.Errorf("known: %+v", s)
	}
	for what, refuse := range map[string]func() (Start, error){
		"beyond the end":  func() (Start, error) { return resolve(nil, StoredCut{0x3000, 14}) },
		"at another LSN":  func() (Start, error) { return resolve(nil, StoredCut{0x3001, 13}) },
		"no cut is there": func() (Start, error) { return resolve(nil, StoredCut{0x4000, 20}) },
	} {
		if _, err := refuse(); outbox.FaultOf(err) == nil || outbox.FaultOf(err).Code != CodeCutOrder {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, cuts := range [][]StoredCut{nil, {{0x5001, 13}}} { // it would be waited for in silence
		_, err := resolve(func(r *Readings) { r.Stream.Cut.LSN = 0x5001 }, cuts...)
		refused(t, err, "server_behind", outbox.Gap, "0/5000 to 0/5001",
			[]string{"cut at 0/5001", "sequence 13 of stream OUTBOX", "cluster 2", "0/5000"})
	}
	if _, err := resolve(func(r *Readings) { r.Record.Owner = 1 }); !errors.Is(err, ErrOwner) {
		t.Errorf("another cluster's: %v", err)
	}
}

// A cut has its place among the messages that are made again.
func TestACutIsCountedInItsPlace(t *testing.T) {
	t.Parallel()
	made := headers(3) // sequences 6, 7 and 9
	cut := StoredCut{0x1200, 8}
	begin := func(newest *outbox.Header, change func(all []relay.Stored)) *TailCheck {
		p := check(4, newest)
		p.start.Shared, p.start.Cuts = true, []StoredCut{cut}
		all := []relay.Stored{{Seq: 6, Header: made[0]}, {Seq: 7, Header: made[1]},
			{Seq: 8, Cut: someCut(0x1200)}, {Seq: 9, Header: made[2]}}
		if change != nil {
			change(all)
		}
		must.Succeed(t, p.Stored(all))
		return p
	}
	skips := func(p *TailCheck, h ...*outbox.Header) (err error) {
		for i := 0; i < len(h) && err == nil; i++ {
			_, err = p.Skip(h[i])
		}
		return err
	}
	p := begin(made[2], nil)
	must.Succeed(t, skips(p, made[:2]...))
	must.Succeed(t, p.Cut(cut))
	must.Succeed(t, skips(p, made[2]))
	if !p.Verified() {
		t.Error("not verified")
	}
	for what, run := range map[string]func() error{
		"too soon": func() error {
			p := begin(made[2], nil)
			return errors.Join(skips(p, made[0]), p.Cut(cut))
		},
		"too late": func() error { return skips(begin(made[2], nil), made...) },
		"behind all": func() error {
			p := check(2, made[1])
			return errors.Join(skips(p, made[:2]...), p.Cut(cut))
		},
		"another message": func() error {
			p := begin(made[2], func(all []relay.Stored) { all[2] = relay.Stored{Seq: 8, Header: made[2]} })
			return errors.Join(skips(p, made[:2]...), p.Cut(cut))
		},
	} {
		if f := outbox.FaultOf(run()); f == nil || f.Code != "divergence" {
			t.Errorf("%s: %v", what, f)
		}
	}
	p = check(4, made[2])
	p.start.Shared = true
	err := p.Stored([]relay.Stored{{Seq: 8, Cut: someCut(0x1200)}, {Seq: 9, Header: made[2]}})
	refused(t, err, CodeCutOrder, outbox.Gap, "0/1000 to 0/1200", []string{"sequence 8", "cluster 2"})
}
