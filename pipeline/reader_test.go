package pipeline

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// oneReader runs a test of cluster 1 of several, which reads the rows of cluster 2. What the others commit is
// up to the test.
func oneReader(t *testing.T, count int, horizon time.Duration, f func(t *testing.T, r *isleReader)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		first := relay.Settings{Horizon: horizon, Sort: outbox.BySeqKey, MaxEvents: 10, MaxBytes: 1 << 20}
		cfg := awayDecoder()
		cfg.Clusters, cfg.Origin = map[string]int{"": 1}, clusterOrigin(2)
		for id := 2; id <= count; id++ {
			cfg.Clusters[clusterOrigin(id)] = id
		}
		w := newHarnessOf(t, 1, first, time.Second, cfg)
		r := &isleReader{harness: w, at: &isle{harness: w, cfg: islandsConfig}, home: 2}
		r.at.cfg.Self, r.at.cfg.Count = 1, count
		w.held = true
		w.mu.Lock()
		defer w.mu.Unlock()
		f(t, r)
		w.killAll()
		w.sleep(time.Minute) // what is still on its way arrives
		if err := r.check(); err != nil {
			t.Error(err)
		}
	})
}

// homeAt is where what lies at an LSN here was committed by the home.
func homeAt(lsn outbox.LSN) outbox.LSN { return lsn + 1<<32 }

// comes lets a transaction of another cluster come, and returns where that has committed it.
func (r *isleReader) comes(from int, x *transaction) outbox.LSN {
	x.home, x.origin, x.time, x.control = homeAt(r.pg.end), clusterOrigin(from), commitTime(time.Now()), true
	r.pg.log(x)
	return x.home
}

// commits lets n transactions of the home come, of one event each.
func (r *isleReader) commits(n int) (to outbox.LSN) {
	for range n {
		r.wrote++
		to = r.comes(2, &transaction{rows: []row{{"d", "a", fmt.Sprintf("a:%06d", r.wrote), "{}"}}})
	}
	return to
}

// says lets a row of another cluster come.
func (r *isleReader) says(by int, row relay.ClusterRow) {
	row.By = by
	r.comes(by, &transaction{logical: []logical{{prefix: relay.ClusterPrefix, content: row.Content()}}})
}

// greets lets the home say hello.
func (r *isleReader) greets(hello uint64) {
	r.says(2, relay.ClusterRow{Kind: relay.Hello, Hello: hello})
}

// signs lets the home give a sign of life.
func (r *isleReader) signs(to outbox.LSN) {
	r.says(2, relay.ClusterRow{Kind: relay.Published, To: to})
}

// claimed lets a claim of cluster 1 come that it did not write now.
func (r *isleReader) claimed(from, to outbox.LSN) {
	row := relay.ClusterRow{Kind: relay.Claim, By: 1, Home: 2, Hello: 1, From: from, To: to}
	r.pg.commit(nil, logical{prefix: relay.ClusterPrefix, content: row.Content()})
}

// rows counts the rows of a kind that cluster 1 has written.
func (r *isleReader) rows(kind relay.ClusterRowKind) int { return r.at.wrote(kind) }

// reads starts the process, and waits until it has echoed the hello of a home that publishes.
func (r *isleReader) reads() {
	r.t.Helper()
	r.start()
	r.greets(1)
	r.until(time.Minute, "an echo", func() bool { return r.rows(relay.Echo) > 0 })
	r.signs(r.commits(3))
	r.until(time.Minute, "running", func() bool { return r.pr.p.Status().State == StateRunning })
}

// has waits until the stream has so many messages.
func (r *isleReader) has(n int) {
	r.t.Helper()
	r.until(time.Minute, fmt.Sprintf("%d messages", n), func() bool { return len(r.js.messages) >= n })
	if len(r.js.messages) > n {
		r.t.Errorf("%d messages of %d", len(r.js.messages), n)
	}
}

// claims waits until n claims are written, and longer than the home's silence makes another one.
func (r *isleReader) claims(n int) {
	r.t.Helper()
	r.until(2*time.Minute, "a claim", func() bool { return r.rows(relay.Claim) >= n })
	if got := r.rows(relay.Claim); got != n {
		r.t.Errorf("%d claims, want %d", got, n)
	}
}

