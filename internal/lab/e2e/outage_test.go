package e2e

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// outages is an outflow with servers of its own under a load of traces, and an undisturbed twin with a NATS server of its own.
type outages struct {
	t              *testing.T
	pg             *pgserver.Server
	url            string
	nats, twinNATS *natstest.ServerProcess
	victim, twin   *outflow
	load           *load
	ops            int
}

func startOutages(t *testing.T, ops int) *outages {
	t.Helper()
	s := &outages{t: t, ops: ops, pg: pgtest.Own(t, 0), nats: natstest.Process(t), twinNATS: natstest.Process(t)}
	var err error
	s.url, err = s.pg.CreateDatabase(t.Context(), "traces")
	must(t, err)
	s.victim = newOutflow(t, s.url, s.nats.URL(), "victim")
	s.twin = newOutflow(t, s.url, s.twinNATS.URL(), "twin")
	for _, o := range []*outflow{s.victim, s.twin} {
		o.init()
		o.start()
	}
	s.load = startLoad(t, s.url, traces(t, ops), 8, 1500, 7)
	return s
}

// written waits until about so many operations are committed.
func (s *outages) written(n int) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("%d operations written", n), func() error {
		if err, _ := s.load.failure.Load().(error); err != nil {
			s.t.Fatalf("write: %v", err)
		}
		if got := int(s.load.written.Load()); got < n {
			return fmt.Errorf("%d", got)
		}
		return nil
	})
}

// flood writes more WAL data than there is room for between the server and an outflow that takes nothing, until the server is stuck
// with it, or has nobody to send it to.
func (s *outages) flood() {
	s.t.Helper()
	conn := db(s.t, s.url)
	mustExec(s.t, conn, "SELECT pg_logical_emit_message(false, 'flood', repeat('x', 1000000)) FROM generate_series(1, 64)")
	eventually(s.t, "the server can't send more", func() error {
		var waits string
		err := conn.QueryRow(s.t.Context(), `SELECT CASE WHEN active_pid IS NULL THEN 'gone' ELSE coalesce(wait_event, '') END
			FROM pg_replication_slots LEFT JOIN pg_stat_activity ON pid = active_pid WHERE slot_name = 'victim'`).Scan(&waits)
		if err == nil && waits != "gone" && waits != "WalSenderWriteData" {
			err = fmt.Errorf("it waits for %q", waits)
		}
		return err
	})
}

// publishing waits until the victim publishes what is written from now on.
func (s *outages) publishing() {
	s.t.Helper()
	awaitMessages(s.t, js(s.t, s.nats.URL()), s.victim.stream, min(int(s.load.written.Load())+200, s.ops))
}

// end waits for the end of the load and compares everything.
func (s *outages) end() {
	s.t.Helper()
	s.load.wait(s.t)
	awaitMessages(s.t, js(s.t, s.nats.URL()), s.victim.stream, s.ops)
	awaitMessages(s.t, js(s.t, s.twinNATS.URL()), s.twin.stream, s.ops)
	compareTwins(s.t, s.url, s.nats.URL(), s.twinNATS.URL(), s.victim.stream, 0)
	if s.victim.term() != 0 || s.twin.term() != 0 {
		s.t.Error("the stop was not clean")
	}
}

// TestNATSOutages: NATS is killed and comes back, and hangs for longer than an acknowledgement is waited for.
func TestNATSOutages(t *testing.T) {
	slow(t)
	t.Parallel()
	s := startOutages(t, 12_000)
	s.written(1500)
	must(t, s.nats.Kill())
	s.written(3500)
	must(t, s.nats.Start())
	s.publishing()

	must(t, s.nats.Pause())
	const silence = 7 * time.Second // an acknowledgement is waited for 5 s
	time.Sleep(silence)
	must(t, s.nats.Resume())
	s.publishing()

	must(t, s.nats.Stop())
	must(t, s.nats.Start())
	s.end()
}

// TestPostgresOutages: PostgreSQL is stopped while NATS is away (it must not wait for us), crashes, and cuts the stream.
func TestPostgresOutages(t *testing.T) {
	slow(t)
	t.Parallel()
	s := startOutages(t, 9_000)
	s.written(1000)
	for round := 1; ; round++ {
		s.victim.ready()
		before := len(s.victim.log.String())
		must(t, s.nats.Kill())
		s.written(1000 + 500*round)
		s.flood()
		must(t, s.pg.Stop("fast")) // one that waits for outflow never stops
		ranOut := strings.Contains(s.victim.log.String()[before:], "NATS did not come back")
		must(t, s.pg.Start(t.Context()))
		must(t, s.nats.Start())
		s.publishing()
		if !ranOut {
			break
		}
		if round == 3 { // before that the machine may have stood still
			t.Fatal("PostgreSQL is let go only when the session's half minute without NATS is over")
		}
	}

	must(t, s.pg.Kill())
	must(t, s.pg.Start(t.Context()))
	s.publishing()

	conn := db(t, s.url)
	for range 3 {
		mustExec(t, conn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 'victim'")
		s.publishing()
	}
	s.end()
}

// TestStandby: a second outflow with the same slot waits, is ready, and takes over when the first is killed, again and again.
func TestStandby(t *testing.T) {
	slow(t)
	t.Parallel()
	const ops = 6000
	pg := pgtest.Own(t, 0)
	url, err := pg.CreateDatabase(t.Context(), "traces")
	must(t, err)
	ns := natstest.Process(t)
	first := newOutflow(t, url, ns.URL(), "shared")
	second := newOutflow(t, url, ns.URL(), "shared")
	first.init()
	first.start()
	first.state("running")
	second.start()
	active, standby := roles(first, second)

	l := startLoad(t, url, traces(t, ops), 8, 1500, 11)
	rnd := rand.New(rand.NewPCG(11, 12))
	for range 3 {
		awaitMessages(t, js(t, ns.URL()), active.stream, min(ops, int(l.written.Load())+200+rnd.IntN(400)))
		active.kill()
		standby.state("running")
		active.start()
		active, standby = roles(first, second)
	}
	l.wait(t)
	awaitMessages(t, js(t, ns.URL()), active.stream, ops)
	active.mustBeComplete(db(t, url), ns.URL())
	if code := standby.term(); code != 0 {
		t.Errorf("stop of the standby: exit code %d", code)
	}
	if code := active.term(); code != 0 {
		t.Errorf("stop: exit code %d", code)
	}
}

// roles waits until one of two runs and the other one stands by. Who stands still too long hands over.
func roles(a, b *outflow) (active, standby *outflow) {
	a.t.Helper()
	eventually(a.t, "one runs, one stands by", func() error {
		_, x := a.get("/readyz")
		_, y := b.get("/readyz")
		switch {
		case strings.HasPrefix(x, "running") && strings.HasPrefix(y, "standby"):
			active, standby = a, b
		case strings.HasPrefix(x, "standby") && strings.HasPrefix(y, "running"):
			active, standby = b, a
		default:
			return fmt.Errorf("%s; %s", x, y)
		}
		return nil
	})
	return active, standby
}

// state waits until /readyz says 200 and names a state.
func (o *outflow) state(want string) {
	o.t.Helper()
	eventually(o.t, want, func() error {
		if code, body := o.get("/readyz"); code != 200 || !strings.HasPrefix(body, want) {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
}
