package reorder

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/app/tempfile"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// memory returns what the events held, read and leaving weigh, with what is needed to find and sort them: all
// but the blocks of a merge and what is about to be written.
func (b *Buffer) memory() int64 {
	n := b.resident() + b.leaving + b.index.weight() + b.sorting
	if b.spill == nil {
		n += b.read.weight
	}
	if b.gap != nil {
		n += b.gap.weight()
	}
	return n
}

// edit makes the i-th event of a large transaction. With the same i it is the same event, in memory of its
// own.
func edit(r *rand.Rand, i int) relay.Event {
	author := fmt.Sprintf("author-%02d", r.IntN(20))
	e := relay.Event{
		Pos: outbox.Position{Index: uint32(i)}, Doc: fmt.Sprintf("note-%03d", r.IntN(200)), Actor: author,
		Key: fmt.Sprintf("%s:%08d", author, r.IntN(100_000)), ID: fmt.Sprint("id-", i),
		Payload: make([]byte, 20+r.IntN(300)),
	}
	for k := range e.Payload {
		e.Payload[k] = byte(i >> (8 * (k % 4)))
	}
	e.PayloadSize = len(e.Payload)
	return e
}

// TestAHugeTransactionIsSortedOnDisk puts a transaction in order that is many times as large as the memory
// for it.
func TestAHugeTransactionIsSortedOnDisk(t *testing.T) {
	t.Parallel()
	const limit = 4 << 20
	for _, c := range []struct {
		name    string
		sort    outbox.Sort
		horizon time.Duration
		fanIn   int
		events  int
	}{
		{"seq_key", outbox.BySeqKey, 0, 64, 300_000},
		{"seq_key, several passes", outbox.BySeqKey, time.Second, 4, 100_000},
		{"commit", outbox.ByCommit, 0, 64, 150_000},
		{"commit, several passes", outbox.ByCommit, time.Second, 3, 100_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			events := c.events
			if !tier.Long() {
				events /= 4
			}
			dir := t.TempDir()
			files := &memScratch{failAfter: -1}
			set := relay.Settings{Horizon: c.horizon, Sort: c.sort, MaxEvents: 65536, MaxBytes: limit}
			b := New(Config{Settings: set, Scratch: watched{tempfile.Dir(dir), files}})
			b.tune.fanIn = c.fanIn
			peak := int64(0)
			files.onWrite = func() { peak = max(peak, b.memory()) }

			// Something is held already when it comes.
			held := []relay.Event{
				{Doc: "note-007", Actor: "author-03", Key: "author-03:00050000"},
				{Doc: "note-008", Actor: "author-03", Key: "z"},
			}
			before := input{commit: relay.Commit{LSN: 0x100, Kind: relay.Events, Events: 2}, events: held}
			held[1].Pos.Index = 1
			for i := range held {
				held[i].Pos.LSN = 0x100
			}
			first, err := feed(b, before)
			must.Succeed(t, err)
			r := rand.New(rand.NewPCG(5, 5))
			for i := range events {
				e := edit(r, i)
				must.Succeed(t, b.Append(&e))
				peak = max(peak, b.memory())
			}
			if err := b.Commit(relay.Commit{LSN: 0x200, Time: 1000, Kind: relay.Events,
				Events: events}); err != nil {
				t.Fatal(err)
			}
			w, err := b.Close()
			must.Succeed(t, err)
			want := hugeOrder(events, c.sort, held, first == nil)
			if w.Of != len(want) || w.Due != 0x200 || w.Pull != 0 {
				t.Fatalf("%+v, want %d events", w, len(want))
			}
			var e relay.Event
			for i, p := range want {
				if ok, err := w.Next(&e); !ok || err != nil {
					t.Fatalf("event %d: %v %v", i, ok, err)
				}
				if e.Pos != p {
					t.Fatalf("event %d is %v, want %v", i, e.Pos, p)
				}
				whole := e.Time == 1000 && len(e.Payload) == e.PayloadSize &&
					e.ID == fmt.Sprint("id-", e.Pos.Index)
				if e.Pos.LSN == 0x200 && (!whole || e.Payload[1] != byte(e.Pos.Index>>8)) {
					t.Fatalf("event %d: %+v", i, e)
				}
				peak = max(peak, b.memory())
			}
			if ok, err := w.Next(&e); ok || err != nil {
				t.Fatalf("after the end: %v %v", ok, err)
			}
			t.Logf("peak %d KiB by weight, %d files, %d KiB written", peak>>10, files.made, files.written>>10)
			if fixed := int64(1 << 20); peak > limit+fixed {
				t.Errorf("peak weight %d, limit %d", peak, limit)
			}
			if files.most > 4 {
				t.Errorf("%d files were open at a time", files.most)
			}
			if files.open != 0 || b.memory() != 0 {
				t.Errorf("%d files, %d bytes are left", files.open, b.memory())
			}
			if names, err := os.ReadDir(dir); err != nil || len(names) > 0 {
				t.Errorf("left in the directory: %v %v", names, err)
			}
		})
	}
}

