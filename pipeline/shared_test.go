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
	taken  int         // epochs
	since  time.Time   // of the newest one
	cuts   int         // that were stored
}

func newSharing(t *testing.T, seed uint64, first relay.Settings, durable time.Duration) *sharing {
	s := &sharing{harness: newHarnessOf(t, seed, first, durable, homeDecoder()),
		rnd: rand.New(rand.NewPCG(seed, 12)), ended: make(chan struct{})}
	s.js.shared, s.js.latency = true, pick(s.rnd, 200*time.Microsecond, 20*time.Millisecond)
	s.other = newPostgres(s.harness, seed+1)
	s.other.end, s.other.confirmed = 0x5000000, 0x5000000
	s.other.identity.Subscription, s.other.systemID = originName, "7361530121234522222"
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

// newest is the newest revision of the record. The lock is held.
func (s *sharing) newest() (*checkpoint.Record, uint64) {
	last := &s.js.revisions[len(s.js.revisions)-1]
	rec, err := last.record()
	s.broken = errors.Join(s.broken, err)
	return rec, last.number
}

// take lets a cluster take the next epoch, whoever has the present one.
func (s *sharing) take(cluster int) {
	s.with(func() {
		rec, before := s.newest()
		revision := before
		doc, err := rec.TakenBy(cluster).Encode()
		if err == nil {
			revision, err = s.js.land(doc, nil, before)
		}
		if err == nil && s.js.lossAt > before { // a start has yet to record what was lost
			s.js.lossAt = revision + 1
		}
		s.broken = errors.Join(s.broken, err)
		s.taken++
		s.since = time.Now()
	})
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

// storeCut closes what cluster 2 holds, if it makes the stream and has published all that its WAL makes; as
// it will do by itself, and reports whether there is one more. Its session does not know of the cut.
func (s *sharing) storeCut() bool {
	pr := s.procs[1]
	var cut *outbox.Cut
	var last, fence uint64
	var l *brokerConn
	var apart time.Time
	s.with(func() {
		// a cut of an epoch that the record loses again would be nobody's
		if rec, _ := s.newest(); rec.Owner == 2 && time.Since(s.since) >= s.durable && !pr.dead &&
			pr.p.Status().State == StateRunning {
			if cut, last, fence = s.nextCut(rec); cut != nil {
				l = pr.connect()
				l.extra = time.Duration(s.rnd.IntN(int(time.Second)))
				// its session reads no input beyond the cut meanwhile, of which the record would say more
				apart, s.apart = s.apart, time.Now().Add(time.Hour)
			}
		}
	})
	if cut == nil {
		return false
	}
	err := l.StoreCut(context.Background(), *cut, last, fence)
	s.with(func() {
		s.apart = apart
		for _, l := range pr.nats {
			l.cut(s.rnd.IntN(2) == 0)
		}
	})
	if err == nil {
		s.cuts++
	}
	return err == nil
}

// nextCut is the cut that cluster 2 has to store next; nil: there is none. The lock is held.
func (s *sharing) nextCut(rec *checkpoint.Record) (cut *outbox.Cut, last, fence uint64) {
	got, cuts := s.stored()
	var low outbox.LSN
	if n := len(cuts); n > 0 {
		low = cuts[n-1] + 1
	}
	if n := s.js.newest(); n > 0 {
		low = max(low, s.js.messages[n-1].header.Thru)
	}
	wal := slices.DeleteFunc(slices.Clone(s.other.wal), func(x *transaction) bool { return x.home == 0 })
	made, held, err := replayCut(wal, cuts, s.first, s.maxPublishedAhead, awayDecoder())
	if err != nil {
		s.broken = errors.Join(s.broken, err)
		return nil, 0, 0
	}
	var at outbox.LSN
	for _, x := range wal {
		if x.input() {
			at = x.home
		}
	}
	if due := rec.Checkpoints[len(rec.Checkpoints)-1].Due; at < due { // no input is at the due of a keepalive
		if slices.ContainsFunc(s.pg.wal, func(x *transaction) bool {
			return x.input() && x.end > at && x.end <= due
		}) {
			return nil, 0, 0
		}
		at = due
	}
	if held == 0 || at < low || len(got) != len(made) {
		return nil, 0, 0
	}
	return &outbox.Cut{SystemID: 7361530121234511111, LSN: at, Epoch: rec.Epoch, Owner: 2},
		uint64(len(s.js.messages)), s.js.newestCut()
}

// stop ends everything.
func (s *sharing) stop() {
	s.ends()
	<-s.ended
	for _, pr := range s.harness.procs {
		if !pr.over() {
			pr.kill()
		}
	}
	time.Sleep(time.Minute) // what is still on its way arrives
}

// goWrong lets something fail.
func (s *sharing) goWrong() {
	i := s.rnd.IntN(2)
	pr := s.procs[i]
	switch s.rnd.IntN(8) {
	case 0, 1:
		pr.kill()
		time.Sleep(time.Duration(s.rnd.IntN(int(time.Second))))
		s.procs[i] = s.run(options{cluster: i + 1})
	case 2:
		s.with(pr.pg.crash)
	case 3, 4:
		s.with(func() { s.js.powerLoss(s.rnd.IntN(2) == 0, s.rnd.IntN(2) == 0) })
	case 5, 6: // it sleeps, with messages on their way
		s.with(func() {
			until := time.Now().Add(time.Duration(s.rnd.IntN(20)) * time.Second)
			for _, l := range pr.nats {
				l.frozen = until
			}
			for _, u := range pr.ups {
				u.frozen = until
			}
		})
	case 7:
		s.with(func() { s.apart = time.Now().Add(time.Duration(s.rnd.IntN(20)) * time.Second) })
	}
}

// gaveUp reports a process that has given up.
func (s *sharing) gaveUp() error {
	for i, pr := range s.procs {
		if pr.over() {
			return fmt.Errorf("cluster %d: %w", i+1, pr.err)
		}
	}
	return nil
}

// TestASharedStreamIsWhatTheWALAndTheCutsMake: a home and another cluster take one stream from each other at
// any moment, the other one closes by cuts what it holds, processes die, the broker loses what is not
// durable, and what closed connections had sent arrives all the same. Each message is that of the rules, and
// in the end all events are there once.
func TestASharedStreamIsWhatTheWALAndTheCutsMake(t *testing.T) {
	t.Parallel()
	taken, cuts, refused := 0, 0, 0
	seeds.Each(t, "pipeline.seed", "pipeline.trials", trials(20), func(seed uint64) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 11))
			s := newSharing(t, seed, randomSettings(rnd), pick(rnd, 0, 2*time.Second, 6*time.Second))
			err := s.torture(rnd)
			s.stop()
			if err = errors.Join(err, s.check(false)); err != nil {
				t.Errorf("seed %d: %v", seed, err)
			}
			taken, cuts, refused = taken+s.taken, cuts+s.cuts, refused+s.js.refused
		})
	})
	t.Logf("%d epochs, %d cuts, %d messages refused", taken, cuts, refused)
}

