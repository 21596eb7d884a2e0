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

	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// islandsConfig is what the clusters of the tests have in common.
var islandsConfig = claim.Config{Delay: 8 * time.Second, Beat: 500 * time.Millisecond}

// clusterOrigin is the name of the origin of what a cluster has committed.
func clusterOrigin(id int) string { return fmt.Sprintf("pg_from_%d", id) }

// isle is a cluster: a home, driven by a pipeline, and readers of the other homes' rows.
type isle struct {
	*harness
	readers []*isleReader
	pr      *process
	cfg     claim.Config
	links   []link    // to the other clusters
	down    time.Time // its database is, until then: nothing is committed or replicated
	failed  []failure
	lossy   bool // when its messages came is not known any more
}

// link replicates what a cluster commits to another one, in order.
type link struct {
	to     *isle
	copied int
	lag    time.Duration
	cut    time.Time // nothing is replicated until then
}

// failure is something that failed at a home.
type failure struct {
	at       time.Time
	end      outbox.LSN // of its WAL
	said     outbox.LSN // up to there all others knew what it had published
	anywhere bool       // its messages may have come at any time before
}

type islands struct {
	rnd   *rand.Rand
	isles []*isle
	ends  context.CancelFunc
	ended chan struct{}
	tally islandsTally
}

// islandsTally is what happened.
type islandsTally struct {
	events, faults, starts, hellos, yields, claims int

	elsewhere, twice int // commits that others have published, and those that their home has as well
}

func (a *islandsTally) add(b islandsTally) {
	a.events += b.events
	a.faults += b.faults
	a.starts += b.starts
	a.hellos += b.hellos
	a.yields += b.yields
	a.claims += b.claims
	a.elsewhere += b.elsewhere
	a.twice += b.twice
}

