package pipeline

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Failures of NATS between which all was well have 30 s each: that nothing was left to be acknowledged is
// well, too.
func TestOutagesHave30SecondsEach(t *testing.T) {
	for name, n := range map[string]int{"idle": 0, "messages between": 3} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
				pr := w.running(options{})
				w.write(3)
				w.published()
				for i := range 3 {
					w.cutBroker(pr, 20*time.Second, true)
					w.until(time.Minute, "it goes on", func() bool { return w.js.resumed == i+1 })
					w.write(n)
					w.published()
					w.sleep(100 * time.Millisecond)
				}
				w.wantResumed(pr, 3)
				w.wantSameStream()
			})
		})
	}
	begun := time.Now()
	for _, c := range []struct {
		acked, sent uint64
		well        bool
	}{{10, 12, false}, {11, 12, true}, {10, 10, true}} {
		o := outage{since: begun, tries: 3, resumed: 10}
		if o.acknowledged(c.acked, c.sent) != c.well || o.since.IsZero() != c.well ||
			(o.tries == 0) != c.well {
			t.Errorf("behind 10, %d of %d acknowledged: %+v", c.acked, c.sent, o)
		}
	}
}

// TestNATSThatStoresNothingIsNotBack: it answers all but what is published, as with a full disk.
func TestNATSThatStoresNothingIsNotBack(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		log := &strings.Builder{}
		pr := w.running(options{log: log})
		w.write(3)
		w.published()
		w.with(func() { w.js.drop = 1 << 30 })
		w.write(3)
		w.until(time.Minute, "it goes on", func() bool { return w.js.resumed == 3 })
		if s := pr.p.Status(); s.State != StateAway || s.Ready() {
			t.Errorf("%+v", s)
		}
		w.with(func() { w.js.drop = 0 })
		w.published()
		w.until(time.Minute, "it runs", func() bool { return pr.p.Status().State == StateRunning })
		w.wantSameStream()
		must.Succeed(t, pr.stop())
		if n := strings.Count(log.String(), "NATS is back"); n != 1 {
			t.Errorf("%d times\n%s", n, log)
		}
	})
}

// The process is alive while it waits for NATS, and says why it does.
func TestAliveWhileNATSIsAway(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.cutBroker(pr, 25*time.Second, true)
		for range 24 {
			w.sleep(time.Second)
			if s := pr.p.Status(); s.State != StateAway || s.Error == "" || !s.Alive(time.Now()) ||
				s.Ready() {
				t.Fatalf("%+v: alive %t, ready %t", s, s.Alive(time.Now()), s.Ready())
			}
		}
		w.until(time.Minute, "it goes on", func() bool { return w.js.resumed == 1 })
		if s := pr.p.Status(); s.State != StateRunning || s.Error != "" {
			t.Errorf("%+v", s)
		}
	})
}

// A session that is not proved yet is not kept: what it has found so far may be wrong.
func TestNATSFailsBeforeTheTailCheck(t *testing.T) {
	inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
		stopped(t, w)
		w.with(func() { w.pg.delay = 300 * time.Millisecond })
		pr := w.run(options{})
		w.until(time.Minute, "comparing", func() bool { return pr.p.Status().State == StateComparing })
		w.cutBroker(pr, time.Second, true)
		w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
		if len(pr.opens) < 2 || len(pr.reopens) > 0 {
			t.Errorf("%d sessions, NATS was opened again %d times", len(pr.opens), len(pr.reopens))
		}
		w.write(3)
		w.published()
		w.wantSameStream()
	})
}

// A heartbeat that is on its way when NATS fails does no harm to those after it: what is held is published as
// ever.
func TestHeartbeatsGoOnAfterNATSFailed(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		reg := prometheus.NewRegistry()
		pr := w.running(options{registry: reg})
		w.sleep(time.Second)
		w.with(func() { w.pg.writeDelay, w.pg.writeFails = time.Second, 1 })
		w.write(1)
		w.until(time.Minute, "a tick is on its way", func() bool { return pr.p.Status().Held == 1 })
		w.sleep(200 * time.Millisecond)
		w.cutBroker(pr, 3*time.Second, true)
		w.until(time.Minute, "it goes on", func() bool { return w.js.resumed == 1 })
		if n := metric(t, reg, "tick_errors_total"); n != 1 {
			t.Errorf("%v ticks failed", n)
		}
		w.with(func() { w.pg.writeDelay = 0 })
		w.published()
		w.wantResumed(pr, 1)
		w.wantSameStream()
	})
}