// hugeOrder returns the positions that the window of a huge transaction has, from the keys alone.
func hugeOrder(events int, by outbox.Sort, held []relay.Event, withHeld bool) []outbox.Position {
	var list []relay.Event
	if withHeld {
		list = slices.Clone(held)
	}
	r := rand.New(rand.NewPCG(5, 5))
	for i := range events {
		e := edit(r, i)
		e.Pos.LSN, e.Payload = 0x200, nil
		list = append(list, e)
	}
	list = modelSort(list, by)
	positions := make([]outbox.Position, len(list))
	for i := range list {
		positions[i] = list[i].Pos
	}
	return positions
}

// watched is a scratch whose files tell another one's watcher what happens.
type watched struct {
	Scratch interface {
		Create() (tempfile.File, error)
	}
	m *memScratch
}

type watchedFile struct {
	ScratchFile
	m *memScratch
}

func (w watched) Create() (ScratchFile, error) {
	f, err := w.Scratch.Create()
	w.m.open++
	w.m.made++
	w.m.most = max(w.m.most, w.m.open)
	return watchedFile{f, w.m}, err
}

func (f watchedFile) Write(p []byte) (int, error) {
	f.m.onWrite()
	n, err := f.ScratchFile.Write(p)
	f.m.written += int64(n)
	return n, err
}

func (f watchedFile) Close() error {
	f.m.open--
	return f.ScratchFile.Close()
}

// TestAFailureOfTheDiskHandsOutNothingWrong lets the disk fill up, or reading fail, at every point there is:
// the error comes out, stays, and Discard leaves no file. Nothing wrong is handed out on the way.
func TestAFailureOfTheDiskHandsOutNothingWrong(t *testing.T) {
	t.Parallel()
	seen := map[string]int{}
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 6))
		s := randomScene(r)
		s.memory = 600
		fine := &memScratch{failAfter: -1}
		var want []*closed
		b := s.start(relay.Checkpoint{Settings: s.cfg.Settings}, fine)
		for _, in := range s.wal {
			w, err := feed(b, in)
			must.Succeed(t, err)
			want = append(want, w)
		}
		for _, broken := range []*memScratch{
			{failCreate: true}, {failAfter: -1, failRead: true}, {failAfter: -1, flip: true},
			{failAfter: 0}, {failAfter: r.Int64N(fine.written + 1)}, {failAfter: r.Int64N(fine.written + 1)},
		} {
			b := s.start(relay.Checkpoint{Settings: s.cfg.Settings}, broken)
			var err error
			for i, in := range s.wal {
				var w *closed
				if w, err = feed(b, in); err != nil {
					break
				}
				if !reflect.DeepEqual(w, want[i]) {
					t.Fatalf("seed %d: input %v: %+v, want %+v", seed, in.commit.LSN, w, want[i])
				}
			}
			if err == nil {
				continue // it did not come to that
			}
			if _, again := feed(b,
				input{commit: relay.Commit{Kind: relay.Heartbeat, LSN: 1 << 40}}); again == nil {
				t.Fatalf("seed %d: the buffer goes on after %v", seed, err)
			}
			switch {
			case errors.Is(err, errDisk):
				seen["disk"]++
			case errors.Is(err, errDamaged):
				seen["damaged"]++
			default:
				t.Fatalf("seed %d: %v", seed, err)
			}
			if outbox.ClassOf(err) != outbox.Transient {
				t.Fatalf("seed %d: %v is not transient", seed, err)
			}
			b.Discard()
			b.Discard()
			if broken.open != 0 {
				t.Fatalf("seed %d: %d files after Discard", seed, broken.open)
			}
			if err := b.Append(&relay.Event{}); err == nil {
				t.Fatal("a discarded buffer takes an event")
			}
		}
	}
	if seen["disk"] < 20 || seen["damaged"] < 5 {
		t.Errorf("errors seen: %v", seen)
	}
}

