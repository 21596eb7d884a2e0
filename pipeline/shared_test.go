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

	"github.com/outflowhq/outflow/internal/lab/seeds"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// sharing are a home, cluster 1, and cluster 2, which reads a delayed copy of its WAL, over one stream and
// one record.
type sharing struct {
	*harness
	rnd    *rand.Rand
	ends   context.CancelFunc
	ended  chan struct{}
	procs  [2]*process // of cluster 1 and 2, at present
	copied int         // transactions of the home
	apart  time.Time   // nothing is replicated until then
	cuts   int         // that were stored
	calm   bool        // nothing goes wrong any more
}

func newSharing(t *testing.T, seed uint64, first relay.Settings, durable time.Duration) *sharing {
	s := &sharing{harness: newHarnessOf(t, seed, first, durable, homeDecoder()),
		rnd: rand.New(rand.NewPCG(seed, 12)), ended: make(chan struct{})}
	s.js.shared, s.js.latency = true, pick(s.rnd, 200*time.Microsecond, 20*time.Millisecond)
	s.other = newPostgres(s.harness, seed+1)
	s.other.end, s.other.confirmed = 0x5000000, 0x5000000
	s.other.identity.Subscription, s.other.systemID = originName, "7361530121234522222"
	s.js.onCut = s.cutStored
	rec := *s.record()
	rec.Owner, rec.Epoch = 1, 1
	doc, err := rec.Encode()
	if err != nil {
		t.Fatal(err)
	}
	s.js.revisions[0].doc, s.js.revisions[0].rec = doc, nil
	s.keep(rec.Checkpoints[0])
	ctx, cancel := context.WithCancel(context.Background())
	s.ends = cancel
	go s.replicate(ctx, rand.New(rand.NewPCG(seed, 13)))
	return s
}

// replicate is the subscription of cluster 2, which takes writes of its own as well.
func (s *sharing) replicate(ctx context.Context, rnd *rand.Rand) {
	defer close(s.ended)
	for ctx.Err() == nil {
		time.Sleep(time.Duration(1 + rnd.IntN(int(pick(rnd, time.Millisecond, 100*time.Millisecond)))))
		s.with(func() {
			if rnd.IntN(20) == 0 {
				s.other.commit([]row{{"own", "b", "b:000001", "{}"}})
			}
			for !time.Now().Before(s.apart) && s.copied < len(s.pg.wal) && rnd.IntN(4) > 0 {
				x := *s.pg.wal[s.copied]
				s.copied++
				if len(x.rows)+len(x.logical) > 0 {
					x.home = x.end
					s.other.log(&x)
				}
			}
		})
	}
}

// stored is the stream as far as it is there, and its cuts. The lock is held.
func (s *sharing) stored() (all []line, cuts []outbox.LSN) {
	for _, m := range s.js.messages {
		switch {
		case m == nil:
		case m.cut != nil:
			all, cuts = append(all, cutLine(m.cut.LSN)), append(cuts, m.cut.LSN)
		default:
			all = append(all, m.line)
		}
	}
	return all, cuts
}

// check holds the stream against what the rules make of the home's WAL and the cuts: it is the beginning of
// that, or all of it.
func (s *sharing) check(all bool) (err error) {
	s.with(func() {
		got, cuts := s.stored()
		want, held, wrong := replayCut(s.pg.wal, cuts, s.first, s.maxPublishedAhead, s.decoder)
		if err = errors.Join(wrong, s.broken); err != nil {
			return
		}
		if all && (held > 0 || len(got) != len(want)) {
			err = fmt.Errorf("%d messages of %d, %d events are held", len(got), len(want), held)
		}
		for i, l := range got {
			if i == len(want) || l != want[i] {
				err = fmt.Errorf("message %d of %d is\n%s\nand not that of WAL and cuts %v:\n%s", i+1,
					len(got),
					l, cuts, append(want[:len(want):len(want)], line{})[i])
				return
			}
		}
	})
	return err
}

