package pipeline

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// homeDecoder is that of a home with a control table, awayDecoder that of whoever reads its rows elsewhere.
func homeDecoder() decoder.Config {
	cfg := decoderConfig
	cfg.Mapping.OwnOnly, cfg.Mapping.Control, cfg.Control = true, "public.outflow_control", controlOID
	return cfg
}

func awayDecoder() decoder.Config {
	cfg := homeDecoder()
	cfg.Mapping.OwnOnly, cfg.Mapping.Subscription, cfg.Origin = false, "from_1", originName
	return cfg
}

// clusters are a home and another cluster, with a NATS each. What the home commits is replicated in order,
// with delay.
type clusters struct {
	*testing.T
	rnd        *rand.Rand
	home, away *harness
	ends       context.CancelFunc
	ended      chan struct{}

	copied int // transactions of the home
	skip   func(*transaction) bool
	free   outbox.LSN // confirmed elsewhere before the home had said anything
	cut    time.Time  // nothing is replicated until then
	heard  outbox.LSN // the newest watermark that came elsewhere
	since  time.Time  // the first one came
	broken error
}

func newClusters(t *testing.T, seed uint64, first relay.Settings, durable time.Duration) *clusters {
	c := &clusters{T: t, rnd: rand.New(rand.NewPCG(seed, 5)), ended: make(chan struct{}),
		skip: func(*transaction) bool { return false }}
	c.home = newHarnessOf(t, seed, first, durable, homeDecoder())
	c.away = newHarnessOf(t, seed+1, first, durable, awayDecoder())
	c.away.pg.onConfirm = c.confirmed
	ctx, cancel := context.WithCancel(context.Background())
	c.ends = cancel
	go c.replicate(ctx, rand.New(rand.NewPCG(seed, 6)))
	return c
}

// replicate is the subscription on the other cluster, which also takes writes of its own.
func (c *clusters) replicate(ctx context.Context, rnd *rand.Rand) {
	defer close(c.ended)
	for ctx.Err() == nil {
		time.Sleep(time.Duration(1 + rnd.IntN(int(pick(rnd, time.Millisecond, 100*time.Millisecond)))))
		var wal []*transaction
		c.home.with(func() { wal = c.home.pg.wal[:len(c.home.pg.wal):len(c.home.pg.wal)] })
		c.away.with(func() {
			if rnd.IntN(20) == 0 {
				c.away.pg.commit([]row{{"own", "b", "b:000001", "{}"}})
			}
			if time.Now().Before(c.cut) || time.Now().Before(c.away.pg.down) {
				return
			}
			for ; c.copied < len(wal) && rnd.IntN(4) > 0; c.copied++ {
				x := *wal[c.copied]
				if len(x.rows)+len(x.logical) == 0 || c.skip(&x) {
					continue
				}
				x.home = x.end
				c.away.pg.log(&x)
				for _, m := range x.logical {
					if m.prefix != relay.WatermarkPrefix {
						continue
					}
					w, err := relay.ParseWatermark(m.content, x.home)
					if err != nil {
						c.broken = err
					}
					if c.heard = max(c.heard, w.LSN); c.since.IsZero() {
						c.since = time.Now()
					}
				}
			}
		})
	}
}

// confirmed holds the slot elsewhere to what the home has said: from it every input comes again that the home
// may have to make again. What came before the home had said anything was confirmed without it.
func (c *clusters) confirmed(lsn outbox.LSN) {
	if rec := c.away.record(); rec.Checkpoints[len(rec.Checkpoints)-1].Home.LSN == 0 {
		c.free = lsn
	}
	if lsn <= c.free || c.since.IsZero() || time.Since(c.since) < time.Second {
		c.free = max(c.free, lsn)
		return
	}
	for _, x := range c.away.pg.wal {
		if x.home > c.heard && x.start < lsn && x.input() {
			c.broken = fmt.Errorf("the slot elsewhere is confirmed at %v; the home's commit at %v, which "+
				"starts at %v there, is above %v, which the home had confirmed", lsn, x.home, x.start,
				c.heard)
		}
	}
}

