package pipeline

import (
	"cmp"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

var (
	simTrials = flag.Int("pipeline.trials", 0, "schedules of each simulation; 0: as many as suit the tier")
	_         = flag.Uint64("pipeline.seed", 1, "the first schedule's seed")
)

// trials is how many schedules a test runs that runs n in the plain tests: few under the race detector, many
// in the long tests.
func trials(n int) int {
	if *simTrials > 0 {
		return *simTrials
	}
	if tier.Long() {
		n *= 10
	}
	if testing.Short() || tier.Race {
		n /= 10
	}
	return max(n, 1)
}

func pick[T any](rnd *rand.Rand, of ...T) T { return of[rnd.IntN(len(of))] }

func randomSettings(rnd *rand.Rand) relay.Settings {
	if rnd.IntN(2) == 0 {
		return relay.Settings{
			Sort: outbox.ByGap, MaxEvents: pick(rnd, 3, 20, 1000), MaxBytes: pick[int64](rnd, 2000, 1<<20),
			Gap: relay.Gap{
				Bound:  pick(rnd, 20*time.Millisecond, 200*time.Millisecond, 2*time.Second),
				Cold:   pick(rnd, 0, 5*time.Millisecond, 20*time.Millisecond),
				Memory: pick(rnd, 1, 3, 20, 16384),
				First:  pick[int64](rnd, 0, 1), Scope: pick(rnd, relay.OfSequence, relay.OfDocument),
			},
		}
	}
	return relay.Settings{
		Horizon:   pick(rnd, 0, 5*time.Millisecond, 20*time.Millisecond, 200*time.Millisecond),
		Sort:      pick(rnd, outbox.BySeqKey, outbox.ByCommit),
		MaxEvents: pick(rnd, 3, 20, 1000), MaxBytes: pick[int64](rnd, 2000, 1<<20),
	}
}

// workload is what services write: rows of several documents by several actors, with keys that are out of
// order within transactions and between them, counters that take more than one, are never committed, come
// twice or are missing, and logical messages, ours and others'.
type workload struct {
	rnd      *rand.Rand
	counters map[string]int
	pending  [][]row
	changes  bool
	horizon  bool // settings are those of a horizon
	n        int
	docs     int
	sizes    []int // of transactions, in rows
}

func (l *workload) rows() []row {
	var rows []row
	for range pick(l.rnd, l.sizes...) {
		doc, actor := fmt.Sprintf("d%d", l.rnd.IntN(l.docs)), fmt.Sprintf("a%d", l.rnd.IntN(3))
		counter := l.counters[doc+actor] + 1
		l.n++
		key := fmt.Sprintf("%s:%06d", actor, counter)
		switch l.rnd.IntN(24) {
		case 0:
			counter++ // one is never committed
		case 1:
			key = fmt.Sprintf("%s:%06d", actor, 1+l.rnd.IntN(counter)) // one comes twice, the other never
		case 2:
			key += "+3"
			counter += 2
		case 3:
			key = actor // without a counter
		}
		l.counters[doc+actor] = counter
		rows = append(rows, row{doc, actor, key, fmt.Sprintf("%d", l.n)})
	}
	l.rnd.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	return rows
}

func (l *workload) settings() relay.Settings {
	s := randomSettings(l.rnd)
	for l.horizon && s.ByGap() {
		s = randomSettings(l.rnd)
	}
	return s
}

// write writes one transaction. The harness's lock is held.
func (l *workload) write(pg *postgres) {
	at := time.Now().Add(-time.Duration(l.rnd.IntN(400)) * time.Microsecond) // timestamps need not ascend
	switch n := l.rnd.IntN(40); {
	case n < 2:
		pg.commitAt(at, nil, logical{prefix: relay.HeartbeatPrefix})
	case n < 7 && l.changes:
		pg.commitAt(at, nil, logical{prefix: relay.SettingsPrefix,
			content: l.settings().Content("outflow")})
	case n == 7:
		pg.commitAt(at, nil, logical{prefix: relay.SettingsPrefix,
			content: l.settings().Content("another")})
	case n == 8:
		pg.commitAt(at, nil, logical{prefix: relay.SettingsPrefix, content: "v=1 slot=outflow horizon=soon"})
	case n == 9:
		pg.commitAt(at, nil) // PostgreSQL 14 sends them
	case n == 10:
		pg.commitAt(at, l.rows(), logical{prefix: relay.HeartbeatPrefix},
			logical{prefix: "another", content: "x", outside: true})
	case n < 13:
		pg.grow(pg.end + outbox.LSN(l.rnd.IntN(5000))) // other databases' WAL
	case n < 20:
		l.pending = append(l.pending, l.rows()) // commits later
	default:
		pg.commitAt(at, l.rows())
	}
	if len(l.pending) > 0 && l.rnd.IntN(3) == 0 {
		i := l.rnd.IntN(len(l.pending))
		pg.commitAt(at, l.pending[i])
		l.pending = append(l.pending[:i], l.pending[i+1:]...)
	}
}

// size is how large schedules are. Short ones find most of what there is to find, long ones what takes many
// sessions.
type size struct {
	bursts, writes int           // at most
	pause          time.Duration // between bursts, at most
	gap            time.Duration // between writes, on average
	docs           int
	sizes          []int
	faults         int // at most
	span           int // a fault comes within so many
	within         time.Duration
	durables       []time.Duration
}

var (
	short = size{
		bursts: 3, writes: 6, pause: 1500 * time.Millisecond, gap: 4 * time.Millisecond, docs: 2,
		sizes:  []int{1, 1, 1, 2, 5},
		faults: 4, span: 90, within: 3 * time.Second, durables: []time.Duration{0, 500 * time.Millisecond,
			2 * time.Second, 6 * time.Second},
	}
	long = size{
		bursts: 10, writes: 20, pause: 4 * time.Second, gap: 8 * time.Millisecond, docs: 4,
		sizes:  []int{1, 1, 1, 2, 3, 12},
		faults: 16, span: 1500, within: 20 * time.Second, durables: []time.Duration{0, 2 * time.Second,
			6 * time.Second, 40 * time.Second},
	}
)

// sizeOf says how large a seed's schedule is: one in 25 is long.
func sizeOf(seed uint64) size {
	if seed%25 == 0 {
		return long
	}
	return short
}

// tally counts what simulations met.
type tally struct {
	schedules, steps, starts, sessions, messages, lost, holes, refused, late, between, confirmed, resumed int

	faults [kinds]int
}

func (a *tally) add(b *tally) {
	a.schedules++
	a.steps += b.steps
	a.starts += b.starts
	a.sessions += b.sessions
	a.messages += b.messages
	a.lost += b.lost
	a.holes += b.holes
	a.refused += b.refused
	a.late += b.late
	a.between += b.between
	a.confirmed += b.confirmed
	a.resumed += b.resumed
	for i, n := range b.faults {
		a.faults[i] += n
	}
}

func (a *tally) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d schedules, %d steps, %d starts, %d sessions, %d messages; refused %d, late %d, "+
		"between a successor's %d, lost %d, holes %d; confirmed %d times; went on without a start %d times;",
		a.schedules, a.steps, a.starts, a.sessions, a.messages, a.refused, a.late, a.between, a.lost, a.holes,
		a.confirmed, a.resumed)
	for i, n := range a.faults {
		fmt.Fprintf(&b, " %s %d", faults[i].name, n)
	}
	return b.String()
}

