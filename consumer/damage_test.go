package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/outbox"
)

// readAll has the effects of what is in the stream, and stops.
func (w *harness) readAll(cfg Config, all []*stream.Message) {
	w.t.Helper()
	r := w.start(w.consumer(cfg), handler)
	w.await(all)
	r.stopped()
	w.exactly(all)
}

// readFirst has the effects of the first n messages, and publishes the others then.
func (w *harness) readFirst(src *memoryStream, all []*stream.Message, n int) {
	w.t.Helper()
	src.publish(all[:n]...)
	w.readAll(w.config(src), all[:n])
	src.publish(all[n:]...)
}

// fails runs a consumer that must end with an error of the kind, whose text has all the words.
func (w *harness) fails(cfg Config, kind error, words ...string) {
	w.t.Helper()
	err := w.start(w.consumer(cfg), handler).ends()
	if !errors.Is(err, kind) {
		w.t.Fatalf("Run: %v, want %v", err, kind)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			w.t.Errorf("%q does not say %q", err, word)
		}
	}
}

// The broker loses its end, and outflow publishes it again: at the same sequences, or, behind a hole, under
// new ones.
func TestEventsThatComeAgainHaveNoSecondEffect(t *testing.T) {
	t.Parallel()
	for _, back := range []bool{true, false} {
		for _, partitions := range []int{3, 5} { // afterwards
			t.Run(fmt.Sprintf("back=%t,partitions=%d", back, partitions), func(t *testing.T) {
				t.Parallel()
				w, s, src := newHarness(t), &publisher{}, newMemoryStream()
				all := s.events(100, 12)
				src.publish(all...)
				cfg := w.config(src)
				cfg.Partitions, cfg.Batch = 3, 4
				w.readAll(cfg, all)
				src.lose(61, back)
				src.publish(all[60:80]...)
				cfg.Partitions = partitions
				r := w.start(w.consumer(cfg), handler)
				src.publish(all[80:]...)
				more := s.events(30, 12)
				src.publish(more...)
				w.await(slices.Concat(all, more))
				r.stopped()
				w.readAll(cfg, slices.Concat(all, more))
			})
		}
	}
}

// A hole appears while a session runs: what it has read before is gone, and comes again; many messages, or
// the last one only.
func TestALossWhileTheStreamIsReadIsSeen(t *testing.T) {
	t.Parallel()
	for _, lost := range []int{40, 1} {
		t.Run(fmt.Sprint("lost-", lost), func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := s.events(100, 12)
			src.publish(all...)
			r := w.start(w.consumer(w.config(src)), handler)
			w.await(all)
			more := s.events(20, 12)
			src.lose(uint64(101-lost), false)
			src.publish(slices.Concat(all[100-lost:], more)...)
			w.await(slices.Concat(all, more))
			r.stopped()
			w.exactly(slices.Concat(all, more))
		})
	}
}

// A database that was moved to another cluster has lower positions. These events are none that come again.
func TestLowerPositionsOfAMovedDatabaseAreNew(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprint("running=", running), func(t *testing.T) {
			t.Parallel()
			w, src := newHarness(t), newMemoryStream()
			old, moved := &publisher{lsn: 1 << 30}, &publisher{n: 1000}
			all := old.events(50, 7)
			src.publish(all...)
			r := w.start(w.consumer(w.config(src)), handler)
			w.await(all)
			if !running {
				r.stopped()
			}
			more := moved.events(50, 7)
			src.publish(more...)
			if !running {
				r = w.start(w.consumer(w.config(src)), handler)
			}
			w.await(slices.Concat(all, more))
			r.stopped()
			w.exactly(slices.Concat(all, more))
		})
	}
}

// Events of a repair share one due; windows of repairs that were killed are unfinished.
func TestEventsOfARepairHaveTheirEffectOnce(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(20, 5)
	for i := range 30 { // two windows, the first one unfinished
		h := outbox.Header{Pos: outbox.Position{LSN: s.lsn, Index: outbox.RepairedIndex + uint32(i)},
			N: i % 18, Of: 25, Due: s.lsn, Thru: s.lsn, ID: fmt.Sprint("r", i)}
		all = append(all, message(fmt.Sprintf("d%d", i%5), &h))
	}
	all = append(all, s.events(20, 5)...)
	cfg := w.config(src)
	cfg.Batch = 3
	src.publish(all[:33]...)
	w.readAll(cfg, all[:33])
	src.lose(26, false) // in the middle of the repair
	src.publish(all[25:]...)
	w.readAll(cfg, all)
}

