package e2e

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// life is what an outflow says of its sessions: how many it began, and how often one went on after NATS had failed.
type life struct{ sessions, resumptions float64 }

func (o *outflow) life() life {
	o.t.Helper()
	return life{metric(o.t, o, "outflow_sessions_total"), metric(o.t, o, "outflow_resumptions_total")}
}

// wentOn waits until the outflow is ready again after a failure of NATS, and reports whether the session of before went on. (It did not
// where NATS needed more than 30 s to come back, as on a machine that stands still.)
func (o *outflow) wentOn(before life) bool {
	o.t.Helper()
	var now life
	eventually(o.t, "ready after the failure", func() error {
		if now = o.life(); now == before {
			return errors.New("it did not notice")
		}
		if code, body := o.get("/readyz"); code != 200 {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	return now.sessions == before.sessions
}

// holder is the process of the server that streams from a slot, 0 if none does.
func holder(t *testing.T, conn *pgx.Conn, slot string) (pid int) {
	t.Helper()
	must(t, conn.QueryRow(t.Context(), "SELECT coalesce(active_pid, 0) FROM pg_replication_slots WHERE slot_name = $1", slot).Scan(&pid))
	return pid
}

// TestNATSHiccup: NATS is killed and started again under load. The stream of replication goes on, nothing is read again, and the stream is
// that of an undisturbed twin. When NATS stays away, PostgreSQL is let go.
func TestNATSHiccup(t *testing.T) {
	slow(t)
	t.Parallel()
	s := startOutages(t, 12_000)
	s.written(1000)
	s.victim.ready()
	conn, wentOn := db(t, s.url), 0
	for range 8 {
		before, pid := s.victim.life(), holder(t, conn, "victim")
		must(t, s.nats.Kill())
		must(t, s.nats.Start())
		if s.victim.wentOn(before) {
			wentOn++
			if now := holder(t, conn, "victim"); pid != 0 && now != pid && s.victim.life().sessions == before.sessions {
				t.Errorf("replication was started anew: process %d, then %d", pid, now)
			}
		}
		s.publishing()
	}
	if wentOn == 0 {
		t.Error("no session went on")
	}
	must(t, s.nats.Kill())
	eventually(t, "PostgreSQL is let go", func() error {
		if pid := holder(t, conn, "victim"); pid != 0 {
			return fmt.Errorf("process %d streams", pid)
		}
		return nil
	})
	must(t, s.nats.Start())
	s.end()
}

// TestRollingRestart restarts the nodes of a cluster one after the other, under load.
func TestRollingRestart(t *testing.T) {
	slow(t)
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Cluster(t, 3)
	o := newOutflow(t, url, nats.URLs(), "rolling", "INIT_REPLICAS=3")
	o.init()
	o.start()
	ops, written := traces(t, 30_000), 0
	for round := 0; ; round++ {
		l := startLoad(t, url, ops[written:written+3000], 4, 1500, uint64(round))
		written += 3000
		for node := range 3 {
			nats.Stop(node)
			if _, err := nats.WaitLeader(o.stream, patience); err != nil {
				t.Fatal(err)
			}
			must(t, nats.Start(node))
			must(t, nats.WaitReady(patience))
		}
		l.wait(t)
		awaitMessages(t, js(t, nats.URLs()), o.stream, written)
		if o.life().resumptions > 0 {
			break
		}
		if round == 9 {
			t.Fatal("no session went on")
		}
	}
	if code := o.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	v, err := oracle.Compare(t.Context(), db(t, url), "outbox", js(t, nats.URLs()), o.stream, 0)
	must(t, err)
	if !v.OK() {
		t.Errorf("%s", v.String())
	}
}

// TestTailLostInAHiccup: NATS comes back, and lacks the end of the stream, or of the record. The session does not go on: that is for an
// ordinary start to judge, with its second reading.
func TestTailLostInAHiccup(t *testing.T) {
	slow(t)
	t.Parallel()
	pg, twinNATS := pgtest.Server(t), natstest.Server(t).URL()
	const ops = 600
	cases := []tail{
		{name: "stream back", stream: part(back, 0.4)},
		{name: "stream hole", stream: part(hole, 0.4)},
		{name: "bucket back", bucket: newest(back, 2)},
		{name: "both back", stream: part(back, 0.5), bucket: newest(back, 2)},
	}
	all, loads := make([]*twins, len(cases)), make([]*load, len(cases))
	atOnce(t, len(cases), func(i int) {
		c := &cases[i]
		s := startTwins(t, pg, twinNATS, "hiccup", "SINK_DURABLE_AFTER=40s")
		all[i], loads[i] = s, startLoad(t, s.url, traces(t, ops), 4, 75, 3)
		s.stored(ops / 2)
		s.recorded(4)
		must(t, s.nats.Stop())
		c.stream.tear(t, s.nats.Dir(), s.victim.stream)
		c.bucket.tear(t, s.nats.Dir(), "KV_"+checkpoint.Bucket(s.victim.stream))
		must(t, s.nats.Start())
	})
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := all[i]
			s.on(t)
			loads[i].wait(t)
			s.equal(ops)
			if n := s.victim.life().sessions; n < 2 {
				t.Errorf("%v sessions", n)
			}
			if c.shows() {
				s.victim.mustSay("the log", s.victim.log.String(), "a loss was read", "published again")
			}
			if code := s.victim.term(); code != 0 {
				t.Errorf("stop: exit code %d", code)
			}
		})
	}
}
