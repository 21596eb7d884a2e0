package pipeline

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
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

// leavesTheSecond is a home that was killed, with a window of two events before it, of which others have
// claimed the second. It returns how many messages the stream has.
func (c *isle) leavesTheSecond() int {
	c.publishing()
	c.sleep(10 * time.Second)
	n := len(c.js.messages)
	c.procs[0].kill()
	c.sleep(2 * c.cfg.Delay)
	c.insert("d", "a:000100")
	c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
	c.sleep(time.Second)
	c.insert("d", "a:000050") // in the same window, and before it
	return n
}

// TestWhatLiesBeforeWhatIsLeftIsStored: a window has an event that others have claimed behind one that they
// have not. The home is killed when its record says that it leaves the first one.
func TestWhatLiesBeforeWhatIsLeftIsStored(t *testing.T) {
	oneHome(t, 5*time.Second, func(t *testing.T, c *isle) {
		n := c.leavesTheSecond()
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

// TestAnIdleHomeThatWasSilentAsksAtOnce: it could write no rows for as long as makes others claim, and has
// nothing to publish. It says hello as soon as it can, while they are there to answer, and not when something
// is to be published.
func TestAnIdleHomeThatWasSilentAsksAtOnce(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		pr := c.publishing()
		c.sleep(5 * time.Second)
		takes := c.pg.writeDelay
		c.pg.writeDelay = time.Hour
		c.sleep(c.cfg.Delay)
		c.pg.writeDelay = takes
		c.echoes(c.greets(2))
		c.sleep(10 * c.cfg.Delay)
		if n := c.wrote(relay.Hello); n != 2 {
			t.Errorf("%d hellos", n)
		}
		c.write(1) // cluster 2 is gone from now on
		c.published()
		pr.kill()
		c.sleep(time.Second)
		c.run(options{islands: &c.cfg})
		c.write(1)
		c.published()
	})
}
