package pipeline

import (
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
)

// loses makes the broker forget the record's revisions from one on, and no message.
func (c *isle) loses(from func(*checkpoint.Record) bool) {
	c.t.Helper()
	n := slices.IndexFunc(c.js.revisions, func(r revision) bool {
		rec, err := r.record()
		return err == nil && from(rec)
	})
	if n < 1 {
		c.t.Fatal("there is no such revision")
	}
	for _, l := range c.brokerConns() {
		l.cut(true)
	}
	c.js.revisions = c.js.revisions[:n]
}

// leaves lets cluster 2 publish n events for cluster 1 while that is silent, which publishes what follows.
func (c *isle) leaves(n, hello int) *process {
	c.t.Helper()
	c.procs[len(c.procs)-1].kill()
	c.write(n)
	to, there := c.pg.end, len(c.js.messages)
	c.write(2)
	c.sleep(2 * c.cfg.Delay)
	c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: uint64(hello - 1), To: to})
	pr := c.run(options{islands: &c.cfg})
	c.echoes(c.greets(hello))
	c.until(time.Minute, "published", func() bool { return len(c.js.messages) == there+2 })
	c.left = c.record().Left
	return pr
}

// TestAHomeFindsAgainWhatItLeft: the broker loses what the record has of it, and keeps what was published
// behind it. A process that lives on and one that starts find out from the WAL, also where others have
// claimed more than once, and more was published than can have been in flight.
func TestAHomeFindsAgainWhatItLeft(t *testing.T) {
	for name, test := range map[string]struct {
		lost func(*checkpoint.Record) bool // the oldest revision that is
		then func(c *isle, pr *process)
	}{
		"the process lives on": {hasLeft, func(*isle, *process) {}},
		"another one starts": {hasLeft, func(c *isle, pr *process) {
			pr.kill()
			c.run(options{islands: &c.cfg})
		}},
		"the first hello is lost as well": {func(r *checkpoint.Record) bool { return r.Hello > 0 },
			func(*isle, *process) {}},
		"NATS fails before it has compared": {hasLeft, func(c *isle, pr *process) {
			pr.kill()
			c.pg.delay = 300 * time.Millisecond
			pr = c.run(options{islands: &c.cfg})
			comparing := func() bool { return pr.p.Status().State == StateComparing }
			c.until(time.Minute, "it compares", comparing)
			c.js.down = time.Now().Add(10 * time.Second)
			pr.broker().cut(true)
			c.echoes(c.greets(4))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			oneHome(t, 0, func(t *testing.T, c *isle) {
				c.publishing()
				c.leaves(3, 2)
				pr := c.leaves(4, 3)
				c.js.limit = 3
				want := c.left
				if len(want) != 2 {
					t.Fatalf("%v is left", want)
				}
				c.loses(test.lost)
				test.then(c, pr)
				c.write(3)
				c.until(time.Minute, "published", func() bool { return len(c.js.messages) == 12 })
				c.wantSameStream()
				if got := c.record().Left; !slices.Equal(got, want) {
					t.Errorf("%v is left, want %v", got, want)
				}
			})
		})
	}
}

func hasLeft(r *checkpoint.Record) bool { return len(r.Left) > 0 }

// TestARecordHasAgainTheHelloThatItLost: else a later start would say the same one again, and nobody echo it.
func TestARecordHasAgainTheHelloThatItLost(t *testing.T) {
	oneHome(t, 0, func(t *testing.T, c *isle) {
		pr := c.publishing()
		c.loses(func(r *checkpoint.Record) bool { return r.Hello > 0 })
		for range 3 {
			c.write(5)
			c.published()
			c.sleep(5 * time.Second)
		}
		if rec := c.record(); rec.Hello != 1 || rec.Checkpoints[0].Due < c.said() {
			t.Errorf("the record has hello %d, and begins at %v", rec.Hello, rec.Checkpoints[0].Due)
		}
		pr.kill()
		c.write(5)
		c.sleep(2 * c.cfg.Delay)
		c.run(options{islands: &c.cfg})
		if hello := c.greets(2); hello.Hello != 2 {
			t.Errorf("hello %d", hello.Hello)
		} else {
			c.echoes(hello)
		}
		c.published()
		c.wantSameStream()
	})
}

