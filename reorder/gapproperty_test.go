package reorder

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func randomGapSettings(r *rand.Rand) relay.Settings {
	pick := func(of ...int) int { return of[r.IntN(len(of))] }
	bound := time.Duration(pick(500, 2000, 5000, 20000, 1000000)) * time.Microsecond
	return relay.Settings{
		Sort:      outbox.ByGap,
		MaxEvents: pick(1, 5, 20, 1000, 1000, 1000),
		MaxBytes:  int64(pick(1, 700, 3000, 1<<20, 1<<20, 1<<20)),
		Gap: relay.Gap{
			Bound: bound, Cold: min(bound, time.Duration(pick(0, 0, 500, 3000, 50000))*time.Microsecond),
			Memory: pick(1, 3, 10, 70, 1000), First: int64(r.IntN(2)), Scope: relay.Scope(r.IntN(2)),
		},
	}
}

// change is a random change of settings: all of them, or a few.
func (w *gapWriter) change() relay.Settings {
	r, next := w.r, randomGapSettings(w.r)
	if r.IntN(4) == 0 {
		next = randomSettings(r)
	} else if w.set.ByGap() && r.IntN(3) > 0 {
		next.Gap.First, next.Gap.Scope = w.set.Gap.First, w.set.Gap.Scope
	}
	w.set = next
	return next
}

// gapWriter makes a random WAL: transactions overtake one another, some counters never come, some come
// twice, some sequences begin anew.
type gapWriter struct {
	r        *rand.Rand
	s        *scene
	set      relay.Settings
	lsn      outbox.LSN
	now      int64
	disorder int
	docs     int
	actors   int
	lost     float64
	again    float64
	spans    int
	nulls    int
	counters map[[2]int]int64
}

func randomGapScene(r *rand.Rand) scene {
	s := scene{cfg: Config{Settings: randomGapSettings(r), MaxHolds: []int{1, 2, 6, 512}[r.IntN(4)],
		MaxPublishedAhead: []int{1, 6, 512}[r.IntN(3)]}}
	if r.IntN(8) == 0 {
		s.cfg.Settings = randomSettings(r)
	}
	if r.IntN(2) == 0 {
		s.memory = []int64{1, 600, 2500, 8000}[r.IntN(4)]
	}
	w := &gapWriter{r: r, s: &s, set: s.cfg.Settings, lsn: outbox.LSN(r.IntN(5)), disorder: min(2, r.IntN(5)),
		docs: []int{1, 3, 12}[r.IntN(3)], actors: 1 + r.IntN(3), lost: []float64{0, 0, 0.05}[r.IntN(3)],
		again: []float64{0, 0, 0.04, 0.2}[r.IntN(4)], spans: max(0, r.IntN(6)-2),
		nulls:    []int{0, 0, 9}[r.IntN(3)],
		counters: map[[2]int]int64{}}
	changes := []float64{0, 0, 0.05, 0.2}[r.IntN(4)]
	largest := []int{1, 3, 12, 40}[r.IntN(4)]
	held := []int{2, 5, 8}[r.IntN(3)]
	if r.IntN(10) == 0 {
		// Many sequences share a name. A large transaction would be sorted by documents, which share it too.
		s.sequence = func(doc, actor string) uint64 { return 1 + outbox.SequenceOf(doc, actor)%3 }
		largest = 1
	}
	var pending []input
	for range 5 + r.IntN(56) {
		w.now += int64(r.ExpFloat64() * 1000)
		switch p := r.Float64(); {
		case p < changes:
			w.add(input{commit: relay.Commit{Kind: relay.SettingsChange, Settings: w.change()}})
			continue
		case p < changes+0.12:
			w.add(input{commit: relay.Commit{Kind: relay.Heartbeat}})
			continue
		case p < changes+0.14:
			w.add(input{commit: relay.Commit{Kind: relay.NoInput}})
			continue
		}
		in := w.transaction(largest)
		if r.IntN(10) < held {
			pending = append(pending, in)
		} else {
			w.add(in)
		}
		if len(pending) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(pending))
			w.add(pending[i])
			pending = slices.Delete(pending, i, i+1)
		}
	}
	for _, in := range pending {
		w.add(in)
	}
	w.now += 10_000_000
	w.add(input{commit: relay.Commit{Kind: relay.Heartbeat}})
	s.cutAnywhere(r)
	return s
}