// input reports whether the transaction is one.
func (x *transaction) input() bool {
	return len(x.rows) > 0 || slices.ContainsFunc(x.logical, func(m logical) bool {
		_, _, err := relay.ParseSettings(m.content)
		return m.prefix == relay.HeartbeatPrefix || m.prefix == relay.SettingsPrefix && err == nil
	})
}

// finish waits until both streams are those of the home's WAL.
func (c *clusters) finish() error {
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		var events int
		c.home.with(func() { events = c.home.events() })
		if len(c.home.stream()) >= events && len(c.away.stream()) >= events {
			break
		}
		for _, w := range []*harness{c.home, c.away} {
			if pr := w.procs[len(w.procs)-1]; pr.over() {
				return pr.err
			}
		}
		if time.Since(begun) > 10*time.Minute {
			return fmt.Errorf("%d events, %d at home, %d elsewhere", events, len(c.home.stream()),
				len(c.away.stream()))
		}
	}
	var wal []*transaction
	c.home.with(func() { wal = slices.Clone(c.home.pg.wal) })
	want, err := replay(wal, c.home.first, 0, c.home.decoder)
	if err != nil {
		return err
	}
	for _, w := range []*harness{c.home, c.away} {
		if got := w.stream(); !slices.Equal(got, want) {
			return fmt.Errorf("home %t: %d messages that are not the %d of its WAL", w == c.home, len(got),
				len(want))
		}
	}
	return c.faults()
}

// faults are what was found wrong meanwhile.
func (c *clusters) faults() (err error) {
	c.home.with(func() { err = c.home.broken })
	c.away.with(func() { err = errors.Join(err, c.away.broken, c.broken) })
	return err
}

func (c *clusters) stop() {
	c.ends()
	<-c.ended
	for _, w := range []*harness{c.home, c.away} {
		w.killAll()
	}
	time.Sleep(time.Minute) // what is still on its way arrives
}

// again kills the process of a cluster and starts another one.
func (c *clusters) again(w *harness, o options) {
	w.procs[len(w.procs)-1].kill()
	time.Sleep(time.Duration(c.rnd.IntN(int(time.Second))))
	w.run(o)
}

// goWrong lets something fail, at either end.
func (c *clusters) goWrong() {
	w := pick(c.rnd, c.home, c.away)
	switch c.rnd.IntN(6) {
	case 0, 1:
		c.again(w, options{})
	case 2:
		w.with(w.pg.crash)
	case 3:
		w.with(func() { w.js.powerLoss(c.rnd.IntN(2) == 0, c.rnd.IntN(2) == 0) })
	case 4:
		c.away.with(func() { c.cut = time.Now().Add(time.Duration(c.rnd.IntN(20)) * time.Second) })
	case 5:
		w.with(func() {
			for _, l := range w.brokerConns() {
				l.cut(true)
			}
		})
	}
}

// inClusters runs a schedule in a bubble of its own.
func inClusters(t *testing.T, seed uint64, first relay.Settings, durable time.Duration,
	f func(c *clusters) error) {
	synctest.Test(t, func(t *testing.T) {
		c := newClusters(t, seed, first, durable)
		err := f(c)
		c.stop()
		if err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
	})
}

// writtenInClusters runs a schedule of chance for each seed, at a home and a cluster that reads its rows: do
// writes load. stream tells the chances of one test from those of another.
func writtenInClusters(t *testing.T, stream uint64,
	do func(c *clusters, load *workload, rnd *rand.Rand, durable time.Duration) error) {
	seeds.Each(t, "pipeline.seed", "pipeline.trials", trials(20), func(seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, stream))
		durable := pick(rnd, 0, 2*time.Second, 6*time.Second)
		inClusters(t, seed, randomSettings(rnd), durable, func(c *clusters) error {
			c.home.run(options{})
			c.away.run(options{})
			load := &workload{rnd: rnd, counters: map[string]int{}, changes: true, docs: 3,
				sizes: []int{1, 1, 2, 5}}
			return do(c, load, rnd, durable)
		})
	})
}

