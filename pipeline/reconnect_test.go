package pipeline

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// cutBroker takes the broker away for d; what is on its way to it is lost, or comes late.
func (w *harness) cutBroker(pr *process, d time.Duration, dropped bool) {
	w.with(func() {
		w.js.down = time.Now().Add(d)
		pr.broker().cut(dropped)
	})
}

// kept fails the test unless the process went on n times within its first session.
func (w *harness) wantResumed(pr *process, n int) {
	w.t.Helper()
	if len(pr.opens) != 1 || len(w.started) != 1 || w.js.resumed != n {
		w.t.Errorf("%d sessions, %d starts of replication, %d times went on; want %d", len(pr.opens),
			len(w.started), w.js.resumed, n)
	}
}

// NATS goes and comes with messages in flight, of which it has stored some, all or none: nothing is read
// again, and the stream is the one that it would have been.
func TestAShortOutageOfNATSChangesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		dropped bool
		after   time.Duration // from the first of the messages to the failure
	}{
		"none stored":         {true, 0},
		"some stored":         {true, 4 * time.Millisecond},
		"all stored":          {true, 15 * time.Millisecond},
		"stored late":         {false, 0},
		"nothing in flight":   {true, time.Second},
		"proved for the most": {true, 19 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, relay.Settings{MaxEvents: 1000, MaxBytes: 1 << 20}, 0,
				func(t *testing.T, w *harness) {
					w.js.latency = 5 * time.Millisecond
					reg := prometheus.NewRegistry()
					pr := w.running(options{registry: reg})
					w.write(10)
					w.published()
					for i := range 5 {
						for range 50 {
							w.write(4)
							w.sleep(100 * time.Microsecond)
						}
						w.sleep(c.after)
						w.cutBroker(pr, 3*time.Second, c.dropped)
						w.until(time.Second, "it waits", func() bool {
							return pr.p.Status().State == StateAway
						})
						w.write(10)
						w.until(time.Minute, "it goes on", func() bool {
							return pr.p.Status().State == StateRunning && w.js.resumed == i+1
						})
						w.published()
						w.until(time.Minute, "all is acknowledged", func() bool {
							return pr.p.Status().InFlight == 0
						})
					}
					w.wantResumed(pr, 5)
					w.wantSameStream()
					for name, want := range map[string]float64{"sessions_total": 1, "resumptions_total": 5,
						"failures_total": 5} {
						if got := metric(t, reg, name); got != want {
							t.Errorf("%s is %v, want %v", name, got, want)
						}
					}
				})
		})
	}
}

// A broker that fails again before anything is acknowledged has 30 s in all.
func TestABrokerThatFailsAgainHasThirtySecondsInAll(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.write(5)
		w.published()
		w.with(func() { w.js.drop = 1 << 30 })
		w.write(5)
		w.sleep(50 * time.Millisecond) // they are in flight
		begun := time.Now()
		w.cutBroker(pr, 0, true)
		w.until(time.Minute, "the session ends", func() bool { return w.pg.active == nil })
		if d := time.Since(begun); d < keepReplication || d > keepReplication+6*time.Second ||
			w.js.resumed < 4 {
			t.Errorf("it ended after %v, and went on %d times", d, w.js.resumed)
		}
		w.with(func() { w.js.drop = 0 })
		w.published()
		w.wantSameStream()
	})
}

// The pauses between attempts grow as those between sessions do.
func TestPausesBetweenAttemptsGrow(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.cutBroker(pr, 20*time.Second, true)
		w.sleep(20 * time.Second)
		if n := len(pr.reopens); n < 50 || n > 110 {
			t.Errorf("%d attempts in 20 s", n)
		}
		w.write(1)
		w.published()
		w.wantResumed(pr, 1)
	})
}

// A broker that does not come back within 30 s: PostgreSQL is let go, and an ordinary start follows.
func TestNATSAwayForLong(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.write(5)
		w.published()
		w.cutBroker(pr, time.Minute, true)
		w.write(5)
		w.sleep(keepReplication - time.Second)
		if w.pg.active == nil {
			t.Error("PostgreSQL was let go before")
		}
		w.sleep(2 * time.Second)
		if w.pg.active != nil {
			t.Error("PostgreSQL was not let go")
		}
		w.published()
		if len(w.started) != 2 || w.js.resumed != 0 {
			t.Errorf("%d starts, %d times went on", len(w.started), w.js.resumed)
		}
		w.wantSameStream()
	})
}