// unclaimed lets d pass, in which nothing is to be claimed.
func (r *isleReader) unclaimed(d time.Duration) {
	r.t.Helper()
	n := r.rows(relay.Claim)
	if r.sleep(d); r.rows(relay.Claim) != n {
		r.t.Errorf("claimed within %v", d)
	}
}

// TestAReaderPublishesWhatAHomeHasNotSaid: behind a delay of silence, and nothing twice.
func TestAReaderPublishesWhatAHomeHasNotSaid(t *testing.T) {
	t.Parallel()
	for _, horizon := range []time.Duration{0, 20 * time.Millisecond} {
		oneReader(t, 2, horizon, func(t *testing.T, r *isleReader) {
			r.reads()
			r.commits(2)
			r.unclaimed(r.at.cfg.Delay - 2*time.Second)
			r.has(0)
			r.claims(1)
			r.has(2)
			r.kill()
			r.start()
			r.commits(3)
			r.claims(2)
			r.has(5)
			r.unclaimed(time.Minute)
			r.greets(2)
			r.signs(r.commits(3))
			r.unclaimed(time.Minute)
			r.has(5)
		})
	}
}

// TestAReaderEchoesWithoutNATS, because the home waits for it. It claims nothing meanwhile, and publishes
// what it had claimed before.
func TestAReaderEchoesWithoutNATS(t *testing.T) {
	t.Parallel()
	oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
		r.reads()
		first := homeAt(r.pg.end)
		to := r.commits(2)
		r.sleep(time.Second)
		r.js.down = time.Now().Add(time.Minute)
		r.pr.broker().cut(true)
		r.sleep(time.Second)
		r.claimed(first-1, to) // it was on its way
		r.sleep(time.Second)
		r.greets(2)
		r.until(5*time.Second, "an echo", func() bool { return r.rows(relay.Echo) == 2 })
		r.commits(1)
		r.unclaimed(time.Until(r.js.down))
		r.has(2)
		r.claims(1)
		r.has(3)
		r.commits(1) // which is the end of the WAL while NATS is away
		r.sleep(time.Second)
		r.js.down = time.Now().Add(time.Minute)
		r.pr.broker().cut(true)
		r.unclaimed(time.Until(r.js.down))
		r.claims(2)
		r.has(4)
	})
}

// TestAReaderThatCannotPublishClaimsNothing, as nobody else would publish that; it echoes.
func TestAReaderThatCannotPublishClaimsNothing(t *testing.T) {
	t.Parallel()
	oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
		r.reads()
		r.commits(2)
		r.claims(1)
		r.has(2)
		r.sleep(time.Second)
		r.kill()
		more := *r.js.messages[1] // of a WAL that its server does not have
		more.header.Pos.LSN += 1 << 20
		more.header.Due += 1 << 20
		more.header.Thru += 1 << 20
		r.js.messages = append(r.js.messages, &more)
		r.commits(1)
		r.greets(2)
		r.start()
		r.until(time.Minute, "an echo", func() bool { return r.rows(relay.Echo) == 2 })
		r.unclaimed(time.Minute)
		r.js.messages = r.js.messages[:2]
		r.kill()
		r.start()
		r.claims(2)
		r.has(3)
	})
}

// TestAReaderClaimsOnlyBehindTheEndOfItsWAL: what it has not read yet may be a sign of life.
func TestAReaderClaimsOnlyBehindTheEndOfItsWAL(t *testing.T) {
	t.Parallel()
	oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
		r.reads()
		to := r.commits(2)
		r.sleep(r.at.cfg.Delay / 2)
		r.pg.delay = 30 * time.Second
		r.signs(to)
		r.unclaimed(20 * time.Second)
		r.pg.delay = 0
		r.unclaimed(time.Minute)
		r.has(0)
	})
}

