package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// oneHome runs a test of cluster 1 of two. What cluster 2 says is up to the test.
func oneHome(t *testing.T, horizon time.Duration, f func(t *testing.T, c *isle)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		first := relay.Settings{Horizon: horizon, Sort: outbox.BySeqKey, MaxEvents: 10, MaxBytes: 1 << 20}
		w := newIslands(t, 1, 2, first, time.Second)
		w.ends()
		<-w.ended
		c := w.isles[0]
		c.pg.rows = rowFaults{}
		c.held = true
		c.mu.Lock()
		defer c.mu.Unlock()
		f(t, c)
		c.killAll()
		c.sleep(time.Minute) // what is still on its way arrives
		if c.broken != nil {
			t.Error(c.broken)
		}
	})
}

// hears lets a row of cluster 2 come.
func (c *isle) hears(row relay.ClusterRow) {
	row.By = 2
	c.pg.log(&transaction{logical: []logical{{prefix: relay.ClusterPrefix, content: row.Content()}},
		time: commitTime(time.Now()), control: true, home: c.pg.end, origin: clusterOrigin(2)})
}

// wrote counts the rows of a kind that cluster 1 has written.
func (c *isle) wrote(kind relay.ClusterRowKind) (n int) {
	for _, row := range c.pg.rows.written {
		if row.Kind == kind {
			n++
		}
	}
	return n
}

// said is where the newest hello of cluster 1 lies.
func (c *isle) said() (at outbox.LSN) {
	for _, x := range c.pg.wal {
		for _, m := range x.logical {
			if row, err := relay.ParseClusterRow(m.content); err == nil && row.Kind == relay.Hello {
				at = x.end
			}
		}
	}
	return at
}

// greets waits until cluster 1 has said its n-th hello, and returns it.
func (c *isle) greets(n int) (hello relay.ClusterRow) {
	c.t.Helper()
	c.until(time.Minute, "a hello", func() bool { return c.wrote(relay.Hello) == n })
	for _, row := range c.pg.rows.written {
		if row.Kind == relay.Hello {
			hello = row
		}
	}
	if rec := c.record(); rec.Hello < hello.Hello {
		c.t.Errorf("hello %d is said, the record has %d", hello.Hello, rec.Hello)
	}
	return hello
}

func (c *isle) echoes(hello relay.ClusterRow) {
	c.hears(relay.ClusterRow{Kind: relay.Echo, Home: 1, Hello: hello.Hello})
}

// publishing lets the first process come so far that it publishes.
func (c *isle) publishing() *process {
	c.t.Helper()
	pr := c.run(options{islands: &c.cfg})
	c.echoes(c.greets(1))
	c.write(5)
	c.published()
	return pr
}

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

// TestAHomeThatStartsAgainSoonSaysNoHello, whether it has published or waits for echoes; one that comes too
// late does.
func TestAHomeThatStartsAgainSoonSaysNoHello(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		pr := c.run(options{islands: &c.cfg})
		hello := c.greets(1)
		c.write(5)
		for range 3 {
			c.sleep(2 * time.Second)
			pr.kill()
			c.sleep(time.Second)
			pr = c.run(options{islands: &c.cfg})
		}
		c.sleep(c.cfg.Delay / 2)
		if len(c.js.messages) > 0 {
			t.Errorf("%d messages without an echo", len(c.js.messages))
		}
		c.echoes(hello)
		for range 3 {
			c.write(5)
			c.published()
			c.sleep(2 * time.Second)
			pr.postgres().cut(true)
			c.write(5)
			c.published()
			c.sleep(2 * time.Second)
			if at := c.record().Heard.At; c.record().Checkpoints[0].Due < c.said() {
				t.Errorf("the record reaches back to the hello, and has the rows up to %v", at)
			}
			pr.kill()
			c.write(5)
			c.sleep(time.Second)
			pr = c.run(options{islands: &c.cfg})
			c.published()
		}
		if n := c.wrote(relay.Hello); n != 1 {
			t.Errorf("%d hellos", n)
		}
		pr.kill()
		c.write(5)
		c.sleep(c.cfg.Delay)
		c.run(options{islands: &c.cfg})
		c.echoes(c.greets(2))
		c.published()
		c.wantSameStream()
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

// TestARowThatComesTooLateIsNoSignOfLife: a process that stood still writes a row before it reads on. It
// leaves to others what they have claimed before that.
func TestARowThatComesTooLateIsNoSignOfLife(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.publishing()
		takes := c.pg.writeDelay
		c.pg.writeDelay = time.Hour
		c.sleep(2 * c.cfg.Delay)
		signs := c.wrote(relay.Published)
		c.pg.writeDelay, c.pg.delay = takes, c.cfg.Delay
		c.write(5)
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
		c.write(1)
		c.until(time.Minute, "a sign of life", func() bool { return c.wrote(relay.Published) > signs })
		c.pg.delay = 0
		c.echoes(c.greets(2))
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == 6 })
		c.left = c.record().Left
		c.wantSameStream()
	})
}

