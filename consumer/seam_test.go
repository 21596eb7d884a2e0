package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/outbox"
)

// windows makes n messages in windows of one to three.
func (s *publisher) windows(rnd *rand.Rand, n int) (all []*stream.Message) {
	for len(all) < n {
		of := min(1+rnd.IntN(3), n-len(all))
		s.lsn += 16
		for i := range of {
			s.n++
			all = append(all, message(fmt.Sprint("d", rnd.IntN(4)), &outbox.Header{
				Pos: outbox.Position{LSN: s.lsn, Index: uint32(i)}, N: i, Of: of, Due: s.lsn, Thru: s.lsn,
				ID: fmt.Sprint("id-", s.n)}))
		}
	}
	return all
}

// seamTrial is a stream with its archive, of which much is gone.
type seamTrial struct {
	t    *testing.T
	seed uint64
	src  *memoryStream
	past *memoryArchive
	done uint64 // what the consumer has read before
	// 2: it reads the rest after it was asked for another layout, so up to a barrier
	partitions int

	mu  sync.Mutex
	had []uint64
}

// damaged publishes messages, lets a consumer with the offsets read some of them, and then erases, loses,
// archives and removes others. The same seed does the same.
func (s *seamTrial) damaged(offsets Offsets) {
	s.t.Helper()
	rnd, s1 := rand.New(rand.NewPCG(s.seed, 3)), &publisher{}
	n := 6 + rnd.IntN(20)
	all := s1.windows(rnd, n)
	s.src, s.done, s.had, s.partitions = newMemoryStream(), rnd.Uint64N(uint64(n)), nil, 1
	s.past = newMemoryArchive(s.src)
	s.src.publish(all[:s.done]...)
	if s.done > 0 {
		if err := s.run(s.config(), offsets, s.done); err != nil {
			s.t.Fatalf("before: %v", err)
		}
		s.had = nil
	}
	s.src.publish(all[s.done:]...)

	var lost, alone, late []uint64
	harm := 1 + rnd.IntN(6) // one of so many messages is harmed
	for seq := range uint64(n - 1) {
		if seq++; rnd.IntN(harm) > 0 {
			continue
		}
		switch rnd.IntN(8) {
		case 0:
			s.src.remove(seq)
		case 1, 2:
			s.src.erase(seq)
		case 3:
			lost = append(lost, seq)
		case 4:
			late = append(late, seq)
		default:
			alone = append(alone, seq)
		}
	}
	archived := rnd.Uint64N(uint64(n) + 1)
	for archived > 0 && s.src.held[archived] == nil { // an archive ends with a message
		archived--
	}
	removed := rnd.Uint64N(archived + 1)
	switch rnd.IntN(4) {
	case 0: // retention has passed the archive
		removed = archived + rnd.Uint64N(uint64(n)-archived+1)
	case 1:
		removed = archived
	}
	s.past.to(archived)
	for _, seq := range lost {
		if seq < archived {
			s.src.remove(seq)
			s.past.loses(seq, seq)
		}
	}
	s.src.remove(late...)
	s.src.removeTo(int64(removed))
	for _, seq := range alone {
		if seq <= min(removed, archived) {
			s.past.erase(seq)
		}
	}
	if rnd.IntN(3) == 0 {
		s.restore()
	}
	if s.done > 0 {
		s.partitions += rnd.IntN(2)
	}
	told := s.src.first > s.src.last || s.partitions > 1 && s.src.erased.Has(s.src.last)
	if s.src.held[s.src.last] == nil && !told {
		// What is missing at the end of a stream the broker may have lost: then it comes again. Only the next
		// message tells, or a barrier that was erased.
		s.src.publish(s1.windows(rnd, 1)...)
	}
}

// restore puts the stream back from the archive, unless the consumer could not tell that it is the same.
func (s *seamTrial) restore() {
	restored := newMemoryStream()
	restored.created, restored.last = s.src.created.Add(time.Hour), s.past.next-1
	restored.erased = s.src.erased.With(s.past.erased...)
	restored.change(func() {
		for seq := range s.src.last {
			if seq++; s.past.held[seq] != nil {
				restored.held[seq] = s.past.held[seq]
			} else if seq >= s.past.next && s.src.held[seq] != nil {
				restored.held[seq], restored.last = s.src.held[seq], seq
			}
		}
	})
	same := s.done == 0 || restored.held[s.done] != nil
	if restored.erased.Has(s.done) {
		same = len(restored.erased.Lacking(1, s.done)) == 0
		for seq := range s.done {
			same = same || restored.held[seq] != nil
		}
	}
	if same {
		s.src, s.past = restored, newMemoryArchive(restored)
	}
}

