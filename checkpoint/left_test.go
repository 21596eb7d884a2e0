package checkpoint

import (
	"bytes"
	"context"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// leaving is the record of a home that has left something to others.
func leaving() *Record {
	r := record(at(0x1000, 5, time.Hour), at(0x2000, 9, time.Minute))
	r.Mapping.Control = "public.outflow_control"
	r.Hello, r.Left = 2, []relay.Left{{Due: 0x900, N: 3, To: 0x1100}, {Due: 0x1800, To: 0x1F00}}
	return r
}

func TestARecordSaysWhatIsLeftToOthers(t *testing.T) {
	t.Parallel()
	doc, err := leaving().Encode()
	must.Succeed(t, err)
	if got, err := Decode(doc); err != nil || got.Version != clustersVersion || got.Hello != 2 ||
		!slices.Equal(got.Left, leaving().Left) {
		t.Fatalf("%+v, %v", got, err)
	}
	for name, change := range map[string]func(*Record){
		"no hello":         func(r *Record) { r.Hello = 0 },
		"no control table": func(r *Record) { r.Mapping.Control = "" },
		"an owner":         func(r *Record) { r.Owner, r.Epoch = 1, 1 },
		"up to nothing":    func(r *Record) { r.Left = []relay.Left{{Due: 0x1800}} },
		"one message twice": func(r *Record) {
			r.Left[0].Due, r.Left[0].N = r.Left[1].Due, r.Left[1].N
		},
		"nothing read": func(r *Record) { r.Heard = new(relay.HomeState) },
		"too many echoes": func(r *Record) {
			r.Heard = &relay.HomeState{At: 1, Echoes: make([]uint64, outbox.MaxCluster+1)}
		},
		"a hello above all": func(r *Record) { r.Hello = relay.MaxHello + 1 },
		"one that was read": func(r *Record) {
			r.Heard = &relay.HomeState{At: 1, Hello: relay.MaxHello + 1}
		},
		"read without a hello": func(r *Record) {
			r.Hello, r.Left, r.Heard = 0, nil, &relay.HomeState{At: 1}
		},
		"up to less": func(r *Record) { r.Left[1].To = r.Left[0].To },
		"before all": func(r *Record) { r.Left[0].N = -1 },
		"gap mode":   func(r *Record) { r.Checkpoints[1].Checkpoint = inGap(r.Checkpoints[1].Checkpoint, 0) },
		"too much": func(r *Record) {
			for i := range maxLeft {
				r.Left = append(r.Left, relay.Left{Due: outbox.LSN(0x2000 + i), To: outbox.LSN(0x2000 + i)})
			}
		},
	} {
		r := leaving()
		change(r)
		if _, err := r.Encode(); err == nil {
			t.Error(name)
		}
	}
	_, err = Decode(bytes.Replace(doc, []byte(`"v":9`), []byte(`"v":8`), 1))
	refused(t, err, "record_corrupt", outbox.Gap, "", nil)
}

// What is left goes with the checkpoints from which it may be made again.
func TestARecordKeepsWhatAStartHasToLeaveOut(t *testing.T) {
	t.Parallel()
	r := leaving()
	for due, want := range map[outbox.LSN][]relay.Left{
		0x10FF: r.Left, 0x1100: r.Left[1:], 0x1EFF: r.Left[1:], 0x1F00: nil,
	} {
		got := r.With(Update{Checkpoints: []StoredCheckpoint{at(due, 9, 0)}}, publication, 0x3000)
		if !slices.Equal(got.Left, want) || got.Hello != 2 || len(r.Left) != 2 {
			t.Errorf("from %v: %+v", due, got)
		}
	}
}

// What is known of the others is in the record once a hello is.
func TestARecordKeepsWhatAHomeHasRead(t *testing.T) {
	t.Parallel()
	home := &relay.HomeState{At: 0x2100, Timeline: 3, Hello: 2, Greeted: true, Waits: true, Yielded: true,
		Told: true, Echoes: []uint64{0, 2}, From: 0x700, Claimed: 0x900, Said: 0x800, Signed: time.Hour,
		Gap: true}
	u := Update{Checkpoints: []StoredCheckpoint{at(0x2000, 9, 0)}, Heard: home}
	doc, err := leaving().With(u, publication, 0x3000).Encode()
	must.Succeed(t, err)
	if got, err := Decode(doc); err != nil || !reflect.DeepEqual(got.Heard, home) {
		t.Errorf("%+v, %v", got.Heard, err)
	}
	none := leaving()
	none.Hello, none.Left = 0, nil
	if got := none.With(u, publication, 0x3000); got.Heard != u.Heard || got.Hello != u.Heard.Hello {
		t.Errorf("a broker that has lost hello %d: %d, %+v", u.Heard.Hello, got.Hello, got.Heard)
	}
	u.Heard = &relay.HomeState{At: 0x2000}
	if got := none.With(u, publication, 0x3000); got.Heard != nil {
		t.Errorf("without a hello: %+v", got.Heard)
	}
}

func TestWhatIsLeftOnlyGrows(t *testing.T) {
	t.Parallel()
	first, last := leaving().Left[0], leaving().Left[1]
	for name, c := range map[string]struct {
		add  relay.Left
		want []relay.Left // nil: refused
	}{
		"more": {relay.Left{Due: 0x1800, N: 1, To: 0x2000},
			[]relay.Left{first, last, {Due: 0x1800, N: 1, To: 0x2000}}},
		"more, and nothing between": {relay.Left{Due: 0x1800, To: 0x2000},
			[]relay.Left{first, {Due: 0x1800, To: 0x2000}}},
		"the same":                  {last, []relay.Left{first, last}},
		"the same, later":           {relay.Left{Due: 0x1900, To: 0x1F00}, []relay.Left{first, last}},
		"behind an earlier message": {relay.Left{Due: 0x17FF, N: 9, To: 0x2000}, nil},
		"less":                      {relay.Left{Due: 0x1900, To: 0x1E00}, nil},
	} {
		r := leaving()
		got, err := r.WithLeft(c.add, r.Hello-1)
		if err == nil && got.Hello != r.Hello {
			t.Errorf("%s: hello %d", name, got.Hello)
		}
		if c.want == nil != (err != nil) || err == nil && !slices.Equal(got.Left, c.want) ||
			!slices.Equal(r.Left, leaving().Left) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	none := leaving()
	none.Hello, none.Left = 0, nil
	if got, err := none.WithLeft(last, 3); err != nil || got.Hello != 3 {
		t.Errorf("a broker that has lost hello 3: %+v, %v", got, err)
	}
	full := leaving()
	full.Left = make([]relay.Left, maxLeft)
	if _, err := full.WithLeft(relay.Left{Due: 1, To: 1}, 0); err == nil {
		t.Error("more than a record may list")
	}
}

// TestAHelloFollowsWhatWasReadAndTaken: its number is above both, and where none is left it is refused.
func TestAHelloFollowsWhatWasReadAndTaken(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ taken, read, want uint64 }{
		{2, 1, 3}, {2, 7, 8}, {2, relay.MaxHello - 1, relay.MaxHello},
	} {
		r := leaving()
		r.Hello = c.taken
		read := &relay.HomeState{At: 1, Hello: c.read}
		if got, err := r.NextHello(read); err != nil || got.Hello != c.want || got.Heard != read ||
			r.Hello != c.taken {
			t.Errorf("behind %d and %d: %+v, %v", c.taken, c.read, got, err)
		}
	}
	_, err := leaving().NextHello(&relay.HomeState{At: 1, Hello: relay.MaxHello})
	refused(t, err, "cluster_row", outbox.Fatal, "", nil)
}

// An outflow that does not take part refuses the record, and two processes do not take one number.
func TestAHelloIsTakenOnce(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	ensure(ctx, t, s)
	_ = save(ctx, t, s, leaving(), 0)
	_, _, err := s.Load(ctx)
	refused(t, err, CodeMode, outbox.Fatal, "", nil)
	own := NewStore(jsapi.New(nc, ""), StoreConfig{Stream: "OUTBOX", Slot: "outflow", Cluster: 1})
	r, rev := load(ctx, t, own)
	next, err := r.NextHello(nil)
	must.Succeed(t, err)
	_ = save(ctx, t, own, next, rev)
	if _, err := own.Save(context.WithoutCancel(ctx), next, rev); err == nil || r.Hello != 2 {
		t.Errorf("taken twice: %v", err)
	}
	if r, _ = load(ctx, t, own); r.Hello != 3 {
		t.Errorf("hello %d is taken", r.Hello)
	}
}

// TestWhatBringsTheOthersRowsIsNamed: a home has no subscription of its own to name.
func TestWhatBringsTheOthersRowsIsNamed(t *testing.T) {
	t.Parallel()
	r := leaving()
	c := Config{Slot: "outflow", Publication: "outflow_pub", Table: "public.outbox", Mapping: r.Mapping}
	now := r.Publication.PublicationIdentity
	now.Subscription = "pg_16500,1,2 pg_16501,1,2"
	err := c.CheckPublication(r.Publication, now, 0x3000)
	f := outbox.FaultOf(err)
	if f == nil || f.Code != CodePublication || !strings.HasPrefix(f.Message, "one of the subscriptions ") {
		t.Errorf("%v", err)
	}
}

// TestARecordSaysOfWhichClusterItIs: one that publishes with others rests on their subscriptions, and its
// record is refused under another cluster.id and without the mode.
func TestARecordSaysOfWhichClusterItIs(t *testing.T) {
	t.Parallel()
	r := record(at(0x1000, 5, time.Hour))
	r.Mapping.Control, r.Mapping.Cluster = "public.outflow_control", 2
	r.Publication.Subscription = "pg_1 pg_3"
	doc, err := r.Encode()
	must.Succeed(t, err)
	got, err := Decode(doc)
	if err != nil || got.Version != clustersVersion || got.Mapping != r.Mapping {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, id := range []int{0, 3} {
		other, rd := config, readings()
		other.Mapping = r.Mapping
		other.Mapping.Cluster = id
		rd.Record = got
		if _, err := Resolve(other, rd); outbox.FaultOf(err) == nil ||
			outbox.FaultOf(err).Code != "mapping_changed" {
			t.Errorf("cluster %d: %v", id, err)
		}
	}
	for name, change := range map[string]func(*Record){
		"no control table": func(r *Record) { r.Mapping.Control = "" },
		"an owner":         func(r *Record) { r.Owner, r.Epoch = 1, 1 },
		"no cluster":       func(r *Record) { r.Mapping.Cluster = outbox.MaxCluster + 1 },
		"none at all":      func(r *Record) { r.Mapping.Cluster = 0 },
	} {
		bad := *r
		change(&bad)
		if _, err := bad.Encode(); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}