func newIslands(t *testing.T, seed uint64, n int, first relay.Settings, durable time.Duration) *islands {
	w := &islands{rnd: rand.New(rand.NewPCG(seed, 15)), ended: make(chan struct{})}
	origins := map[string]int{}
	for id := 1; id <= n; id++ {
		origins[clusterOrigin(id)] = id
	}
	for id := 1; id <= n; id++ {
		cfg := homeDecoder()
		cfg.Clusters = map[string]int{"": id}
		for name, of := range origins {
			if of != id {
				cfg.Clusters[name] = of
			}
		}
		c := &isle{harness: newHarnessOf(t, seed+uint64(id), first, durable, cfg), cfg: islandsConfig}
		c.cfg.Self, c.cfg.Count = id, n
		c.js.latency = pick(w.rnd, 200*time.Microsecond, 20*time.Millisecond)
		c.pg.rows.lost, c.pg.rows.late, c.pg.rows.twice = .02, .05, .02
		for home := 1; home <= n; home++ {
			if home != id {
				c.readers = append(c.readers, newIsleReader(c, seed+uint64(100*id+home), home))
			}
		}
		w.isles = append(w.isles, c)
	}
	for _, c := range w.isles {
		for _, d := range w.isles {
			if d != c {
				c.links = append(c.links, link{to: d,
					lag: pick(w.rnd, 20*time.Millisecond, 300*time.Millisecond)})
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.ends = cancel
	go w.drive(ctx, rand.New(rand.NewPCG(seed, 16)))
	return w
}

// drive replicates.
func (w *islands) drive(ctx context.Context, rnd *rand.Rand) {
	defer close(w.ended)
	for ctx.Err() == nil {
		time.Sleep(time.Duration(1 + rnd.IntN(int(20*time.Millisecond))))
		for _, c := range w.isles {
			for i := range c.links {
				if rnd.Int64N(int64(c.links[i].lag)) < int64(20*time.Millisecond) {
					c.replicate(&c.links[i])
				}
			}
		}
	}
}

func (c *isle) replicate(l *link) {
	var wal []*transaction
	c.with(func() {
		if !time.Now().Before(c.down) && !time.Now().Before(l.cut) {
			wal = c.pg.wal[:len(c.pg.wal):len(c.pg.wal)]
		}
	})
	l.to.with(func() {
		for ; l.copied < len(wal) && !time.Now().Before(l.to.down); l.copied++ {
			x := *wal[l.copied]
			if x.origin == "" && len(x.rows)+len(x.logical) > 0 {
				x.home, x.origin = x.end, clusterOrigin(c.cfg.Self)
				l.to.pg.log(&x)
			}
		}
	})
}

func (c *isle) start() {
	c.pr = c.run(options{islands: &c.cfg})
	for _, r := range c.readers {
		r.start()
	}
}

// kill ends the processes of a cluster.
func (c *isle) kill() {
	c.pr.kill()
	for _, r := range c.readers {
		r.kill()
	}
}

// covered is up to where the home has said in the WAL of another cluster that all is published.
func (c *isle) covered(of int) (to outbox.LSN) {
	for _, x := range c.pg.wal {
		for _, m := range x.logical {
			if row, err := relay.ParseClusterRow(m.content); err == nil && row.By == of &&
				row.Kind == relay.Published && x.origin == clusterOrigin(of) {
				to = max(to, row.To)
			}
		}
	}
	return to
}

// fails takes note that something has failed at a home.
func (w *islands) fails(c *isle) {
	f := failure{at: time.Now(), said: ^outbox.LSN(0), anywhere: c.lossy}
	c.with(func() { f.end = c.pg.end })
	for i := range c.links {
		to := c.links[i].to
		to.with(func() { f.said = min(f.said, to.covered(c.cfg.Self)) })
	}
	c.failed = append(c.failed, f)
}

// excused reports whether a commit that was stored at a time may come twice: it was published not long before
// something failed, or was on its way, and its home had not said so everywhere.
func (c *isle) excused(lsn outbox.LSN, at time.Time) bool {
	return slices.ContainsFunc(c.failed, func(f failure) bool {
		return lsn > f.said && lsn <= f.end && at.Before(f.at.Add(5*time.Second)) &&
			(f.anywhere || at.After(f.at.Add(-c.cfg.Delay)))
	})
}

// inStream is what the home's stream has, by commit.
func (c *isle) inStream() (all map[outbox.LSN]time.Time) {
	all = map[outbox.LSN]time.Time{}
	c.with(func() {
		for _, m := range c.js.messages {
			if m != nil {
				all[m.header.Pos.LSN] = m.at
			}
		}
	})
	return all
}

// each does something to what each process of a cluster runs on.
func (c *isle) each(f func(h *harness)) {
	c.with(func() { f(c.harness) })
	for _, r := range c.readers {
		r.with(func() { f(r.harness) })
	}
}

// fail lets something fail at a cluster, for a while.
func (w *islands) fail(c *isle, d time.Duration) {
	w.tally.faults++
	until := time.Now().Add(d)
	kind, outlive := w.rnd.IntN(8), false
	switch kind {
	case 0: // its processes
		c.kill()
	case 1: // its database, and so they, or they outlive it
		c.with(func() { c.down = until })
		c.each(func(h *harness) {
			h.pg.down = until
			for _, u := range h.postgresConns() {
				u.cut(true)
			}
		})
		c.with(c.pg.crash)
		if outlive = w.rnd.IntN(2) == 0; !outlive {
			c.kill()
		}
	case 2, 3: // its NATS
		c.each(func(h *harness) {
			h.js.down = until
			for _, l := range h.brokerConns() {
				l.cut(w.rnd.IntN(2) == 0)
			}
		})
	case 4, 5: // its processes can't reach the database, or only for a moment; the other clusters can
		c.each(func(h *harness) {
			if kind == 4 {
				h.pg.down = until
			}
			for _, u := range h.postgresConns() {
				u.cut(w.rnd.IntN(2) == 0)
			}
		})
	case 6: // its broker loses what it had not synced, of stream and record
		c.lossy = true
		c.each(func(h *harness) { h.js.powerLoss(w.rnd.IntN(3) > 0, w.rnd.IntN(2) == 0) })
	case 7: // its streams take no messages
		c.each(func(h *harness) { h.js.full = true })
	}
	w.fails(c)
	time.Sleep(time.Until(until))
	c.each(func(h *harness) { h.js.full = false })
	if kind < 2 && !outlive {
		c.start()
	}
	for range w.rnd.IntN(3) { // and dies in the middle of what follows
		time.Sleep(time.Duration(w.rnd.IntN(int(4 * time.Second))))
		c.kill()
		w.fails(c)
		time.Sleep(time.Duration(w.rnd.IntN(int(pick(w.rnd, time.Second, 10*time.Second)))))
		c.start()
	}
}

// torture runs a schedule of faults.
func (w *islands) torture(loads []*workload, cut bool) error {
	for _, c := range w.isles {
		c.start()
	}
	stop := make(chan struct{})
	wrote := make(chan struct{})
	rnd := rand.New(rand.NewPCG(w.rnd.Uint64(), 17))
	go func() { // what services do meanwhile
		defer close(wrote)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rnd.IntN(int(200 * time.Millisecond)))):
			}
			i := rnd.IntN(len(w.isles))
			c := w.isles[i]
			c.with(func() {
				if !time.Now().Before(c.down) {
					loads[i].write(c.pg)
				}
			})
		}
	}()
	for range 2 + w.rnd.IntN(4) {
		time.Sleep(time.Duration(w.rnd.IntN(int(20 * time.Second))))
		if cut && w.rnd.IntN(2) == 0 {
			c := pick(w.rnd, w.isles...)
			l := &c.links[w.rnd.IntN(len(c.links))]
			c.with(func() { l.cut = time.Now().Add(time.Duration(w.rnd.IntN(int(time.Minute)))) })
		}
		w.fail(pick(w.rnd, w.isles...), time.Duration(w.rnd.IntN(int(pick(w.rnd, time.Second, 10*time.Second,
			40*time.Second)))))
		if err := w.gaveUp(); err != nil {
			close(stop)
			<-wrote
			return err
		}
	}
	close(stop)
	<-wrote
	for i, c := range w.isles {
		c.with(func() {
			for _, rows := range loads[i].pending {
				c.pg.commit(rows)
			}
			c.pg.rows = rowFaults{written: c.pg.rows.written}
		})
	}
	return w.finish()
}