// TestAReaderCountsSilenceAnewAtAStart: it does not know how long the home was silent.
func TestAReaderCountsSilenceAnewAtAStart(t *testing.T) {
	t.Parallel()
	oneReader(t, 3, 0, func(t *testing.T, r *isleReader) {
		r.reads()
		r.sleep(2 * time.Second)
		r.kill()
		r.commits(2)
		r.start()
		// The first turn of silence is that of cluster 3, and a start waits for a whole circle more.
		r.unclaimed(4*r.at.cfg.Delay - time.Second)
		r.claims(1)
		r.has(2)
	})
}

// TestAClaimIsRecordedWithWhatWasRead: whatever becomes of the record of it, and of the process.
func TestAClaimIsRecordedWithWhatWasRead(t *testing.T) {
	t.Parallel()
	claimed := func(r *isleReader) {
		r.reads()
		r.commits(2)
		r.claims(1)
	}
	again := func(r *isleReader) {
		r.commits(1)
		r.claims(2)
		r.has(3)
	}
	t.Run("unheard", func(t *testing.T) {
		t.Parallel()
		oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
			claimed(r)
			r.js.saves = saveUnheard
			r.has(2)
			again(r)
		})
	})
	t.Run("stopped", func(t *testing.T) {
		t.Parallel()
		for d := range 15 { // while a record is on its way, while that of the claim is, and later
			oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
				r.reads()
				r.sleep(2 * time.Second)
				r.js.latency = 100 * time.Millisecond
				r.signs(r.commits(1)) // so a record is on its way
				r.sleep(20 * time.Millisecond)
				from := r.commits(1)
				r.signs(from) // and there is another checkpoint
				r.sleep(20 * time.Millisecond)
				r.claimed(from, r.commits(2))
				r.sleep(time.Duration(20+50*d) * time.Millisecond)
				if err := r.pr.stop(); err != nil {
					t.Errorf("stopped after %d ms: %v", 20+50*d, err)
				}
				r.js.latency = time.Millisecond
				r.start()
				r.has(2)
				r.commits(1)
				r.claims(1)
				r.has(3)
			})
		}
	})
	t.Run("lost", func(t *testing.T) {
		t.Parallel()
		for d := range 15 {
			oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
				claimed(r)
				before := len(r.js.revisions)
				r.until(time.Minute, "the record", func() bool { return len(r.record().Claimed) > 0 })
				r.sleep(time.Duration(d) * 200 * time.Microsecond)
				r.pr.broker().cut(true)
				r.js.revisions = r.js.revisions[:before]
				r.js.last = r.js.revisions[before-1].number
				r.has(2)
				again(r)
			})
		}
	})
}

// TestAReaderConfirmsWhatIsSettled, whatever the home has confirmed; its slot keeps what may have to be
// claimed.
func TestAReaderConfirmsWhatIsSettled(t *testing.T) {
	t.Parallel()
	for _, horizon := range []time.Duration{0, 20 * time.Millisecond} {
		oneReader(t, 2, horizon, func(t *testing.T, r *isleReader) {
			r.reads()
			at := r.commits(1) // which is all that it will ever have confirmed
			mark := relay.Watermark{Confirmed: relay.Confirmed{LSN: at, Timeline: timeline}, At: at}
			r.comes(2, &transaction{logical: []logical{
				{prefix: relay.WatermarkPrefix, content: mark.Content()}}})
			r.signs(r.commits(19))
			open := r.pg.end
			r.commits(20)
			r.until(r.at.cfg.Delay/2, "confirmed", func() bool { return r.pg.confirmed >= open-0x1000 })
			if r.pg.confirmed > open {
				t.Errorf("%v is confirmed, and all above %v is open", r.pg.confirmed, open)
			}
			r.claims(1)
			r.has(20)
			for i := range 5 {
				for range 5 {
					r.sleep(2 * time.Second)
					r.signs(r.commits(1))
				}
				if end := r.pg.end - 0x1000; r.pg.confirmed < end {
					t.Errorf("%v is confirmed, of %v", r.pg.confirmed, end)
				}
				r.commits(1)
				r.claims(2 + i)
			}
			r.sleep(5 * time.Second)
			if n := len(r.record().Claimed); n > 2 {
				t.Errorf("%d ranges are left of 6", n)
			}
		})
	}
}