// everyCall is from which call of the disk to which the failure goes: a prime, so that in time all kinds of
// calls fail, or to the next one in long runs.
func everyCall() int {
	if tier.Long() {
		return 1
	}
	return 7
}

// TestEveryDiskErrorStops lets each call of a scratch file fail in turn, while a transaction spills, is
// merged in several passes and is read: the error stops the buffer wherever it comes, is one that a new start
// mends, and leaves no file behind.
func TestEveryDiskErrorStops(t *testing.T) {
	t.Parallel()
	for _, sort := range []outbox.Sort{outbox.BySeqKey, outbox.ByCommit} {
		run := func(files *memScratch) (read int, err error) {
			set := relay.Settings{Horizon: time.Second, Sort: sort, MaxEvents: 10, MaxBytes: 200 << 10}
			b := New(Config{Settings: set, Scratch: files})
			defer b.Discard()
			b.tune.least, b.tune.fanIn, b.tune.block = 0, 2, 128<<10
			held := relay.Event{Doc: "note-1", Key: "00000005"}
			held.Pos.LSN = 0x80
			if _, err := feed(b, input{relay.Commit{LSN: 0x80, Kind: relay.Events, Events: 1},
				[]relay.Event{held}}); err != nil {
				return 0, err
			}
			if err := large(b, 50, 20_000); err != nil {
				return 0, err
			}
			w, err := b.Close()
			if err != nil {
				return 0, err
			}
			var e relay.Event
			for more := true; more && err == nil; read++ {
				more, err = w.Next(&e)
			}
			return read - 1, err
		}
		whole := &memScratch{failAfter: -1}
		if n, err := run(whole); n != 51 || err != nil {
			t.Fatalf("%v: %d events, %v", sort, n, err)
		}
		t.Logf("%v: %d calls", sort, whole.calls)
		for at := 1; at <= whole.calls; at += everyCall() {
			files := &memScratch{failAfter: -1, failAt: at}
			_, err := run(files)
			if !errors.Is(err, errDisk) || outbox.ClassOf(err) != outbox.Transient || files.calls != at ||
				files.open != 0 || !strings.Contains(err.Error(), "reorder.spill_dir") {
				t.Fatalf("%v: call %d of %d failed: %v, %d calls, %d files left", sort, at, whole.calls, err,
					files.calls, files.open)
			}
		}
	}
}

// TestAWindowThatFailedOnceIsNotReadOn: a window that could not be read once is not read on, also where the
// disk is well again: an event would be missing.
func TestAWindowThatFailedOnceIsNotReadOn(t *testing.T) {
	t.Parallel()
	const events = 4000
	for _, sort := range []outbox.Sort{outbox.BySeqKey, outbox.ByCommit} {
		files := &memScratch{failAfter: -1}
		b := New(Config{Settings: relay.Settings{Sort: sort, MaxEvents: 10, MaxBytes: 32 << 10},
			Scratch: files})
		b.tune.least, b.tune.block = 0, 4<<10
		must.Succeed(t, large(b, events, 50))
		w, err := b.Close()
		must.Succeed(t, err)
		var e relay.Event
		for range events / 2 {
			if ok, err := w.Next(&e); !ok || err != nil {
				t.Fatal(ok, err)
			}
		}
		files.failRead = true
		for err == nil {
			_, err = w.Next(&e)
		}
		files.failRead = false
		for range 3 {
			if ok, again := w.Next(&e); ok || !errors.Is(again, errDisk) {
				t.Fatalf("%v: after %v: %v, %v", sort, err, ok, again)
			}
		}
		if b.Discard(); files.open != 0 {
			t.Errorf("%v: %d files are left", sort, files.open)
		}
	}
}

// TestWithoutScratchALargeTransactionIsAnError says what is missing.
func TestWithoutScratchALargeTransactionIsAnError(t *testing.T) {
	t.Parallel()
	b := New(Config{Settings: relay.Settings{MaxEvents: 10, MaxBytes: 1}})
	var err error
	for i := 0; err == nil; i++ {
		err = b.Append(&relay.Event{Pos: outbox.Position{Index: uint32(i)}, Doc: "note"})
	}
	if !errors.Is(err, errNoScratch) {
		t.Fatal(err)
	}
}