// schedule is one run: a workload, processes that are killed and stopped, and faults between any two steps.
type schedule struct {
	*harness
	size
	rnd      *rand.Rand
	alive    []*process
	replaced []relay.Settings // the settings that a process may be started with
	spread   time.Duration    // how far clocks are apart at most
	clock    time.Duration    // how far they are all behind the broker's at most
	calm     bool             // nothing goes wrong any more
	tally    tally
}

// newSchedule makes what a seed decides, but for the faults.
func newSchedule(t *testing.T, seed uint64, size size) *schedule {
	rnd := rand.New(rand.NewPCG(seed, 0))
	first := randomSettings(rnd)
	durable := pick(rnd, size.durables...)
	s := &schedule{harness: newHarness(t, seed, first, durable), size: size, rnd: rnd}
	s.noise = newNoise(seed, 4)
	s.js.ackEvery, s.js.limit = pick(rnd, 1, 3, 50), pick(rnd, 4, 30, 2000)
	s.js.latency = pick(rnd, 100*time.Microsecond, time.Millisecond, 20*time.Millisecond)
	s.js.replicated = rnd.IntN(8) == 0
	s.pg.delay = pick(rnd, 0, 0, 2*time.Millisecond, 50*time.Millisecond)
	s.spread = pick(rnd, 0, durable/4)
	s.loses = durable - s.spread
	s.clock = pick(rnd, 0, 0, -time.Hour)
	s.maxPublishedAhead = pick(rnd, 0, 1, 6) // small, so that it is met
	s.replaced = []relay.Settings{first}
	if rnd.IntN(3) == 0 {
		s.replaced = append(s.replaced, randomSettings(rnd))
	}
	return s
}