// TestARowBehindASilenceIsNoSignOfLifeAtAStart: a process that starts soon behind the one before stands still
// before it has read its first sign of life. What it says behind that makes it no start that was soon.
func TestARowBehindASilenceIsNoSignOfLifeAtAStart(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		pr := c.publishing()
		c.sleep(5 * time.Second)
		pr.kill()
		takes, signs := c.pg.writeDelay, c.wrote(relay.Published)
		c.pg.delay = 3 * c.cfg.Delay
		c.run(options{islands: &c.cfg})
		said := func() bool { return c.wrote(relay.Published) > signs }
		c.until(c.cfg.Delay/4, "its first sign of life", said)
		c.pg.writeDelay = time.Hour
		c.sleep(c.cfg.Delay + time.Second)
		c.write(5)
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
		c.write(1)
		signs, c.pg.writeDelay = c.wrote(relay.Published), takes
		c.until(time.Minute, "another one", said)
		c.pg.delay = 0
		c.echoes(c.greets(2))
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == 6 })
		c.left = c.record().Left
		c.wantSameStream()
	})
}

// TestWhatAHomeHasSaidComesAgain: its broker loses messages, and others have claimed up to what comes behind
// them. They claim nothing that was said to be published.
func TestWhatAHomeHasSaidComesAgain(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		c.publishing()
		signs := c.wrote(relay.Published)
		c.until(time.Minute, "signs of life", func() bool { return c.wrote(relay.Published) > signs+2 })
		c.procs[0].kill()
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
		c.write(3)
		c.sleep(2 * c.cfg.Delay)
		c.js.messages = c.js.messages[:3]
		c.run(options{islands: &c.cfg})
		c.echoes(c.greets(2))
		c.published()
		c.wantSameStream()
	})
}

// TestWhatWasPublishedBeforeSomethingWasLeftComesAgain: also what the home had not said yet, and others have
// claimed. It is before what was left, so it was published.
func TestWhatWasPublishedBeforeSomethingWasLeftComesAgain(t *testing.T) {
	oneHome(t, 20*time.Millisecond, func(t *testing.T, c *isle) {
		pr := c.publishing()
		c.sleep(2 * time.Second)
		signs := c.wrote(relay.Published)
		c.until(time.Minute, "a sign of life", func() bool { return c.wrote(relay.Published) > signs })
		c.write(3)
		c.published()
		c.write(1)
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
		c.write(1)
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == 9 })
		if n := c.wrote(relay.Published); n != signs+1 || len(c.record().Left) != 1 {
			t.Fatalf("%d signs of life, %v is left", n-signs, c.record().Left)
		}
		pr.kill()
		c.js.messages = c.js.messages[:5]
		c.run(options{islands: &c.cfg})
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == 9 })
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

