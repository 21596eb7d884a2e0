package pipeline

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// After five seconds without an acknowledgement the same messages are sent again, on a new connection.
func TestWithoutAnAcknowledgementMessagesAreSentAgain(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.with(func() { w.js.drop = 1 << 30 })
		begun := time.Now()
		w.write(7)
		w.until(10*time.Second, "a second connection", func() bool { return len(pr.reopens) == 1 })
		if d := time.Since(begun); d < 5*time.Second || d > 5500*time.Millisecond {
			t.Errorf("it came after %v", d)
		}
		w.with(func() { w.js.drop = 0 })
		w.published()
		first, second := pr.nats[0].pub.sent, pr.nats[1].pub.sent
		if len(pr.opens) != 1 {
			t.Errorf("%d sessions", len(pr.opens))
		}
		if len(first) != 7 || !slices.Equal(first, second) {
			t.Errorf("sent first\n%q\nthen\n%q", first, second)
		}
		w.wantSameStream()
	})
}

// What was stored but not acknowledged is not sent again.
func TestWhatWasStoredIsNotSentAgain(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.with(func() { w.js.lostAcks = time.Now().Add(time.Hour) })
		w.write(7)
		w.until(10*time.Second, "a second connection", func() bool {
			return w.js.resumed == 1 && pr.p.Status().State == StateRunning
		})
		w.with(func() { w.js.lostAcks = time.Time{} })
		if n := len(pr.nats[1].pub.sent); n != 0 || len(w.js.messages) != 7 {
			t.Errorf("%d messages sent again, %d in the stream", n, len(w.js.messages))
		}
		w.wantSameStream()
	})
}

// A full publisher stops the reading of WAL data, and no heartbeat is written; it goes on where it stopped.
func TestAFullPublisherStopsTheReadingOfWAL(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.with(func() { w.js.limit, w.js.paused = 4, time.Now().Add(4*time.Second) })
		for range 40 {
			w.write(20)
			w.sleep(3 * time.Millisecond)
		}
		w.write(1)
		w.sleep(time.Second)
		var taken, ticks int
		look := func() { taken, ticks = pr.postgres().taken, len(w.pg.ticks) }
		w.with(look)
		before, ticksBefore, rounds := taken, ticks, pr.broker().pub.rounds
		w.sleep(time.Second)
		w.with(func() { rounds = pr.broker().pub.rounds - rounds })
		if rounds > 20 {
			t.Errorf("the loop went round %d times in a second with nothing to do", rounds)
		}
		w.with(look)
		if taken != before || taken > 100 {
			t.Errorf("%d batches taken, then %d", before, taken)
		}
		if ticks != ticksBefore {
			t.Errorf("%d ticks while publishing was blocked", ticks-ticksBefore)
		}
		w.published()
		if len(pr.opens) != 1 {
			t.Errorf("%d sessions", len(pr.opens))
		}
		w.wantSameStream()
	})
}

// flood is a replication stream that is never empty.
type flood struct {
	*postgresConn
	batches chan *relay.Batch
}

func (f *flood) Batches() <-chan *relay.Batch { return f.batches }

// A stop is heard though there is always more to read.
func TestStopInEndlessWAL(t *testing.T) {
	inBubble(t, relay.Settings{MaxEvents: 1000, MaxBytes: 1 << 20}, 0, func(t *testing.T, w *harness) {
		const stop, all = 500, 5000
		batches := make(chan *relay.Batch, all)
		pr := w.run(options{open: func(l *Conns) {
			l.Source = &flood{l.Source.(*postgresConn), batches}
		}})
		lsn := w.pg.end
		var at outbox.LSN
		for i := range all {
			x := &transaction{start: lsn + 10, end: lsn + 20}
			lsn += 20
			b := batchOf(x.messages(false, oidText, false))
			if i == stop {
				at, b.Free = x.end, pr.cancel
			}
			batches <- b
		}
		close(batches)
		pr.ends(time.Minute)
		if got := pr.p.Status().Received; got < at || got > at+10*20 {
			t.Errorf("read up to %v; the stop came at %v, the end is %v", got, at, lsn)
		}
	})
}

// What is held back goes out though there is always more to read: it may be one transaction for minutes.
func TestFlushInEndlessWAL(t *testing.T) {
	inBubble(t, relay.Settings{MaxEvents: 1 << 20, MaxBytes: 1 << 30}, 0, func(t *testing.T, w *harness) {
		const all = 2000
		batches := make(chan *relay.Batch, all)
		pr := w.run(options{open: func(l *Conns) { l.Source = &flood{l.Source.(*postgresConn), batches} }})
		lsn, stored := w.pg.end, 0
		for i := range all {
			x := &transaction{start: lsn + 10, end: lsn + 20}
			if i < 2 {
				x.rows = []row{{"friendsforever", "a", fmt.Sprintf("a:%06d", i), "{}"}}
			}
			lsn += 20
			b := batchOf(x.messages(i == 0, oidText, false))
			b.Free = func() {
				time.Sleep(time.Millisecond) // a slow disk
				if i == all/2 {
					w.mu.Lock()
					stored = len(w.js.messages)
					w.mu.Unlock()
					pr.cancel()
				}
			}
			batches <- b
		}
		close(batches)
		w.until(time.Minute, "the end", pr.over)
		if stored != 2 {
			t.Errorf("%d of 2 messages in the stream after a second of other transactions", stored)
		}
	})
}