// readable are the messages that somebody has and the consumer has to read; lost are those that nobody has
// and that were not erased.
func (s *seamTrial) readable() (readable, lost []uint64) {
	for seq := s.done + 1; seq <= s.src.last; seq++ {
		inArchive := seq < s.src.first && seq < s.past.next
		switch {
		case s.src.held[seq] != nil, inArchive && s.past.held[seq] != nil:
			readable = append(readable, seq)
		case inArchive && slices.Contains(s.past.lost, stream.Gap{From: seq, To: seq}),
			!inArchive && !s.src.erased.Has(seq):
			lost = append(lost, seq)
		}
	}
	return readable, lost
}

func (s *seamTrial) config() Config {
	cfg := (&harness{t: s.t, log: slog.New(slog.DiscardHandler)}).config(s.src)
	cfg.Archive, cfg.Partitions, cfg.Lease = s.past, max(s.partitions, 1), time.Minute
	return cfg
}

// run reads until it has the message of a sequence, or the consumer ends.
func (s *seamTrial) run(cfg Config, offsets Offsets, last uint64) error {
	s.t.Helper()
	c, err := New(nil, offsets, cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	c.cfg.confirm, c.cfg.interval = time.Millisecond, 50*time.Millisecond
	ctx, stop := context.WithCancel(s.t.Context())
	defer stop()
	r := &running{t: s.t, stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.err = c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *Event) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.had = append(s.had, e.Sequence)
			return nil
		})
	}()
	if !await.True(func() bool {
		select {
		case <-r.ended:
			return true
		default:
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		return last == 0 || slices.Contains(s.had, last)
	}) {
		readable, lost := s.readable()
		s.t.Fatalf("seed %d: had %v, and Run does not end; behind %d can be read %v, and %v are lost", s.seed,
			s.had, s.done, readable, lost)
	}
	stop()
	return r.ends()
}

var rangeOf = regexp.MustCompile(`sequences (\d+) to (\d+) are`)

// TestWhatIsErasedAroundTheSeamIsNoGapAndWhatIsLostIs: whatever of archive and stream was erased, lost or
// removed, also where the stream was put back from the archive, a consumer reads all that there is, once and
// in order, and ends where the first message is lost, if one is; with AcceptGap it reads what is behind that.
func TestWhatIsErasedAroundTheSeamIsNoGapAndWhatIsLostIs(t *testing.T) {
	t.Parallel()
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	var whole, gaps int
	for i := range uint64(20 * *trials) {
		name := fmt.Sprint("seed ", first+i)
		offsets := Memory()
		s := &seamTrial{t: t, seed: first + i}
		s.damaged(offsets)
		readable, lost := s.readable()
		last := slices.Max(append(readable, 0))
		if len(lost) == 0 {
			whole++
			if err := s.run(s.config(), offsets, last); err != nil || !slices.Equal(s.had, readable) {
				t.Fatalf("%s: had %v, want %v: %v", name, s.had, readable, err)
			}
			continue
		}
		gaps++
		before, _ := slices.BinarySearch(readable, lost[0])
		never := last
		if before == len(readable) {
			never = s.src.last + 1
		}
		err := s.run(s.config(), offsets, never)
		if !errors.Is(err, ErrGap) || len(s.had) > before || !slices.Equal(s.had, readable[:len(s.had)]) {
			t.Fatalf("%s: had %v, want %v, of which %v are lost: %v", name, s.had, readable, lost, err)
		}
		says := rangeOf.FindStringSubmatch(err.Error())
		if says == nil {
			t.Fatalf("%s: lost are %v: %v", name, lost, err)
		}
		to, _ := strconv.ParseUint(says[2], 10, 64)
		if says[1] != fmt.Sprint(lost[0]) || !slices.Contains(lost, to) ||
			before < len(readable) && to > readable[before] {
			t.Fatalf("%s: lost are %v, and %v can be read: %v", name, lost, readable, err)
		}
		offsets = Memory()
		s.damaged(offsets)
		cfg := s.config()
		cfg.AcceptGap = true
		if err := s.run(cfg, offsets, last); err != nil || !slices.Equal(s.had, readable) {
			t.Fatalf("%s: with AcceptGap: had %v, want %v: %v", name, s.had, readable, err)
		}
	}
	if whole == 0 || gaps == 0 {
		t.Errorf("%d trials without a loss, and %d with one", whole, gaps)
	}
}