// TestAHomeIsNotSilentWhilePublishing: to leave a message to others takes seconds here, in which it gives no
// sign of life. Whether it may publish the next one of the window is asked anew.
func TestAHomeIsNotSilentWhilePublishing(t *testing.T) {
	oneHome(t, 200*time.Millisecond, func(t *testing.T, c *isle) {
		c.publishing()
		c.sleep(2 * time.Second)
		n := len(c.js.messages)
		c.write(1)
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
		c.write(1)
		c.js.latency = 4500 * time.Millisecond
		c.until(time.Minute, "left", func() bool { return len(c.record().Left) > 0 })
		c.sleep(c.js.latency + 200*time.Millisecond)
		c.js.latency, c.left = 200*time.Microsecond, c.record().Left
		c.sleep(5 * time.Second)
		if len(c.js.messages) > n {
			t.Error("a message was published behind a silence of half of the delay, without a hello")
		}
		c.echoes(c.greets(2))
		c.until(10*time.Second, "the other one", func() bool { return len(c.js.messages) == n+1 })
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

// standing is a process that stands still when it has handed the message of a sequence to its publisher, and
// is maybe told to stop then.
type standing struct {
	seq   uint64
	takes time.Duration
	stop  func()
}

func (*standing) Found(*relay.Event, *outbox.Header, uint64, time.Time, time.Time) {}
func (*standing) Acked(uint64)                                                     {}

func (s *standing) Sent(_ *relay.Event, _ *outbox.Header, seq uint64, _ time.Time) {
	if seq == s.seq {
		s.seq = 0
		time.Sleep(s.takes)
		s.stop()
	}
}

// TestWhatOthersHaveClaimedIsNotSent: the process stands still between the decision to publish a message and
// its first byte.
func TestWhatOthersHaveClaimedIsNotSent(t *testing.T) {
	for name, of := range map[string]struct {
		rows, published int // of a transaction; of these, before the process stands still
		stops           bool
	}{
		"the only one":                 {rows: 1},
		"one of a window":              {rows: burst + 100, published: burst - 1},
		"the process is told to stop":  {rows: 1, stops: true},
		"and has published a part too": {rows: burst + 100, published: burst - 1, stops: true},
	} {
		rounds := 1
		if of.stops {
			rounds = 8 // the loop may take something else first
		}
		for round := range rounds {
			t.Run(fmt.Sprint(name, round), func(t *testing.T) {
				oneHome(t, 0, func(t *testing.T, c *isle) {
					claimedMeanwhile(t, c, of.rows, of.published, of.stops)
				})
			})
		}
	}
}

func claimedMeanwhile(t *testing.T, c *isle, rows, published int, stops bool) {
	t.Helper()
	still := &standing{seq: uint64(5 + published + 1), takes: 2 * c.cfg.Delay, stop: func() {}}
	pr := c.run(options{islands: &c.cfg, open: func(l *Conns) { l.Observer = still }})
	if stops {
		still.stop = pr.cancel
	}
	c.echoes(c.greets(1))
	c.write(5)
	c.published()
	c.sleep(2 * time.Second)
	c.pg.commit(slices.Repeat([]row{{"d", "a", "a:000001", "{}"}}, rows))
	c.sleep(c.cfg.Delay)
	c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
	n := len(c.js.messages)
	if stops {
		c.sleep(2 * c.cfg.Delay)
	} else {
		c.echoes(c.greets(2))
		c.sleep(2 * time.Second)
	}
	if m := len(c.js.messages); m != n {
		t.Errorf("%d messages when others claimed the rest, %d later", n, m)
	}
}

// TestAHomeGivesSignsOfLifeWhileItSorts: a transaction takes more than half of the delay to be put in order.
// A session that was silent meanwhile would begin again, and so would the next one.
func TestAHomeGivesSignsOfLifeWhileItSorts(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		pr := c.run(options{islands: &c.cfg, scratch: slow{},
			settings: relay.Settings{Sort: outbox.ByCommit, MaxEvents: 10, MaxBytes: 1 << 20}})
		c.echoes(c.greets(1))
		c.write(5)
		c.published()
		c.sleep(3 * time.Second)
		rows := make([]row, 3000)
		for i := range rows {
			rows[i] = row{"d", "a", "a:000001", strings.Repeat("0123456789", 100)}
		}
		c.pg.commit(rows)
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == 3005 })
		if len(pr.opens) != 1 || c.wrote(relay.Hello) != 1 {
			t.Errorf("%d sessions, %d hellos", len(pr.opens), c.wrote(relay.Hello))
		}
	})
}

// TestARowOfTheProcessBeforeIsNoFirstOne: it comes behind the end of the WAL that the start has read, and the
// start takes longer than the delay until it says its own. Others publish meanwhile.
func TestARowOfTheProcessBeforeIsNoFirstOne(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		pr := c.publishing()
		c.sleep(2 * time.Second)
		signs := c.wrote(relay.Published)
		c.until(time.Minute, "a sign of life", func() bool { return c.wrote(relay.Published) > signs })
		c.write(1)
		c.published()
		pr.kill()
		signs = c.wrote(relay.Published)
		c.pg.delay = 12 * time.Second // so long it makes again what is in the stream
		again := c.run(options{islands: &c.cfg})
		c.until(time.Second, "a session", func() bool { return again.p.Status().State == StateComparing })
		c.sleep(100 * time.Millisecond)
		late := relay.ClusterRow{Kind: relay.Published, By: 1, To: 1}
		c.pg.commit(nil, logical{prefix: relay.ClusterPrefix, content: late.Content()})
		c.sleep(time.Second)
		c.write(5)
		c.sleep(c.cfg.Delay)
		if n := c.wrote(relay.Published); n != signs {
			t.Fatalf("%d signs of life meanwhile", n-signs)
		}
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
		c.until(time.Minute, "a sign of life", func() bool { return c.wrote(relay.Published) > signs })
		c.sleep(20 * time.Second)
		c.pg.delay = 0
		c.echoes(c.greets(2))
		c.write(1)
		c.until(time.Minute, "what comes then", func() bool { return len(c.js.messages) >= 7 })
		c.left = c.record().Left
		c.wantSameStream()
	})
}