// write writes n transactions of load at the home, a moment apart.
func (c *clusters) write(load *workload, n int) {
	for range n {
		c.home.with(func() { load.write(c.home.pg) })
		time.Sleep(time.Duration(load.rnd.IntN(int(20 * time.Millisecond))))
	}
}

// TestACountElsewhereIsTheHomes: whatever fails at a home or at a cluster that reads its rows, the counts are
// the same, both streams are the home's, and the slot elsewhere keeps what the home has not confirmed.
func TestACountElsewhereIsTheHomes(t *testing.T) {
	t.Parallel()
	writtenInClusters(t, 8,
		func(c *clusters, load *workload, rnd *rand.Rand, durable time.Duration) error {
			for range 3 + rnd.IntN(8) {
				c.write(load, 1+rnd.IntN(20))
				c.goWrong()
				time.Sleep(time.Duration(rnd.IntN(int(4 * time.Second))))
			}
			c.home.with(func() {
				for _, rows := range load.pending {
					c.home.pg.commit(rows)
				}
			})
			if err := c.finish(); err != nil {
				return err
			}
			time.Sleep(durable + 30*time.Second)
			written := func() (all []relay.Watermark) {
				c.home.with(func() { all = slices.Clone(c.home.pg.watermarks) })
				return all
			}
			before := written()
			time.Sleep(time.Minute)
			marks := written()
			if n := len(marks); n != len(before) || n == 0 {
				return fmt.Errorf("a silent home has written %d watermarks, and %d before", n, len(before))
			}
			c.away.with(func() {
				all := c.away.record().Checkpoints
				newest, last := all[len(all)-1], marks[len(marks)-1].LSN
				if c.heard != last {
					c.broken = fmt.Errorf("the last watermark is %v, elsewhere %v", last, c.heard)
				}
				if newest.Home.LSN != c.heard || newest.Tally.Events == 0 {
					c.broken = fmt.Errorf("elsewhere %+v was recorded, and %v had come", newest, c.heard)
				}
				for _, w := range []*harness{c.home, c.away} { // what is shown
					s, mark := w.procs[len(w.procs)-1].p.Status(), marks[len(marks)-1]
					if s.Said.LSN != last || s.Said.Events != mark.Events || s.Said.At.IsZero() ||
						s.Tally.Events != mark.Events || !s.Kept.Since.IsZero() {
						c.broken = fmt.Errorf("home %t: the newest watermark is %+v, shown are %+v, %+v and "+
							"%+v", w == c.home, mark, s.Said, s.Tally, s.Kept)
					}
				}
				if c.away.pg.confirmed < c.away.pg.wal[len(c.away.pg.wal)*9/10].start {
					c.broken = fmt.Errorf("the home is silent, and %v of %v is confirmed elsewhere",
						c.away.pg.confirmed, c.away.pg.end)
				}
			})
			return c.faults()
		})
}

// TestASkippedTransactionIsFoundByItsCount: a transaction that a subscription has skipped, or another one in
// its place, ends the reader with exit code 4, at each start.
func TestASkippedTransactionIsFoundByItsCount(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(x *transaction) bool{
		"skipped":      func(*transaction) bool { return true },
		"another time": func(x *transaction) bool { x.time++; return false },
		"a row less":   func(x *transaction) bool { x.rows = x.rows[1:]; return false },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, restart := range []bool{false, true} {
				inClusters(t, 1, defaults, time.Second, func(c *clusters) error {
					c.home.run(options{})
					c.away.run(options{})
					commit := func() {
						c.home.with(func() {
							c.home.pg.commit([]row{{"d", "a", "a:000001", "1"}, {"d", "a", "a:000002", "2"}})
						})
						time.Sleep(15 * time.Second) // a start reads twice what it stops at
					}
					commit()
					c.away.with(func() {
						spoiled := false
						c.skip = func(x *transaction) bool {
							if spoiled || len(x.rows) == 0 {
								return false
							}
							spoiled = true
							return spoil(x)
						}
					})
					if restart { // it was skipped while nobody looked
						c.home.procs[0].kill()
					}
					commit()
					if restart {
						c.again(c.away, options{})
						c.home.run(options{})
					}
					for range 2 {
						commit()
						pr := c.away.procs[len(c.away.procs)-1]
						if !pr.over() {
							return fmt.Errorf("restart %t: it goes on", restart)
						}
						f := outbox.FaultOf(pr.err)
						if f == nil || f.Code != checkpoint.CodeHome || f.Class != outbox.Gap {
							return fmt.Errorf("restart %t: %v", restart, pr.err)
						}
						c.away.run(options{})
					}
					return nil
				})
			}
		})
	}
}