func (s *sharing) torture(rnd *rand.Rand) error {
	for i := range s.procs {
		s.procs[i] = s.run(options{cluster: i + 1})
	}
	load := &workload{rnd: rnd, counters: map[string]int{}, changes: true, docs: 3, sizes: []int{1, 1, 2, 5}}
	owner := 1
	for range 6 + rnd.IntN(10) {
		for range rnd.IntN(12) {
			s.with(func() { load.write(s.pg) })
			time.Sleep(time.Duration(rnd.IntN(int(20 * time.Millisecond))))
		}
		s.with(func() { s.pg.writeFails = pick(rnd, 0, 1<<20, 1<<20) }) // it may have no tick for long
		switch rnd.IntN(4) {
		case 0, 1:
			owner = 3 - owner
			s.take(owner)
		case 2:
			s.goWrong()
		}
		time.Sleep(time.Duration(rnd.IntN(int(pick(rnd, 50*time.Millisecond, 10*time.Second)))))
		for n := rnd.IntN(40); n > 0 && !s.storeCut(); n-- {
			time.Sleep(50 * time.Millisecond)
		}
		switch rnd.IntN(6) {
		case 0: // the cut may not be recorded yet
			owner = 1
			s.take(1)
		case 1, 2: // or what it closed may not be durable
			time.Sleep(time.Duration(rnd.Int64N(int64(2*s.durable) + 1)))
			s.with(func() { s.js.powerLoss(rnd.IntN(2) == 0, rnd.IntN(2) == 0) })
		}
		if err := errors.Join(s.check(false), s.gaveUp()); err != nil {
			return err
		}
	}
	s.with(func() {
		s.pg.writeFails = 0
		for _, rows := range load.pending {
			s.pg.commit(rows)
		}
	})
	s.take(1)
	for begun := time.Now(); s.check(true) != nil; time.Sleep(100 * time.Millisecond) {
		if err := s.gaveUp(); err != nil {
			return err
		}
		if time.Since(begun) > 10*time.Minute {
			return errors.Join(s.check(true), fmt.Errorf("%+v", s.procs[0].p.Status()))
		}
	}
	return nil
}
