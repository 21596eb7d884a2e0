package pipeline

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// What cluster 2 keeps for itself of a simulated home.

// keep makes the first record, as init makes it with the slot.
func (s *sharing) keep(first checkpoint.StoredCheckpoint) {
	first.Due, first.Read = 1, s.other.end
	rec := &checkpoint.Record{
		Slot: "elsewhere", Database: "app", SystemID: s.other.systemID, Mapping: awayDecoder().Mapping,
		Stream: "OUTBOX", Created: s.js.created,
		Publication: checkpoint.PublicationSeen{PublicationIdentity: s.other.identity, Seen: s.other.end},
		Checkpoints: []checkpoint.StoredCheckpoint{first},
	}
	doc, err := rec.Encode()
	must.Succeed(s.t, err)
	if _, err := s.js.landIn(&s.js.kept, doc, rec, 0); err != nil {
		s.t.Fatal(err)
	}
	s.js.kept[0].at = time.Now().Add(-time.Hour)
}

// elsewhere lets the process read the home's rows, and the home's record as cluster 2 has to read it.
func (pr *process) elsewhere(conns *Conns) {
	conns.Decoder = awayDecoder()
	conns.Checkpoint.Mapping, conns.Checkpoint.Slot = conns.Decoder.Mapping, "elsewhere"
	conns.Store = &Elsewhere{Home: conns.Store, Own: keptStore{conns.Store.(*brokerConn)}}
	conns.Writer = nil
	conns.Reopen = func(ctx context.Context) (JetStream, Store, error) {
		js, store, err := pr.reopen(ctx)
		if err != nil {
			return nil, nil, err
		}
		return js, &Elsewhere{Home: store, Own: keptStore{store.(*brokerConn)}}, nil
	}
}

// keptStore is where cluster 2 keeps its record.
type keptStore struct{ *brokerConn }

func (k keptStore) Load(ctx context.Context) (*checkpoint.Record, uint64, error) {
	return k.load(ctx, &k.js.kept)
}

func (k keptStore) Save(ctx context.Context, rec *checkpoint.Record, last uint64) (uint64, error) {
	return k.save(ctx, &k.js.kept, rec, last)
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
	})
}

// loseKept loses of what is kept what the broker stored behind the record's newest revision, unless that is
// durable, and returns the last number that is left.
func (js *jetstream) loseKept(now time.Time) uint64 {
	left := js.revisions[len(js.revisions)-1].number
	for n := len(js.kept); n > 0; n-- {
		if r := &js.kept[n-1]; r.number < left || now.Sub(r.at) >= js.w.loses {
			return max(left, r.number)
		}
		js.kept = js.kept[:n-1]
	}
	return left
}

// checkKept holds a confirmation of cluster 2 to its promise: whatever the broker may lose at this moment of
// the record, of what is kept, and of the stream, there is a checkpoint from which cluster 2 goes on at or
// above it.
func (w *harness) checkKept(lsn outbox.LSN) {
	firm := uint64(w.js.firm())
	for _, home := range w.losable(w.js.revisions) {
		for _, own := range w.losable(w.js.kept) {
			safe := false
			if rec, err := own.Elsewhere(home); err == nil {
				for _, p := range rec.Checkpoints {
					safe = safe || p.Read >= lsn && p.Seq <= firm
					if from := w.other.from(p.Checkpoint); p.Read > from {
						w.broken = errors.Join(w.broken, fmt.Errorf("%v is said to be read elsewhere from "+
							"%v on, where it begins at %v", p.Due, p.Read, from))
					}
				}
			}
			if !safe {
				w.broken = errors.Join(w.broken, fmt.Errorf("elsewhere %v was confirmed; there may be no "+
					"checkpoint left at or above it, with %d messages: %+v and %+v", lsn, firm,
					home.Checkpoints, own.Checkpoints))
				return
			}
		}
	}
}

// losable are the revisions that may become the newest one.
func (w *harness) losable(all []revision) (left []*checkpoint.Record) {
	for i := len(all) - 1; i >= 0; i-- {
		rec, err := all[i].record()
		if err != nil {
			w.broken = errors.Join(w.broken, err)
			return nil
		}
		left = append(left, rec)
		if time.Since(all[i].at) >= w.loses {
			break
		}
	}
	return left
}

// inSharing runs f in a bubble of its own, with the processes of both clusters.
func inSharing(t *testing.T, durable time.Duration, f func(s *sharing) error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newSharing(t, 1, defaults, durable)
		for i := range s.procs {
			s.procs[i] = s.run(options{cluster: i + 1})
		}
		err := f(s)
		s.stop()
		if err = errors.Join(err, s.check(false)); err != nil {
			t.Error(err)
		}
	})
}

