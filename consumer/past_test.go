package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/outbox"
)

// memoryArchive is the archive of a stream in memory.
type memoryArchive struct {
	stream *memoryStream
	reads  func(seq uint64) error // called before each message is handed out; may be nil

	mu     sync.Mutex
	opened int
	next   uint64
	held   map[uint64]*stream.Message
	lost   []stream.Gap
	erased outbox.Sequences
	fault  error // of everything that is asked
}

func newMemoryArchive(s *memoryStream) *memoryArchive {
	return &memoryArchive{stream: s, next: 1, held: map[uint64]*stream.Message{}}
}

// to archives the stream up to a message.
func (a *memoryArchive) to(seq uint64) {
	a.stream.mu.Lock()
	defer a.stream.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	for ; a.next <= seq; a.next++ {
		if m := a.stream.held[a.next]; m != nil {
			a.held[a.next] = m
		}
	}
}

// loses notes messages as lost before they were archived.
func (a *memoryArchive) loses(from, to uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.held, func(seq uint64, _ *stream.Message) bool { return seq >= from && seq <= to })
	a.lost = append(a.lost, stream.Gap{From: from, To: to})
}

// erase erases messages from the archive alone: the stream does not have them any more.
func (a *memoryArchive) erase(seqs ...uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, seq := range seqs {
		if a.held[seq] != nil {
			delete(a.held, seq)
			a.erased = a.erased.With(outbox.SequenceRange{From: seq, To: seq})
		}
	}
}

func (a *memoryArchive) Past(context.Context, string, time.Time) (stream.Past, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.opened++
	return &memoryPast{archive: a, next: a.next}, a.fault
}

type memoryPast struct {
	archive *memoryArchive
	mu      sync.Mutex
	next    uint64
}

func (p *memoryPast) Next() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.next
}

func (p *memoryPast) Refresh(context.Context) error {
	p.archive.mu.Lock()
	defer p.archive.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next = p.archive.next
	return p.archive.fault
}

func (p *memoryPast) Get(_ context.Context, seq uint64) (*stream.Message, error) {
	p.archive.mu.Lock()
	defer p.archive.mu.Unlock()
	return p.archive.held[seq], p.archive.fault
}

func (p *memoryPast) Same(ctx context.Context, m *stream.Message) (bool, error) {
	mine, err := p.Get(ctx, m.Sequence)
	return mine != nil && string(mine.Data) == string(m.Data), err
}

