package pipeline

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// noScratch is for what is held in memory alone.
type noScratch struct{ asked bool }

func (s *noScratch) Create() (reorder.ScratchFile, error) {
	s.asked = true
	return nil, errors.New("no scratch files")
}

// TestAHomeWaitsBehindAnyNumberOfEvents: it says hello with a number that its record has, publishes nothing
// and gives signs of life until the others have echoed, whatever its buffer holds. It yields, as they may
// never do; when they have, it says hello once more, and then publishes everything.
func TestAHomeWaitsBehindAnyNumberOfEvents(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		scratch := new(noScratch)
		rows := make([]row, 5)
		for i := range rows {
			rows[i] = row{"d", "a", "a:000001", "{}"}
		}
		for range 100 {
			c.pg.commit(rows)
		}
		pr := c.run(options{islands: &c.cfg, scratch: scratch})
		hello := c.greets(1)
		for range 100 {
			c.pg.commit(rows)
		}
		signs := c.wrote(relay.Published)
		c.sleep(time.Minute)
		if n := c.wrote(relay.Published) - signs; n < 100 || len(c.js.messages) > 0 {
			t.Errorf("while it waits it gives %d signs of life and publishes %d messages", n,
				len(c.js.messages))
		}
		if s := pr.p.Status(); s.State != StateEchoes || s.Ready() || !s.Alive(time.Now()) || !s.Holds() ||
			s.Held+s.InFlight > 0 || s.Lag(time.Now()) < time.Minute {
			t.Errorf("%+v", s)
		}
		c.echoes(hello)
		c.echoes(c.greets(2))
		c.published()
		c.wantSameStream()
		if s := pr.p.Status(); s.State != StateRunning {
			t.Errorf("%+v", s)
		}
		if scratch.asked || c.wrote(relay.Hello) != 2 || c.wrote(relay.Yield) != 1 {
			t.Errorf("scratch files %t, %d hellos, %d yields", scratch.asked, c.wrote(relay.Hello),
				c.wrote(relay.Yield))
		}
	})
}

// TestAHomeWithoutNATSYields: it reads on for rows meanwhile, and leaves out what was claimed, and nothing
// else. What it left is in the record before anything behind it is published.
func TestAHomeWithoutNATSYields(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.publishing()
		c.js.down = time.Now().Add(time.Minute)
		c.procs[0].broker().cut(true)
		c.write(20)
		to := c.pg.end
		c.until(2*c.cfg.Delay, "a yield", func() bool { return c.wrote(relay.Yield) == 1 })
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: to})
		c.write(3)
		c.sleep(30 * time.Second)
		if c.wrote(relay.Hello) != 1 || c.wrote(relay.Yield) != 1 {
			t.Errorf("%d hellos and %d yields", c.wrote(relay.Hello), c.wrote(relay.Yield))
		}
		hello := c.greets(2)
		c.sleep(c.cfg.Delay / 2)
		if len(c.js.messages) != 5 {
			t.Errorf("%d messages before the echo", len(c.js.messages))
		}
		c.echoes(hello)
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == 8 })
		for range 2 { // what was left is no message
			c.write(30)
			c.until(time.Minute, "published", func() bool { return len(c.js.messages) == c.events()-20 })
			c.sleep(2 * time.Second)
			c.procs[len(c.procs)-1].kill()
			c.run(options{islands: &c.cfg})
		}
		for _, r := range c.js.revisions {
			if rec, err := r.record(); err == nil && len(rec.Left) > 0 {
				if c.left = rec.Left; r.at.After(c.js.messages[5].at) {
					t.Errorf("recorded at %v, published from %v", r.at, c.js.messages[5].at)
				}
				break
			}
		}
		c.wantSameStream()
	})
}

// TestAHomeWhoseNATSGoesBeforeItsHelloYields: the number of a hello comes from there, and the home gives
// signs of life without one.
func TestAHomeWhoseNATSGoesBeforeItsHelloYields(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.publishing().kill()
		c.sleep(2 * c.cfg.Delay)
		c.write(20)
		to, signs := c.pg.end, c.wrote(relay.Published)
		c.pg.delay = time.Second // until it reads its first sign of life
		again := c.run(options{islands: &c.cfg})
		c.until(time.Minute, "a sign of life", func() bool { return c.wrote(relay.Published) > signs })
		c.js.down = time.Now().Add(5 * c.cfg.Delay)
		again.broker().cut(true)
		c.pg.delay = 0
		c.until(2*c.cfg.Delay, "a yield", func() bool { return c.wrote(relay.Yield) == 1 })
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: to})
		c.write(3)
		c.echoes(c.greets(2))
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == 8 })
		c.left = c.record().Left
		c.wantSameStream()
	})
}

