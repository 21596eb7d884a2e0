package repair

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// pair is a primary and a standby of it.
type pair struct {
	t                *testing.T
	primary, standby *pgserver.Server
}

// startPair makes a primary with a database for an outflow, and, once the slot is there, the standby: one
// that synchronises slots must not see that of a database that it has not replayed yet. It starts outflow
// with an address that leads to whichever is the primary.
func startPair(t *testing.T, major int, init func(url string) []*harness.Outflow) (p *pair, url string) {
	t.Helper()
	p = &pair{t: t, primary: pgtest.Own(t, major)}
	url, err := p.primary.CreateDatabase(t.Context(), "app")
	harness.Must(t, err)
	installed := init(url)
	var settings map[string]string
	if major >= 17 {
		// synchronised says when; by itself the worker naps up to 30 s
		settings = map[string]string{"sync_replication_slots": "off"}
	}
	p.standby, err = p.primary.Standby(t.Context(), "standby", settings)
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("end of the standby's log:\n%s", lastBytes(p.standby.Log(), 4000))
		}
		if err := p.standby.Remove(); err != nil {
			t.Error(err)
		}
	})
	url = fmt.Sprintf(
		"postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/app?sslmode=disable&target_session_attrs=read-write",
		p.primary.Port, p.standby.Port)
	for _, o := range installed {
		o.Set("POSTGRES_URL=" + url)
		o.Start()
	}
	return p, url
}

func lastBytes(s string, n int) string { return s[max(0, len(s)-n):] }

// caughtUp waits until the standby has everything.
func (p *pair) caughtUp() {
	p.t.Helper()
	a, b := harness.Connect(p.t, p.primary.URL("postgres")), harness.Connect(p.t, p.standby.URL("postgres"))
	harness.Eventually(p.t, "the standby has everything", func() error {
		var end string
		var has bool
		harness.Must(p.t, a.QueryRow(p.t.Context(), "SELECT pg_current_wal_flush_lsn()::text").Scan(&end))
		harness.Must(p.t, b.QueryRow(p.t.Context(), "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn",
			end).Scan(&has))
		if !has {
			return fmt.Errorf("not %s", end)
		}
		return nil
	})
}

// synchronised waits until the standby has slots that a promotion keeps. A new one is not before the
// primary's has moved on.
func (p *pair) synchronised(slots ...string) {
	p.t.Helper()
	primary, standby := harness.Connect(p.t, p.primary.URL("postgres")), harness.Connect(p.t,
		p.standby.URL("postgres"))
	harness.Eventually(p.t, "slots are synchronised", func() error {
		harness.Exec(p.t, primary, "SELECT pg_log_standby_snapshot()")
		if _, err := standby.Exec(p.t.Context(), "SELECT pg_sync_replication_slots()"); err != nil {
			return err
		}
		n := harness.Value[int](p.t, standby, "SELECT count(*) FROM pg_replication_slots "+
			"WHERE slot_name = ANY($1) AND synced AND NOT temporary", slots)
		if n < len(slots) {
			return fmt.Errorf("%d of %d", n, len(slots))
		}
		return nil
	})
}

// failover lets the primary crash, for ever, and promotes the standby.
func (p *pair) failover() {
	p.t.Helper()
	harness.Must(p.t, p.primary.Kill())
	harness.Must(p.t, p.standby.Promote(p.t.Context()))
}