func (p *memoryPast) Read(ctx context.Context, from, below uint64, f func(*stream.Message) error,
	lost func(*stream.Gap) error) error {
	a := p.archive
	for seq := from; seq < min(below, p.Next()); seq++ {
		if a.reads != nil {
			if err := a.reads(seq); err != nil {
				return err
			}
		}
		a.mu.Lock()
		m, err, gaps := a.held[seq], a.fault, slices.Clone(a.lost)
		a.mu.Unlock()
		if err == nil {
			err = ctx.Err()
		}
		for _, g := range gaps {
			if g.From == seq && err == nil {
				err = lost(&g)
			}
		}
		if m != nil && err == nil {
			c := *m
			err = f(&c)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// withPast is a stream of n messages, of which some are archived and some removed.
func withPast(s *publisher, n, archived, removed int) (*memoryStream, *memoryArchive, []*stream.Message) {
	src := newMemoryStream()
	all := s.events(n, 7)
	src.publish(all...)
	a := newMemoryArchive(src)
	a.to(uint64(archived))
	src.removeTo(int64(removed))
	return src, a, all
}

// TestTheArchiveIsReadBeforeTheStream: a new consumer begins at event 1 of a stream that has only its end,
// also where the stream is empty, and one that was down goes on where it was.
func TestTheArchiveIsReadBeforeTheStream(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ archived, removed int }{{70, 50}, {70, 70}, {100, 100}, {1, 1}, {100, 1}} {
		t.Run(fmt.Sprint(c.archived, "-", c.removed), func(t *testing.T) {
			t.Parallel()
			w, s := newHarness(t), &publisher{}
			src, past, all := withPast(s, 100, c.archived, c.removed)
			cfg := w.config(src)
			cfg.Archive = past
			r := w.start(w.consumer(cfg), handler)
			w.await(all)
			r.stopped()
			more := s.events(50, 7)
			src.publish(more...)
			past.to(140)
			src.removeTo(140)
			all = slices.Concat(all, more)
			r = w.start(w.consumer(cfg), handler)
			w.await(all)
			r.stopped()
			w.exactly(all)
			w.awaitOffsets(150)
		})
	}
}

// TestTheArchiveIsNotOpenedForWhatTheStreamHas: a consumer that has read everything needs none.
func TestTheArchiveIsNotOpenedForWhatTheStreamHas(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	src, past, all := withPast(s, 100, 70, 0)
	past.fault = errors.New("it is away")
	cfg := w.config(src)
	cfg.Archive = past
	r := w.start(w.consumer(cfg), handler)
	w.await(all)
	r.stopped()
	src.removeTo(100)
	more := s.events(10, 7)
	src.publish(more...)
	r = w.start(w.consumer(cfg), handler)
	w.await(slices.Concat(all, more))
	r.stopped()
	if past.opened > 0 {
		t.Errorf("opened %d times", past.opened)
	}
}

// TestRetentionMayOvertakeAConsumerThatHasAnArchive: what it has not read goes while it reads the stream, and
// while it reads the archive.
func TestRetentionMayOvertakeAConsumerThatHasAnArchive(t *testing.T) {
	t.Parallel()
	for _, filters := range [][]string{nil, {"outbox.*"}} { // by a filter nothing shows what is missing
		t.Run(fmt.Sprint(filters), func(t *testing.T) {
			t.Parallel()
			overtake(t, filters)
		})
	}
}

func overtake(t *testing.T, filters []string) {
	w, s := newHarness(t), &publisher{}
	src, past, all := withPast(s, 200, 40, 20)
	cfg := w.config(src)
	cfg.Archive, cfg.MaxInFlight, cfg.Batch, cfg.Filters = past, 4, 1, filters
	overtake := map[uint64]func(){
		10:  func() { past.to(90); src.removeTo(60) },   // while it reads the archive
		70:  func() { past.to(130); src.removeTo(120) }, // while it reads the stream
		125: func() { past.to(180); src.removeTo(180) },
	}
	var mu sync.Mutex
	r := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		mu.Lock()
		if f := overtake[e.Sequence]; f != nil {
			f()
			delete(overtake, e.Sequence)
		}
		mu.Unlock()
		return handler(ctx, tx, e)
	})
	w.await(all)
	r.stopped()
	w.exactly(all)
}

// TestACrashAnywhereInTheArchiveHasNoEffectTwice crashes at the first point, goes on and crashes at the
// second, and so on, in archive and stream, while retention goes on.
func TestACrashAnywhereInTheArchiveHasNoEffectTwice(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	src, past, all := withPast(s, 60, 30, 10)
	cfg := w.config(src)
	cfg.Partitions, cfg.Batch, cfg.MaxInFlight, cfg.Archive = 3, 1, 4, past
	crashes := 0
	for n := 1; ; n++ {
		if n%3 == 0 && n < 30 {
			past.to(uint64(30 + n))
			src.removeTo(int64(10 + n*3/2))
		}
		cfg.hooks.Crash = (&crashAt{n: n, answers: n%2 == 0, dead: true}).at
		r := w.start(w.consumer(cfg), handler)
		crashed := false
		if !await.True(func() bool {
			select {
			case <-r.ended:
				crashed = true
			default:
				return len(w.offsets()) == 3 && fmt.Sprint(w.effects()) == fmt.Sprint(want(all))
			}
			return true
		}) {
			t.Fatalf("neither crashed nor done: %v", w.effects())
		}
		w.expire()
		if r.stop(); !crashed && r.ends() == nil {
			break
		}
		if !errors.Is(r.err, errCrash) {
			t.Fatalf("Run: %v", r.err)
		}
		crashes++
	}
	w.exactly(all)
	if crashes < 5 {
		t.Errorf("%d crashes", crashes)
	}
}

