package pipeline

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

var (
	simTrials = flag.Int("pipeline.trials", 300, "schedules of the simulation")
	simSeed   = flag.Uint64("pipeline.seed", 1, "the first schedule's seed")
)

func pick[T any](rnd *rand.Rand, of ...T) T { return of[rnd.IntN(len(of))] }

func randomSettings(rnd *rand.Rand) outbox.Settings {
	return outbox.Settings{
		Horizon: pick(rnd, 0, 5*time.Millisecond, 20*time.Millisecond, 200*time.Millisecond), Sort: pick(rnd, outbox.BySeqKey, outbox.ByCommit),
		MaxEvents: pick(rnd, 3, 20, 1000), MaxBytes: pick[int64](rnd, 2000, 1<<20),
	}
}

// workload is what services write: rows of several documents by several actors, with keys that are out of order within
// transactions and between them, and logical messages, ours and others'.
type workload struct {
	rnd      *rand.Rand
	counters map[string]int
	pending  [][]row
	changes  bool
	n        int
}

func (l *workload) rows() []row {
	var rows []row
	for range pick(l.rnd, 1, 1, 1, 2, 3, 12) {
		doc, actor := fmt.Sprintf("d%d", l.rnd.IntN(4)), fmt.Sprintf("a%d", l.rnd.IntN(3))
		l.counters[doc+actor]++
		l.n++
		rows = append(rows, row{doc, actor, fmt.Sprintf("%s:%06d", actor, l.counters[doc+actor]), fmt.Sprintf("%d", l.n)})
	}
	l.rnd.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	return rows
}

// write writes one transaction. The world's lock is held.
func (l *workload) write(pg *postgres) {
	at := time.Now().Add(-time.Duration(l.rnd.IntN(400)) * time.Microsecond) // timestamps need not ascend
	switch n := l.rnd.IntN(40); {
	case n < 2:
		pg.commitAt(at, nil, logical{prefix: outbox.TickPrefix})
	case n < 4 && l.changes:
		pg.commitAt(at, nil, logical{prefix: outbox.SettingsPrefix, content: randomSettings(l.rnd).Content("outflow")})
	case n == 4:
		pg.commitAt(at, nil, logical{prefix: outbox.SettingsPrefix, content: randomSettings(l.rnd).Content("another")})
	case n == 5:
		pg.commitAt(at, nil, logical{prefix: outbox.SettingsPrefix, content: "v=1 slot=outflow horizon=soon"})
	case n == 6:
		pg.commitAt(at, nil) // PostgreSQL 14 sends them
	case n == 7:
		pg.commitAt(at, l.rows(), logical{prefix: outbox.TickPrefix}, logical{prefix: "another", content: "x", outside: true})
	case n < 10:
		pg.grow(pg.end + outbox.LSN(l.rnd.IntN(5000))) // other databases' WAL
	case n < 18:
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

// tally counts what a simulation met.
type tally struct {
	kills, stops, starts, sessions, lost, holes, refused, late, messages, losses, confirmed int
}

func (a *tally) add(b tally) {
	a.kills += b.kills
	a.stops += b.stops
	a.starts += b.starts
	a.sessions += b.sessions
	a.lost += b.lost
	a.holes += b.holes
	a.refused += b.refused
	a.late += b.late
	a.messages += b.messages
	a.losses += b.losses
	a.confirmed += b.confirmed
}

// schedule is one run: a workload, processes that are killed and stopped, and faults at random moments.
type schedule struct {
	*world
	rnd      *rand.Rand
	alive    []*process
	replaced []outbox.Settings // the settings that a process may be started with
	tally    tally
}

func (s *schedule) spawn() *process {
	s.tally.starts++
	return s.run(options{settings: pick(s.rnd, s.replaced...), stop: pick(s.rnd, 50*time.Millisecond, 10*time.Second)})
}

// fault lets one thing go wrong.
func (s *schedule) fault() {
	i := s.rnd.IntN(len(s.alive))
	pr := s.alive[i]
	switch s.rnd.IntN(16) {
	case 0, 1, 2, 3:
		s.tally.kills++
		pr.kill()
		time.Sleep(time.Duration(s.rnd.IntN(600)) * time.Millisecond)
		s.alive[i] = s.spawn()
	case 4:
		s.tally.stops++
		if err := pr.stop(); err != nil {
			s.broken = fmt.Errorf("stopped with %w", err)
		}
		s.alive[i] = s.spawn()
	case 5:
		s.with(func() {
			for _, u := range s.upstreams() {
				u.cut(s.rnd.IntN(2) == 0)
			}
			s.pg.down = time.Now().Add(time.Duration(s.rnd.IntN(1000)) * time.Millisecond)
		})
	case 6:
		s.with(func() {
			for _, l := range s.links() {
				l.cut(s.rnd.IntN(2) == 0)
			}
			s.js.down = time.Now().Add(time.Duration(s.rnd.IntN(1000)) * time.Millisecond)
		})
	case 7:
		s.with(func() { s.js.lostAcks = time.Now().Add(time.Duration(s.rnd.IntN(2000)) * time.Millisecond) })
	case 8:
		s.with(func() { s.js.paused = time.Now().Add(time.Duration(s.rnd.IntN(8000)) * time.Millisecond) })
	case 9, 10:
		s.with(func() {
			if s.js.powerLoss() {
				s.tally.losses++
			}
		})
	case 11:
		s.with(s.js.retention)
	case 12:
		s.with(s.pg.crash)
	case 13:
		s.with(func() { s.js.saves = pick(s.rnd, saveUnheard, saveLate, saveNever) })
	case 14:
		s.with(func() { s.pg.writeFails, s.pg.failsLate = 1+s.rnd.IntN(2), s.rnd.IntN(2) == 0 })
	case 15:
		s.with(func() { s.js.drop = 1 })
	}
}

// simulate runs one schedule in a bubble of its own.
func simulate(t *testing.T, seed uint64, faults int) (out tally) {
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		first := randomSettings(rnd)
		s := &schedule{world: newWorld(t, seed, first, pick(rnd, 0, 2*time.Second, 6*time.Second, 40*time.Second)), rnd: rnd}
		s.js.ackEvery, s.js.limit = pick(rnd, 1, 3, 50), pick(rnd, 4, 30, 2000)
		s.js.latency = pick(rnd, 100*time.Microsecond, time.Millisecond, 20*time.Millisecond)
		s.js.replicated = rnd.IntN(8) == 0
		s.pg.delay = pick(rnd, 0, 0, 2*time.Millisecond, 50*time.Millisecond)
		s.replaced = []outbox.Settings{first}
		load := &workload{rnd: rand.New(rand.NewPCG(seed, 3)), counters: map[string]int{}}
		if rnd.IntN(3) == 0 {
			load.changes = true
			s.replaced = append(s.replaced, randomSettings(rnd))
		}
		for range pick(rnd, 1, 1, 2) {
			s.alive = append(s.alive, s.spawn())
		}

		written := make(chan struct{})
		go func() {
			defer close(written)
			for range 2 + load.rnd.IntN(8) {
				for range 1 + load.rnd.IntN(20) {
					s.with(func() { load.write(s.pg) })
					time.Sleep(time.Duration(load.rnd.ExpFloat64() * float64(8*time.Millisecond)))
				}
				time.Sleep(time.Duration(load.rnd.IntN(4000)) * time.Millisecond)
			}
			s.with(func() {
				for _, rows := range load.pending {
					s.pg.commit(rows)
				}
			})
		}()
		for range faults {
			time.Sleep(time.Duration(rnd.ExpFloat64() * float64(1500*time.Millisecond)))
			s.fault()
		}
		<-written
		s.finish(t, seed)
		time.Sleep(time.Minute) // what is still on its way arrives
		out = s.tally
	})
	return out
}