// TestTransactionsBelowTheStartLeaveNothing reads transactions at or below the start: they leave nothing,
// neither in memory nor on disk.
func TestTransactionsBelowTheStartLeaveNothing(t *testing.T) {
	t.Parallel()
	files := &memScratch{failAfter: -1}
	b := New(Config{Start: 0x1000, Settings: relay.Settings{Horizon: time.Hour, MaxEvents: 1000,
		MaxBytes: 100_000}, Scratch: files})
	b.tune.least = 10_000
	for lsn := outbox.LSN(1); lsn <= 0x1000; lsn += 0x100 {
		var events []relay.Event
		for i := range 2000 {
			events = append(events, relay.Event{Pos: outbox.Position{Index: uint32(i)}, Doc: "note",
				Key: fmt.Sprint(i)})
		}
		in := input{commit: relay.Commit{LSN: lsn, Kind: relay.Events, Events: len(events)}, events: events}
		if w, err := feed(b, in); w != nil || err != nil {
			t.Fatal(w, err)
		}
	}
	if n, _ := b.Held(); n != 0 || b.memory() != 0 || files.made == 0 {
		t.Errorf("held %d, %d bytes, %d files made", n, b.memory(), files.made)
	}
	if err := checkClean(b, files); err != nil {
		t.Error(err)
	}
}

// TestSpilledEventsAreReadAsTheyWereWritten writes and reads events with every value there can be.
func TestSpilledEventsAreReadAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(7, 7))
	for range 2000 {
		e := relay.Event{
			Pos: outbox.Position{LSN: outbox.LSN(r.Uint64()), Index: r.Uint32()}, Time: int64(r.Uint64()),
			Doc: string(make([]byte, r.IntN(300))), Actor: "b\xff", Key: "",
		}
		fillValues(r, &e)
		if r.IntN(2) == 0 {
			e.Counter = outbox.Counter{Sequence: r.Uint64(), First: int64(r.Uint64()), Span: 1 +
				r.Uint32()>>1,
				Late: r.IntN(2) == 0}
		}
		e.Null |= relay.Nulls(1) << r.IntN(64)
		place := outbox.Position{LSN: outbox.LSN(r.Uint64()), Index: r.Uint32()}
		b, err := appendRecord([]byte("before"), &item{&e, place})
		must.Succeed(t, err)
		b = b[len("before"):]
		var got relay.Event
		if at, err := decodeRecord(b, &got); err != nil || at != place || !reflect.DeepEqual(got, e) {
			t.Fatalf("%+v at %v, %v; want %+v at %v", got, at, err, e, place)
		}
		bad := slices.Clone(b)
		bad[recordHead+r.IntN(len(b)-recordHead)] ^= 1 << r.IntN(8)
		if _, err := decodeRecord(bad, &got); err == nil {
			t.Fatal("a flipped bit is not seen")
		}
	}
}

// TestCallsOutOfTurnAreNoticed holds that misuse is noticed.
func TestCallsOutOfTurnAreNoticed(t *testing.T) {
	t.Parallel()
	at := func(i int) *relay.Event {
		return &relay.Event{Pos: outbox.Position{Index: uint32(i)}, Doc: "note", Key: fmt.Sprint(i)}
	}
	fresh := func() *Buffer { return New(Config{Settings: relay.Settings{MaxEvents: 10, MaxBytes: 1000}}) }
	for name, f := range map[string]func(b *Buffer) error{
		"index": func(b *Buffer) error { return b.Append(at(1)) },
		"missing": func(b *Buffer) error {
			return b.Commit(relay.Commit{LSN: 1, Kind: relay.Events, Events: 1})
		},
		"too many": func(b *Buffer) error {
			return cmp.Or(b.Append(at(0)), b.Commit(relay.Commit{LSN: 1, Kind: relay.Heartbeat}))
		},
		"back": func(b *Buffer) error {
			_, err := feed(b, input{commit: relay.Commit{LSN: 5, Kind: relay.Heartbeat}})
			return cmp.Or(err, b.Commit(relay.Commit{LSN: 5, Kind: relay.Heartbeat}))
		},
	} {
		if f(fresh()) == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for name, f := range map[string]func(b *Buffer){
		"not closed": func(b *Buffer) {
			_ = b.Commit(relay.Commit{LSN: 5, Kind: relay.Heartbeat})
			_ = b.Append(at(0))
		},
		"not read": func(b *Buffer) {
			_ = cmp.Or(b.Append(at(0)), b.Commit(relay.Commit{LSN: 5, Kind: relay.Events, Events: 1}))
			_, _ = b.Close()
			_ = b.Append(at(0))
		},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f(fresh())
		}()
	}
}