// What PostgreSQL says while NATS is away counts: the checkpointer, still at work then, finds that the
// publication is another one.
func TestPublicationChangesWhileNATSFails(t *testing.T) {
	inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
		pr, _ := w.cutWhileTheRecorderAsks()
		w.with(func() { w.pg.identity.RelXmin++ })
		if f := pr.ends(time.Minute); f == nil || f.Code != "publication_changed" || w.js.resumed > 0 {
			t.Errorf("ended with %v, went on %d times", pr.err, w.js.resumed)
		}
	})
}

// A connection that comes when nobody waits for it any more is closed.
func TestLateConnectionToNATSIsClosed(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{open: func(l *Conns) {
			reopen := l.Reopen
			l.Reopen = func(context.Context) (JetStream, Store, error) {
				time.Sleep(2 * time.Second)
				return reopen(context.Background())
			}
		}})
		w.cutBroker(pr, 0, true)
		w.sleep(time.Second)
		if err := pr.stop(); err != nil {
			t.Error(err)
		}
		w.sleep(5 * time.Second)
		if len(pr.reopens) != 1 || len(w.brokerConns()) > 0 {
			t.Errorf("opened again %d times, %d connections are left", len(pr.reopens), len(w.brokerConns()))
		}
	})
}

// ending is a broker that has answered when its process is told to stop.
type ending struct {
	JetStream
	told func()
}

func (b ending) Tail(ctx context.Context) (relay.StreamState, error) {
	s, err := b.JetStream.Tail(ctx)
	b.told()
	return s, err
}

// Nor is one left that is there at the moment when the process is told to stop, whichever is seen first.
func TestConnectionToNATSAtTheEndIsClosed(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		for range 10 {
			var pr *process
			pr = w.running(options{open: func(l *Conns) {
				reopen := l.Reopen
				l.Reopen = func(ctx context.Context) (JetStream, Store, error) {
					b, s, err := reopen(ctx)
					return ending{b, func() { pr.cancel() }}, s, err
				}
			}})
			w.cutBroker(pr, 0, true)
			w.until(time.Minute, "the end", pr.over)
			w.sleep(time.Second)
			if pr.err != nil || len(w.brokerConns()) > 0 {
				t.Fatalf("it ended with %v, %d connections are left", pr.err, len(w.brokerConns()))
			}
		}
	})
}

// unread is a store whose record can't be read at the first attempt.
type unread struct {
	Store
	tries *int
}

func (s unread) Load(ctx context.Context) (*checkpoint.Record, uint64, error) {
	if *s.tries++; *s.tries == 1 {
		return nil, 0, errDown
	}
	return s.Store.Load(ctx)
}

// A record that can't be read says nothing: it is read again.
func TestRecordIsReadAgain(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		tries := 0
		pr := w.running(options{open: func(l *Conns) {
			reopen := l.Reopen
			l.Reopen = func(ctx context.Context) (JetStream, Store, error) {
				b, s, err := reopen(ctx)
				return b, unread{s, &tries}, err
			}
		}})
		w.write(3)
		w.published()
		w.cutBroker(pr, 0, true)
		w.until(time.Minute, "it goes on", func() bool { return w.js.resumed == 1 })
		if tries < 2 {
			t.Errorf("read %d times", tries)
		}
		w.write(3)
		w.published()
		w.wantResumed(pr, 1)
		w.wantSameStream()
	})
}