// copy lets the subscription bring what the home has committed, but for what is skipped, while it does not do
// so by itself. The lock is held.
func (s *sharing) copy(skip func(*transaction) bool) {
	for ; s.copied < len(s.pg.wal); s.copied++ {
		if x := *s.pg.wal[s.copied]; len(x.rows)+len(x.logical) > 0 && !skip(&x) {
			x.home = x.end
			s.other.log(&x)
		}
	}
}

// TestWhoStandsByKeepsNoMoreWALThanItMust: while the home is silent, both slots follow what the owner has
// found durable, whoever that is, and with it what else is written on their servers. Nothing is written for
// that at home, and nothing to what an owner has not said.
func TestWhoStandsByKeepsNoMoreWALThanItMust(t *testing.T) {
	t.Parallel()
	for owner := 1; owner <= 2; owner++ {
		inSharing(t, 5*time.Second, func(s *sharing) error {
			s.take(owner)
			time.Sleep(5 * time.Second)
			s.write(20)
			time.Sleep(time.Minute)
			var home, own []revision
			look := func() (rec *checkpoint.Record) {
				s.with(func() {
					home, own = s.js.revisions, s.js.kept
					rec, _ = s.newest()
				})
				return rec
			}
			rec := look()
			newest := rec.Checkpoints[len(rec.Checkpoints)-1]
			ticks := len(s.pg.ticks)
			if err := s.check(true); err != nil || rec.Owner != owner || ticks == 0 ||
				rec.Confirmed != newest.Published() || s.pg.confirmed != rec.Confirmed {
				return fmt.Errorf("owner %d has said %v, with %v and %d ticks: %+v, %w", rec.Owner,
					rec.Confirmed, s.pg.confirmed, ticks, rec, err)
			}
			before := home[len(home)-1].number
			time.Sleep(time.Minute)
			look()
			s.with(func() {
				late := s.other.wal[len(s.other.wal)*9/10].start
				if s.other.confirmed < late || len(s.pg.ticks) != ticks || len(own) > history {
					s.broken = fmt.Errorf("the home is silent: %v of %v is confirmed elsewhere, %d ticks, "+
						"then %d", s.other.confirmed, s.other.end, ticks, len(s.pg.ticks))
				}
				if now := home[len(home)-1].number; owner == 1 && now != before {
					s.broken = fmt.Errorf("the record of a silent home goes from revision %d to %d", before,
						now)
				}
			})
			s.procs[owner-1].kill() // and nobody says anything more
			s.write(20)
			time.Sleep(time.Minute)
			said := look().Confirmed
			s.with(func() {
				for _, x := range s.other.wal {
					if x.home > said && x.input() && x.start < s.other.confirmed {
						s.broken = fmt.Errorf("%v is confirmed elsewhere, which frees %v", s.other.confirmed,
							x.home)
					}
				}
				if s.pg.confirmed > said {
					s.broken = fmt.Errorf("%v is confirmed at home, and said is %v", s.pg.confirmed, said)
				}
			})
			return nil
		})
	}
}

// TestWhoStandsByFindsWhatWasSkipped: the cluster whose subscription has skipped a transaction stops, at each
// start, also as the owner; the home goes on.
func TestWhoStandsByFindsWhatWasSkipped(t *testing.T) {
	t.Parallel()
	inSharing(t, time.Second, func(s *sharing) error {
		s.with(func() { s.apart = time.Now().Add(time.Hour) })
		spoiled := false
		for i := range 20 {
			s.write(1)
			time.Sleep(2 * time.Second)
			s.with(func() {
				s.copy(func(x *transaction) bool {
					skip := i == 10 && !spoiled && len(x.rows) > 0
					spoiled = spoiled || skip
					return skip
				})
			})
		}
		stopped := func() error {
			if !s.procs[1].over() {
				return fmt.Errorf("cluster 2 goes on: %+v", s.procs[1].p.Status())
			}
			f := outbox.FaultOf(s.procs[1].err)
			if f == nil || f.Code != checkpoint.CodeHome || f.Class != outbox.Gap {
				return fmt.Errorf("cluster 2 has ended with %v", s.procs[1].err)
			}
			return nil
		}
		if err := errors.Join(stopped(), s.check(true)); err != nil {
			return err
		}
		for _, owner := range []int{1, 2} {
			s.take(owner)
			s.procs[1] = s.run(options{cluster: 2})
			time.Sleep(time.Minute)
			if err := stopped(); err != nil {
				return err
			}
		}
		s.take(1)
		s.write(1)
		time.Sleep(time.Minute)
		return s.check(true)
	})
}