// TestInstancesShareTheArchive: several instances come and crash at random while the archive grows and
// retention goes on, also beyond what they have read, and the number of partitions changes.
func TestInstancesShareTheArchive(t *testing.T) {
	t.Parallel()
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	for i := range uint64(*trials) {
		t.Run(fmt.Sprint("seed-", first+i), func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(first+i, 2))
			w, s := newHarness(t), &publisher{}
			src, past, all := withPast(s, 100, 60, 40)
			for range 10 {
				var instances []*running
				for range 1 + rnd.IntN(3) {
					cfg := w.config(src)
					cfg.Archive, cfg.Partitions, cfg.Batch = past, 2+rnd.IntN(4), 1+rnd.IntN(6)
					cfg.hooks.Crash = (&crashAt{n: 1 + rnd.IntN(60), answers: true}).at
					instances = append(instances, w.start(w.consumer(cfg), handler))
				}
				more := s.events(rnd.IntN(30), 7)
				src.publish(more...)
				all = append(all, more...)
				for range rnd.IntN(5) {
					src.mu.Lock()
					last := src.last
					src.mu.Unlock()
					past.to(min(last, past.next+rnd.Uint64N(20)))
					src.removeTo(int64(past.next-1) - int64(rnd.IntN(9)))
					if rnd.IntN(3) == 0 {
						w.expire()
					}
				}
				for _, r := range instances {
					r.stop()
					if err := r.ends(); err != nil && !errors.Is(err, errCrash) {
						t.Fatalf("Run: %v", err)
					}
				}
				w.expire()
			}
			cfg := w.config(src)
			cfg.Archive = past
			r := w.start(w.consumer(cfg), handler)
			w.await(all)
			r.stopped()
			w.exactly(all)
		})
	}
}

// TestWhatTheArchiveLacksIsAGap: between archive and stream, and what was lost before it was archived. With
// AcceptGap all that is somewhere is read.
func TestWhatTheArchiveLacksIsAGap(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		archived, from, to int
		loses              bool
	}{
		"between":        {archived: 40, from: 41, to: 60},
		"all":            {archived: 0, from: 1, to: 60},
		"in the archive": {archived: 70, from: 21, to: 30, loses: true},
		"at its start":   {archived: 70, from: 1, to: 30, loses: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s := newHarness(t), &publisher{}
			src, past, all := withPast(s, 100, c.archived, 60)
			if c.loses {
				past.loses(uint64(c.from), uint64(c.to))
			}
			cfg := w.config(src)
			cfg.Archive = past
			r := w.start(w.consumer(cfg), handler)
			err := r.ends()
			if !errors.Is(err, ErrGap) {
				t.Fatalf("Run: %v", err)
			}
			says := fmt.Sprintf("sequences %d to %d are neither", c.from, c.to)
			if !strings.Contains(err.Error(), says) {
				t.Errorf("%v does not say %q", err, says)
			}
			for _, seq := range w.offsets() {
				if seq >= int64(c.from) {
					t.Errorf("an offset is at %d", seq)
				}
			}
			cfg.AcceptGap = true
			all = slices.Concat(all[:c.from-1], all[c.to:])
			r = w.start(w.consumer(cfg), handler)
			w.await(all)
			r.stopped()
			w.exactly(all)
		})
	}
}

// TestWhatWasDeletedBeforeItWasArchivedIsNoGap: the archive knows of it, also within a window.
func TestWhatWasDeletedBeforeItWasArchivedIsNoGap(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(10, 3)
	for n := range 5 { // a window of five
		s.lsn += 16
		h := outbox.Header{Pos: outbox.Position{LSN: s.lsn}, N: n, Of: 5, Due: 1000, Thru: 1000,
			Timeline: 1, ID: fmt.Sprint("w-", n), Key: fmt.Sprint(n)}
		all = append(all, message("d1", &h))
	}
	s.lsn = 2000
	all = append(all, s.events(10, 3)...)
	src.publish(all...)
	src.remove(4, 13, 15)
	past := newMemoryArchive(src)
	past.to(20)
	src.removeTo(18)
	cfg := w.config(src)
	cfg.Archive = past
	r := w.start(w.consumer(cfg), handler)
	all = slices.Concat(all[:3], all[4:12], all[13:14], all[15:])
	w.await(all)
	r.stopped()
	w.exactly(all)
}

