package reorder

import (
	"errors"
	"flag"
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

var (
	trials = flag.Int("trials", 1500,
		"random WALs that the buffer is compared on; 20 times as many in a long run")
	_ = flag.Uint64("seed", 0, "seed of the first of them")
)

// scene is a random WAL with what it is read with.
type scene struct {
	cfg    Config
	wal    []input
	memory int64 // spill beyond that; 0: never
	// names sequences in gap mode, nil: as always
	sequence func(doc, actor string) uint64
}

func randomSettings(r *rand.Rand) relay.Settings {
	pick := func(of ...int) int { return of[r.IntN(len(of))] }
	return relay.Settings{
		Horizon:   time.Duration(pick(0, 1, 500, 2000, 5000, 20000, 1000000)) * time.Microsecond,
		Sort:      outbox.Sort(r.IntN(2)),
		MaxEvents: pick(1, 5, 20, 20, 1000, 1000, 1000),
		MaxBytes:  int64(pick(1, 700, 3000, 1<<20, 1<<20, 1<<20)),
	}
}

func randomScene(r *rand.Rand) scene {
	s := scene{cfg: Config{Settings: randomSettings(r), MaxPublishedAhead: []int{1, 2, 6, 512}[r.IntN(4)]}}
	s.cfg.Unkeyed = r.IntN(12) == 0
	keyless := s.cfg.Unkeyed && r.IntN(2) == 0
	if r.IntN(2) == 0 {
		s.memory = []int64{1, 600, 2500, 8000}[r.IntN(4)]
	}
	changes := []float64{0, 0, 0.05, 0.3}[r.IntN(4)]
	docs, actors, disorder := 1+r.IntN(4), 1+r.IntN(3), min(2, r.IntN(5))
	largest := []int{1, 3, 12, 60}[r.IntN(4)]
	lsn, now := outbox.LSN(r.IntN(5)), int64(0)
	counters := map[[2]int]int{}
	var pending []input
	add := func(in input) {
		lsn += outbox.LSN(1 + r.IntN(6))
		in.commit.LSN = lsn
		in.commit.Time = now - int64(r.IntN(600))*int64(disorder) // commit timestamps need not ascend
		in.commit.Events = len(in.events)
		for i := range in.events {
			in.events[i].Pos, in.events[i].Time = outbox.Position{LSN: lsn, Index: uint32(i)}, in.commit.Time
		}
		s.wal = append(s.wal, in)
	}
	for range 5 + r.IntN(56) {
		now += int64(r.ExpFloat64() * 1000)
		switch p := r.Float64(); {
		case p < changes:
			add(input{commit: relay.Commit{Kind: relay.SettingsChange, Settings: randomSettings(r)}})
			continue
		case p < changes+0.15:
			add(input{commit: relay.Commit{Kind: relay.Heartbeat}})
			continue
		case p < changes+0.18:
			add(input{commit: relay.Commit{Kind: relay.NoInput}})
			continue
		}
		in := input{commit: relay.Commit{Kind: relay.Events}}
		n, keyless := 1, keyless || r.IntN(8) == 0
		if r.IntN(3) == 0 {
			n = 1 + r.IntN(largest)
		}
		for range n {
			d, a := r.IntN(docs), r.IntN(actors)
			counters[[2]int{d, a}]++
			key := counters[[2]int{d, a}]
			if disorder == 2 && r.IntN(4) == 0 {
				key = max(0, key-r.IntN(8)) // the same key again
			}
			e := relay.Event{Doc: fmt.Sprint("d", d), Actor: fmt.Sprint("a", a),
				Key: fmt.Sprintf("a%d:%04d", a, key)}
			if keyless || a == 0 && r.IntN(9) == 0 {
				e.Key, e.Null = "", relay.NullKey
			}
			fillValues(r, &e)
			in.events = append(in.events, e)
		}
		if disorder > 0 {
			r.Shuffle(n, func(i, j int) { in.events[i], in.events[j] = in.events[j], in.events[i] })
		}
		if r.IntN(10) < 3*disorder/2 {
			pending = append(pending, in)
			continue
		}
		add(in)
		if len(pending) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(pending))
			add(pending[i])
			pending = slices.Delete(pending, i, i+1)
		}
	}
	now += 10_000_000
	add(input{commit: relay.Commit{Kind: relay.Heartbeat}})
	s.cutAnywhere(r)
	return s
}

// cutAnywhere puts cuts between the inputs of half of the WALs, before the first and behind the last one: at
// the LSN of the input before, or above it, and now and then twice.
func (s *scene) cutAnywhere(r *rand.Rand) {
	often, last := []float64{0, 0, 0.05, 0.3}[r.IntN(4)], outbox.LSN(0)
	var all []input
	for i := range len(s.wal) + 1 {
		next := last + 4
		if i < len(s.wal) {
			next = s.wal[i].commit.LSN
		}
		for last < next && r.Float64() < often {
			last += outbox.LSN(r.IntN(int(next - last)))
			all = append(all, input{commit: relay.Commit{Kind: aCut, LSN: last}})
		}
		if i < len(s.wal) {
			all, last = append(all, s.wal[i]), next
		}
	}
	s.wal = all
}

