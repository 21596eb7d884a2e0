package maintenance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
)

// planned is a change that is planned: an outflow with servers under a load of traces, which goes on all the
// time.
type planned struct {
	*harness.Outflow
	t       *testing.T
	conn    *pgx.Conn
	url     string
	natsURL string
	load    *harness.Load
	mixed   bool // a repair published rows: the order is not judged
}

// timedServer starts a server that tracks commit timestamps, so that what is late can be told from what is
// out of order.
func timedServer(t *testing.T) *pgserver.Server { return pgtest.Own(t, 0, "track_commit_timestamp=on") }

var many struct {
	once sync.Once
	ops  []recording.Op
}

// manyTraces returns many operations, loaded once for all tests.
func manyTraces(t *testing.T) []recording.Op {
	many.once.Do(func() { many.ops = harness.RecordedOps(t, 100_000) })
	return many.ops
}

// underLoad starts outflow and the load, of rate operations a second. prepare may make the table, say, before
// outflow init; nil: nothing.
func underLoad(t *testing.T, pg *pgserver.Server, natsURL, slot string, rate int, prepare func(*pgx.Conn),
	settings ...string) *planned {
	t.Helper()
	p := &planned{t: t, natsURL: natsURL}
	p.Outflow, p.conn, p.url = harness.Install(t, pg, natsURL, slot, settings...)
	if prepare != nil {
		prepare(p.conn)
	}
	p.Init()
	p.Start()
	p.load = harness.StartEndlessLoad(t, p.url, manyTraces(t), 8, rate, 17)
	p.publishing()
	return p
}

// publishing waits until what is written from now on is published.
func (p *planned) publishing() {
	p.t.Helper()
	js := harness.JetStream(p.t, p.natsURL)
	n := p.load.Written.Load() + 100
	harness.Eventually(p.t, fmt.Sprintf("%d messages", n), func() error {
		if err, _ := p.load.Failure.Load().(error); err != nil {
			p.t.Fatalf("write: %v", err)
		}
		s, err := js.Stream(p.t.Context(), p.Stream)
		if err == nil && s.CachedInfo().State.LastSeq < uint64(n) {
			err = fmt.Errorf("%d messages", s.CachedInfo().State.LastSeq)
		}
		return err
	})
}

// written waits until n more operations are committed.
func (p *planned) written(n int) {
	p.t.Helper()
	goal := p.load.Written.Load() + int64(n)
	harness.Eventually(p.t, fmt.Sprintf("%d operations written", goal), func() error {
		if got := p.load.Written.Load(); got < goal {
			return fmt.Errorf("%d", got)
		}
		return nil
	})
}

// end ends the load and compares stream and table.
func (p *planned) end() {
	p.t.Helper()
	p.load.Ending.Store(true)
	p.load.Wait(p.t)
	written := int(p.load.Written.Load())
	harness.AwaitMessages(p.t, harness.JetStream(p.t, p.natsURL), p.Stream, written)
	p.complete()
	p.MustStop(p.t)
}

// complete compares stream and table: nothing missing, nothing twice, and out of order only what came later
// than the horizon.
func (p *planned) complete() {
	p.t.Helper()
	const horizon = 20 * time.Millisecond
	v, err := oracle.Compare(p.t.Context(), p.conn, "outbox", harness.JetStream(p.t, p.natsURL), p.Stream,
		horizon)
	harness.Must(p.t, err)
	p.t.Log(v.String())
	if !v.OK() {
		p.t.Errorf("stream and table differ: %s", v.String())
	}
	if v.Timed && !p.mixed && v.OutOfOrder != v.Late {
		p.t.Errorf("%d events follow a higher one of their sequence without need", v.OutOfOrder-v.Late)
	}
}

// secondInstance is a second instance of the same installation, with pages of its own.
func secondInstance(o *harness.Outflow, natsURL string) *harness.Outflow {
	o.T.Helper()
	url := ""
	for _, e := range o.Env {
		if v, ok := strings.CutPrefix(e, "OUTFLOW_POSTGRES_URL="); ok {
			url = v
		}
	}
	twin := harness.New(o.T, url, natsURL, o.Slot)
	twin.UseStream(o.Stream)
	return twin
}

// owners watches who holds a slot.
type owners struct {
	cancel context.CancelFunc
	group  sync.WaitGroup
	free   []time.Duration // how long nobody held it, each time
	err    error
}