func (w *gapWriter) transaction(largest int) input {
	r := w.r
	in := input{commit: relay.Commit{Kind: relay.Events}}
	n := 1
	if r.IntN(3) == 0 {
		n = 1 + r.IntN(largest)
	}
	for len(in.events) < n {
		d, a := r.IntN(w.docs), r.IntN(w.actors)
		span := 1 + r.IntN(w.spans+1)
		next, ok := w.counters[[2]int{d, a}]
		if !ok {
			next = int64(r.IntN(2))
		}
		if r.IntN(60) == 0 {
			next = int64(r.IntN(3)) // begins anew
		}
		c := next
		if r.Float64() < w.again {
			c = max(0, c-r.Int64N(8))
		}
		w.counters[[2]int{d, a}] = max(next, c+int64(span))
		if r.Float64() < w.lost {
			continue
		}
		e := relay.Event{Doc: fmt.Sprint("d", d), Actor: fmt.Sprint("a", a), Key: fmt.Sprintf("%04d", c),
			Counter: outbox.Counter{First: c, Span: uint32(span)}}
		if w.nulls > 0 && r.IntN(w.nulls) == 0 {
			e.Counter = outbox.Counter{}
		}
		fillValues(r, &e)
		in.events = append(in.events, e)
	}
	if w.disorder > 0 {
		r.Shuffle(n, func(i, j int) { in.events[i], in.events[j] = in.events[j], in.events[i] })
	}
	return in
}

func (w *gapWriter) add(in input) {
	w.lsn += outbox.LSN(1 + w.r.IntN(6))
	in.commit.LSN, in.commit.Start = w.lsn, w.lsn-1
	in.commit.Time = w.now - int64(w.r.IntN(1500))*int64(w.disorder) // commit timestamps need not ascend
	in.commit.Events = len(in.events)
	for i := range in.events {
		in.events[i].Pos, in.events[i].Time = outbox.Position{LSN: w.lsn, Index: uint32(i)}, in.commit.Time
	}
	w.s.wal = append(w.s.wal, in)
}

// gapStart makes a buffer that goes on from a checkpoint.
func (s *scene) gapStart(c gapPoint, scratch *memScratch) *Buffer {
	cfg := s.cfg
	cfg.Settings, cfg.Start, cfg.Due, cfg.PublishedAhead = c.cp.Settings, c.cp.Start(), c.cp.Due,
		c.cp.PublishedAhead
	cfg.Holds, cfg.Remembered, cfg.Recent, cfg.Scratch = c.cp.Holds, c.cp.Remembered, c.recent, scratch
	b := New(cfg)
	if s.memory > 0 {
		b.tune.memory, b.tune.least, b.tune.block, b.tune.fanIn = s.memory, 0, 64, 2+int(s.memory%3)
	}
	if s.sequence != nil {
		b.tune.sequence = s.sequence
	}
	return b
}

// gapPoint is a checkpoint with what the stream says of the messages up to it.
type gapPoint struct {
	cp     relay.Checkpoint
	made   int // windows up to there
	recent []outbox.Counter
}

// after is what is known behind an input.
type after struct {
	marker relay.Checkpoint
	ok     bool
}

func (m *gapModel) point(cp relay.Checkpoint, windows int) gapPoint {
	recent := slices.Clone(m.made)
	slices.Reverse(recent)
	return gapPoint{cp, windows, recent}
}