// large reads a transaction of n events with payloads of a size, which spills, in descending order of keys,
// up to its commit record.
func large(b *Buffer, n, size int) error {
	for i := range n {
		e := relay.Event{Pos: outbox.Position{Index: uint32(i)}, Doc: "note-" + strconv.Itoa(i%7),
			Key: fmt.Sprintf("%08d", n-i), Payload: make([]byte, size)}
		e.PayloadSize = len(e.Payload)
		if err := b.Append(&e); err != nil {
			return err
		}
	}
	return b.Commit(relay.Commit{LSN: 0x100, Kind: relay.Events, Events: n})
}

// TestALongSortEndsWhenAsked asks a long sort to end: it does, before it has read much more, wherever it is.
func TestALongSortEndsWhenAsked(t *testing.T) {
	t.Parallel()
	const events, memory = 8000, 32 << 10
	stopped := errors.New("stopped")
	for _, sort := range []outbox.Sort{outbox.BySeqKey, outbox.ByCommit} {
		asked, at := 0, -1
		files := &memScratch{failAfter: -1}
		start := func() *Buffer {
			asked = 0
			b := New(Config{
				Settings: relay.Settings{Sort: sort, MaxEvents: 10, MaxBytes: memory}, Scratch: files,
				Stop: func() error {
					if asked++; at >= 0 && asked > at {
						return stopped
					}
					return nil
				},
			})
			b.tune.least, b.tune.fanIn, b.tune.block = 0, 4, 4<<10
			return b
		}
		b := start()
		must.Succeed(t, large(b, events, 50))
		w, err := b.Close()
		if err != nil || w.Of != events {
			t.Fatalf("%v: %v %v", sort, w, err)
		}
		whole := asked
		b.Discard()
		// Every record that is read in the call lies in a block before which it was asked.
		if least := events * 50 / (8 << 10); whole < least {
			t.Errorf("%v: asked %d times in one call, want %d or more", sort, whole, least)
		}
		r := rand.New(rand.NewPCG(8, uint64(sort)))
		for range 20 {
			at = r.IntN(whole)
			b := start()
			err := large(b, events, 50)
			if err == nil {
				_, err = b.Close()
			}
			if err != stopped || asked != at+1 {
				t.Fatalf("%v: stopped after %d of %d: %v, asked %d times", sort, at, whole, err, asked)
			}
			b.Discard()
		}
		if at = -1; files.open != 0 {
			t.Errorf("%v: %d files are left", sort, files.open)
		}
	}
}

// TestFilesNeverGrowBeyondTheLimit holds that the files never grow beyond the limit, and that what needs more
// is fatal: it would come again.
func TestFilesNeverGrowBeyondTheLimit(t *testing.T) {
	t.Parallel()
	const events, memory = 8000, 32 << 10
	for _, sort := range []outbox.Sort{outbox.BySeqKey, outbox.ByCommit} {
		run := func(limit int64) (most int64, err error) {
			files := &memScratch{failAfter: -1}
			b := New(Config{Settings: relay.Settings{Sort: sort, MaxEvents: 10, MaxBytes: memory},
				Scratch: files, MaxSpill: limit})
			defer b.Discard()
			b.tune.least, b.tune.fanIn = 0, 4
			files.onWrite = func() { most = max(most, b.disk.size) }
			if err = large(b, events, 50); err != nil {
				return most, err
			}
			w, err := b.Close()
			var e relay.Event
			for more := true; more && err == nil; {
				more, err = w.Next(&e)
			}
			if err == nil && b.disk.size != 0 {
				t.Errorf("%v: %d bytes are left", sort, b.disk.size)
			}
			return most, err
		}
		most, err := run(0)
		must.Succeed(t, err)
		// The transaction: values and 48 bytes an event, twice for passes, three times by commit. The last
		// write is not in most.
		size := int64(events * (6 + 8 + 50 + 48))
		if copies := int64(2 + sort); most > copies*size || most < size {
			t.Errorf("%v: %d bytes on disk for a transaction of %d", sort, most, size)
		}
		if _, err := run(most + writeSize*2); err != nil {
			t.Errorf("%v: just enough: %v", sort, err)
		}
		for _, limit := range []int64{1, size / 2, most} {
			got, err := run(limit)
			if fault := outbox.FaultOf(err); fault == nil || fault.Class != outbox.Fatal ||
				!strings.Contains(fault.Error(), "reorder.max_spill") {
				t.Errorf("%v: limit %d of %d: %v", sort, limit, most, err)
			}
			if got > limit {
				t.Errorf("%v: %d bytes on disk, limit %d", sort, got, limit)
			}
		}
	}
}