// A checkpoint is not older than the broker's clock says, also where it stood still while NATS was away:
// nothing was synced meanwhile.
func TestBrokersClockCountsAfterAnOutage(t *testing.T) {
	const durable = 20 * time.Second
	inBubble(t, defaults, durable, func(t *testing.T, w *harness) {
		behind := time.Duration(0)
		w.js.now = func() time.Time { return time.Now().Add(-behind) }
		pr := w.running(options{noHeartbeats: true})
		w.with(func() { w.pg.grow(w.pg.end + 1000) })
		w.until(time.Minute, "it is recorded", func() bool { return len(w.record().Checkpoints) > 1 })
		stored := time.Now()
		w.sleep(10 * time.Second)
		w.with(func() { behind = 8 * time.Second })
		w.cutBroker(pr, 5*time.Second, true)
		w.until(time.Minute, "confirmed", func() bool { return len(w.pg.confirmedAt) > 0 })
		if d := w.pg.confirmedAt[0].at.Sub(stored); d < durable+behind-time.Second || d > durable+behind+
			5*time.Second {
			t.Errorf("confirmed %v after it was stored, by a clock that stood still for %v", d, behind)
		}
		w.wantResumed(pr, 1)
	})
}

// refusing is a broker whose configuration does not do any more.
type refusing struct{ JetStream }

func (refusing) Check(context.Context) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: "stream_config", Message: "the stream refuses"}
}

// What is wrong for good when NATS is back is for the ordinary start to say, at once, and the connection on
// which it was seen is closed.
func TestNATSIsBackAndRefuses(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{open: func(l *Conns) {
			reopen := l.Reopen
			l.Reopen = func(ctx context.Context) (JetStream, Store, error) {
				b, s, err := reopen(ctx)
				return refusing{b}, s, err
			}
		}})
		w.write(1)
		w.published()
		w.cutBroker(pr, 0, true)
		begun := time.Now()
		w.until(time.Minute, "another session", func() bool {
			return len(pr.opens) == 2 &&
				pr.p.Status().State == StateRunning
		})
		if d := time.Since(begun); d > 5*time.Second || w.js.resumed > 0 || len(pr.reopens) != 1 ||
			len(w.brokerConns()) != 1 {
			t.Errorf("after %v, went on %d times, opened again %d times, %d connections", d, w.js.resumed,
				len(pr.reopens), len(w.brokerConns()))
		}
	})
}

// Of a session that goes on the old connection is closed, and what it still says does not count.
func TestOldConnectionIsClosed(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		for i := range 3 {
			w.with(func() {
				pr.broker().pub.err = &outbox.Fault{Class: outbox.Transient, Code: "ack_timeout",
					Message: "nobody answers"}
			})
			w.until(time.Minute, "it goes on", func() bool { return w.js.resumed == i+1 })
			if n := len(w.brokerConns()); n != 1 {
				t.Errorf("%d connections", n)
			}
		}
		w.write(3)
		w.published()
		w.wantResumed(pr, 3)
		w.wantSameStream()
	})
}

// A stream into which nothing was published yet, or all of which is of an earlier session, is known by what
// the start found.
func TestNATSOutageBeforeTheFirstMessage(t *testing.T) {
	for name, c := range map[string]struct {
		before  int
		happens func(w *harness)
		goesOn  bool
	}{
		"an empty stream":            {0, func(*harness) {}, true},
		"an earlier session's":       {3, func(*harness) {}, true},
		"another message at its end": {3, func(w *harness) { w.js.messages[2].header.Pos.Index++ }, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, time.Hour, func(t *testing.T, w *harness) {
				if c.before > 0 {
					pr := w.running(options{})
					w.write(c.before)
					w.published()
					w.sleep(1200 * time.Millisecond)
					must.Succeed(t, pr.stop())
				}
				w.started, w.stops = nil, 0
				pr := w.running(options{})
				w.cutBroker(pr, time.Second, true)
				w.with(func() { c.happens(w) })
				w.until(time.Minute, "it goes on, or does not", func() bool {
					return w.js.resumed == 1 ||
						len(pr.opens) > 1
				})
				if (w.js.resumed == 1) != c.goesOn {
					t.Errorf("went on %d times", w.js.resumed)
				}
				if c.goesOn {
					w.write(3)
					w.published()
					w.wantResumed(pr, 1)
					w.wantSameStream()
				}
			})
		})
	}
}