// checkGaps holds the buffer's own books against the model.
func checkGaps(b *Buffer, m *gapModel, in relay.Commit) error {
	events, bytes := b.Held()
	held := m.events()
	if events != len(held) || bytes != sizes(held) {
		return fmt.Errorf("held %d events, %d bytes; want %d, %d", events, bytes, len(held), sizes(held))
	}
	oldest, ok := b.OldestLSN()
	if ok != (events > 0) || ok && oldest != held[0].Pos.LSN {
		return fmt.Errorf("oldest %v %v", oldest, ok)
	}
	if b.Settings() != m.set {
		return fmt.Errorf("settings %v, want %v", b.Settings(), m.set)
	}
	gaps := m.gaps()
	if n := b.OpenGaps(); n != len(gaps) {
		return fmt.Errorf("%d open gaps, want %d", n, len(gaps))
	}
	for _, n := range []int{1, 3, 1000} {
		got, want := b.Gaps(n), gaps[:min(n, len(gaps))]
		for i := range got {
			if got[i].Cold {
				got[i].First = 0
			}
		}
		if len(got) != len(want) || len(got) > 0 && !reflect.DeepEqual(got, want) {
			return fmt.Errorf("gaps %+v, want %+v", got, want)
		}
	}
	at, ok := b.Deadline()
	if want, has := m.deadline(); at != want || ok != has {
		return fmt.Errorf("deadline %v %v, want %v %v", at, ok, want, has)
	}
	return nil
}

func markerOf(b *Buffer, lsn outbox.LSN) after {
	if n, _ := b.Held(); n > 0 && !b.gapMode() {
		return after{}
	}
	p, ok := b.Marker(lsn)
	return after{p, ok}
}

// runGap compares the buffer with the model over the whole scene and returns the windows, every checkpoint to
// go on from, and what is known behind each input.
func (s *scene) runGap(r *rand.Rand, st *gapStats) (windows []*closed, points []gapPoint, then []after,
	err error) {
	scratch := &memScratch{failAfter: -1}
	m := newGapModel(s.cfg)
	if s.sequence != nil {
		m.sequence = s.sequence
	}
	points = append(points, gapPoint{cp: relay.Checkpoint{Settings: s.cfg.Settings}})
	b := s.gapStart(points[0], scratch)
	out := 0
	for k, in := range s.wal {
		want := m.read(in)
		got, err := feed(b, in)
		if err != nil {
			return nil, nil, nil, fmt.Errorf("input %v: %w", in.commit.LSN, err)
		}
		if !reflect.DeepEqual(got, want) {
			return nil, nil, nil, fmt.Errorf("input %v: window\n%+v, want\n%+v", in.commit.LSN, got, want)
		}
		if err := checkGaps(b, m, in.commit); err != nil {
			return nil, nil, nil, fmt.Errorf("input %v: %w", in.commit.LSN, err)
		}
		edge := in.commit.LSN
		var now after
		now.marker, now.ok = m.marker(edge)
		if p := markerOf(b, edge); !reflect.DeepEqual(p, now) {
			return nil, nil, nil, fmt.Errorf("marker %v: %+v, want %+v", edge, p, now)
		}
		then = append(then, now)
		if want != nil {
			windows = append(windows, want)
			out += want.Of
			st.count(want)
			if got.Checkpoint.Due != 0 {
				points = append(points, m.point(got.Checkpoint, len(windows)))
			}
		}
		if now.ok {
			p, _ := b.Marker(s.edge(r, k))
			points = append(points, m.point(p, len(windows)))
			st.holds += min(1, len(p.Holds))
		} else if m.horizon == nil {
			st.none++
		}
	}
	if want := s.events(); out != want {
		return nil, nil, nil, fmt.Errorf("%d events came out, %d went in", out, want)
	}
	if c := b.GapCounts(); c != m.givenUp {
		return nil, nil, nil, fmt.Errorf("counts %+v, want %+v", c, m.givenUp)
	}
	st.counts(m.givenUp)
	if m.horizon == nil { // otherwise some may be below a horizon
		err = checkClean(b, scratch)
	}
	st.files += scratch.made
	return windows, points, then, err
}