// A stop while NATS is away ends at once, and what was not published is published by the next process.
func TestStopWhileNATSIsAway(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.write(5)
		w.published()
		w.with(func() { w.js.drop = 5 })
		w.write(5)
		w.sleep(50 * time.Millisecond)
		w.cutBroker(pr, time.Hour, true)
		w.sleep(time.Second)
		begun := time.Now()
		if err := pr.stop(); err != nil || time.Since(begun) > 100*time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		if w.stops != 1 || w.pg.active != nil {
			t.Errorf("%d ended in order", w.stops)
		}
		w.with(func() { w.js.down = time.Time{} })
		w.running(options{})
		w.published()
		w.wantSameStream()
	})
}

// PostgreSQL goes while NATS is away: the session ends at once.
func TestPostgresEndsWhileNATSIsAway(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.cutBroker(pr, time.Minute, true)
		w.sleep(time.Second)
		w.with(func() { pr.postgres().cut(true) })
		w.until(2*idleInterval, "the session ends", func() bool {
			return pr.p.Status().State == StateWaiting
		})
		w.write(5)
		w.published()
		w.wantSameStream()
	})
}

// What a take-over may not pass over ends the session, and the ordinary start finds what has become of the
// stream.
func TestWhatMayNotBePassedOverEndsTheSession(t *testing.T) {
	for name, c := range map[string]struct {
		happens func(w *harness)
		code    string // how the run ends; "": it goes on, and the stream is as it would have been
	}{
		"the end is lost": {func(w *harness) { w.js.messages = w.js.messages[:7] }, ""},
		"the end is lost without going back": {func(w *harness) {
			w.js.messages[9], w.js.messages[8] = nil,
				nil
		}, "holes"},
		"the stream is empty": {func(w *harness) { w.js.removed = len(w.js.messages) }, ""},
		"another stream": {func(w *harness) { w.js.created = w.js.created.Add(time.Hour) },
			"stream_recreated"},
		"no stream": {func(w *harness) { w.js.exists = false }, "stream_missing"},
		"another message": {func(w *harness) {
			other := *w.js.messages[9]
			other.header.Pos.Index++
			w.js.messages[9] = &other
		}, "divergence"},
		"a message more": {func(w *harness) {
			other := *w.js.messages[9]
			w.js.messages = append(w.js.messages, &other)
		}, "divergence"},
		"the record is another one": {func(w *harness) {
			top := w.js.revisions[len(w.js.revisions)-1]
			if _, err := w.js.land(top.doc, nil, top.number); err != nil {
				w.t.Error(err)
			}
		}, ""},
		"another record at its revision": {func(w *harness) {
			rec, top := w.record(), &w.js.revisions[len(w.js.revisions)-1]
			rec.Publication.Seen++
			doc, err := rec.Encode()
			if err != nil {
				w.t.Error(err)
			}
			top.doc, top.rec = doc, nil
		}, ""},
		"the record went back": {func(w *harness) { w.js.revisions = w.js.revisions[:len(w.js.revisions)-1] },
			""},
		"no record": {func(w *harness) { w.js.revisions = nil }, "record_missing"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 10*time.Second, func(t *testing.T, w *harness) {
				pr := w.running(options{})
				w.write(10)
				w.published()
				w.until(time.Minute, "it is recorded", func() bool {
					r := w.record()
					return r.Checkpoints[len(r.Checkpoints)-1].Seq == 10
				})
				w.with(func() { w.js.drop = 3 })
				w.write(3)
				w.sleep(50 * time.Millisecond)
				w.cutBroker(pr, time.Second, true)
				w.with(func() { c.happens(w) })
				w.until(time.Minute, "the session ends", func() bool { return len(pr.opens) > 1 })
				if w.js.resumed != 0 {
					t.Error("it went on")
				}
				if n := len(w.brokerConns()); n > 1 {
					t.Errorf("%d connections: the one that showed it is not closed", n)
				}
				switch c.code {
				case "":
					w.until(time.Minute, "published", func() bool { return len(w.js.messages) >= w.events() })
					if w.js.removed == 0 {
						w.wantSameStream()
					}
				case "holes":
					w.until(time.Minute, "published", func() bool {
						return len(w.js.messages) >= w.events()+
							2
					})
					w.wantSameStream()
				default:
					if f := pr.ends(time.Minute); f == nil || f.Code != c.code {
						t.Errorf("ended with %v", pr.err)
					}
				}
			})
		})
	}
}

