package outage

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// outages is an outflow with servers of its own under a load of traces, and an undisturbed twin with a NATS
// server of its own.
type outages struct {
	t              *testing.T
	pg             *pgserver.Server
	url            string
	nats, twinNATS *natstest.ServerProcess
	victim, twin   *harness.Outflow
	load           *harness.Load
	ops            int
}

func startOutages(t *testing.T, ops int) *outages {
	t.Helper()
	s := &outages{t: t, ops: ops, pg: pgtest.Own(t, 0), nats: natstest.Process(t),
		twinNATS: natstest.Process(t)}
	var err error
	s.url, err = s.pg.CreateDatabase(t.Context(), "traces")
	harness.Must(t, err)
	s.victim = harness.New(t, s.url, s.nats.URL(), "victim")
	s.twin = harness.New(t, s.url, s.twinNATS.URL(), "twin")
	for _, o := range []*harness.Outflow{s.victim, s.twin} {
		o.Init()
		o.Start()
	}
	s.load = harness.StartLoad(t, s.url, harness.RecordedOps(t, ops), 8, 1500, 7)
	return s
}

// written waits until about so many operations are committed.
func (s *outages) written(n int) {
	s.t.Helper()
	harness.Eventually(s.t, fmt.Sprintf("%d operations written", n), func() error {
		if err, _ := s.load.Failure.Load().(error); err != nil {
			s.t.Fatalf("write: %v", err)
		}
		if got := int(s.load.Written.Load()); got < n {
			return fmt.Errorf("%d", got)
		}
		return nil
	})
}

// flood writes more WAL data than there is room for between the server and an outflow that takes nothing,
// until the server is stuck with it, or has nobody to send it to.
func (s *outages) flood() {
	s.t.Helper()
	conn := harness.Connect(s.t, s.url)
	harness.Exec(s.t, conn, "SELECT pg_logical_emit_message(false, 'flood', repeat('x', 1000000)) FROM "+
		"generate_series(1, 64)")
	harness.Eventually(s.t, "the server can't send more", func() error {
		var waits string
		err := conn.QueryRow(s.t.Context(), `SELECT CASE WHEN active_pid IS NULL THEN 'gone'
			ELSE coalesce(wait_event, '') END
			FROM pg_replication_slots LEFT JOIN pg_stat_activity ON pid = active_pid
			WHERE slot_name = 'victim'`).Scan(&waits)
		if err == nil && waits != "gone" && waits != "WalSenderWriteData" {
			err = fmt.Errorf("it waits for %q", waits)
		}
		return err
	})
}

// publishing waits until the victim publishes what is written from now on.
func (s *outages) publishing() {
	s.t.Helper()
	harness.AwaitMessages(s.t, harness.JetStream(s.t, s.nats.URL()), s.victim.Stream,
		min(int(s.load.Written.Load())+200, s.ops))
}

// end waits for the end of the load and compares everything.
func (s *outages) end() {
	s.t.Helper()
	s.load.Wait(s.t)
	harness.AwaitMessages(s.t, harness.JetStream(s.t, s.nats.URL()), s.victim.Stream, s.ops)
	harness.AwaitMessages(s.t, harness.JetStream(s.t, s.twinNATS.URL()), s.twin.Stream, s.ops)
	harness.CompareStreams(s.t, s.url, s.nats.URL(), s.twinNATS.URL(), s.victim.Stream, 0)
	if s.victim.Stop() != 0 || s.twin.Stop() != 0 {
		s.t.Error("the stop was not clean")
	}
}

// TestOutagesOfNATSLeaveAnExactStream: NATS is killed and comes back, and hangs for longer than an
// acknowledgement is waited for.
func TestOutagesOfNATSLeaveAnExactStream(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	s := startOutages(t, 12_000)
	s.written(1500)
	harness.Must(t, s.nats.Kill())
	s.written(3500)
	harness.Must(t, s.nats.Start())
	s.publishing()

	harness.Must(t, s.nats.Pause())
	const silence = 7 * time.Second // an acknowledgement is waited for 5 s
	time.Sleep(silence)
	harness.Must(t, s.nats.Resume())
	s.publishing()

	harness.Must(t, s.nats.Stop())
	harness.Must(t, s.nats.Start())
	s.end()
}

// TestOutagesOfPostgreSQLLeaveAnExactStream: PostgreSQL is stopped while NATS is away (it must not wait for
// us), crashes, and cuts the stream.
func TestOutagesOfPostgreSQLLeaveAnExactStream(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	s := startOutages(t, 9_000)
	s.written(1000)
	for round := 1; ; round++ {
		s.victim.AwaitReady()
		before := len(s.victim.Log.String())
		harness.Must(t, s.nats.Kill())
		s.written(1000 + 500*round)
		s.flood()
		harness.Must(t, s.pg.Stop("fast")) // one that waits for outflow never stops
		ranOut := strings.Contains(s.victim.Log.String()[before:], "NATS did not come back")
		harness.Must(t, s.pg.Start(t.Context()))
		harness.Must(t, s.nats.Start())
		s.publishing()
		if !ranOut {
			break
		}
		if round == 3 { // before that the machine may have stood still
			t.Fatal("PostgreSQL is let go only when the session's half minute without NATS is over")
		}
	}

	harness.Must(t, s.pg.Kill())
	harness.Must(t, s.pg.Start(t.Context()))
	s.publishing()

	conn := harness.Connect(t, s.url)
	for range 3 {
		harness.Exec(t, conn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE "+
			"slot_name = 'victim'")
		s.publishing()
	}
	s.end()
}

// TestAStandbyTakesOver: a second outflow with the same slot waits, is ready, and takes over when the first
// is killed, again and again.
func TestAStandbyTakesOver(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	const ops = 6000
	pg := pgtest.Own(t, 0)
	url, err := pg.CreateDatabase(t.Context(), "traces")
	harness.Must(t, err)
	ns := natstest.Process(t)
	first := harness.New(t, url, ns.URL(), "shared")
	second := harness.New(t, url, ns.URL(), "shared")
	first.Init()
	first.Start()
	first.AwaitState("running")
	second.Start()
	active, standby := harness.AwaitRoles(first, second)

	l := harness.StartLoad(t, url, harness.RecordedOps(t, ops), 8, 1500, 11)
	rnd := rand.New(rand.NewPCG(11, 12))
	for range 3 {
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), active.Stream,
			min(ops, int(l.Written.Load())+200+rnd.IntN(400)))
		active.Kill()
		standby.AwaitState("running")
		active.Start()
		active, standby = harness.AwaitRoles(first, second)
	}
	l.Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), active.Stream, ops)
	active.MustBeComplete(harness.Connect(t, url), ns.URL())
	standby.MustStop(t)
	active.MustStop(t)
}

// watchStandstill watches whether this process, a server and an outflow stand still. The function that it
// returns ends that and says for how long one did at most.
func watchStandstill(t *testing.T, pgURL string, o *harness.Outflow) (longest func() time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	var most atomic.Int64
	watch := func(look func()) {
		group.Go(func() {
			for ctx.Err() == nil {
				begun := time.Now()
				look()
				time.Sleep(20 * time.Millisecond)
				// nearly right is enough where two write
				most.Store(max(most.Load(), int64(time.Since(begun))))
			}
		})
	}
	conn := harness.Connect(t, pgURL)
	watch(func() { _ = conn.Ping(ctx) })
	watch(func() { o.Get("/healthz") })
	return func() time.Duration {
		cancel()
		group.Wait()
		return time.Duration(most.Load())
	}
}
