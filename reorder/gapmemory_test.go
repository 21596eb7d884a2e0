package reorder

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func gapSettings(scope relay.Scope) relay.Settings {
	return relay.Settings{Sort: outbox.ByGap, MaxEvents: relay.DefaultMaxEvents,
		MaxBytes: relay.DefaultMaxBytes,
		Gap: relay.Gap{Bound: 10 * time.Second, Cold: 10 * time.Second, Memory: relay.DefaultMemory, First: 1,
			Scope: scope}}
}

// TestMemoryForgetsByCount compares what gap mode remembers with the list of the newest messages, while its
// size changes.
func TestMemoryForgetsByCount(t *testing.T) {
	t.Parallel()
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 15))
		limit := 1 + r.IntN(100)
		m := newMemory(limit)
		var made []outbox.Counter
		for step := range 2000 {
			c := outbox.Counter{Sequence: uint64(r.IntN(60)), First: int64(step), Span: 1,
				Late: r.IntN(5) == 0}
			if r.IntN(6) == 0 {
				c = outbox.Counter{}
			}
			m.add(c)
			if made = append(made, c); r.IntN(100) == 0 {
				made = made[max(0, len(made)-limit):] // a larger memory does not bring back what is forgotten
				limit = 1 + r.IntN(100)
				m.resize(limit)
			}
			made = made[max(0, len(made)-limit):]
			q := uint64(r.IntN(60))
			var want int64
			var ok bool
			for _, c := range made {
				if c.Span > 0 && !c.Late && c.Sequence == q {
					want, ok = c.Last(), true
				}
			}
			if got, known := m.last(q); got != want || known != ok || m.len != len(made) {
				t.Fatalf("seed %d, step %d: %d %v of %d, want %d %v of %d", seed, step, got, known, m.len,
					want,
					ok, len(made))
			}
		}
	}
}

// TestMessagesThatAreGoneCountAsRemembered goes on from a stream that has fewer messages than the checkpoint
// remembers: what is known is the same, and the next checkpoints are.
func TestMessagesThatAreGoneCountAsRemembered(t *testing.T) {
	t.Parallel()
	set := gapSettings(relay.OfSequence)
	set.Gap.Memory = 5
	q := outbox.SequenceOf("note", "ana")
	b := New(Config{Settings: set, Start: 9, Remembered: 4, Recent: []outbox.Counter{
		{}, {Sequence: q, First: 2, Span: 1, Late: true}, {Sequence: q, First: 7, Span: 2}}})
	if p, ok := b.Marker(9); !ok || p.Remembered != 4 {
		t.Errorf("%+v, %v", p, ok)
	}
	w, err := feed(b, input{relay.Commit{LSN: 12, Kind: relay.Events, Events: 1}, []relay.Event{
		{Doc: "note", Actor: "ana", Counter: outbox.Counter{First: 9, Span: 1}}}})
	if err != nil || w == nil || w.Events[0].Counter.Late || w.Checkpoint.Remembered != 5 {
		t.Errorf("%+v, %v", w, err)
	}
}

// TestAMillionSequencesLeaveMemorySmall lets a million sequences pass through.
func TestAMillionSequencesLeaveMemorySmall(t *testing.T) {
	m := newMemory(relay.DefaultMemory)
	before := heapInUse()
	for i := range uint64(1 << 20) {
		m.add(outbox.Counter{Sequence: i * 0x9E3779B97F4A7C15, First: 1, Span: 1})
	}
	took := heapInUse() - before
	if want := int64(relay.DefaultMemory*memoryWeight) + 64<<10; took > want ||
		m.newest.live > relay.DefaultMemory {
		t.Errorf("%d bytes for %d messages, want %d or less", took, relay.DefaultMemory, want)
	}
	runtime.KeepAlive(m)
}

func heapInUse() int64 {
	runtime.GC()
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc)
}

