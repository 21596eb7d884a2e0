package pipeline

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// silent is a broker and a server of which the first of their kind never answers one question.
type silent struct {
	JetStream
	Source
	check, start bool
}

func (s *silent) Check(ctx context.Context) error {
	if s.check {
		<-ctx.Done()
		return ctx.Err()
	}
	return s.JetStream.Check(ctx)
}

func (s *silent) Start(ctx context.Context, from outbox.LSN, binary bool) error {
	if s.start {
		<-ctx.Done()
		return ctx.Err()
	}
	return s.Source.Start(ctx, from, binary)
}

type silentBroker struct {
	JetStream
	s *silent
}

func (b silentBroker) Check(ctx context.Context) error { return b.s.Check(ctx) }

type silentUpstream struct {
	Source
	s *silent
}

func (u silentUpstream) Start(ctx context.Context, from outbox.LSN, binary bool) error {
	return u.s.Start(ctx, from, binary)
}

// Each question of a start has its time; one that nobody answers ends the session, and the next one goes on.
func TestAQuestionNobodyAnswersEndsTheSession(t *testing.T) {
	for name, first := range map[string]silent{"check of the stream": {check: true},
		"start of replication": {start: true}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
				opened := 0
				pr := w.run(options{open: func(l *Conns) {
					if opened++; opened == 1 {
						s := first
						s.JetStream, s.Source = l.JetStream, l.Source
						l.JetStream, l.Source = silentBroker{l.JetStream, &s}, silentUpstream{l.Source, &s}
					}
				}})
				w.until(time.Minute, "running", func() bool { return pr.p.Status().State == StateRunning })
				w.write(3)
				w.published()
				w.wantSameStream()
			})
		})
	}
}

// seen is a broker whose connection is lost because of something that was seen on it.
type seen struct{ JetStream }

func (seen) Err() error {
	return &outbox.Fault{Class: outbox.Gap, Code: "foreign_message", Observed: true,
		Message: "somebody else published"}
}

// What the publisher reports, rather than the broker, gets its range as well: the loop may hear of it from
// either.
func TestSeenGapHasItsRange(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{open: func(l *Conns) { l.JetStream = seen{l.JetStream} }})
		w.write(3)
		w.published()
		w.with(func() { pr.broker().pub.err = (seen{}).Err() })
		w.until(time.Minute, "the end", pr.over)
		f := outbox.FaultOf(pr.err)
		if f == nil || f.Code != "foreign_message" || f.To == 0 || f.From == 0 || f.To < f.From {
			t.Errorf("%+v", f)
		}
		if rec := w.record(); rec.Stopped != "foreign_message" {
			t.Errorf("the record says %q: whoever is started next goes on", rec.Stopped)
		}
	})
}

// While NATS is away, the loop that waits for it goes round as often as any, also when an attempt to connect
// hangs: a probe that looked in between would end a process that is well.
func TestTheLoopThatWaitsForNATSIsAlive(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.running(options{open: func(l *Conns) {
			l.Reopen = func(ctx context.Context) (JetStream, Store, error) {
				<-ctx.Done()
				return nil, nil, ctx.Err()
			}
		}})
		w.cutBroker(pr, time.Hour, true)
		w.until(time.Second, "it waits", func() bool { return pr.p.Status().State == StateAway })
		for begun := time.Now(); time.Since(begun) < keepReplication-time.Second; w.sleep(idleInterval / 10) {
			s := pr.p.Status()
			if silent := time.Since(s.beat); s.State != StateAway || silent > 2*idleInterval {
				t.Fatalf("%s, silent for %v after %v", s.State, silent, time.Since(begun))
			}
		}
	})
}

// slow is a disk that takes its time to read.
type slow struct{ memory }

type slowFile struct{ reorder.ScratchFile }

func (s slow) Create() (reorder.ScratchFile, error) {
	f, err := s.memory.Create()
	return slowFile{f}, err
}

func (f slowFile) ReadAt(p []byte, off int64) (int, error) {
	time.Sleep(100 * time.Millisecond)
	return f.ScratchFile.ReadAt(p, off)
}

var sorting = relay.Settings{Sort: outbox.ByCommit, MaxEvents: 1000, MaxBytes: 1 << 20}

// longSort is a process that has to sort a transaction on slow files.
func (w *harness) longSort() *process {
	w.t.Helper()
	pr := w.running(options{scratch: slow{}})
	rows := make([]row, 3000)
	for i := range rows {
		rows[i] = row{"friendsforever", "a", fmt.Sprintf("a:%06d", len(rows)-i),
			fmt.Sprintf(`{"text":"%01000d"}`, i)}
	}
	w.with(func() { w.pg.commit(rows) })
	return pr
}

// A transaction that takes minutes to sort is no standstill: whoever watches must not end the process, which
// would begin it anew.
func TestALongSortIsNoStandstill(t *testing.T) {
	inBubble(t, sorting, 0, func(t *testing.T, w *harness) {
		pr := w.longSort()
		begun, silent := time.Now(), time.Duration(0)
		w.until(time.Hour, "published", func() bool {
			s := pr.p.Status()
			silent = max(silent, time.Since(s.beat))
			if !s.Alive(time.Now()) {
				t.Errorf("not alive after %v", time.Since(begun))
				return true
			}
			w.sleep(time.Second)
			return len(w.js.messages) >= w.events()
		})
		if silent < stalled {
			t.Errorf("the loop was silent for %v only", silent)
		}
		w.wantSameStream()
	})
}

// A stop is heard in the middle of the sorting, which is one call that may take minutes; nothing of the
// transaction is published then.
func TestAStopIsHeardInTheMiddleOfASort(t *testing.T) {
	inBubble(t, sorting, 0, func(t *testing.T, w *harness) {
		pr := w.longSort()
		w.until(time.Minute, "sorting", func() bool { return pr.p.Status().busy })
		w.sleep(5 * time.Second)
		pr.cancel()
		pr.ends(time.Second)
		if pr.err != nil || len(w.js.messages) != 0 {
			t.Errorf("ended with %v and %d messages", pr.err, len(w.js.messages))
		}
		w.running(options{})
		w.published()
		w.wantSameStream()
	})
}

// A publication is read by a dozen questions. Where the server is busy, or far away, they take seconds, and
// the session begins all the same.
func TestAPublicationMayTakeSecondsToRead(t *testing.T) {
	inBubble(t, defaults, 0, func(t *testing.T, w *harness) {
		pr := w.run(options{open: func(l *Conns) {
			l.Source = &asking{postgresConn: l.Source.(*postgresConn), delay: 3 * time.Second}
		}})
		w.write(10)
		w.published()
		if n := len(pr.opens); n != 1 {
			t.Errorf("%d sessions", n)
		}
	})
}