// finish waits until everything is published, stops the processes and compares.
func (s *schedule) finish(t *testing.T, seed uint64) {
	failed := func(err error) {
		t.Errorf("seed %d (-pipeline.seed=%d -pipeline.trials=1): %v", seed, seed, err)
	}
	begun := time.Now()
	for !s.complete() {
		time.Sleep(100 * time.Millisecond)
		for _, pr := range s.alive {
			if pr.over() {
				failed(fmt.Errorf("the pipeline ended: %w", pr.err))
				s.end()
				return
			}
		}
		if time.Since(begun) > 10*time.Minute {
			failed(fmt.Errorf("not everything is published after %v: %d of %d; %+v", time.Since(begun), len(s.stream()), s.events(), s.alive[0].p.Snapshot()))
			s.end()
			return
		}
	}
	if s.rnd.IntN(4) == 0 {
		time.Sleep(s.durable + 5*time.Second) // all of it is confirmed
	}
	for _, pr := range s.alive {
		if err := pr.stop(); err != nil {
			failed(fmt.Errorf("stopped with %w", err))
		}
		s.tally.sessions += len(pr.opens)
	}
	if err := s.compare(); err != nil {
		failed(err)
	}
	s.tally.messages = len(s.js.messages)
	s.tally.lost, s.tally.holes, s.tally.refused, s.tally.late = s.js.lost, s.js.holes, s.js.refused, s.js.late
	s.tally.confirmed = len(s.pg.earlier)
}

func (s *schedule) end() {
	for _, pr := range s.alive {
		pr.kill()
	}
}

func (s *schedule) complete() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, m := range s.js.messages {
		if m != nil {
			n++
		}
	}
	return n >= s.events()
}

// TestSimulation: whatever dies, is late, dropped, lost or removed, the stream is the undisturbed one, every event is in it once, and
// no confirmation went further than a place that survives whatever the broker may lose.
func TestSimulation(t *testing.T) {
	t.Parallel()
	n := *simTrials
	if testing.Short() {
		n /= 10
	}
	var all tally
	for i := range n {
		all.add(simulate(t, *simSeed+uint64(i), 2+i%14))
		if t.Failed() {
			return
		}
	}
	t.Logf("%d schedules from seed %d: %+v", n, *simSeed, all)
	if n >= 50 && (all.kills == 0 || all.lost == 0 || all.holes == 0 || all.refused == 0 || all.late == 0 || all.confirmed == 0) {
		t.Errorf("the faults did not happen: %+v", all)
	}
}

// TestUndisturbed is the simulation without faults: the loop itself makes what the rules make.
func TestUndisturbed(t *testing.T) {
	t.Parallel()
	for seed := range uint64(30) {
		if got := simulate(t, seed, 0); got.refused > 0 || got.sessions != got.starts && got.starts == 1 {
			t.Errorf("seed %d: %+v", seed, got)
		}
	}
}