// TestTheNextMessageTellsWhatIsMissingAtTheEnd: sequence 7 was lost, and what was archived behind it has been
// erased, so a stream that is put back ends with a hole. As long as nothing is behind that it looks like one
// that comes again. A consumer that has read up to 6 waits, and passes it over for nobody.
func TestTheNextMessageTellsWhatIsMissingAtTheEnd(t *testing.T) {
	t.Parallel()
	for _, comesAgain := range []bool{false, true} {
		s1, offsets := &publisher{}, Memory()
		s := &seamTrial{t: t, src: newMemoryStream(), done: 6}
		s.past = newMemoryArchive(s.src)
		s.src.publish(s1.events(6, 1)...)
		if err := s.run(s.config(), offsets, s.done); err != nil {
			t.Fatalf("before: %v", err)
		}
		s.had = nil
		s.src.publish(s1.events(4, 1)...)
		s.src.erase(2, 6)
		s.past.to(9)
		s.past.loses(5, 5)
		s.past.loses(7, 7)
		s.src.removeTo(10)
		s.past.erase(1, 4, 8, 9)
		s.restore()
		if s.src.first != 3 || s.src.last != 9 || len(s.src.held) != 1 {
			t.Fatalf("the stream has %v, up to %d", s.src.held, s.src.last)
		}
		cfg, looked := s.config(), &lookedAt{memoryStream: s.src}
		cfg.hooks.Source = looked
		c, err := New(nil, offsets, cfg)
		if err != nil {
			t.Fatal(err)
		}
		c.cfg.confirm, c.cfg.interval = time.Millisecond, 5*time.Millisecond
		r := (&harness{t: t}).start(c, func(_ context.Context, _ pgx.Tx, e *Event) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.had = append(s.had, e.Sequence)
			return nil
		})
		await.Until(t, "inspections", func() error {
			if n := looked.times.Load(); n < 20 {
				return fmt.Errorf("%d", n)
			}
			return nil
		})
		s.src.change(func() {
			if comesAgain {
				s.src.lost = 7
			}
		})
		s.src.publish(s1.events(1, 1)...)
		if !comesAgain {
			err := r.ends()
			if !errors.Is(err, ErrGap) || !strings.Contains(err.Error(), "sequences 7 to 7 are") {
				t.Errorf("Run: %v", err)
			}
			continue
		}
		await.Until(t, "the message", func() error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if !slices.Equal(s.had, []uint64{10}) {
				return fmt.Errorf("had %v", s.had)
			}
			return nil
		})
		r.stopped()
	}
}

// lookedAt counts how often it was asked for the stream's state.
type lookedAt struct {
	*memoryStream
	times atomic.Int64
}

func (l *lookedAt) State(ctx context.Context) (stream.State, error) {
	l.times.Add(1)
	return l.memoryStream.State(ctx)
}

// TestWhatTheBrokerLostAtTheSeamIsNoGap: the archive ends before it, the stream begins behind it, and the
// message there says that it comes again. Whoever had read it passes it over.
func TestWhatTheBrokerLostAtTheSeamIsNoGap(t *testing.T) {
	t.Parallel()
	for done := range uint64(9) {
		rnd, s1, offsets := rand.New(rand.NewPCG(1, 3)), &publisher{}, Memory()
		s := &seamTrial{t: t, src: newMemoryStream(), done: done}
		s.past = newMemoryArchive(s.src)
		all := s1.windows(rnd, 10)
		s.src.publish(all[:done]...)
		if done > 0 {
			if err := s.run(s.config(), offsets, done); err != nil {
				t.Fatalf("before: %v", err)
			}
			s.had = nil
		}
		s.src.publish(all[done:8]...)
		s.past.to(5)
		s.src.lose(6, false)
		s.src.publish(all[5:]...)
		s.src.removeTo(5)
		var want []uint64
		for n := done + 1; n <= 10; n++ {
			seq := n
			if n > 5 {
				seq += 3
			}
			want = append(want, seq)
		}
		if err := s.run(s.config(), offsets, 13); err != nil || !slices.Equal(s.had, want) {
			t.Errorf("%d were done: had %v, want %v: %v", done, s.had, want, err)
		}
	}
}