// TestAnArchiveThatCannotBeBelievedEndsRun: an object is damaged, or the stream has another message where
// both have one. Nothing behind it has an effect. One that can't be reached is tried again.
func TestAnArchiveThatCannotBeBelievedEndsRun(t *testing.T) {
	t.Parallel()
	damaged := &outbox.Fault{Class: outbox.Gap, Code: "archive_damaged", Message: "000: a bit was flipped"}
	t.Run("damaged", func(t *testing.T) {
		t.Parallel()
		w, s := newHarness(t), &publisher{}
		src, past, all := withPast(s, 100, 70, 60)
		past.reads = func(seq uint64) error {
			if seq > 30 {
				return damaged
			}
			return nil
		}
		cfg := w.config(src)
		cfg.Archive = past
		err := w.start(w.consumer(cfg), handler).ends()
		if !errors.Is(err, ErrArchive) || !strings.Contains(err.Error(), "bit was flipped") {
			t.Errorf("Run: %v", err)
		}
		for _, seq := range w.offsets() {
			if seq > 30 {
				t.Errorf("an offset is at %d", seq)
			}
		}
		past.reads = nil
		cfg.MaxInFlight = 3
		r := w.start(w.consumer(cfg), handler)
		w.await(all)
		r.stopped()
	})
	t.Run("other", func(t *testing.T) {
		t.Parallel()
		w, s := newHarness(t), &publisher{}
		src, past, _ := withPast(s, 100, 70, 60)
		other := *past.held[70]
		other.Data = []byte("other")
		past.held[70] = &other
		cfg := w.config(src)
		cfg.Archive = past
		err := w.start(w.consumer(cfg), handler).ends()
		if !errors.Is(err, ErrArchive) || !strings.Contains(err.Error(), "sequence 70") {
			t.Errorf("Run: %v", err)
		}
		w.exactly(nil)
	})
	t.Run("away", func(t *testing.T) {
		t.Parallel()
		w, s := newHarness(t), &publisher{}
		src, past, all := withPast(s, 100, 70, 60)
		tries := 0
		past.reads = func(seq uint64) error {
			if seq == 30 && tries < 3 {
				tries++
				return errors.New("connection reset")
			}
			return nil
		}
		cfg := w.config(src)
		cfg.Archive = past
		r := w.start(w.consumer(cfg), handler)
		w.await(all)
		r.stopped()
		w.exactly(all)
	})
}

// TestRunEndsWhileTheArchiveIsWaitedFor: whether it is opened or read.
func TestRunEndsWhileTheArchiveIsWaitedFor(t *testing.T) {
	t.Parallel()
	for _, opening := range []bool{true, false} {
		w, s := newHarness(t), &publisher{}
		src, past, _ := withPast(s, 100, 70, 60)
		waits := make(chan struct{})
		var once sync.Once
		hanging := hangingArchive{past, opening, func() { once.Do(func() { close(waits) }) }}
		cfg := w.config(src)
		cfg.Archive = hanging
		r := w.start(w.consumer(cfg), handler)
		<-waits
		r.stopped()
	}
}

// hangingArchive answers when its context ends.
type hangingArchive struct {
	*memoryArchive
	opening bool
	waits   func()
}

func (a hangingArchive) Past(ctx context.Context, name string, created time.Time) (stream.Past, error) {
	if a.opening {
		a.waits()
		<-ctx.Done()
		return nil, ctx.Err()
	}
	p, err := a.memoryArchive.Past(ctx, name, created)
	return hangingPast{p, a}, err
}

type hangingPast struct {
	stream.Past
	archive hangingArchive
}

func (p hangingPast) Read(ctx context.Context, _, _ uint64, _ func(*stream.Message) error,
	_ func(*stream.Gap) error) error {
	p.archive.waits()
	<-ctx.Done()
	return ctx.Err()
}
