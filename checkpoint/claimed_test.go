package checkpoint

import (
	"bytes"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// claiming is the record of a cluster that publishes for the home whose rows it reads.
func claiming() *Record {
	_, r := awayReadings() // at A1000, A2000 and A3000
	r.Record.Reader = &relay.ReaderState{At: 0x3100, Timeline: 1, Newest: 0xA3000, Settled: 0xA2900,
		Hello: 2, Yielded: true, Echoes: []uint64{2, 0, 1}}
	r.Record.Claimed = []relay.Claimed{{From: 0xA0800, To: 0xA1000}, {From: 0xA1000, To: 0xA1400},
		{From: 0xA2800, To: 0xA2900}}
	return r.Record
}

func TestARecordSaysWhatIsClaimed(t *testing.T) {
	t.Parallel()
	doc, err := claiming().Encode()
	must.Succeed(t, err)
	if got, err := Decode(doc); err != nil || got.Version != clustersVersion ||
		!slices.Equal(got.Claimed, claiming().Claimed) || !reflect.DeepEqual(got.Reader, claiming().Reader) {
		t.Fatalf("%+v, %v", got, err)
	}
	for name, change := range map[string]func(*Record){
		"nothing read":       func(r *Record) { r.Reader = nil },
		"read up to nothing": func(r *Record) { r.Reader.At = 0 },
		"too many echoes":    func(r *Record) { r.Reader.Echoes = make([]uint64, outbox.MaxCluster+1) },
		"rows of its own": func(r *Record) {
			r.Mapping.Subscription, r.Publication.Subscription = "", ""
		},
		"an owner":                func(r *Record) { r.Owner, r.Epoch = 1, 1 },
		"a hello":                 func(r *Record) { r.Hello = 1 },
		"an empty range":          func(r *Record) { r.Claimed[1].From = r.Claimed[1].To },
		"ranges that overlap":     func(r *Record) { r.Claimed[1].From-- },
		"ranges out of order":     func(r *Record) { slices.Reverse(r.Claimed) },
		"more than what was read": func(r *Record) { r.Reader.Settled-- },
		"gap mode": func(r *Record) {
			r.Checkpoints[0].Checkpoint = inGap(r.Checkpoints[0].Checkpoint, 0)
		},
		"too much": func(r *Record) {
			r.Claimed = nil
			for i := range outbox.LSN(MaxClaimed + 1) {
				r.Claimed = append(r.Claimed, relay.Claimed{From: 0x100 + i, To: 0x101 + i})
			}
		},
	} {
		r := claiming()
		change(r)
		if _, err := r.Encode(); err == nil {
			t.Error(name)
		}
	}
	_, err = Decode(bytes.Replace(doc, []byte(`"v":9`), []byte(`"v":8`), 1))
	refused(t, err, "record_corrupt", outbox.Gap, "", nil)
}

// TestARecordKeepsTheRangesThatAStartMakes: they go with the checkpoints from which they may be made again.
// What was read stays where there is nothing newer.
func TestARecordKeepsTheRangesThatAStartMakes(t *testing.T) {
	t.Parallel()
	r := claiming()
	for due, want := range map[outbox.LSN][]relay.Claimed{
		0xA0FFF: r.Claimed, 0xA1000: r.Claimed[1:], 0xA13FF: r.Claimed[1:], 0xA1400: r.Claimed[2:],
		0xA28FF: r.Claimed[2:], 0xA2900: nil,
	} {
		oldest, newest := at(due, 9, 0), at(0xA3000, 9, 0)
		got := r.With(Update{Checkpoints: []StoredCheckpoint{oldest, newest}}, publication, 0x3000)
		if !slices.Equal(got.Claimed, want) || got.Reader != r.Reader || len(r.Claimed) != 3 {
			t.Errorf("from %v: %+v", due, got)
		}
	}
	newer := &relay.ReaderState{At: 0x3200, Timeline: 1}
	if got := r.With(Update{Checkpoints: r.Checkpoints, Reader: newer}, publication, 0x3000); got.Reader !=
		newer {
		t.Errorf("%+v", got.Reader)
	}
}

// TestWhatIsClaimedOnlyGrows: in its order, together with what was read; what the record has already, and may
// be read again, is passed over.
func TestWhatIsClaimedOnlyGrows(t *testing.T) {
	t.Parallel()
	had, more := claiming().Claimed, relay.Claimed{From: 0xA2900, To: 0xA3000}
	read := &relay.ReaderState{At: 0x3200, Timeline: 1, Newest: 0xA3000, Settled: 0xA3000}
	for name, add := range map[string][]relay.Claimed{
		"more": {more}, "again": {had[1], had[2], more}, "twice": {more, more},
	} {
		r := claiming()
		got, err := r.WithClaimed(add, read)
		if err != nil || !slices.Equal(got.Claimed, append(slices.Clone(had), more)) || got.Reader != read ||
			!reflect.DeepEqual(r, claiming()) {
			t.Errorf("%s: %+v, %v", name, got, err)
		} else if _, err := got.Encode(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	full := claiming()
	full.Claimed = make([]relay.Claimed, MaxClaimed)
	if _, err := full.WithClaimed([]relay.Claimed{more}, read); err == nil {
		t.Error("more than a record may list")
	}
}

// TestAStartKnowsWhatIsClaimed by its record.
func TestAStartKnowsWhatIsClaimed(t *testing.T) {
	t.Parallel()
	c, r := awayReadings()
	r.Record = claiming()
	for i := range r.Record.Checkpoints {
		r.Record.Checkpoints[i].Since = epoch.Add(-time.Hour)
	}
	if start, err := Resolve(c, r); err != nil || !slices.Equal(start.Claimed, claiming().Claimed) {
		t.Errorf("%v, %v", start.Claimed, err)
	}
}
