package checkpoint

import (
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
