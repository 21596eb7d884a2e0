package pipeline

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

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

// TestAStopWhileSomethingIsLeftIsNoFailure: the home is told to stop while it waits until what lies before an
// event that it leaves to others is stored. NATS has not failed, and the others hear what is published.
func TestAStopWhileSomethingIsLeftIsNoFailure(t *testing.T) {
	oneHome(t, 5*time.Second, func(t *testing.T, c *isle) {
		n := c.leavesTheSecond()
		c.js.slow = time.Second
		pr := c.run(options{islands: &c.cfg})
		c.echoes(c.greets(2))
		c.until(time.Minute, "the message before it", func() bool { return len(c.js.messages) > n })
		signs := c.wrote(relay.Published)
		must.Succeed(t, pr.stop())
		if c.wrote(relay.Published) != signs+1 {
			t.Error("the others were not told what is published")
		}
	})
}