// A record that was on its way, and another one in its place: the session can't know what that says.
func TestAnotherRecordInsteadOfTheOneOnItsWay(t *testing.T) {
	inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
		pr := w.running(options{})
		w.write(1)
		w.published()
		w.sleep(5 * time.Second)
		w.with(func() { w.js.saves = saveNever })
		w.write(1)
		w.until(time.Minute, "it is on its way", func() bool { return w.js.saves == saveWell })
		w.sleep(10 * time.Millisecond)
		w.cutBroker(pr, time.Second, true)
		w.with(func() {
			top := w.js.revisions[len(w.js.revisions)-1]
			if _, err := w.js.land(top.doc, nil, top.number); err != nil {
				t.Error(err)
			}
		})
		w.until(time.Minute, "another session", func() bool {
			return len(pr.opens) == 2 &&
				pr.p.Status().State == StateRunning
		})
		if w.js.resumed != 0 {
			t.Error("it went on")
		}
		w.write(1)
		w.published()
		w.wantSameStream()
	})
}

// deaf is a broker's side that hears nothing of the end of its connection: only the context ends what waits.
type deaf struct {
	JetStream
	Store
	w     *harness
	hangs *string // under the harness's lock
}

// hang tells whether this question is the one that gets no answer.
func (d deaf) hang(what string) bool {
	d.w.mu.Lock()
	defer d.w.mu.Unlock()
	if *d.hangs != what {
		return false
	}
	*d.hangs = "hung"
	return true
}

func (d deaf) Tail(ctx context.Context) (relay.StreamState, error) {
	if d.hang("look") {
		<-ctx.Done()
		return relay.StreamState{}, ctx.Err()
	}
	return d.JetStream.Tail(ctx)
}

func (d deaf) Save(ctx context.Context, rec *checkpoint.Record, last uint64) (uint64, error) {
	if d.hang("record") {
		<-ctx.Done()
		return 0, checkpoint.ErrUnknown
	}
	return d.Store.Save(ctx, rec, last)
}

// What waits for an answer on a connection that was lost waits no longer: it would keep the session from
// going on.
func TestNothingWaitsOnALostConnection(t *testing.T) {
	for _, what := range []string{"look", "record"} {
		t.Run(what, func(t *testing.T) {
			inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
				hangs := ""
				pr := w.running(options{open: func(l *Conns) {
					d := deaf{l.JetStream, l.Store, w, &hangs}
					l.JetStream, l.Store = d, d
				}})
				w.write(1)
				w.published()
				w.sleep(5 * time.Second)
				hangs = what
				w.write(1)
				w.until(time.Minute, "it waits", func() bool { return hangs == "hung" })
				w.cutBroker(pr, 0, true)
				begun := time.Now()
				w.until(time.Minute, "it goes on", func() bool { return w.js.resumed == 1 })
				if d := time.Since(begun); d > 2*time.Second {
					t.Errorf("after %v", d)
				}
				w.wantResumed(pr, 1)
			})
		})
	}
}

// failing is a connection whose next answer to one of the checkpointer's questions is an error.
type failing struct {
	*postgresConn
	fails   string
	looking bool
}

func (f *failing) fail(what string) error {
	f.lock()
	defer f.unlock()
	if f.fails != what {
		return nil
	}
	f.fails = ""
	return &outbox.Fault{Class: outbox.Transient, Code: "asked", Message: what + " can't be read"}
}

func (f *failing) Slot(ctx context.Context) (relay.SlotState, error) {
	f.looking = true
	if err := f.fail("slot"); err != nil {
		return relay.SlotState{}, err
	}
	return f.postgresConn.Slot(ctx)
}

func (f *failing) Server(ctx context.Context) (relay.ServerState, error) {
	what := "server, storing"
	if f.looking {
		what, f.looking = "server, looking", false
	}
	if err := f.fail(what); err != nil {
		return relay.ServerState{}, err
	}
	return f.postgresConn.Server(ctx)
}

func (f *failing) Publication(ctx context.Context) (relay.PublicationIdentity, error) {
	if err := f.fail("publication"); err != nil {
		return relay.PublicationIdentity{}, err
	}
	return f.postgresConn.Publication(ctx)
}