// A record that was on its way when NATS failed: it is there, and counts; or it is not, and is written again.
func TestRecordOnItsWay(t *testing.T) {
	for name, how := range map[string]saving{"stored": saveUnheard, "lost": saveNever} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
				pr := w.running(options{})
				w.write(1)
				w.published()
				w.sleep(5 * time.Second)
				before := len(w.js.revisions)
				w.with(func() { w.js.saves = how })
				w.write(1)
				w.until(time.Minute, "it is on its way", func() bool { return w.js.saves == saveWell })
				w.sleep(10 * time.Millisecond)
				w.cutBroker(pr, time.Second, true)
				w.until(time.Minute, "it goes on", func() bool { return w.js.resumed == 1 })
				w.sleep(10 * time.Second)
				if n := len(w.js.revisions) - before; n != 1 ||
					w.pg.confirmed < w.pg.wal[len(w.pg.wal)-1].end {
					t.Errorf("%d records, confirmed %v", n, w.pg.confirmed)
				}
				w.write(1)
				w.published()
				w.sleep(10 * time.Second)
				w.wantResumed(pr, 1)
				w.wantSameStream()
			})
		})
	}
}

// asking is a connection to PostgreSQL that answers late what the checkpointer asks before it writes.
type asking struct {
	*postgresConn
	delay  time.Duration
	waits  bool
	opened int // the broker's connections, when it answered
}

func (a *asking) Publication(ctx context.Context) (relay.PublicationIdentity, error) {
	a.lock()
	d := a.delay
	a.delay, a.waits = 0, d > 0
	a.unlock()
	time.Sleep(d)
	a.lock()
	if a.waits {
		a.opened = len(a.pg.w.all)
	}
	a.waits = false
	a.unlock()
	return a.postgresConn.Publication(ctx)
}

// cutWhileTheRecorderAsks is a session whose broker is away while PostgreSQL takes its time for an answer.
func (w *harness) cutWhileTheRecorderAsks() (pr *process, pg *asking) {
	w.t.Helper()
	pr = w.running(options{open: func(l *Conns) {
		pg = &asking{postgresConn: l.Source.(*postgresConn)}
		l.Source = pg
	}})
	w.write(1)
	w.published()
	w.sleep(5 * time.Second)
	pg.delay = 3 * time.Second
	w.write(1)
	w.until(time.Minute, "the recorder asks", func() bool { return pg.waits })
	w.cutBroker(pr, 0, true)
	return pr, pg
}

// What the checkpointer has begun when NATS fails is over before the session looks what the record says now:
// it would write what nobody knows of, or into the new connection's record what was meant for the old one's.
func TestNATSOutageWaitsForTheCheckpointer(t *testing.T) {
	inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
		pr, pg := w.cutWhileTheRecorderAsks()
		w.until(time.Minute, "it goes on", func() bool { return w.js.resumed == 1 })
		if pg.waits || pg.opened != 1 {
			t.Errorf("the recorder is at work (%t), or NATS was read (%d times) while it was", pg.waits,
				pg.opened-1)
		}
		w.write(1)
		w.published()
		w.sleep(10 * time.Second)
		if w.pg.confirmed < w.pg.wal[len(w.pg.wal)-1].end {
			t.Errorf("confirmed %v", w.pg.confirmed)
		}
		w.wantResumed(pr, 1)
		w.wantSameStream()
	})
}