// TestAReaderKeepsUpWithABusyHome: what that says settles checkpoints that waited, while there is always more
// to read; its slot follows.
func TestAReaderKeepsUpWithABusyHome(t *testing.T) {
	t.Parallel()
	oneReader(t, 2, 20*time.Millisecond, func(t *testing.T, r *isleReader) {
		r.reads()
		var all, here []outbox.LSN
		for i := range 800 {
			all, here = append(all, r.commits(1)), append(here, r.pg.end)
			if i%10 == 9 {
				r.signs(all[i-5])
			}
			r.sleep(50 * time.Millisecond)
		}
		if r.pg.confirmed < here[600] || r.pg.confirmed > here[len(here)-1] || r.rows(relay.Claim) > 0 {
			t.Errorf("%v is confirmed of %v, %d claims", r.pg.confirmed, r.pg.end, r.rows(relay.Claim))
		}
		for range 2 * maxWaiting { // more than may wait are open
			r.commits(1)
			r.sleep(25 * time.Millisecond)
		}
		r.claims(1)
		r.has(2*maxWaiting + 5)
	})
}

// TestACheckpointWaitsForWhatClosedItsWindow: of three events the second is claimed, with a claim that was
// decided before the third one came and closed the window of the first.
func TestACheckpointWaitsForWhatClosedItsWindow(t *testing.T) {
	t.Parallel()
	oneReader(t, 2, 200*time.Millisecond, func(t *testing.T, r *isleReader) {
		r.reads()
		r.sleep(time.Second)
		first := r.commits(1)
		r.signs(first)
		r.sleep(100 * time.Millisecond)
		second := r.commits(1)
		r.sleep(150 * time.Millisecond)
		r.commits(1)
		r.sleep(3 * time.Second)
		r.claimed(first, second)
		r.has(1)
		r.kill()
		r.start()
		r.claims(1)
		r.has(2)
	})
}

// rowsAsked keeps when rows were asked for, by the end of their time.
type rowsAsked struct {
	Writer
	until chan time.Time
}

func (w rowsAsked) ClusterRow(_ context.Context, _ relay.ClusterRow, until time.Time) error {
	w.until <- until
	return nil
}

// slowly answers a while after it was asked.
type slowly struct{ Source }

func (slowly) Server(context.Context) (relay.ServerState, error) {
	time.Sleep(900 * time.Millisecond)
	return relay.ServerState{WALEnd: 100}, nil
}

// TestAClaimIsAsOldAsTheEndOfTheWALThatItIsDecidedAt: nobody knows what the server has behind it.
func TestAClaimIsAsOldAsTheEndOfTheWALThatItIsDecidedAt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cfg := claim.Config{Self: 1, Count: 2, Delay: 8 * time.Second}
		begun := time.Now()
		w := rowsAsked{until: make(chan time.Time, 1)}
		r := &reader{rowsRead: rowsRead{cfg: cfg, begun: begun}}
		r.Reader = claim.ReaderFrom(cfg, 2, relay.ReaderState{Newest: 7, Hello: 1, Echoes: []uint64{1}})
		s := &session{reader: r, clusters: &r.rowsRead, verified: true, questions: newWorker(),
			tracker: new(checkpoint.Tracker),
			in:      &input{away: &away{read: 100}}, heartbeats: &heartbeatWriter{worker: newWorker()},
			conns: &Conns{Writer: w, Source: slowly{}}}
		defer s.questions.close()
		defer s.heartbeats.worker.close()
		s.askEnd(begun)
		must.Succeed(t, s.questions.take(<-s.questions.done))
		if r.walEnd != 100 || !r.asked.Equal(begun) {
			t.Errorf("%v, %v behind the question", r.walEnd, r.asked.Sub(begun))
		}
		s.questions.busy = true // another one
		turn := begun.Add(2 * cfg.Delay)
		r.Start(0)
		for _, c := range []struct {
			asked  time.Time
			end    outbox.LSN
			claims bool
		}{
			{turn.Add(-time.Millisecond), 100, false}, // it was not its turn then
			{turn, 0, false},   // not answered
			{turn, 101, false}, // not read
			{turn, 100, true},
		} {
			r.asked, r.walEnd = c.asked, c.end
			s.answer(turn.Add(time.Second))
			if s.heartbeats.worker.busy != c.claims {
				t.Errorf("asked %v before its turn, the WAL ends at %v: %t", turn.Sub(c.asked), c.end,
					!c.claims)
			}
		}
		if until := <-w.until; !until.Equal(turn.Add(cfg.Delay / 4)) {
			t.Errorf("until %v behind its turn", until.Sub(turn))
		}
	})
}

