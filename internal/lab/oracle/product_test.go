package oracle

import (
	"os"
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// The judge and package reorder make the same messages of random WALs in gap mode, also when the buffer goes
// on from a checkpoint and from the counters of the messages before it.
func TestTheProductAndTheJudgeAgree(t *testing.T) {
	t.Parallel()
	files, resumed := scratch(t.TempDir()), 0
	for seed := range uint64(*gapTrials) {
		s, r := gapSceneOf(seed)
		var want []string
		o := newOrder(s.first, false)
		for _, x := range s.wal {
			w, events := x.feed(o)
			for n, e := range events {
				h := Header{Pos: e.Pos, N: n, Of: w.of, Due: w.due, Thru: w.thru, Pull: w.pull, Sort: w.sort}
				if w.sort == ByGap {
					h.Sequence, h.Counter, h.Span, h.Late = e.sequence(), e.Counter, e.Span, w.late[n]
				}
				want = append(want, h.String())
			}
		}
		p := product{scratch: files, wal: s.wal}
		made, points := p.run(t, relay.Checkpoint{Settings: s.first.product()}, nil)
		for i := range max(len(made), len(want)) {
			if i >= min(len(made), len(want)) || made[i] != want[i] {
				t.Fatalf("seed %d: message %d of %d is not that of %d:\n%v, want\n%v", seed, i, len(made),
					len(want), made[min(i, len(made)):min(i+1, len(made))],
					want[min(i, len(want)):min(i+1, len(want))])
			}
		}
		for range min(3, len(points)) {
			c := points[r.IntN(len(points))]
			rest, _ := p.run(t, c, p.counters[:c.Seq])
			resumed++
			if !slices.Equal(rest, want[c.Seq:]) {
				t.Fatalf("seed %d: from %+v comes\n%v, want\n%v", seed, c, rest, want[c.Seq:])
			}
		}
	}
	t.Logf("%d WALs, gone on %d times", *gapTrials, resumed)
}

type scratch string

func (s scratch) Create() (reorder.ScratchFile, error) { return os.CreateTemp(string(s), "") }

// product is package reorder on a WAL.
type product struct {
	scratch  scratch
	wal      []testInput
	counters []outbox.Counter // of the messages of the first run
}

// run goes on from a checkpoint. The messages come as headers.
func (p *product) run(t *testing.T, c relay.Checkpoint, before []outbox.Counter) (made []string,
	points []relay.Checkpoint) {
	t.Helper()
	recent := slices.Clone(before)
	slices.Reverse(recent)
	b := reorder.New(reorder.Config{Settings: c.Settings, Start: c.Start(), Due: c.Due, Holds: c.Holds,
		Remembered: c.Remembered, Recent: recent, PublishedAhead: c.PublishedAhead, Scratch: p.scratch})
	first := c.Due == 0
	for _, x := range p.wal {
		if outbox.LSN(x.lsn) <= c.Start() {
			continue
		}
		in := relay.Commit{LSN: outbox.LSN(x.lsn), Start: outbox.LSN(x.lsn) - 1, Time: x.time,
			Kind: relay.Heartbeat, Events: len(x.events)}
		if len(x.events) > 0 {
			in.Kind = relay.Events
		}
		if x.set != nil {
			in.Kind, in.Settings = relay.SettingsChange, x.set.product()
		}
		for i, e := range x.events {
			ev := relay.Event{Pos: outbox.Position{Index: uint32(i)}, Doc: e.Doc, Actor: e.Actor,
				Payload: make([]byte, e.Size), PayloadSize: e.Size,
				Counter: outbox.Counter{First: e.Counter, Span: uint32(e.Span)}}
			if err := b.Append(&ev); err != nil {
				t.Fatal(err)
			}
		}
		var w *reorder.Window
		var err error
		if x.cut {
			w, err = b.Cut(in.LSN)
		} else if err = b.Commit(in); err == nil {
			w, err = b.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		if w == nil {
			continue
		}
		var e relay.Event
		for n := 0; ; n++ {
			ok, err := w.Next(&e)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			h := outbox.Header{Pos: e.Pos, N: n, Of: w.Of, Due: w.Due, Thru: w.Thru, Pull: w.Pull,
				Sort: w.Sort, Counter: e.Counter}
			made = append(made, h.String())
			if first {
				p.counters = append(p.counters, e.Counter)
			}
		}
		point, ok := w.Checkpoint, true
		if point.Due == 0 {
			point, ok = b.Marker(w.Thru)
		}
		if ok {
			point.Seq = uint64(len(made))
			points = append(points, point)
		}
	}
	b.Discard()
	return made, points
}

// product is the settings as the product has them.
func (s *Settings) product() relay.Settings {
	p := relay.Settings{Horizon: s.Horizon, Sort: outbox.Sort(s.Sort), MaxEvents: s.MaxEvents,
		MaxBytes: s.MaxBytes}
	if s.Sort == ByGap {
		p.Gap = relay.Gap{Bound: s.Gap.Bound, Cold: s.Gap.Cold, Memory: s.Gap.Memory, First: s.Gap.First}
		if s.Gap.Document {
			p.Gap.Scope = relay.OfDocument
		}
	}
	return p
}