func TestAGapEndsRunUnlessItIsAccepted(t *testing.T) {
	t.Parallel()
	t.Run("removed before it was read", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(100, 9)
		w.readFirst(src, all, 40)
		src.removeTo(60)
		w.fails(w.config(src), ErrGap, "sequences 41 to 60", "outflow replay --from table", "AcceptGap")
		w.exactly(all[:40])
		cfg, reg := w.config(src), prometheus.NewRegistry()
		cfg.AcceptGap, cfg.Registerer = true, reg
		w.readAll(cfg, slices.Concat(all[:40], all[60:]))
		name := "outflow_consumer_gap_messages_total consumer=" + cfg.Name
		if counted := gather(t, reg)[name]; counted != 20 {
			t.Errorf("%v messages are counted as missing, want 20", counted)
		}
	})
	t.Run("removed after it was read", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(40, 3) // most partitions have nothing
		src.publish(all...)
		w.readAll(w.config(src), all)
		w.awaitOffsets(40)
		src.removeTo(40)
		more := s.events(5, 3)
		src.publish(more...)
		w.readAll(w.config(src), slices.Concat(all, more))
	})
	t.Run("inside a window", func(t *testing.T) {
		t.Parallel()
		w, src := newHarness(t), newMemoryStream()
		for _, n := range []int{0, 1, 3} {
			src.publish(message("d", &outbox.Header{Pos: outbox.Position{LSN: 16, Index: uint32(n)}, N: n,
				Of: 4, Due: 16, Thru: 16}))
		}
		w.fails(w.config(src), ErrGap, "sequence 3")
	})
	t.Run("deleted by hand", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(10, 3)
		src.publish(all...)
		src.remove(4, 5)
		w.fails(w.config(src), ErrGap, "sequences 4 to 5")
		accept := w.config(src)
		accept.AcceptGap = true
		w.readAll(accept, slices.Concat(all[:3], all[5:]))
	})
	t.Run("deleted by hand right behind the offsets", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(10, 3)
		w.readFirst(src, all, 5)
		src.remove(6, 7)
		w.fails(w.config(src), ErrGap, "sequences 6 to 7")
	})
	t.Run("deleted by hand before what the broker lost", func(t *testing.T) {
		t.Parallel()
		w, s, src := newHarness(t), &publisher{}, newMemoryStream()
		all := s.events(10, 3)
		src.publish(all...)
		src.lose(6, false)
		src.publish(all[5:]...)
		src.remove(4, 5)
		w.fails(w.config(src), ErrGap, "sequences 4 to 5")
	})
}

func TestAStreamThatWasRestoredOrRecreatedIsTold(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(30, 4)
	src.publish(all...)
	w.readAll(w.config(src), all)

	// from a backup: it counts as another one, with the same messages
	restored := newMemoryStream().publish(all...)
	more := s.events(5, 4)
	restored.publish(more...)
	restored.created = src.created.Add(time.Hour)
	all = append(all, more...)
	w.readAll(w.config(restored), all)

	other := newMemoryStream().publish((&publisher{lsn: 7}).events(60, 4)...)
	w.fails(w.config(other), ErrStream, "sequence 35", "position", "rewind")
	empty := newMemoryStream()
	empty.created = src.created.Add(2 * time.Hour)
	w.fails(w.config(empty), ErrStream, "sequence 35")
	cfg := w.config(restored)
	cfg.Stream = "OTHER"
	w.fails(cfg, ErrStream, "OUTBOX", "OTHER")
	w.exactly(all)
}