// What can't be read ends the session, whatever the checkpointer reads it for; nothing is recorded or
// confirmed on half an answer.
func TestRecorderPassesNoErrorOver(t *testing.T) {
	for _, what := range []string{"slot", "server, looking", "server, storing", "publication"} {
		t.Run(what, func(t *testing.T) {
			inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
				var first *failing
				pr := w.running(options{open: func(l *Conns) {
					f := &failing{postgresConn: l.Source.(*postgresConn)}
					if l.Source = f; first == nil {
						first = f
					}
				}})
				w.write(1)
				w.published()
				w.sleep(5 * time.Second)
				first.fails = what
				w.write(1)
				w.until(time.Minute, "another session", func() bool {
					return len(pr.opens) == 2 &&
						pr.p.Status().State == StateRunning
				})
				w.wantSameStream()
			})
		})
	}
}

// ended is a publisher that has sent ten messages of which six are acknowledged; an odd one's header it does
// not know any more.
type ended struct{ Publisher }

func (ended) Acked() uint64 { return 6 }
func (ended) Sent() uint64  { return 10 }
func (ended) Header(seq uint64) *outbox.Header {
	if seq%2 == 1 {
		return nil
	}
	return &outbox.Header{Due: outbox.LSN(seq)}
}

// TestTheEndOfTheStreamIsThatOfTheSession: the stream ends as the session has left it, or the session does
// not go on.
func TestTheEndOfTheStreamIsThatOfTheSession(t *testing.T) {
	t.Parallel()
	created := time.Unix(1000, 0)
	s := &session{pub: ended{}, outage: outage{created: created, start: 7, newest: &outbox.Header{Due: 7}}}
	for name, c := range map[string]struct {
		change func(st *relay.StreamState)
		goesOn bool
	}{
		"with one that was sent": {func(*relay.StreamState) {}, true},
		"with the last acknowledged": {func(st *relay.StreamState) {
			st.LastSeq, st.NewestSeq, st.Newest.Due = 6, 6, 6
		}, true},
		"with the last sent": {func(st *relay.StreamState) {
			st.LastSeq, st.NewestSeq, st.Newest.Due = 10, 10, 10
		}, true},
		"with what the start found": {func(st *relay.StreamState) {
			st.LastSeq, st.NewestSeq, st.Newest.Due = 7, 7, 7
		}, true},
		"before what was acknowledged": {func(st *relay.StreamState) {
			st.LastSeq, st.NewestSeq, st.Newest.Due = 4, 4, 4
		}, false},
		"behind what was sent": {func(st *relay.StreamState) {
			st.LastSeq, st.NewestSeq, st.Newest.Due = 12, 12, 12
		}, false},
		"with one that is not known": {func(st *relay.StreamState) {
			st.LastSeq, st.NewestSeq, st.Newest.Due = 9, 9, 9
		}, false},
		"with another message": {func(st *relay.StreamState) { st.Newest.Due = 9 }, false},
		"with one that is not the start's": {func(st *relay.StreamState) { st.LastSeq, st.NewestSeq = 7, 7 },
			false},
		"with a message of somebody else": {func(st *relay.StreamState) { st.Newest = nil }, false},
		"without its end":                 {func(st *relay.StreamState) { st.NewestSeq = 7 }, false},
		"as another stream": {func(st *relay.StreamState) { st.Created = created.Add(1) },
			false},
		"gone": {func(st *relay.StreamState) { st.Exists = false }, false},
	} {
		st := &relay.StreamState{Exists: true, Created: created, LastSeq: 8, NewestSeq: 8,
			Newest: &outbox.Header{Due: 8}}
		c.change(st)
		pr := &probe{stream: *st, stored: []relay.Stored{{Seq: st.LastSeq, Header: st.Newest}}}
		if err := s.checkEnd(pr); (err == nil) != c.goesOn {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A server that stands still lets each attempt time out, from another local port each.
func TestAReasonIsNoOtherOneBecauseOfTheLocalPort(t *testing.T) {
	var p Pipeline
	timedOut := func(port int) error {
		return &outbox.Fault{Code: "nats_connect", Message: "NATS can't be reached", Err: fmt.Errorf(
			"read tcp 127.0.0.1:%d->127.0.0.1:4222: i/o timeout", port)}
	}
	for i, c := range []struct {
		err   error
		fresh bool
	}{{timedOut(40001), true}, {timedOut(40002), false}, {errors.New("refused"), true},
		{timedOut(40003), true}} {
		if p.fresh(c.err) != c.fresh {
			t.Errorf("%d: %v: fresh is %t", i, c.err, !c.fresh)
		}
	}
}