// TestAPromotionThatLostCommitsStopsOutflow: the standby that is promoted lacks the last commits, and they
// are in the stream already. Whatever the slot looks like on it, outflow stops.
func TestAPromotionThatLostCommitsStopsOutflow(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	cases := []struct {
		name  string
		major int
		after func(g *gapSetup) // on the new primary
		code  string
	}{
		{"15, no slot", 15, func(g *gapSetup) { g.write(50) }, "slot_missing"},
		{"15, slot made by hand", 15, (*gapSetup).createSlot, "timeline_lost"},
		{"18, synchronised slot", 18, func(g *gapSetup) { g.write(60) }, "timeline_lost"},
		{"17, synchronised slot", 17, func(*gapSetup) {}, "timeline_lost"},
		{"15, slot made by hand and more written", 15, func(g *gapSetup) {
			g.write(50)
			g.createSlot()
		}, "timeline_lost"},
		{"17, synchronised slot and more written", 17, func(g *gapSetup) { g.write(60) }, "timeline_lost"},
	}
	cases = harness.Part(2, cases)
	all := make([]*gapSetup, len(cases))
	harness.AtOnce(t, len(cases), func(i int) {
		c := cases[i]
		if !installed(c.major) {
			return
		}
		g := &gapSetup{nats: natstest.Process(t)}
		var p *pair
		p, g.url = startPair(t, c.major, func(url string) []*harness.Outflow {
			g.Outflow = harness.New(t, url, g.nats.URL(), "app")
			g.Init()
			return []*harness.Outflow{g.Outflow}
		})
		g.pg, g.conn, g.js = p.primary, harness.Connect(t, p.primary.URL("app")), harness.JetStream(t,
			g.nats.URL())
		g.write(20)
		harness.AwaitMessages(t, g.js, g.Stream, 20)
		p.caughtUp()
		if c.major >= 17 {
			p.synchronised(g.Slot)
		}
		harness.Must(t, p.standby.Detach(t.Context()))
		harness.Eventually(t, "the standby receives nothing", func() error {
			n := harness.Value[int](t, g.conn, "SELECT count(*) FROM pg_stat_replication WHERE "+
				"application_name = 'standby'")
			if n > 0 {
				return fmt.Errorf("%d walsenders", n)
			}
			return nil
		})
		g.write(20) // which only the primary and the stream will have had
		harness.AwaitMessages(t, g.js, g.Stream, 40)
		harness.Eventually(t, "the record knows them", func() error {
			if r := g.Status(); r.Checkpoint.Seq < 40 {
				return fmt.Errorf("checkpoint %v", r.Checkpoint)
			}
			return nil
		})
		promote := func() {
			p.failover()
			g.conn = harness.Connect(t, g.url)
			g.from = harness.WALEnd(g.T, g.conn)
			g.to = g.from
			c.after(g)
			g.sum = g.digest()
		}
		if i%2 == 0 {
			g.Kill()
			promote()
			g.Start()
		} else {
			whileFrozen(g.Outflow, promote)
		}
		all[i] = g
	})
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			all[i].mustStand(t, c.major, c.code, c.major == 15, false) // a synchronised slot has the rest
		})
	}
}

// TestOutflowGoesOnAfterAFailoverWithoutLoss: the primary crashes under load, and the standby that is
// promoted has all that was published, because commits wait for it (synchronous_standby_names) and so does
// the walsender (synchronized_standby_slots). Outflow goes on where it was: the stream is the one that a
// second outflow makes, which nobody killed.
func TestOutflowGoesOnAfterAFailoverWithoutLoss(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	for _, major := range []int{17, 18} {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			t.Parallel()
			if !installed(major) {
				SkipWithoutMajor(t, major)
			}
			const ops = 3000
			s := &harness.Twins{T: t, NATS: natstest.Process(t)}
			twinNATS := natstest.Server(t)
			s.JS, s.TwinJS = harness.JetStream(t, s.NATS.URL()), harness.JetStream(t, twinNATS.URL())
			var p *pair
			p, s.URL = startPair(t, major, func(url string) []*harness.Outflow {
				s.Instance, s.Twin = harness.New(t, url, s.NATS.URL(), "victim"), harness.New(t, url,
					twinNATS.URL(), "twin")
				s.Instance.Init()
				s.Twin.Init()
				return []*harness.Outflow{s.Instance, s.Twin}
			})
			admin := harness.Connect(t, p.primary.URL("postgres"))
			for _, sql := range []string{
				"ALTER SYSTEM SET synchronous_standby_names = 'standby'",
				"ALTER SYSTEM SET synchronized_standby_slots = 'standby'", "SELECT pg_reload_conf()",
			} {
				harness.Exec(t, admin, sql)
			}
			l := harness.StartLoad(t, s.URL, harness.RecordedOps(t, ops), 8, 500, 5)
			s.AwaitStored(ops / 3)
			p.synchronised("victim", "twin")
			// (startPair has turned off one of the settings that a standby needs.)
			out := s.Instance.MustRun("doctor", "--only", "standby", "--skip", "standby.settings",
				"--timeout", "1m", "--standby",
				p.standby.URL("app"))
			s.Instance.MustContain("outflow doctor", out, "7 ok")
			s.Instance.Kill()
			p.failover()
			s.Instance.Start()
			l.Wait(t)
			s.Conn = harness.Connect(t, s.URL)
			const more = 50 // on the new timeline, however slow the rest was
			harness.Exec(t, s.Conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT "+
				"'later', 'anna', n, '{}' FROM generate_series(1, $1) n", more)
			s.MustBeEqual(ops + more)
			timelines := map[uint32]int{}
			for _, m := range harness.Messages(t, s.JS, s.Instance.Stream) {
				timelines[m.Outflow.Timeline]++
			}
			if len(timelines) != 2 || timelines[1] == 0 || timelines[2] == 0 {
				t.Errorf("messages by timeline: %v, want some on 1 and some on 2", timelines)
			}
			if s.Instance.Stop() != 0 || s.Twin.Stop() != 0 {
				t.Error("the stop was not clean")
			}
			if strings.Contains(s.Twin.Log.String(), "a loss was read") {
				t.Error("a failover without loss was taken for one")
			}
		})
	}
}