// TestHeldEventsStayWithinMaxWeight fills the buffer with events of sequences and documents of their own,
// each cut from a block of a megabyte as the decoder's arenas are, and measures.
func TestHeldEventsStayWithinMaxWeight(t *testing.T) {
	for _, scope := range []relay.Scope{relay.OfSequence, relay.OfDocument} {
		set := gapSettings(scope)
		set.MaxEvents, set.MaxBytes = 20_000, 4<<20
		before := heapInUse()
		b := New(Config{Settings: set})
		for i := range 30_000 {
			text := strings.Repeat(fmt.Sprintf("%08d", i), 20)
			block := []byte(text + strings.Repeat("x", 4000))
			e := relay.Event{Doc: text[:9], Actor: text[8:14], Payload: block[:100], PayloadSize: 100,
				Counter: outbox.Counter{First: 7, Span: 1}}
			must.Succeed(t, b.Append(&e))
			must.Succeed(t, b.Commit(relay.Commit{LSN: outbox.LSN(i + 1), Time: int64(i), Kind: relay.Events,
				Events: 1}))
			w, err := b.Close()
			must.Succeed(t, err)
			for more := w != nil; more && err == nil; {
				more, err = w.Next(&e)
			}
			must.Succeed(t, err)
		}
		took := heapInUse() - before
		events, _ := b.Held()
		if limit := MaxWeight(set); events < 10_000 || b.memory() > limit || took > limit {
			t.Errorf("%v: %d events take %d bytes, %d by weight; want %d or less", scope, events, took,
				b.memory(),
				limit)
		}
		t.Logf("%v: %d events take %d bytes, %d by weight, of %d", scope, events, took, b.memory(),
			MaxWeight(set))
		runtime.KeepAlive(b)
	}
}

// TestHotDocumentIsNotQuadratic holds tens of thousands of events of one sequence in the worst order, then
// lets them go at once.
func TestHotDocumentIsNotQuadratic(t *testing.T) {
	t.Parallel()
	const events = 50_000
	for _, c := range []struct {
		scope relay.Scope
		span  uint32
	}{{relay.OfSequence, 1}, {relay.OfDocument, 1}, {relay.OfSequence, 100_000}} {
		b := New(Config{Settings: gapSettings(c.scope)})
		all := 0
		for i := range events {
			e := relay.Event{Doc: "note", Actor: "ana",
				Counter: outbox.Counter{First: int64(events - i), Span: c.span}}
			if c.span > 1 { // each ends behind the one before it: none is late, and all follow at once
				e.Counter.First = int64(2 + i)
				if i == events-1 {
					e.Counter = outbox.Counter{First: 1, Span: 1}
				}
			}
			w, err := feed(b, input{relay.Commit{LSN: outbox.LSN(i + 1), Kind: relay.Events, Events: 1},
				[]relay.Event{e}})
			must.Succeed(t, err)
			if w != nil {
				all += w.Of
			}
		}
		if all != events {
			t.Errorf("%d events came out, want %d", all, events)
		}
	}
}

// TestHugeTransactionInGapMode reads a transaction that is many times as large as the memory for it, in an
// order that makes most of it wait, behind a buffer that is full.
func TestHugeTransactionInGapMode(t *testing.T) {
	t.Parallel()
	const events, sequences = 60_000, 300
	set := gapSettings(relay.OfSequence)
	set.MaxBytes, set.Gap.Memory = 2<<20, 1000
	files := &memScratch{failAfter: -1}
	b := New(Config{Settings: set, Scratch: files})
	peak := int64(0)
	files.onWrite = func() { peak = max(peak, b.memory()) }
	lsn := outbox.LSN(0)
	read := func(list []relay.Event) (n int) {
		lsn++
		for i := range list {
			list[i].Pos.Index = uint32(i)
			must.Succeed(t, b.Append(&list[i]))
			peak = max(peak, b.memory())
		}
		must.Succeed(t, b.Commit(relay.Commit{LSN: lsn, Kind: relay.Events, Events: len(list)}))
		w, err := b.Close()
		must.Succeed(t, err)
		last := map[string]int64{}
		var e relay.Event
		for more := w != nil; more; {
			more, err = w.Next(&e)
			must.Succeed(t, err)
			if !more {
				break
			}
			peak = max(peak, b.memory())
			if n++; e.Pos.LSN == 2 && e.Counter.First != last[e.Doc]+1 {
				t.Fatalf("%s: %d follows %d", e.Doc, e.Counter.First, last[e.Doc])
			}
			if e.Pos.LSN == 2 {
				last[e.Doc] = e.Counter.Last()
			}
		}
		return n
	}
	var held []relay.Event
	for i := range 10_000 {
		held = append(held, relay.Event{Doc: fmt.Sprint("held-", i), Payload: make([]byte, 100),
			PayloadSize: 100,
			Counter:     outbox.Counter{First: 5, Span: 1}})
	}
	out := read(held)
	var list []relay.Event
	for i := range events {
		c := int64(i/sequences) + 1
		list = append(list, relay.Event{Doc: fmt.Sprintf("note-%03d", i%sequences),
			Payload:     make([]byte, 200),
			PayloadSize: 200, Counter: outbox.Counter{First: c, Span: 1}})
	}
	r := rand.New(rand.NewPCG(1, 16))
	r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	out += read(list)
	still, _ := b.Held()
	if out+still != len(held)+events || files.made == 0 {
		t.Errorf("%d events came out, %d are held, %d went in; %d files", out, still, len(held)+events,
			files.made)
	}
	if limit := MaxWeight(set) + 2<<20; peak > limit {
		t.Errorf("peak weight %d, want %d or less", peak, limit)
	}
	if files.open != 0 {
		t.Errorf("%d files are left", files.open)
	}
	t.Logf("peak %d KiB by weight of %d KiB, %d files", peak>>10, MaxWeight(set)>>10, files.made)
}