// gaveUp reports a process that has ended by itself.
func (w *islands) gaveUp() error {
	for _, c := range w.isles {
		if c.pr.over() && !c.pr.dead {
			return fmt.Errorf("cluster %d: %w", c.cfg.Self, c.pr.err)
		}
		for _, r := range c.readers {
			if r.pr.over() && !r.pr.dead {
				return fmt.Errorf("cluster %d, for cluster %d: %w", c.cfg.Self, r.home, r.pr.err)
			}
		}
	}
	return nil
}

// finish waits until all that was committed is published by somebody.
func (w *islands) finish() error {
	for begun := time.Now(); ; time.Sleep(time.Second) {
		if err := w.gaveUp(); err != nil {
			return err
		}
		missing := errors.New("nothing was committed")
		for _, c := range w.isles {
			if missing = w.missing(c); missing != nil {
				break
			}
		}
		if missing == nil {
			time.Sleep(time.Second) // beyond any horizon, so that nothing is held
			w.tick()
			return nil
		}
		if time.Since(begun) > 10*time.Minute {
			return missing
		}
		w.tick()
	}
}

// tick lets each home close what it holds.
func (w *islands) tick() {
	for _, c := range w.isles {
		c.with(func() { c.pg.commit(nil, logical{prefix: relay.HeartbeatPrefix}) })
	}
}

// elsewhere is who has published a home's commits for it.
func (w *islands) elsewhere(c *isle) map[outbox.LSN][]int {
	all := map[outbox.LSN][]int{}
	for i := range c.links { // the rest of a link belongs to who replicates
		to := c.links[i].to
		for _, r := range to.readers {
			if r.home != c.cfg.Self {
				continue
			}
			seen := map[outbox.LSN]bool{}
			for _, m := range r.stream() {
				if lsn := m.header.Pos.LSN; !seen[lsn] {
					seen[lsn] = true
					all[lsn] = append(all[lsn], to.cfg.Self)
				}
			}
		}
	}
	return all
}

// missing is what of a home's commits nobody has published.
func (w *islands) missing(c *isle) error {
	own, elsewhere := c.inStream(), w.elsewhere(c)
	var err error
	c.with(func() {
		for _, x := range c.pg.wal {
			if _, ok := own[x.end]; x.origin == "" && len(x.rows) > 0 && !ok && len(elsewhere[x.end]) == 0 {
				err = errors.Join(err, fmt.Errorf("nobody has published %v of cluster %d: %+v", x.end,
					c.cfg.Self, c.pr.p.Status()))
				return
			}
		}
	})
	return err
}