func watchOwners(t *testing.T, url, slot string) *owners {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	w := &owners{cancel: cancel}
	conn := harness.Connect(t, url)
	w.group.Go(func() {
		var since time.Time // since when nobody holds it
		for ctx.Err() == nil {
			var held bool
			if err := conn.QueryRow(context.WithoutCancel(ctx),
				"SELECT active FROM pg_replication_slots WHERE slot_name = $1",
				slot).Scan(&held); err != nil {
				w.err = err
				return
			}
			switch now := time.Now(); {
			case !held && since.IsZero():
				since = now
			case held && !since.IsZero():
				w.free, since = append(w.free, now.Sub(since)), time.Time{}
			}
			time.Sleep(time.Millisecond) // the resolution of what is measured
		}
	})
	return w
}

// times ends the watching.
func (w *owners) times(t *testing.T) []time.Duration {
	t.Helper()
	w.cancel()
	w.group.Wait()
	harness.Must(t, w.err)
	return w.free
}

// arrivals notes when messages arrive.
type arrivals struct {
	mu   sync.Mutex
	at   []time.Time
	stop jetstream.ConsumeContext
}

func watchArrivals(t *testing.T, natsURL, stream string) *arrivals {
	t.Helper()
	a := &arrivals{}
	oc, err := harness.JetStream(t, natsURL).OrderedConsumer(t.Context(), stream,
		jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverNewPolicy})
	harness.Must(t, err)
	a.stop, err = oc.Consume(func(jetstream.Msg) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.at = append(a.at, time.Now())
	})
	harness.Must(t, err)
	t.Cleanup(a.stop.Stop)
	return a
}

// silence is the longest pause between two messages that ended within a stretch of time.
func (a *arrivals) silence(from, to time.Time) (longest time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, at := range a.at {
		if i > 0 && at.After(from) && at.Before(to) {
			longest = max(longest, at.Sub(a.at[i-1]))
		}
	}
	return longest
}

// TestARollingDeployLosesNothing: the new version is started beside the old one, stands by, and takes over
// when the old one is stopped, or dies, or, in the long form, stands still, until the server ends its
// session. The last one in the row brings other ordering settings, another subject and a header.
func TestARollingDeployLosesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	deploys := harness.EnvInt(t, "OUTFLOW_TEST_DEPLOYS", harness.Sized(10, 3)) // of each kind
	kinds := []string{"SIGTERM", "kill -9", "SIGSTOP"}[:harness.Sized(3, 2)]
	ns := natstest.Process(t)
	p := underLoad(t, timedServer(t), ns.URL(), "deploy", 1000, nil)
	seen := watchArrivals(t, ns.URL(), p.Stream)
	old := p.Outflow
	for _, kind := range kinds {
		for n := range deploys {
			next := secondInstance(p.Outflow, ns.URL())
			if n == deploys-1 {
				next.Set("REORDER_HORIZON=50ms", "REORDER_SORT=commit", "SUBJECT=changed.{doc_id}",
					"HEADERS=Written=created_at")
			}
			next.Start()
			old, next = harness.AwaitRoles(old, next)
			p.publishing()
			watch := watchOwners(t, p.url, p.Slot)
			time.Sleep(rand.N(200 * time.Millisecond)) // at any time between two looks of the standby
			begun := time.Now()
			switch kind {
			case "SIGTERM":
				old.MustStop(t)
			case "kill -9":
				old.Kill()
			case "SIGSTOP":
				harness.Must(t, old.Process.Pause())
			}
			next.AwaitState("running")
			running := time.Since(begun)
			p.publishing()
			quiet := seen.silence(begun, time.Now())
			free := watch.times(t)
			if kind == "SIGSTOP" {
				harness.Must(t, old.Process.Resume())
				harness.AwaitRoles(next, old)
				old.MustStop(t)
			}
			t.Logf("%s: nobody held the slot for %v, the new one ran after %v, a consumer waited %v", kind,
				free, running, quiet)
			old = next
		}
	}
	p.Outflow = old
	p.end()
	if !strings.Contains(old.Log.String(), "horizon=50ms sort=commit") {
		t.Error("the new settings were never in force")
	}
	all := harness.Messages(t, harness.JetStream(t, ns.URL()), p.Stream)
	if last := all[len(all)-1]; !strings.HasPrefix(last.Subject, "changed.") ||
		last.Header.Get("Written") == "" {
		t.Errorf("the newest message is on %s, with headers %v", last.Subject, last.Header)
	}
}