// TestDiskErrorsStopGapMode lets each call of a scratch file fail in turn.
func TestDiskErrorsStopGapMode(t *testing.T) {
	t.Parallel()
	run := func(files *memScratch) (int, error) {
		set := gapSettings(relay.OfSequence)
		set.MaxEvents, set.MaxBytes = 100, 32<<10
		b := New(Config{Settings: set, Scratch: files})
		defer b.Discard()
		b.tune.least, b.tune.fanIn, b.tune.block = 0, 2, 8<<10
		in := input{commit: relay.Commit{LSN: 9, Kind: relay.Events, Events: 600}}
		for i := range in.commit.Events {
			in.events = append(in.events, relay.Event{Pos: outbox.Position{Index: uint32(i)},
				Doc: fmt.Sprint("note-", i%7), Payload: make([]byte, 500), PayloadSize: 500,
				Counter: outbox.Counter{First: int64(100 - i/7), Span: 1}})
		}
		w, err := feed(b, in)
		if err != nil {
			return 0, err
		}
		return w.Of, nil
	}
	whole := &memScratch{failAfter: -1}
	if n, err := run(whole); n < 500 || err != nil {
		t.Fatalf("%d events, %v", n, err)
	}
	for at := 1; at <= whole.calls; at += everyCall() {
		files := &memScratch{failAfter: -1, failAt: at}
		if _, err := run(files); err == nil || files.calls != at || files.open != 0 {
			t.Fatalf("call %d of %d failed: %v, %d calls, %d files left", at, whole.calls, err, files.calls,
				files.open)
		}
	}
}

// TestAChangeOfModeThatIsStoppedStillHoldsTheRest: whoever stops it may still ask what is held, for its
// gauges.
func TestAChangeOfModeThatIsStoppedStillHoldsTheRest(t *testing.T) {
	t.Parallel()
	stopped, asked, at := errors.New("stopped"), 0, 0
	for ; at < 10; at++ {
		counting := false
		b := New(Config{Settings: gapSettings(relay.OfSequence), Stop: func() error {
			if asked++; counting && asked > at {
				return stopped
			}
			return nil
		}})
		in := input{commit: relay.Commit{LSN: 9, Kind: relay.Events, Events: 3}}
		for i := range in.commit.Events { // counter 1 is missing in each of the sequences
			in.events = append(in.events, relay.Event{Pos: outbox.Position{Index: uint32(i)},
				Doc: fmt.Sprint("note-", i), Counter: outbox.Counter{First: 2, Span: 1}})
		}
		_, err := feed(b, in)
		must.Succeed(t, err)
		asked, counting = 0, true
		_, err = feed(b, input{commit: relay.Commit{LSN: 17, Kind: relay.SettingsChange,
			Settings: relay.Settings{Sort: outbox.ByCommit, MaxEvents: 10, MaxBytes: 1 << 20}}})
		held, _ := b.Held()
		if oldest, ok := b.OldestLSN(); ok != (held > 0) || ok && oldest != 9 {
			t.Errorf("stopped at the %dth question: %d are held, the oldest from %v, %t", at+1, held, oldest,
				ok)
		}
		b.Discard()
		if err == nil {
			break
		}
		if err != stopped {
			t.Fatal(err)
		}
	}
	if at < 2 || at == 10 {
		t.Errorf("it was stopped %d times", at)
	}
}