// edge is an LSN at which a keepalive may come behind input k, before the next one.
func (s *scene) edge(r *rand.Rand, k int) outbox.LSN {
	at := s.wal[k].commit.LSN
	if k+1 == len(s.wal) {
		return at
	}
	next := s.wal[k+1]
	room := int(next.commit.LSN - at)
	if next.cut() { // which may come at the same LSN
		room++
	}
	return at + outbox.LSN(r.IntN(room))
}

// fillValues fills in what the order does not depend on.
func fillValues(r *rand.Rand, e *relay.Event) {
	e.ID = fmt.Sprint("id", r.IntN(1000))
	switch r.IntN(6) {
	case 0:
		e.Null |= relay.NullPayload
	case 1:
		e.Payload = []byte{}
	case 2:
		e.PayloadSize = 300 + r.IntN(300)
		e.Bad = "payload: too large"
	default:
		e.Payload = make([]byte, r.IntN(60))
		for i := range e.Payload {
			e.Payload[i] = byte(r.Uint32())
		}
		e.PayloadSize = len(e.Payload)
	}
	for range r.IntN(3) {
		e.Extra = append(e.Extra, fmt.Sprint("x", r.IntN(50)))
	}
	if len(e.Extra) > 1 && r.IntN(2) == 0 {
		e.Extra[1] = ""
		e.SetExtraNull(1)
	}
}

// start makes a buffer that goes on from a checkpoint of the scene.
func (s *scene) start(p relay.Checkpoint, scratch *memScratch) *Buffer {
	cfg := s.cfg
	cfg.Settings, cfg.Start, cfg.PublishedAhead, cfg.Scratch = p.Settings, p.Due, p.PublishedAhead, scratch
	b := New(cfg)
	b.late.table = make([]lastKey, 16)
	if s.memory > 0 {
		b.tune = tuning{memory: s.memory, block: 64, fanIn: 2 + int(s.memory%3)}
	}
	return b
}

// feed reads one commit as the decoder delivers it and returns the window that it closes, nil if none.
func feed(b *Buffer, in input) (*closed, error) {
	for i := range in.events {
		e := in.events[i]
		e.Pos.LSN, e.Time = 0, 0
		if err := b.Append(&e); err != nil {
			return nil, err
		}
	}
	var w *Window
	var err error
	if in.cut() {
		w, err = b.Cut(in.commit.LSN)
	} else if err = b.Commit(in.commit); err == nil {
		w, err = b.Close()
	}
	if w == nil || err != nil {
		return nil, err
	}
	c := &closed{Due: w.Due, Thru: w.Thru, Of: w.Of, Pull: w.Pull, Sort: w.Sort, Bytes: w.Bytes,
		Checkpoint: w.Checkpoint}
	if c.Checkpoint.Due == 0 {
		c.Checkpoint, _ = b.Marker(w.Thru)
	}
	for {
		var e relay.Event
		ok, err := w.Next(&e)
		if err != nil {
			return nil, err
		}
		if !ok {
			return c, nil
		}
		c.Events = append(c.Events, e)
	}
}

// check holds the buffer's own books against the model.
func check(b *Buffer, m *model) error {
	events, bytes := b.Held()
	if events != len(m.events) || bytes != sizes(m.events) {
		return fmt.Errorf("held %d events, %d bytes; want %d, %d", events, bytes, len(m.events),
			sizes(m.events))
	}
	if len(b.taken) > m.maxTaken {
		return fmt.Errorf("%d taken", len(b.taken))
	}
	oldest, ok := b.OldestLSN()
	if ok != (events > 0) || ok && oldest != m.events[0].Pos.LSN {
		return fmt.Errorf("oldest %v %v", oldest, ok)
	}
	if b.Settings() != m.set {
		return fmt.Errorf("settings %v, want %v", b.Settings(), m.set)
	}
	return nil
}

// checkClean looks for what should have been given back: everything has left.
func checkClean(b *Buffer, scratch *memScratch) error {
	if scratch.open != 0 {
		return fmt.Errorf("%d scratch files are left", scratch.open)
	}
	for _, c := range slices.Concat(b.fifo.spare, b.fifo.chunks) {
		for i := range c {
			if c[i].Doc != "" || c[i].Payload != nil || c[i].seq != nil || c[i].Pos.LSN != 0 {
				return fmt.Errorf("a free slot holds %v", c[i].Pos)
			}
		}
	}
	if b.fifo.head != b.fifo.tail || len(b.fifo.chunks) > 1 {
		return fmt.Errorf("slots %d to %d in %d chunks", b.fifo.head, b.fifo.tail, len(b.fifo.chunks))
	}
	if n := b.memory(); n != 0 {
		return fmt.Errorf("by the buffer's books %d bytes are in use", n)
	}
	if b.index.live != 0 || slices.ContainsFunc(b.index.table, func(q *sequence) bool { return q != nil }) {
		return fmt.Errorf("%d sequences are left in the index", b.index.live)
	}
	for _, list := range [][]*slot{b.order[:cap(b.order)], b.other[:cap(b.other)], b.pulled[:cap(b.pulled)]} {
		if slices.ContainsFunc(list, func(s *slot) bool { return s != nil }) {
			return errors.New("a working slice keeps a slot")
		}
	}
	return nil
}