// check holds the streams against the WAL: what a home has published is what the rules make of it, in their
// order, without what was left to others. What is there twice has a reason.
func (w *islands) check(cut bool) error {
	var all error
	for _, c := range w.isles {
		all = errors.Join(all, w.missing(c), w.checkHome(c), c.broken)
		for _, r := range c.readers {
			all = errors.Join(all, r.check())
		}
		elsewhere, own := w.elsewhere(c), c.inStream()
		for lsn, by := range elsewhere {
			at, twice := own[lsn]
			w.tally.elsewhere++
			if twice {
				w.tally.twice++
			}
			switch {
			case cut:
			case len(by) > 1:
				all = errors.Join(all, fmt.Errorf("%v of cluster %d by %v", lsn, c.cfg.Self, by))
			case twice && !c.excused(lsn, at):
				all = errors.Join(all, fmt.Errorf("%v of cluster %d by itself and by %v, without a reason",
					lsn, c.cfg.Self, by))
			}
		}
		w.tally.starts += len(c.procs)
		for _, row := range c.pg.rows.written {
			switch row.Kind {
			case relay.Yield:
				w.tally.yields++
			case relay.Hello:
				w.tally.hellos++
			case relay.Claim:
				w.tally.claims++
			}
		}
	}
	return all
}

// checkHome compares a home's stream with what the rules make of its WAL.
func (w *islands) checkHome(c *isle) error {
	want, err := replay(c.pg.wal, c.first, c.maxPublishedAhead, c.decoder)
	if err != nil {
		return err
	}
	w.tally.events += len(want)
	for i, l := range c.stream() {
		n := slices.Index(want, l)
		if n < 0 {
			return fmt.Errorf("message %d of cluster %d is not the next one that its WAL makes:\n%s", i+1,
				c.cfg.Self, l)
		}
		want = want[n+1:]
	}
	return c.unexplained()
}

func (w *islands) stop() {
	w.ends()
	<-w.ended
	for _, c := range w.isles {
		c.killAll()
		for _, r := range c.readers {
			if !r.pr.over() {
				r.kill()
			}
		}
	}
	time.Sleep(time.Minute) // what is still on its way arrives
}

// TestHomesForWhichOthersPublish: whatever fails at one cluster, each event is published, in its home's order
// where that does it, and twice only where the home could not say that it had.
func TestHomesForWhichOthersPublish(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]bool{"one thing broken": false, "links cut": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var total islandsTally
			seeds.Each(t, "pipeline.seed", "pipeline.trials", trials(10), func(seed uint64) {
				synctest.Test(t, func(t *testing.T) {
					one, err := tortureIslands(t, seed, cut)
					if err != nil {
						t.Errorf("seed %d: %v", seed, err)
					}
					total.add(one)
				})
			})
			t.Logf("%+v", total)
			if trials(10) >= 10 && (min(total.claims, total.yields, total.twice) == 0 ||
				total.elsewhere == total.twice) {
				t.Errorf("nothing happened: %+v", total)
			}
		})
	}
}

func tortureIslands(t *testing.T, seed uint64, cut bool) (islandsTally, error) {
	rnd := rand.New(rand.NewPCG(seed, 14))
	n := 2 + rnd.IntN(2)
	loads := make([]*workload, n)
	for i := range loads {
		loads[i] = &workload{rnd: rand.New(rand.NewPCG(seed, 20+uint64(i))), counters: map[string]int{},
			horizon: true, docs: 3, sizes: []int{1, 1, 2, 5}}
	}
	first := relay.Settings{Horizon: pick(rnd, 0, 20*time.Millisecond, 200*time.Millisecond),
		Sort: pick(rnd, outbox.BySeqKey, outbox.ByCommit), MaxEvents: 1000, MaxBytes: 1 << 20}
	w := newIslands(t, seed, n, first, pick(rnd, 0, 2*time.Second, 6*time.Second))
	err := w.torture(loads, cut)
	w.stop()
	return w.tally, errors.Join(err, w.check(cut))
}