// TestAHomeThatWaitsReadsOnWithoutNATS: what comes meanwhile is not waited for again.
func TestAHomeThatWaitsReadsOnWithoutNATS(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		pr := c.run(options{islands: &c.cfg})
		hello := c.greets(1)
		c.write(5)
		c.sleep(time.Second)
		c.js.down = time.Now().Add(time.Minute)
		pr.broker().cut(true)
		c.sleep(time.Second)
		c.echoes(hello)
		c.sleep(2 * time.Second)
		// it may publish and can't, from then on
		c.until(2*c.cfg.Delay, "a yield", func() bool { return c.wrote(relay.Yield) == 1 })
		c.echoes(c.greets(2))
		c.published()
		c.wantSameStream()
	})
}

// TestAHomeThatCouldNotWriteBeginsAgain: who may have been taken for dead publishes nothing before it has
// read what the others did.
func TestAHomeThatCouldNotWriteBeginsAgain(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.publishing()
		c.pg.down = time.Now().Add(2 * c.cfg.Delay)
		for _, u := range c.postgresConns() {
			u.cut(true)
		}
		c.write(5)
		to := c.pg.end
		hello := c.greets(2)
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: to})
		c.write(1)
		c.echoes(hello)
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == 6 })
		c.left = c.record().Left
		c.wantSameStream()
	})
}

// TestGapModeIsRefusedWhereOthersPublish: with the setting, and with a record that is from it. What was
// changed without the mode, and is durable, is no hindrance.
func TestGapModeIsRefusedWhereOthersPublish(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		gap := relay.Settings{Sort: outbox.ByGap, MaxEvents: 10, MaxBytes: 1 << 20, Gap: relay.Gap{
			Bound: time.Second, Cold: time.Second, Memory: 10, First: relay.DefaultFirst}}
		refused := func(s relay.Settings) {
			t.Helper()
			pr := c.run(options{islands: &c.cfg, settings: s})
			if f := pr.ends(time.Minute); f == nil || f.Code != codeGapMode || f.Class != outbox.Fatal {
				t.Errorf("it has ended with %v", pr.err)
			}
		}
		refused(gap)
		pr := c.run(options{settings: gap})
		c.until(time.Minute, "gap mode", func() bool {
			cp := c.record().Checkpoints
			return cp[len(cp)-1].Settings.ByGap()
		})
		must.Succeed(t, pr.stop())
		refused(c.first)
		pr = c.run(options{})
		c.write(5)
		c.sleep(10 * time.Second)
		c.write(5)
		c.sleep(10 * time.Second)
		must.Succeed(t, pr.stop())
		c.run(options{islands: &c.cfg})
		c.echoes(c.greets(1))
		c.write(5)
		c.published()
		c.wantSameStream()
		refused(gap)
	})
}

// TestAHomeThatCannotPublishSaysNothing: else nobody would publish for it.
func TestAHomeThatCannotPublishSaysNothing(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.publishing().kill()
		c.sleep(time.Second)
		c.js.messages[4].header.Due++
		c.pg.end += 0x100            // that of others
		c.pg.delay = 2 * time.Second // it has time to say something
		rows := len(c.pg.rows.written)
		again := c.run(options{islands: &c.cfg})
		if f := again.ends(time.Minute); f == nil || f.Code != codeDivergence {
			t.Errorf("it has ended with %v", again.err)
		}
		if n := len(c.pg.rows.written); n != rows {
			t.Errorf("it has said %d rows", n-rows)
		}
	})
}

// TestAHomeWhoseStreamTakesNothingYields: NATS answers, and refuses all messages. So others publish, and the
// home tries again from time to time. When the stream takes messages again it publishes what is left.
func TestAHomeWhoseStreamTakesNothingYields(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.publishing()
		c.sleep(2 * time.Second)
		c.js.full = true
		c.write(5)
		c.until(2*c.cfg.Delay, "a yield", func() bool { return c.wrote(relay.Yield) == 1 })
		c.sleep(2*c.cfg.Delay - time.Second)
		if n := c.wrote(relay.Hello); n != 1 {
			t.Errorf("%d hellos in the time of two turns of the other cluster", n)
		}
		c.echoes(c.greets(2))
		c.until(10*time.Second, "another yield", func() bool { return c.wrote(relay.Yield) == 2 })
		c.js.full = false
		c.echoes(c.greets(3))
		c.published()
	})
}