type point struct {
	cp   relay.Checkpoint
	made int // windows up to there
}

// run compares the buffer with the model over the whole scene and returns the windows and every checkpoint to
// go on from.
func (s *scene) run(r *rand.Rand, st *stats) (windows []*closed, points []point, err error) {
	scratch := &memScratch{failAfter: -1}
	first := relay.Checkpoint{Settings: s.cfg.Settings}
	m, b := newModel(s.cfg), s.start(first, scratch)
	points = append(points, point{first, 0})
	out := 0
	for k, in := range s.wal {
		want := m.read(in)
		got, err := feed(b, in)
		if err != nil {
			return nil, nil, fmt.Errorf("input %v: %w", in.commit.LSN, err)
		}
		if !reflect.DeepEqual(got, want) {
			return nil, nil, fmt.Errorf("input %v: window\n%+v, want\n%+v", in.commit.LSN, got, want)
		}
		if err := check(b, m); err != nil {
			return nil, nil, fmt.Errorf("input %v: %w", in.commit.LSN, err)
		}
		if want != nil {
			windows = append(windows, want)
			out += want.Of
			points = append(points, point{got.Checkpoint, len(windows)})
			st.count(want)
			if in.cut() {
				st.cuts++
			}
		}
		if len(m.events) == 0 {
			edge := s.edge(r, k)
			p, ok := b.Marker(edge)
			if want := m.marker(edge); !ok || !reflect.DeepEqual(p, want) {
				return nil, nil, fmt.Errorf("marker %v: %+v, want %+v", edge, p, want)
			}
			points = append(points, point{p, len(windows)})
		}
	}
	if want := s.events(); out != want {
		return nil, nil, fmt.Errorf("%d events came out, %d went in", out, want)
	}
	if err := checkClean(b, scratch); err != nil {
		return nil, nil, err
	}
	st.files += scratch.made
	return windows, points, nil
}

func (s *scene) events() (n int) {
	for _, in := range s.wal {
		n += len(in.events)
	}
	return n
}

// resume goes on from a checkpoint and compares what is made with the rest of what the undisturbed run made;
// whole: with all inputs, also those that are none any more, and beside a model that goes on from the
// checkpoint too.
func (s *scene) resume(c point, windows []*closed, whole bool) error {
	scratch := &memScratch{failAfter: -1}
	b := s.start(c.cp, scratch)
	cfg := s.cfg
	cfg.Settings, cfg.Start, cfg.PublishedAhead = c.cp.Settings, c.cp.Due, c.cp.PublishedAhead
	m := newModel(cfg)
	made := c.made
	for _, in := range s.wal {
		if in.commit.LSN < c.cp.Due && !whole {
			continue // PostgreSQL may send it again or not
		}
		got, err := feed(b, in)
		if err != nil {
			return err
		}
		if whole {
			m.read(in)
			if err := check(b, m); err != nil {
				return err
			}
			if lsn := in.commit.LSN; len(m.events) == 0 && lsn > c.cp.Due {
				if p, _ := b.Marker(lsn); !reflect.DeepEqual(p, m.marker(lsn)) {
					return fmt.Errorf("marker %v: %+v, want %+v", lsn, p, m.marker(lsn))
				}
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

// stats shows that the scenes reach what they are meant to.
type stats struct {
	windows, events, pulls, taken, cuts, resumed, files int
}

func (st *stats) count(w *closed) {
	st.windows++
	st.events += w.Of
	if w.Pull > 0 {
		st.pulls++
	}
	if len(w.Checkpoint.PublishedAhead) > 0 {
		st.taken++
	}
}

// TestTheBufferIsTheModelOfHorizonMode compares the buffer with the obvious model on random WALs, and goes on
// from the checkpoints that either makes (from every one of every eighth WAL): what comes then must be what
// came without the restart.
func TestTheBufferIsTheModelOfHorizonMode(t *testing.T) {
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
			var st stats
			for i := part; i < len(all.List); i += parts {
				if err := tryModel(all.List[i], &st); err != nil {
					all.Failed(t, all.List[i])
					t.Fatal(err)
				}
			}
			t.Logf("%d WALs: %+v", n/parts, st)
			if n > 500 && (st.pulls == 0 || st.taken == 0 || st.cuts == 0 || st.files == 0) {
				t.Errorf("the scenes miss what they are for: %+v", st)
			}
		})
	}
}

func tryModel(seed uint64, st *stats) error {
	r := rand.New(rand.NewPCG(seed, 1))
	s := randomScene(r)
	windows, points, err := s.run(r, st)
	if err != nil {
		return err
	}
	every := seed/4%8 == 0 // in every part
	for _, c := range points {
		if !every && r.IntN(len(points)) >= 3 {
			continue
		}
		st.resumed++
		if err := s.resume(c, windows, r.IntN(8) == 0); err != nil {
			return fmt.Errorf("from checkpoint %+v: %w", c.cp, err)
		}
	}
	return nil
}
