package outage

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// awaitResumption waits until the outflow is ready again after a failure of NATS, and reports whether the
// session of before went on. (It did not where NATS needed more than 30 s to come back, as on a machine that
// stands still.)
func awaitResumption(o *harness.Outflow, before harness.Life) bool {
	o.T.Helper()
	var now harness.Life
	harness.Eventually(o.T, "ready after the failure", func() error {
		if now = o.Life(); now == before {
			return errors.New("it did not notice")
		}
		if code, body := o.Get("/readyz"); code != 200 {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	return now.Sessions == before.Sessions
}

// holder is the process of the server that streams from a slot, 0 if none does.
func holder(t *testing.T, conn *pgx.Conn, slot string) (pid int) {
	t.Helper()
	harness.Must(t, conn.QueryRow(t.Context(), "SELECT coalesce(active_pid, 0) FROM pg_replication_slots "+
		"WHERE slot_name = $1", slot).Scan(&pid))
	return pid
}

// TestReplicationGoesOnWhileNATSRestarts: NATS is killed and started again under load. The stream of
// replication goes on, nothing is read again, and the stream is that of an undisturbed twin. When NATS stays
// away, PostgreSQL is let go.
func TestReplicationGoesOnWhileNATSRestarts(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	s := startOutages(t, 12_000)
	s.written(1000)
	s.victim.AwaitReady()
	conn, wentOn := harness.Connect(t, s.url), 0
	for range 8 {
		before, pid := s.victim.Life(), holder(t, conn, "victim")
		harness.Must(t, s.nats.Kill())
		harness.Must(t, s.nats.Start())
		if awaitResumption(s.victim, before) {
			wentOn++
			if now := holder(t, conn, "victim"); pid != 0 && now != pid &&
				s.victim.Life().Sessions == before.Sessions {
				t.Errorf("replication was started anew: process %d, then %d", pid, now)
			}
		}
		s.publishing()
	}
	if wentOn == 0 {
		t.Error("no session went on")
	}
	harness.Must(t, s.nats.Kill())
	harness.Eventually(t, "PostgreSQL is let go", func() error {
		if pid := holder(t, conn, "victim"); pid != 0 {
			return fmt.Errorf("process %d streams", pid)
		}
		return nil
	})
	harness.Must(t, s.nats.Start())
	s.end()
}

// TestARollingRestartOfNATSLosesNothing restarts the nodes of a cluster one after the other, under load.
func TestARollingRestartOfNATSLosesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Cluster(t, 3)
	o := harness.New(t, url, nats.URLs(), "rolling", "INIT_REPLICAS=3")
	o.Init()
	o.Start()
	ops, written := harness.RecordedOps(t, 30_000), 0
	for round := 0; ; round++ {
		l := harness.StartLoad(t, url, ops[written:written+3000], 4, 1500, uint64(round))
		written += 3000
		for node := range 3 {
			nats.Stop(node)
			if _, err := nats.WaitLeader(o.Stream, harness.Patience); err != nil {
				t.Fatal(err)
			}
			harness.Must(t, nats.Start(node))
			harness.Must(t, nats.WaitReady(harness.Patience))
		}
		l.Wait(t)
		harness.AwaitMessages(t, harness.JetStream(t, nats.URLs()), o.Stream, written)
		if o.Life().Resumptions > 0 {
			break
		}
		if round == 9 {
			t.Fatal("no session went on")
		}
	}
	o.MustStop(t)
	v, err := oracle.Compare(t.Context(), harness.Connect(t, url), "outbox",
		harness.JetStream(t, nats.URLs()), o.Stream, 0)
	harness.Must(t, err)
	if !v.OK() {
		t.Errorf("%s", v.String())
	}
}