// TestAHomeThatCannotKnowWhatItLeftRecordsNothing: it ends with the difference, and leaves the record as it
// is.
func TestAHomeThatCannotKnowWhatItLeftRecordsNothing(t *testing.T) {
	for name, changes := range map[string]func(c *isle){
		"the first difference was not read": func(c *isle) {
			c.loses(hasLeft)
			c.js.more = 2
		},
		"the WAL makes less": func(c *isle) {
			c.pg.wal = slices.DeleteFunc(c.pg.wal, func(x *transaction) bool {
				return x.end == c.js.messages[6].header.Pos.LSN
			})
		},
		"it is before what is left": func(c *isle) { c.js.messages[4].header.Due++ },
	} {
		t.Run(name, func(t *testing.T) {
			oneHome(t, 0, func(t *testing.T, c *isle) {
				c.publishing()
				c.leaves(3, 2).kill()
				changes(c)
				rec := c.record()
				pr := c.run(options{islands: &c.cfg})
				c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 2, To: c.pg.end})
				c.write(3)
				if f := pr.ends(time.Minute); f == nil || f.Code != codeDivergence {
					t.Errorf("it has ended with %v", pr.err)
				}
				if now := c.record(); !slices.Equal(now.Left, rec.Left) {
					t.Errorf("%v is left, before it was %v", now.Left, rec.Left)
				}
			})
		})
	}
}

// takesOver lets the second process of a slot take it from the first one, which stands by from then on.
func (w *harness) takesOver(first, second *process) {
	w.t.Helper()
	is := func(pr *process, s State) func() bool { return func() bool { return pr.p.Status().State == s } }
	w.until(time.Minute, "the second one stands by", is(second, StateStandby))
	w.until(time.Minute, "the second one has it", func() bool { // or the first one again: the first to ask
		if is(first, StateRunning)() {
			first.postgres().cut(true)
		}
		w.sleep(300 * time.Millisecond)
		return is(second, StateRunning)()
	})
	w.until(time.Minute, "the first one stands by", is(first, StateStandby))
}

// TestWhoStoodByKnowsNoMoreThanTheRecord: a process that had the slot before another one goes on as one that
// starts does. It finds what the record has lost of what the other one left, and says no hello without need.
func TestWhoStoodByKnowsNoMoreThanTheRecord(t *testing.T) {
	oneHome(t, 20*time.Millisecond, func(t *testing.T, c *isle) {
		first := c.publishing()
		c.sleep(2 * time.Second)
		second := c.run(options{islands: &c.cfg})
		c.takesOver(first, second)
		for range 10 { // the record goes on
			c.write(1)
			c.sleep(time.Second)
		}
		c.write(1)
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, To: c.pg.end})
		there := len(c.js.messages)
		c.write(1)
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == there+1 })
		c.left = c.record().Left
		second.kill()
		c.loses(hasLeft)
		c.write(1)
		c.until(time.Minute, "published", func() bool { return len(c.js.messages) == there+2 })
		c.wantSameStream()
		if n := c.wrote(relay.Hello); n != 1 || len(c.left) != 1 {
			t.Errorf("%d hellos, %v is left", n, c.left)
		}
	})
}

// TestWhatWasSaidIsNotLeftBehindAnEventFromBeyondIt: a window may take an event from beyond its due, and have
// it first. Where the broker loses a window that was said to be published, and others have claimed from there
// on, they have claimed that event, and not those behind it.
func TestWhatWasSaidIsNotLeftBehindAnEventFromBeyondIt(t *testing.T) {
	oneHome(t, 5*time.Second, func(t *testing.T, c *isle) {
		c.publishing()
		c.sleep(10 * time.Second)
		there := len(c.js.messages)
		c.insert("d", "a:000100")
		due := c.pg.end
		c.sleep(4 * time.Second)
		c.insert("d", "a:000050")
		beyond := c.pg.end
		c.sleep(2 * time.Second)
		c.insert("d", "a:000200")
		c.until(time.Second, "the window", func() bool { return len(c.js.messages) == there+2 })
		if h := c.js.messages[there].header; h.Due != due || h.Pos.LSN != beyond {
			t.Fatalf("the window begins with %v", &h)
		}
		c.until(3*time.Second, "said", func() bool {
			written := c.pg.rows.written
			return written[len(written)-1].To == due
		})
		c.procs[0].kill()
		c.js.messages = c.js.messages[:there]
		c.sleep(2 * c.cfg.Delay)
		c.hears(relay.ClusterRow{Kind: relay.Claim, Home: 1, Hello: 1, From: due, To: beyond})
		c.run(options{islands: &c.cfg})
		c.echoes(c.greets(2))
		c.published()
		c.wantSameStream()
	})
}