// planFaults makes those that the seed decides.
func (s *schedule) planFaults() {
	for range 1 + s.rnd.IntN(s.faults) {
		f := s.rnd.IntN(len(faults))
		do := func() {
			s.tally.faults[f]++
			faults[f].happens(s)
		}
		if s.rnd.IntN(4) == 0 {
			time.AfterFunc(time.Duration(s.rnd.Int64N(int64(s.within))),
				func() { s.with(func() { s.goWrong(do) }) })
		} else {
			s.plan = append(s.plan, planned{1 + s.rnd.IntN(s.span), func() { s.goWrong(do) }})
		}
	}
	slices.SortStableFunc(s.plan, func(a, b planned) int { return cmp.Compare(a.after, b.after) })
}

// goWrong does something if things may still go wrong.
func (s *schedule) goWrong(do func()) {
	if !s.calm && len(s.living()) > 0 {
		do()
	}
}

// spawn starts the i-th process anew, on its host.
func (s *schedule) spawn(i int) {
	s.tally.starts++
	pr := s.run(options{settings: pick(s.rnd, s.replaced...),
		stop: pick(s.rnd, 50*time.Millisecond, 10*time.Second)})
	pr.skew = s.clock
	if i < len(s.alive) {
		pr.skew = s.alive[i].skew
		s.alive[i] = pr
	} else {
		s.alive = append(s.alive, pr)
	}
}

// respawn does so in a while.
func (s *schedule) respawn(i int) {
	d := time.Duration(s.rnd.IntN(pick(s.rnd, 1, 30, 600))) * time.Millisecond
	time.AfterFunc(s.noise.about(d), func() { s.with(func() { s.spawn(i) }) })
}

// living are the indices of the processes that live and were not told to stop.
func (s *schedule) living() (live []int) {
	for i, pr := range s.alive {
		if !pr.dead && !pr.stopping {
			live = append(live, i)
		}
	}
	return live
}

// write is what services do meanwhile.
func (s *schedule) write(seed uint64) {
	load := &workload{
		rnd: rand.New(rand.NewPCG(seed, 3)), counters: map[string]int{}, changes: len(s.replaced) > 1,
		docs: s.docs, sizes: s.sizes,
	}
	for range 1 + load.rnd.IntN(s.bursts) {
		for range 1 + load.rnd.IntN(s.writes) {
			s.with(func() { load.write(s.pg) })
			time.Sleep(time.Duration(load.rnd.ExpFloat64() * float64(s.gap)))
		}
		time.Sleep(time.Duration(load.rnd.Int64N(int64(pick(load.rnd, 10*time.Millisecond, s.pause)))))
	}
	s.with(func() {
		for _, rows := range load.pending {
			s.pg.commit(rows)
		}
	})
}