// TestCheckpointsThatWaitAreThinned: however many, some of all ages are left, and the newest.
func TestCheckpointsThatWaitAreThinned(t *testing.T) {
	t.Parallel()
	s := new(session)
	for n := range outbox.LSN(10 * maxWaiting) {
		s.await(waiting{thru: n})
		if len(s.waiting) > maxWaiting || s.waiting[0].thru != 0 || s.waiting[len(s.waiting)-1].thru != n ||
			n > maxWaiting && len(s.waiting) < maxWaiting/2 {
			t.Fatalf("%d wait of %d, from %v", len(s.waiting), n+1, s.waiting[0].thru)
		}
	}
}

// TestAReaderTakesRowsOnce, of the server that it reads: rows that another one has left behind are read again
// where its timeline left off.
func TestAReaderTakesRowsOnce(t *testing.T) {
	t.Parallel()
	cfg := claim.Config{Self: 1, Count: 2, Delay: 8 * time.Second}
	state := &relay.ReaderState{At: 500, Timeline: 1, Newest: 7, Hello: 1, Echoes: []uint64{1}}
	r := checkpoint.Readings{Record: &checkpoint.Record{Reader: state}, Server: relay.ServerState{
		History: relay.History{Timeline: 2, Switches: []relay.Switch{{Timeline: 1, End: 300}}}}}
	p := New(Config{Islands: &cfg})
	rd := p.readerFrom(&decoder.Config{Clusters: map[string]int{"": 1, "from": 2}, Origin: "from"}, &r)
	claimed := decoder.Result{Commit: relay.Commit{Read: 300}, ClusterRows: []relay.ClusterRow{
		{Kind: relay.Claim, By: 1, Home: 2, Hello: 1, To: 7}}}
	if rd.take(&claimed); len(rd.claimed) > 0 {
		t.Error("a row was taken again")
	}
	claimed.Commit.Read++
	for range 2 {
		if rd.take(&claimed); len(rd.claimed) != 1 || rd.read != 301 {
			t.Errorf("%v are claimed up to %v", rd.claimed, rd.read)
		}
	}
	if got := rd.stateAt(); got.At != 301 || got.Timeline != 2 {
		t.Errorf("%+v", got)
	}
}

// TestARecordIsNotFilledWithClaims: beyond half of what it can list nothing is claimed until they go with
// their checkpoints.
func TestARecordIsNotFilledWithClaims(t *testing.T) {
	t.Parallel()
	oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
		r.durable, r.loses = time.Hour, time.Hour
		r.reads()
		for range checkpoint.MaxClaimed/2 + 5 {
			r.commits(1)
			r.sleep(r.at.cfg.Delay + time.Second)
		}
		if n := len(r.record().Claimed); n != checkpoint.MaxClaimed/2 || r.rows(relay.Claim) != n {
			t.Errorf("%d ranges, %d claims", n, r.rows(relay.Claim))
		}
		r.sleep(time.Hour + 5*time.Minute)
		r.has(checkpoint.MaxClaimed/2 + 5)
	})
}

// What was replicated before the slot was made is not here. While the home has not said that it is published,
// a claim would cover it, and it would be in no stream. The newest hello may have come before as well.
func TestAReaderClaimsNothingThatMayLieBeforeItsSlot(t *testing.T) {
	t.Parallel()
	for _, kind := range []relay.ClusterRowKind{relay.Hello, relay.Published} {
		first := relay.ClusterRow{Kind: kind, Hello: 1}
		oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
			r.start()
			r.says(2, first)
			r.until(time.Minute, "an echo", func() bool { return r.rows(relay.Echo) > 0 })
			to := r.commits(3)
			r.signs(1)
			r.unclaimed(time.Minute)
			r.signs(to)
			r.commits(2)
			r.claims(1)
			r.has(2)
		})
	}
}