// TestWhatWasPublishedIsSaidAtAStop: nothing has failed, so nothing is published twice.
func TestWhatWasPublishedIsSaidAtAStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newIslands(t, 1, 2, relay.Settings{Horizon: 20 * time.Millisecond, Sort: outbox.BySeqKey,
			MaxEvents: 1000, MaxBytes: 1 << 20}, time.Second)
		for _, c := range w.isles {
			c.pg.rows = rowFaults{}
			c.start()
		}
		time.Sleep(10 * time.Second)
		home, elsewhere := w.isles[0], w.isles[1].readers[0]
		for range 100 {
			home.write(1)
			time.Sleep(50 * time.Millisecond)
		}
		time.Sleep(200 * time.Millisecond)
		must.Succeed(t, home.pr.stop())
		time.Sleep(time.Minute)
		if n := len(home.inStream()); n != 100 || len(elsewhere.stream()) > 0 {
			t.Errorf("%d of 100 events in the home's stream, %d in the other", n, len(elsewhere.stream()))
		}
		for _, c := range w.isles {
			c.kill()
		}
		w.ends()
		<-w.ended
		time.Sleep(time.Minute)
	})
}

// TestAHomeThatWaitsSendsNothingAtAStop: a yield of the process before comes right behind an event that was
// handed to the publisher. Another cluster claims that by the yield.
func TestAHomeThatWaitsSendsNothingAtAStop(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		pr := c.publishing()
		c.sleep(2 * time.Second)
		c.write(1)
		yield := relay.ClusterRow{Kind: relay.Yield, By: 1, Hello: 1}
		c.pg.commit(nil, logical{prefix: relay.ClusterPrefix, content: yield.Content()})
		c.write(1)
		c.sleep(time.Second)
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
		c.sleep(2 * time.Second)
		n := len(c.js.messages)
		pr.cancel()
		c.sleep(5 * time.Second)
		if m := len(c.js.messages); m != n {
			t.Errorf("%d messages before the stop, %d behind it", n, m)
		}
	})
}

// recorded calls f for each record that is stored, before its process knows that.
type recorded struct {
	Store
	f func(*checkpoint.Record)
}

func (r recorded) Save(ctx context.Context, rec *checkpoint.Record, last uint64) (uint64, error) {
	revision, err := r.Store.Save(ctx, rec, last)
	if err == nil {
		r.f(rec)
	}
	return revision, err
}

// TestWhatLiesBeforeWhatIsLeftIsStored: a window has an event that others have claimed behind one that they
// have not. The home is killed when its record says that it leaves the first one.
func TestWhatLiesBeforeWhatIsLeftIsStored(t *testing.T) {
	oneHome(t, 5*time.Second, func(t *testing.T, c *isle) {
		c.publishing()
		c.sleep(10 * time.Second)
		n := len(c.js.messages)
		c.procs[0].kill()
		c.sleep(2 * c.cfg.Delay)
		c.insert("d", "a:000100")
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
		c.sleep(time.Second)
		c.insert("d", "a:000050") // in the same window, and before it
		killed := false
		c.run(options{islands: &c.cfg, open: func(l *Conns) {
			l.Store = recorded{l.Store, func(rec *checkpoint.Record) {
				if len(rec.Left) > 0 && !killed {
					killed = true
					c.with(func() { c.procs[len(c.procs)-1].dies() })
				}
			}}
		}})
		c.echoes(c.greets(2))
		c.until(time.Minute, "the kill", func() bool { return killed })
		if m := len(c.js.messages); m != n+1 {
			t.Errorf("%d messages when the record says what is left, %d before", m, n)
		}
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