// simulate runs one schedule in a bubble of its own. plan plans what goes wrong in it.
func simulate(t *testing.T, seed uint64, size size, plan func(*schedule)) (out *schedule) {
	synctest.Test(t, func(t *testing.T) {
		s := newSchedule(t, seed, size)
		plan(s)
		out = s
		s.with(func() {
			for i := range pick(s.rnd, 1, 1, 2) {
				s.spawn(i)
			}
		})
		s.write(seed)
		err := s.finish()
		for _, pr := range s.everyone() {
			if !pr.over() {
				pr.kill()
			}
		}
		time.Sleep(time.Minute) // what is still on its way arrives
		if err != nil {
			t.Errorf("seed %d: %v\n%s", seed, err, s.trace(80))
		}
		s.with(func() {
			s.tally.steps, s.tally.messages, s.tally.confirmed =
				s.steps, len(s.js.messages), len(s.pg.earlier)
			s.tally.lost, s.tally.holes, s.tally.refused, s.tally.late, s.tally.between =
				s.js.lost, s.js.holes, s.js.refused, s.js.late, s.js.between
			s.tally.resumed = s.js.resumed
			for _, pr := range s.procs {
				s.tally.sessions += len(pr.opens)
			}
		})
	})
	return out
}

// finish waits until everything is published, stops the processes and compares.
func (s *schedule) finish() error {
	begun := time.Now()
	var own *noise
	s.with(func() { own = s.noise.another() })
	for !s.complete() {
		time.Sleep(own.about(20 * time.Millisecond))
		var ended error
		s.with(func() {
			for _, pr := range s.procs {
				if pr.over() && !pr.dead && (!pr.stopping || pr.err != nil) {
					ended = fmt.Errorf("the pipeline ended: %w", pr.err)
				}
			}
		})
		if ended != nil {
			return ended
		}
		if time.Since(begun) > 10*time.Minute {
			return fmt.Errorf("not everything is published after %v: %d of %d; %+v", time.Since(begun),
				len(s.stream()), s.events(), s.alive[0].p.Status())
		}
	}
	if own.IntN(4) == 0 {
		var away time.Duration // the broker may still be
		s.with(func() { away = max(time.Until(s.js.down), 0) })
		time.Sleep(away + s.durable + 20*time.Second)
		var last, confirmed outbox.LSN
		s.with(func() { last, confirmed = s.lastEvent(), s.pg.confirmed })
		if confirmed < last {
			return fmt.Errorf("nothing happened for %v, and only %v of %v is confirmed", s.durable+
				20*time.Second, confirmed, last)
		}
	}
	for _, pr := range s.everyone() {
		if err := pr.stop(); err != nil && !pr.dead {
			return fmt.Errorf("stopped with %w", err)
		}
	}
	return s.compare()
}

// everyone is all processes that there were.
func (s *schedule) everyone() (all []*process) {
	s.with(func() { all = slices.Clone(s.procs) })
	return all
}

// lastEvent is where the last transaction with events ends.
func (s *schedule) lastEvent() (end outbox.LSN) {
	for _, x := range s.pg.wal {
		if len(x.rows) > 0 {
			end = x.end
		}
	}
	return end
}

// complete reports whether everything is in the stream. From then on nothing goes wrong any more.
func (s *schedule) complete() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, m := range s.js.messages {
		if m != nil {
			n++
		}
	}
	s.calm = n >= s.events() && len(s.living()) == len(s.alive)
	return s.calm
}