// resumeGap goes on from a checkpoint and compares what is made with the rest of what the undisturbed run
// made.
func (s *scene) resumeGap(c gapPoint, windows []*closed, then []after, whole bool) error {
	scratch := &memScratch{failAfter: -1}
	b := s.gapStart(c, scratch)
	made := c.made
	for k, in := range s.wal {
		if in.commit.LSN <= c.cp.Start() && !whole {
			continue // PostgreSQL may send it again or not
		}
		got, err := feed(b, in)
		if err != nil {
			return err
		}
		fresh := in.commit.LSN > c.cp.Due || in.cut() && in.commit.LSN == c.cp.Due
		if fresh && in.commit.Kind != relay.NoInput && b.gapMode() {
			if p := markerOf(b, in.commit.LSN); !reflect.DeepEqual(p, then[k]) {
				return fmt.Errorf("behind %v: %+v, want %+v", in.commit.LSN, p, then[k])
			}
		}
		if got == nil {
			continue
		}
		if made == len(windows) {
			return fmt.Errorf("window %d, thru %v, is one too many", made, got.Thru)
		}
		if want := windows[made]; !reflect.DeepEqual(got, want) {
			return fmt.Errorf("window %d:\n%+v, want\n%+v", made, got, want)
		}
		made++
	}
	if made != len(windows) {
		return fmt.Errorf("%d windows, want %d", made, len(windows))
	}
	return nil
}

// gapStats shows that the scenes reach what they are meant to.
type gapStats struct {
	windows, events, holds, none, resumed, files int
	GapCounts
}

func (st *gapStats) count(w *closed) {
	st.windows++
	st.events += w.Of
}

func (st *gapStats) counts(c GapCounts) {
	st.Bound += c.Bound
	st.Cold += c.Cold
	st.Size += c.Size
	st.Settings += c.Settings
	st.Cut += c.Cut
	st.Missed += c.Missed
	st.Repeats += c.Repeats
	st.Resets += c.Resets
}

// TestTheBufferIsTheModelOfGapMode compares the buffer with the obvious model of gap mode on random WALs,
// with changes of settings and of the mode among them, and goes on from the checkpoints that either makes
// (from every one of every eighth WAL): what comes then must be what came without the restart.
func TestTheBufferIsTheModelOfGapMode(t *testing.T) {
	t.Parallel()
	n := *trials
	if tier.Long() {
		n *= 20
	}
	const parts = 4
	all := seeds.For(t, "seed", "trials", n)
	for part := range parts {
		t.Run(fmt.Sprint(part), func(t *testing.T) {
			t.Parallel()
			var st gapStats
			for i := part; i < len(all.List); i += parts {
				if err := tryGapModel(all.List[i], &st); err != nil {
					all.Failed(t, all.List[i])
					t.Fatal(err)
				}
			}
			t.Logf("%d WALs: %+v", n/parts, st)
			if n > 500 && (st.holds == 0 || st.none == 0 || st.files == 0 || st.Bound == 0 || st.Cold == 0 ||
				st.Size == 0 || st.Settings == 0 || st.Cut == 0 || st.Missed == 0 || st.Repeats == 0 ||
				st.Resets == 0) {
				t.Errorf("the scenes miss what they are for: %+v", st)
			}
		})
	}
}

func tryGapModel(seed uint64, st *gapStats) error {
	r := rand.New(rand.NewPCG(seed, 14))
	s := randomGapScene(r)
	windows, points, then, err := s.runGap(r, st)
	if err != nil {
		return err
	}
	every := seed/4%8 == 0 // in every part
	for _, c := range points {
		if !every && r.IntN(len(points)) >= 3 {
			continue
		}
		st.resumed++
		if err := s.resumeGap(c, windows, then, r.IntN(8) == 0); err != nil {
			return fmt.Errorf("from %+v: %w", c.cp, err)
		}
	}
	return nil
}