// TestHeldEventThatDoesNotComeAgainStops goes on from a checkpoint that holds three events, on a WAL that has
// not all of them any more as they were: nothing is released, no checkpoint is made. It shows at the next
// input, and at a keepalive where none comes.
func TestHeldEventThatDoesNotComeAgainStops(t *testing.T) {
	t.Parallel()
	set := gapSettings(relay.OfSequence)
	wal := func(counters ...int64) (all []input) {
		for i, c := range counters {
			if c != 0 {
				all = append(all, input{relay.Commit{LSN: outbox.LSN(10 * (i + 1)), Kind: relay.Events,
					Events: 1,
					Start:  outbox.LSN(10*(i+1) - 1)}, []relay.Event{{Doc: "note", Actor: "ana",
					Counter: outbox.Counter{First: c, Span: 1}}}})
			}
		}
		return all
	}
	first := New(Config{Settings: set})
	for _, in := range wal(1, 3, 4, 5) {
		_, err := feed(first, in)
		must.Succeed(t, err)
	}
	cp, ok := first.Marker(45)
	if !ok || len(cp.Holds) != 1 {
		t.Fatalf("checkpoint %+v", cp)
	}
	cfg := Config{Settings: set, Start: cp.Start(), Due: cp.Due, Holds: cp.Holds, Remembered: cp.Remembered,
		Recent: []outbox.Counter{{Sequence: cp.Holds[0].Sequence, First: 1, Span: 1}}}
	next := input{commit: relay.Commit{LSN: 50, Start: 49, Kind: relay.Heartbeat}}
	for name, c := range map[string]struct {
		wal   []input
		stops bool
	}{
		"all come again":             {wal(1, 3, 4, 5), false},
		"the oldest does not":        {wal(1, 0, 4, 5), true},
		"a younger one does not":     {wal(1, 3, 0, 5), true},
		"a younger one has changed":  {wal(1, 3, 4, 6), true},
		"two have changed places":    {wal(1, 3, 5, 4), true},
		"one has come to be another": {wal(1, 3, 1, 5), true},
		"none comes again":           {nil, true},
	} {
		for _, idle := range []bool{false, true} {
			b := New(cfg)
			for _, in := range c.wal {
				w, err := feed(b, in)
				must.Succeed(t, err)
				if w != nil {
					t.Errorf("%s: %+v is released again", name, w)
				}
			}
			must.Succeed(t, b.Reached(cp.Due-1))
			if p, ok := b.Marker(cp.Due - 1); ok {
				t.Errorf("%s: checkpoint %+v before all of it was read again", name, p)
			}
			var err error
			if idle {
				err = b.Reached(cp.Due)
			} else {
				_, err = feed(b, next)
			}
			if fault := outbox.FaultOf(err); (fault != nil && fault.Code == "held_missing") != c.stops {
				t.Errorf("%s, idle %v: goes on with %v", name, idle, err)
			}
			if p, ok := b.Marker(50); ok == c.stops {
				t.Errorf("%s, idle %v: checkpoint %+v, %v", name, idle, p, ok)
			}
		}
	}
	cfg.Settings = relay.Settings{MaxEvents: 10, MaxBytes: 1000}
	if err := New(cfg).Append(&relay.Event{}); err == nil {
		t.Error("a buffer of another mode takes over what gap mode held")
	}
}

// TestGivingUpManyWaitsCanBeStopped: an input may end as many waits as the limits allow to be held.
func TestGivingUpManyWaitsCanBeStopped(t *testing.T) {
	t.Parallel()
	stop, set := errors.New("stopped"), gapSettings(relay.OfSequence)
	less, other := set, set
	less.MaxEvents, other.Gap.First = 1, 0
	for name, end := range map[string]relay.Commit{
		"by time":              {Kind: relay.Heartbeat, Time: time.Hour.Microseconds()},
		"by size":              {Kind: relay.SettingsChange, Settings: less},
		"by another beginning": {Kind: relay.SettingsChange, Settings: other},
	} {
		asked := 0
		b := New(Config{Settings: set, Stop: func() error {
			if asked++; asked > 10 {
				return stop
			}
			return nil
		}})
		in := input{commit: relay.Commit{LSN: 10, Start: 9, Kind: relay.Events, Events: 1000}}
		for i := range in.commit.Events {
			in.events = append(in.events, relay.Event{Pos: outbox.Position{Index: uint32(i)},
				Doc: fmt.Sprint("note-", i), Counter: outbox.Counter{First: 7, Span: 1}})
		}
		_, err := feed(b, in)
		must.Succeed(t, err)
		asked, end.LSN, end.Start = 0, 20, 19
		if _, err = feed(b, input{commit: end}); !errors.Is(err, stop) {
			t.Errorf("%s: %v after %d questions", name, err, asked)
		}
	}
}