// TestAnOutageBehindAnotherIsNotOneWithIt: two short failures of NATS, between which there was nothing to be
// stored, because what came is held. Nobody has to publish for the home.
func TestAnOutageBehindAnotherIsNotOneWithIt(t *testing.T) {
	oneHome(t, time.Hour, func(t *testing.T, c *isle) {
		c.run(options{islands: &c.cfg, noHeartbeats: true})
		c.echoes(c.greets(1))
		c.write(5)
		for range 3 {
			c.sleep(2 * c.cfg.Delay)
			c.procs[0].broker().cut(true)
		}
		c.sleep(c.cfg.Delay)
		if n := c.wrote(relay.Yield); n > 0 {
			t.Errorf("%d yields", n)
		}
	})
}

// TestAHomeThatIsHeldSaysNothing: a process that lives, and waits for a person to repair its stream, gives no
// signs of life, although it has compared the stream before.
func TestAHomeThatIsHeldSaysNothing(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.cfg.Delay, c.cfg.Beat = 5*time.Minute, 5*time.Second
		pr := c.run(options{islands: &c.cfg, hold: true})
		c.echoes(c.greets(1))
		c.write(5)
		c.published()
		c.js.messages[len(c.js.messages)-1].header.Due++
		c.pg.end += 0x100
		c.write(1)
		c.pg.delay = 200 * time.Millisecond
		pr.broker().cut(true)
		c.until(5*time.Minute, "the fault", func() bool { return pr.p.Status().State == StateFault })
		signs := c.wrote(relay.Published)
		c.sleep(20 * time.Minute)
		if n := c.wrote(relay.Published) - signs; n > 0 {
			t.Errorf("%d signs of life", n)
		}
	})
}

// TestBetweenAttemptsOthersHaveTheirTurns: the fault is found behind the comparison of the stream, at each
// attempt again, and such an attempt gives signs of life.
func TestBetweenAttemptsOthersHaveTheirTurns(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.cfg.Delay, c.cfg.Beat = time.Minute, 5*time.Second
		pr := c.run(options{islands: &c.cfg, hold: true})
		c.echoes(c.greets(1))
		c.write(5)
		c.published()
		c.js.poison = "poison"
		c.pg.commit([]row{{"d", "a", "k", "poison"}})
		c.until(5*time.Minute, "the fault", func() bool { return pr.p.Status().State == StateFault })
		silent, newest, signs, hellos := time.Duration(0), time.Now(), c.wrote(relay.Published), 1
		for begun := time.Now(); time.Since(begun) < 20*time.Minute; c.sleep(100 * time.Millisecond) {
			if n := c.wrote(relay.Hello); n > hellos {
				hellos = n
				c.echoes(c.greets(n))
			}
			if n := c.wrote(relay.Published); n > signs {
				silent, newest, signs = max(silent, time.Since(newest)), time.Now(), n
			}
		}
		if len(pr.opens) < 5 || silent < 4*c.cfg.Delay-time.Second {
			t.Errorf("%d attempts, at most %v between two signs of life", len(pr.opens), silent)
		}
		c.js.poison = ""
	})
}

// unanswered stores each record, and does not say so.
type unanswered struct{ Store }

func (u unanswered) Save(ctx context.Context, rec *checkpoint.Record, last uint64) (uint64, error) {
	if _, err := u.Store.Save(ctx, rec, last); err != nil {
		return 0, err
	}
	<-ctx.Done()
	return 0, ctx.Err()
}

// TestAHomeWhoseRecordsAreNotAnsweredYields: each new session finds what the one before has stored.
func TestAHomeWhoseRecordsAreNotAnsweredYields(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.publishing().kill()
		c.sleep(2 * c.cfg.Delay)
		c.write(5)
		c.run(options{islands: &c.cfg, open: func(l *Conns) { l.Store = unanswered{l.Store} }})
		c.until(10*c.cfg.Delay, "a yield", func() bool { return c.wrote(relay.Yield) > 0 })
	})
}