// completeElsewhere reports whether cluster 2 has published all that it has of a home that is gone, or can't:
// something that it does not have has closed the newest message.
func (s *sharing) completeElsewhere() (err error) {
	s.with(func() {
		got, cuts := s.stored()
		wal := slices.DeleteFunc(slices.Clone(s.other.wal), func(x *transaction) bool { return x.home == 0 })
		made, held, wrong := replayCut(wal, cuts, s.first, s.maxPublishedAhead, awayDecoder())
		var newest outbox.LSN
		for _, x := range wal {
			if x.input() {
				newest = x.home
			}
		}
		if n := s.js.newest(); n > 0 && s.js.messages[n-1].header.Thru > newest {
			return
		}
		if err = wrong; err == nil && (held > 0 || len(got) < len(made)) {
			err = fmt.Errorf("the home is gone: %d messages of %d, %d events are held, inputs up to %v",
				len(got), len(made), held, newest)
		}
	})
	return err
}

// spawn starts the process of a cluster.
func (s *sharing) spawn(i int, maximumDelay time.Duration) {
	s.procs[i] = s.run(options{cluster: i + 1, maximumDelay: maximumDelay})
}

// gone ends the process of a cluster, which comes back after a while, in other hands. The lock is held.
func (s *sharing) gone(i int, d time.Duration) {
	s.procs[i].dies()
	time.AfterFunc(d, func() { s.with(func() { s.back(i) }) })
}

// back lets the process of a cluster come back. The lock is held.
func (s *sharing) back(i int) {
	if !s.calm && s.procs[i].dead {
		s.spawn(i, pick(s.rnd, time.Millisecond, 500*time.Millisecond, 3*time.Second, 15*time.Second))
	}
}

// cutStored is what happens soon after a cut was stored: it may not be recorded yet, or what it closed may
// not be durable. The lock is held.
func (s *sharing) cutStored() {
	s.cuts++
	soon := s.upTo(3*s.durable + time.Second)
	if s.calm {
		return
	}
	switch s.rnd.IntN(6) {
	case 0:
		time.AfterFunc(soon, func() { s.with(func() { s.back(0) }) })
	case 1:
		s.gone(1, s.upTo(time.Second))
	case 2:
		time.AfterFunc(soon, s.lose)
	}
}

func (s *sharing) upTo(d time.Duration) time.Duration { return time.Duration(s.rnd.Int64N(int64(d))) }

// lose lets the broker forget what is not durable.
func (s *sharing) lose() {
	s.with(func() {
		if !s.calm {
			s.js.powerLoss(s.rnd.IntN(2) == 0, s.rnd.IntN(2) == 0)
		}
	})
}

// stop ends everything.
func (s *sharing) stop() {
	s.with(func() { s.calm = true })
	s.ends()
	<-s.ended
	for _, pr := range s.everyone() {
		if !pr.over() {
			pr.kill()
		}
	}
	time.Sleep(time.Minute) // what is still on its way arrives
}

// everyone is all processes that there were.
func (s *sharing) everyone() (all []*process) {
	s.with(func() { all = slices.Clone(s.harness.procs) })
	return all
}

// goWrong lets something fail.
func (s *sharing) goWrong() {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.rnd.IntN(2)
	pr := s.procs[i]
	switch s.rnd.IntN(9) {
	case 0, 1:
		s.gone(i, s.upTo(time.Second))
	case 2:
		pr.pg.crash()
	case 3, 4:
		s.sleeps(pr)
	case 5, 8:
		if s.rnd.IntN(2) == 0 { // the home is cut off from everybody
			s.sleeps(s.procs[0])
		}
		s.apart = time.Now().Add(s.upTo(20 * time.Second))
	case 6:
		s.js.saves = pick(s.rnd, saveUnheard, saveLate, saveNever)
	case 7: // the home's database is down
		s.pg.down = time.Now().Add(s.upTo(40 * time.Second))
		for _, u := range s.ups {
			if u.pg == s.pg {
				u.cut(true)
			}
		}
	}
}

// sleeps lets a process sleep, with messages on their way. The lock is held.
func (s *sharing) sleeps(pr *process) {
	until := time.Now().Add(s.upTo(20 * time.Second))
	for _, l := range pr.nats {
		l.frozen = until
	}
	for _, u := range pr.ups {
		u.frozen = until
	}
}

// gaveUp reports a process that has given up.
func (s *sharing) gaveUp() error {
	for _, pr := range s.everyone() {
		if pr.over() && pr.err != nil {
			return fmt.Errorf("a process gave up: %w", pr.err)
		}
	}
	return nil
}