// While NATS is away nothing is confirmed, and nothing is written into the WAL; what was stored before counts
// once NATS was asked again.
func TestNothingIsConfirmedWithoutNATS(t *testing.T) {
	const durable = 10 * time.Second
	inBubble(t, defaults, durable, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.write(3)
		w.published()
		w.sleep(2 * time.Second)
		stored := w.js.revisions[len(w.js.revisions)-1].at
		w.cutBroker(pr, 20*time.Second, true)
		w.write(3)
		w.sleep(19 * time.Second)
		if n := len(w.pg.ticks); len(w.pg.confirmedAt) > 0 || n > 1 {
			t.Errorf("confirmed %v, %d ticks", w.pg.confirmedAt, n)
		}
		if time.Since(stored) < durable {
			t.Error("it shows nothing")
		}
		w.published()
		w.until(time.Second, "confirmed", func() bool { return len(w.pg.confirmedAt) == 1 })
		w.wantResumed(pr, 1)
		w.wantSameStream()
	})
}

// The window in hand when NATS fails is gone on with: also the message that the publisher did not take.
func TestNATSFailsInALongWindow(t *testing.T) {
	inBubble(t, relay.Settings{MaxEvents: 10_000, MaxBytes: 1 << 24}, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		failures := 0
		w.with(func() {
			w.js.limit = 64
			w.js.onFull = func(n int) { // the publisher hears of it before the next Publish
				if n == 500 {
					failures++
					pr.broker().pub.err = &outbox.Fault{Class: outbox.Transient, Code: "wrong_last_sequence",
						Message: "refused"}
				}
			}
		})
		rows := make([]row, 3000)
		for i := range rows {
			rows[i] = row{"friendsforever", "a", fmt.Sprintf("a:%06d", i), "{}"}
		}
		w.with(func() { w.pg.commit(rows) })
		w.published()
		if failures < 4 {
			t.Errorf("it failed %d times", failures)
		}
		// A late copy from the old connection may come first: what is refused for it is one more failure, of
		// which the session goes on as well.
		w.wantResumed(pr, max(failures, w.js.resumed))
		w.wantSameStream()
	})
}

// What a start found to be lost is in the record before anything is sent: a session that could not write it
// does not go on.
func TestNATSFailsBeforeTheLossIsRecorded(t *testing.T) {
	inBubble(t, defaults, 10*time.Second, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.write(10)
		w.published()
		w.until(time.Minute, "it is recorded", func() bool {
			r := w.record()
			return r.Checkpoints[len(r.Checkpoints)-1].Seq == 10
		})
		pr.kill()
		w.with(func() { w.js.messages, w.js.saves = w.js.messages[:7], saveNever })
		w.run(options{})
		w.until(time.Minute, "something is sent", func() bool { return len(w.js.messages) > 7 })
		if rec := w.record(); w.js.saves != saveWell || rec.Checkpoints[len(rec.Checkpoints)-1].Seq > 7 ||
			w.js.resumed != 0 {
			t.Errorf("the record goes up to %d, %d times went on",
				rec.Checkpoints[len(rec.Checkpoints)-1].Seq, w.js.resumed)
		}
		w.published()
		w.wantSameStream()
	})
}

// Without a way to open NATS's side alone a failure of it ends the session.
func TestWithoutReopenAFailureOfNATSEndsTheSession(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{open: func(l *Conns) { l.Reopen = nil }})
		w.write(3)
		w.published()
		w.cutBroker(pr, time.Second, true)
		w.write(3)
		w.published()
		if len(pr.opens) < 2 || !slices.IsSortedFunc(pr.opens, time.Time.Compare) {
			t.Errorf("%d sessions", len(pr.opens))
		}
		w.wantSameStream()
	})
}

// A stranger's message is seen on the connection, and the publisher hears first that one of ours was refused
// for it: the session is not kept, and the next start stops at it as well.
func TestNoReconnectAfterAForeignMessage(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{open: func(l *Conns) { l.JetStream = seen{l.JetStream} }})
		w.write(3)
		w.published()
		w.with(func() {
			pr.broker().pub.err = &outbox.Fault{Class: outbox.Transient, Code: "wrong_last_sequence",
				Message: "refused"}
		})
		w.until(time.Minute, "the end", func() bool { return pr.over() || w.js.resumed > 0 })
		if f := outbox.FaultOf(pr.err); f == nil || f.Code != "foreign_message" || f.To == 0 {
			t.Errorf("it ended with %v, and went on %d times", pr.err, w.js.resumed)
		}
		if rec := w.record(); rec.Stopped != "foreign_message" {
			t.Errorf("the record says %q: whoever is started next goes on", rec.Stopped)
		}
	})
}