// A stop is heard in the middle of a window that the broker takes as fast as it comes, and in one that is
// made again.
func TestStopInLongWindow(t *testing.T) {
	for name, again := range map[string]bool{"published": false, "made again": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, relay.Settings{MaxEvents: 100_000, MaxBytes: 1 << 30}, time.Hour,
				func(t *testing.T, w *harness) {
					const all = 20_000
					w.js.limit = 1 << 20
					rows := make([]row, all)
					for i := range rows {
						rows[i] = row{"friendsforever", "a", fmt.Sprintf("a:%06d", i), "{}"}
					}
					w.with(func() { w.pg.commit(rows) })
					if again {
						pr := w.running(options{})
						w.published()
						pr.kill()
						w.until(time.Minute, "the slot is free", func() bool { return w.pg.active == nil })
					}
					var pr *process
					w.js.onFull = func(calls int) {
						if calls == all/4 {
							pr.cancel()
						}
					}
					pr = w.run(options{})
					pr.ends(time.Minute)
					if n := pr.broker().pub.calls; n < all/4 || n >= all/2 {
						t.Errorf("%d messages made", n)
					}
					w.js.onFull = nil
					w.running(options{})
					w.published()
					w.wantSameStream()
				})
		})
	}
}

// A binary value that cannot be read brings the text form with the next session.
func TestABinaryValueThatCannotBeReadComesAsText(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		w.pg.payload = oidNumeric
		pr := w.running(options{binary: true})
		w.write(3)
		w.published()
		if len(w.started) != 2 || !w.started[0].binary || w.started[1].binary {
			t.Errorf("starts: %+v", w.started)
		}
		if pr.over() {
			t.Error(pr.err)
		}
		w.with(func() { pr.postgres().cut(true) })
		w.until(time.Minute, "a third session", func() bool { return len(w.started) == 3 })
		if w.started[2].binary {
			t.Error("binary again")
		}
	})
}

// A row that can't be published stops everything; what comes before it is recorded first.
func TestARowThatCannotBePublishedStopsEverything(t *testing.T) {
	inBubble(t, relay.Settings{MaxEvents: 1000, MaxBytes: 1 << 20}, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.with(func() { w.js.latency = 50 * time.Millisecond })
		w.write(30)
		w.with(func() {
			w.js.poison = "poison"
			w.pg.commit([]row{{"d", "a", "k", "poison"}})
		})
		w.write(5)
		if f := pr.ends(time.Minute); f == nil || f.Class != outbox.Poison {
			t.Fatalf("ended with %v", pr.err)
		}
		if len(w.js.messages) != 30 {
			t.Errorf("%d messages", len(w.js.messages))
		}
		checkpoints := w.record().Checkpoints
		if top := checkpoints[len(checkpoints)-1]; top.Seq != 30 || top.Due != w.pg.wal[29].end {
			t.Errorf("the newest checkpoint is %v, %d", top.Due, top.Seq)
		}
		if w.stops != 1 || len(pr.opens) != 1 {
			t.Errorf("%d sessions, %d ended in order", len(pr.opens), w.stops)
		}
		w.js.poison = ""
		w.running(options{})
		w.published()
		w.wantSameStream()
	})
}

// A stream that another WAL made is a divergence: also when that WAL is silent, and shows its end by
// keepalives alone.
func TestAStreamOfAnotherWALIsADivergence(t *testing.T) {
	for name, silent := range map[string]bool{"by an input": false, "by a keepalive": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
				pr := w.running(options{})
				w.write(3)
				w.published()
				w.sleep(100 * time.Millisecond)
				w.write(3)
				w.published()
				w.sleep(2 * time.Second)
				must.Succeed(t, pr.stop())
				// The last event was never written here.
				for i, x := range w.pg.wal {
					if len(x.rows) > 0 && x.rows[0].key == "a:000006" {
						w.pg.wal = slices.Delete(w.pg.wal, i, i+1)
						break
					}
				}
				w.pg.wal = w.pg.wal[:len(w.pg.wal)-1] // nor the heartbeat after it
				w.with(func() { w.pg.grow(w.pg.end + 100) })
				if w.pg.quiet = !silent; w.pg.quiet {
					w.write(1)
				}
				pr = w.run(options{})
				if f := pr.ends(time.Minute); f == nil || f.Class != outbox.Gap || f.Code != "divergence" {
					t.Fatalf("ended with %v", pr.err)
				}
				if d := pr.opens[len(pr.opens)-1].Sub(pr.opens[0]); len(pr.opens) != 2 || d < 5*time.Second {
					t.Errorf("%d sessions in %v", len(pr.opens), d)
				}
			})
		})
	}
}