// TestASharedStreamIsWhatTheWALAndTheCutsMake: another cluster takes a home's stream whenever it suspects the
// home, rightly or not, and closes by cuts what it holds; the home takes it back. Processes die, the broker
// loses what is not durable, and what closed connections had sent arrives all the same. Each message is that
// of the rules, and in the end all events are there once. If the home is gone for good, those are that have
// left it. In half of the trials the broker syncs each write, which is what the mode is for: then it loses
// nothing, but for what has not reached it.
func TestASharedStreamIsWhatTheWALAndTheCutsMake(t *testing.T) {
	t.Parallel()
	epochs, cuts, refused, lost := uint64(0), 0, 0, 0
	seeds.Each(t, "pipeline.seed", "pipeline.trials", trials(20), func(seed uint64) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 11))
			s := newSharing(t, seed, randomSettings(rnd), pick(rnd, 0, 0, 2*time.Second, 6*time.Second))
			err := s.torture(rnd)
			s.stop()
			if err = errors.Join(err, s.check(false)); err != nil {
				t.Errorf("seed %d: %v", seed, err)
			}
			if s.durable == 0 && s.js.lost > 0 {
				t.Errorf("seed %d: a broker that syncs each write has lost %d messages", seed, s.js.lost)
			}
			lost += s.js.lost
			epochs, cuts, refused = epochs+s.record().Epoch-1, cuts+s.cuts, refused+s.js.refused
		})
	})
	t.Logf("%d epochs, %d cuts, %d messages refused, %d lost", epochs, cuts, refused, lost)
}

func (s *sharing) torture(rnd *rand.Rand) error {
	for i := range s.procs {
		s.spawn(i, 3*time.Second)
	}
	load := &workload{rnd: rnd, counters: map[string]int{}, changes: true, docs: 3, sizes: []int{1, 1, 2, 5}}
	for range 6 + rnd.IntN(10) {
		for range rnd.IntN(12) {
			s.with(func() {
				if !time.Now().Before(s.pg.down) {
					load.write(s.pg)
				}
			})
			time.Sleep(time.Duration(rnd.IntN(int(20 * time.Millisecond))))
			if rnd.IntN(20) == 0 {
				s.goWrong()
			}
		}
		switch rnd.IntN(6) {
		case 0, 1:
			s.with(func() { s.gone(0, s.upTo(pick(rnd, time.Second, 20*time.Second, time.Minute))) })
		case 2, 3:
			s.goWrong()
		case 4:
			s.lose()
		}
		pause := pick(rnd, 50*time.Millisecond, 10*time.Second, 40*time.Second)
		time.Sleep(time.Duration(rnd.IntN(int(pause))))
		if err := errors.Join(s.check(false), s.gaveUp()); err != nil {
			return err
		}
	}
	s.with(func() {
		for _, rows := range load.pending {
			s.pg.commit(rows)
		}
	})
	return s.finish(rnd)
}

// finish waits until everything is in the stream that can be: the home is back, or gone for good, and with it
// what was not replicated.
func (s *sharing) finish(rnd *rand.Rand) error {
	back := rnd.IntN(3) > 0
	s.with(func() {
		s.calm = true
		s.pg.down = time.Time{}
		for _, pr := range s.procs {
			pr.dies()
		}
		delay := pick(rnd, 2*time.Second, 10*time.Second)
		if back {
			delay = time.Hour
			s.spawn(0, delay)
		} else if rnd.IntN(2) == 0 {
			s.apart = time.Now().Add(time.Hour)
		}
		s.spawn(1, delay)
	})
	wanted := func() error { return s.check(true) }
	if !back {
		time.Sleep(time.Minute) // the links bring what has left the home
		wanted = s.completeElsewhere
	}
	for begun := time.Now(); wanted() != nil; time.Sleep(100 * time.Millisecond) {
		if err := s.gaveUp(); err != nil {
			return err
		}
		if time.Since(begun) > 10*time.Minute {
			return errors.Join(wanted(), fmt.Errorf("%+v; %+v", s.procs[0].p.Status(), s.procs[1].p.Status()))
		}
	}
	return nil
}