// TestAReaderThatStoodByKnowsWhatTheOtherHasRead: of two processes for a slot the first one goes on where the
// second one was. It claims with the hello that this one has echoed: by an older one nobody else would count
// the claim.
func TestAReaderThatStoodByKnowsWhatTheOtherHasRead(t *testing.T) {
	oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
		r.reads()
		first := r.pr
		second := r.run(options{islands: &r.at.cfg, open: func(c *Conns) { c.Writer = &writer{r.write} }})
		r.takesOver(first, second)
		r.greets(2)
		r.until(time.Minute, "an echo", func() bool { return r.rows(relay.Echo) == 2 })
		for range 20 { // beyond the hello
			r.signs(r.commits(3))
			r.sleep(time.Second)
		}
		second.kill()
		r.until(time.Minute, "taken", func() bool { return first.p.Status().State == StateRunning })
		r.signs(r.commits(1))
		r.commits(2)
		r.claims(1)
		if row := r.pg.rows.written[len(r.pg.rows.written)-1]; row.Kind != relay.Claim || row.Hello != 2 {
			t.Errorf("%v", row.Content())
		}
	})
}

// TestAReaderThatOutlivesItsDatabaseClaimsNothing of a home that lives, whose rows come later than the
// database is back.
func TestAReaderThatOutlivesItsDatabaseClaimsNothing(t *testing.T) {
	t.Parallel()
	for away := 5 * time.Second; away < 30*time.Second; away += time.Second {
		oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
			r.reads()
			to := r.commits(2) // that the home publishes at once; its next sign of life is on its way
			r.sleep(300 * time.Millisecond)
			r.pg.down = time.Now().Add(away)
			for _, u := range r.postgresConns() {
				u.cut(true)
			}
			r.sleep(away)
			r.pg.grow(r.pg.end + 0x100)
			r.sleep(5 * time.Second) // until its subscription is connected again
			r.signs(to)
			r.unclaimed(3 * time.Second)
			if n := r.rows(relay.Claim); n > 0 {
				t.Errorf("the database was away for %v: %d claims", away, n)
			}
		})
	}
}

// TestAReaderClaimsWhileItsWALGrows: it reads its WAL half a second late, and others write without a pause,
// or with short ones.
func TestAReaderClaimsWhileItsWALGrows(t *testing.T) {
	t.Parallel()
	for _, every := range []int{1000, 50, 30} { // tenths of a second until a pause
		oneReader(t, 2, 0, func(t *testing.T, r *isleReader) {
			r.reads()
			r.commits(2)
			r.pg.delay = 400 * time.Millisecond
			for i := 0; i < 1200 && r.rows(relay.Claim) == 0; i++ {
				if i%(every+15) < every {
					r.pg.grow(r.pg.end + 0x100)
				}
				r.sleep(100 * time.Millisecond)
			}
			if r.rows(relay.Claim) == 0 {
				t.Errorf("not claimed within two minutes, %d tenths of a second from pause to pause", every)
			}
		})
	}
}

// TestAReaderWhoseStreamTakesNothingClaimsNoMore: NATS answers, and refuses all messages. What it had claimed
// before waits for it; what comes is for others.
func TestAReaderWhoseStreamTakesNothingClaimsNoMore(t *testing.T) {
	t.Parallel()
	oneReader(t, 3, 0, func(t *testing.T, r *isleReader) {
		r.reads()
		r.commits(2)
		r.js.full = true
		r.claims(1)
		opens := len(r.pr.opens)
		for range 20 {
			r.commits(1)
			r.unclaimed(r.at.cfg.Delay)
		}
		if n := len(r.pr.opens) - opens; n > 20*int(2*r.at.cfg.Delay/backoffMax) {
			t.Errorf("%d sessions in %v", n, 20*r.at.cfg.Delay)
		}
		r.js.full = false
		r.claims(2)
		r.has(22)
	})
}