// onOneP lets what follows run as repeatably as Go allows: on one P, and without a garbage collection in
// between. (So these tests are not parallel.) collect is for the moments between schedules.
func onOneP(t *testing.T) (collect func()) {
	procs, percent := runtime.GOMAXPROCS(1), debug.SetGCPercent(-1)
	t.Cleanup(func() {
		runtime.GOMAXPROCS(procs)
		debug.SetGCPercent(percent)
	})
	n := 0
	return func() {
		if n++; n%32 == 0 {
			runtime.GC()
		}
	}
}

// TestWhateverFailsTheStreamIsTheUndisturbedOne: whatever dies, is late, dropped, lost or removed, the stream
// is the undisturbed one, every event is in it once, and no confirmation went further than a checkpoint that
// survives whatever the broker may lose.
func TestWhateverFailsTheStreamIsTheUndisturbedOne(t *testing.T) {
	collect := onOneP(t)
	n := trials(3000)
	var all tally
	begun := time.Now()
	seeds.Each(t, "pipeline.seed", "pipeline.trials", n, func(seed uint64) {
		all.add(&simulate(t, seed, sizeOf(seed), (*schedule).planFaults).tally) // ends the test when it fails
		collect()
	})
	t.Logf("%.0f a second: %v", float64(n)/time.Since(begun).Seconds(), &all)
	for i, n := range all.faults {
		if all.schedules >= 300 && n == 0 {
			t.Errorf("%s did not happen", faults[i].name)
		}
	}
	if all.schedules >= 300 && (all.lost == 0 || all.holes == 0 || all.refused == 0 || all.late == 0 ||
		all.between == 0 || all.confirmed == 0 || all.resumed == 0) {
		t.Errorf("the faults did not happen: %v", &all)
	}
}

// TestKilledAtEveryStep kills a process after each step of a run in turn; another one goes on.
func TestKilledAtEveryStep(t *testing.T) {
	collect := onOneP(t)
	n, kills := trials(12), 0
	seeds.Each(t, "pipeline.seed", "pipeline.trials", n, func(seed uint64) {
		for at, killed := 1, true; killed; at++ {
			killed = false
			simulate(t, seed, short, func(s *schedule) {
				s.plan = []planned{{at, func() {
					s.goWrong(func() {
						killed = true
						kills++
						s.killOne()
					})
				}}}
			})
			collect()
		}
	})
	t.Logf("%d kills", kills)
}

// TestTheUndisturbedLoopMakesWhatTheRulesMake is the simulation without faults: the loop itself makes what
// the rules make.
func TestTheUndisturbedLoopMakesWhatTheRulesMake(t *testing.T) {
	onOneP(t)
	for seed := range uint64(60) {
		if got := simulate(t, seed, sizeOf(seed), func(*schedule) {}).tally; got.refused > 0 ||
			got.sessions != got.starts && got.starts == 1 {
			t.Errorf("seed %d: %v", seed, &got)
		}
	}
}

// TestASeedIsARunStepByStep: a seed is a run, step by step, so that one that failed fails again. What happens
// in the same nanosecond, by a rare chance, may happen in any order.
func TestASeedIsARunStepByStep(t *testing.T) {
	collect := onOneP(t)
	for seed := range uint64(trials(200)) {
		var runs [2][]step
		for i := range runs {
			runs[i] = simulate(t, seed, sizeOf(seed), (*schedule).planFaults).traced
			slices.SortStableFunc(runs[i], func(a, b step) int {
				return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.what, b.what), cmp.Compare(a.n, b.n))
			})
		}
		a, b := runs[0], runs[1]
		if !slices.Equal(a, b) {
			i := 0
			for i < min(len(a), len(b)) && a[i] == b[i] {
				i++
			}
			t.Errorf("seed %d: the runs of %d and %d steps part at step %d: %v, then %v", seed, len(a),
				len(b), i+1, a[i:min(i+3, len(a))], b[i:min(i+3, len(b))])
		}
		collect()
	}
}