// TestAnyClusterGoesOnFromTheHomesCheckpoint: when the home's process has died, at any point, another cluster
// goes on with the home's stream from the home's record and what it has recorded itself, wherever its slot
// is.
func TestAnyClusterGoesOnFromTheHomesCheckpoint(t *testing.T) {
	t.Parallel()
	writtenInClusters(t, 9,
		func(c *clusters, load *workload, rnd *rand.Rand, durable time.Duration) error {
			for begun := time.Now(); time.Since(begun) < 2*durable+10*time.Second; {
				c.write(load, 5)
				time.Sleep(time.Second)
			}
			for range rnd.IntN(6) {
				c.write(load, rnd.IntN(20))
				c.goWrong()
				time.Sleep(time.Duration(rnd.IntN(int(4 * time.Second))))
			}
			c.write(load, rnd.IntN(20))
			for _, w := range []*harness{c.home, c.away} {
				w.procs[len(w.procs)-1].kill()
			}
			c.write(load, rnd.IntN(20))
			time.Sleep(time.Minute) // what is still on its way arrives
			if err := c.handOver(); err != nil {
				return err
			}
			c.away.run(options{})
			c.write(load, rnd.IntN(20))
			for begun := time.Now(); time.Since(begun) < 30*time.Second; time.Sleep(time.Second) {
				c.home.with(func() { c.home.pg.commit(nil, logical{prefix: relay.HeartbeatPrefix}) })
			}
			if pr := c.away.procs[len(c.away.procs)-1]; pr.over() {
				return pr.err
			}
			want, err := replay(c.home.pg.wal, c.home.first, 0, c.home.decoder)
			if err != nil {
				return err
			}
			if got := c.away.stream(); !slices.Equal(got, want) {
				return fmt.Errorf("the stream has %d messages that are not the %d of the home", len(got),
					len(want))
			}
			return c.faults()
		})
}

// handOver gives the other cluster the home's stream and record.
func (c *clusters) handOver() error {
	home, own := c.home.record(), c.away.record()
	rec, err := own.Elsewhere(home)
	if err != nil {
		return err
	}
	doc, err := rec.Encode()
	if err != nil {
		return err
	}
	js := c.away.js
	js.created, js.messages, js.removed = c.home.js.created, c.home.js.messages, c.home.js.removed
	js.revisions = nil
	_, err = js.land(doc, rec, 0)
	return err
}

// TestAClusterRowThatCantBeReadEndsRun: at each start, and only where cluster rows are read at all.
func TestAClusterRowThatCantBeReadEndsRun(t *testing.T) {
	t.Parallel()
	for _, on := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			cfg := homeDecoder()
			if on {
				cfg.Clusters = map[string]int{"": 1, originName: 2}
			}
			w := newHarnessOf(t, 1, defaults, 0, cfg)
			w.with(func() { w.pg.commit(nil, logical{prefix: relay.ClusterPrefix, content: "v=2"}) })
			for range 2 {
				pr := w.run(options{})
				time.Sleep(time.Minute)
				if on {
					f := pr.ends(0)
					if f == nil || f.Class != outbox.Fatal || f.Code != decoder.CodeClusterRow {
						t.Errorf("it has ended with %v", f)
					}
				} else if pr.over() {
					t.Errorf("cluster rows are not read, and it has ended with %v", pr.err)
				}
				pr.kill()
			}
			time.Sleep(time.Minute) // what is still on its way arrives
		})
	}
}