func TestForeignAndRepeatedMessagesEndRun(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(5, 2)
	src.publish(all...)
	src.publish(&stream.Message{Subject: "outbox.x", Header: nats.Header{}})
	w.fails(w.config(src), ErrForeign, "message 6")

	w2, src2 := newHarness(t), newMemoryStream()
	src2.publish(all...).publish(all[4])
	w2.fails(w2.config(src2), ErrRepeat, "5 and 6")

	w3, src3 := newHarness(t), newMemoryStream() // the first one was read by an earlier session
	src3.publish(all...)
	w3.readAll(w3.config(src3), all)
	src3.publish(all[4])
	w3.fails(w3.config(src3), ErrRepeat, "5 and 6")
	w3.exactly(all)
}

// The number of partitions changes at any point, many times.
func TestTheNumberOfPartitionsMayChangeAnywhere(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	var all []*stream.Message
	seen := map[int]bool{}
	for i, partitions := range []int{3, 5, 2, 8, 1, 4, 6, 3, 1, 7} {
		cfg := w.config(src)
		cfg.Partitions, cfg.Batch = partitions, 3
		cfg.hooks.Crash = (&crashAt{n: 50 + 23*i}).at
		r := w.start(w.consumer(cfg), handler)
		for running := true; running; {
			var done int64
			if at := w.offsets(); len(at) > 0 {
				done = slices.Min(at)
			}
			if int64(len(all)) < done+20 { // else a slow instance crashes before it is at the barrier
				more := s.events(4, 40)
				all = append(all, more...)
				src.publish(more...)
			}
			select {
			case <-r.ended:
				running = false
			case <-time.After(50 * time.Millisecond):
			}
		}
		if !errors.Is(r.err, errCrash) {
			t.Fatal(r.err)
		}
		w.expire()
		if err := w.mine.QueryRow(t.Context(), `SELECT partitions FROM outflow_consumer`).Scan(
			&partitions); err != nil {
			t.Fatal(err)
		}
		seen[partitions] = true
	}
	if len(seen) < 3 {
		t.Errorf("the layouts had only %v partitions", seen)
	}
	w.readAll(w.config(src), all)
}

// Two instances: the second one stands by, and takes over when the first one stops. One that sleeps through a
// take-over can do nothing.
func TestAZombieHasNoEffect(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(60, 6)
	src.publish(all...)
	asleep, awake := make(chan struct{}), make(chan struct{})
	var once atomic.Bool
	cfg := w.config(src)
	cfg.Partitions, cfg.Batch = 2, 2
	zombie := cfg
	zombie.hooks.Crash = func(at stream.Point, seq uint64) error {
		if at == stream.AtBegin && seq > 20 && once.CompareAndSwap(false, true) {
			close(asleep)
			<-awake
		}
		return nil
	}
	sleeping := w.start(w.consumer(zombie), handler)
	<-asleep
	r := w.start(w.consumer(cfg), handler)
	for !await.True(func() bool { w.expire(); return fmt.Sprint(w.effects()) == fmt.Sprint(want(all)) }) {
		t.Fatal(w.effects())
	}
	close(awake)
	r.stopped()
	sleeping.stopped()
	w.exactly(all)
}

// A transaction that is open when another instance takes over is waited for.
func TestATransactionOfAZombieIsWaitedFor(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(20, 1)
	src.publish(all...)
	cfg := w.config(src)
	cfg.Batch = 1
	asleep, awake := make(chan struct{}), make(chan struct{})
	zombie := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if err := handler(ctx, tx, e); err != nil {
			return err
		}
		if e.seq == 10 {
			close(asleep)
			<-awake
		}
		return nil
	})
	<-asleep
	var second atomic.Int64 // the first event that the second instance handles
	r := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		second.CompareAndSwap(0, int64(e.seq))
		return handler(ctx, tx, e)
	})
	var taken bool // of the partition of which the transaction is open nobody can take over
	if !await.True(func() bool {
		w.expire()
		err := w.mine.QueryRow(t.Context(), `SELECT count(*) = 1 FROM outflow_mark
			WHERE epoch < (SELECT max(epoch) FROM outflow_mark)`).Scan(&taken)
		return err == nil && taken
	}) {
		t.Fatal("the open transaction does not keep its partition from being claimed, or the others are not")
	}
	close(awake)
	w.await(all)
	r.stopped()
	zombie.stopped()
	w.exactly(all)
	if n := second.Load(); n != 0 && n < 11 {
		t.Errorf("the second instance began with event %d", n)
	}
}
