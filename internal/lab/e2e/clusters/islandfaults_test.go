package clusters

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// failing are islands of which several things fail at once.
type failing struct {
	*islands
	rnd    *rand.Rand
	broken []string // what is by now
	mend   []func() error
	heal   []func() error // links
	silent []int          // homes that can't publish meanwhile
}

// fails lets something fail at two clusters, or between them.
func (s *failing) fails(kind string, a, b int) {
	s.Helper()
	nats, pg, home := s.nats[a], s.all[a].pg, s.rnd.IntN(len(s.all))
	switch kind {
	case "nats dies":
		s.breaks(fmt.Sprint("nats ", a+1), nats.Kill, nats.Start, a)
	case "nats hangs":
		h := hang{at: a, from: time.Now()}
		s.breaks(fmt.Sprint("nats ", a+1), nats.Pause, func() error {
			err := nats.Resume()
			h.to = time.Now()
			s.hangs = append(s.hangs, h)
			return err
		}, a)
	case "link":
		s.cut(a, b)
		s.cut(b, a)
	case "link one way":
		s.cut(a, b)
	case "homes die":
		for _, at := range []int{a, b} {
			s.dies(at, at)
			if s.rnd.IntN(2) == 0 {
				s.fails("postgres dies", at, at)
			}
		}
	case "postgres dies":
		s.breaks(fmt.Sprint("postgres ", a+1), pg.Kill, func() error { return pg.Start(s.Context()) })
	case "outflow dies":
		s.dies(home, a)
	case "outflow sleeps":
		o := s.of[home][a].Process
		s.breaks(fmt.Sprintf("outflow of %d at %d", home+1, a+1), o.Pause, o.Resume)
	default:
		s.Fatalf("no such thing fails: %s", kind)
	}
}

func (s *failing) dies(home, at int) {
	s.Helper()
	o, silent := s.of[home][at], []int{}
	if home == at {
		silent = append(silent, home)
	}
	s.breaks(fmt.Sprintf("outflow of %d at %d", home+1, at+1), func() error { o.Kill(); return nil },
		func() error { o.Start(); return nil }, silent...)
}

func (s *failing) cut(from, to int) {
	s.Helper()
	l, what := s.links[link{from, to}], fmt.Sprintf("link %d to %d", from+1, to+1)
	if !slices.Contains(s.broken, what) {
		l.Refuse(true)
		l.Cut()
		s.broken, s.heal = append(s.broken, what), append(s.heal, func() error { l.Heal(); return nil })
	}
}

// breaks does it unless it is broken by now.
func (s *failing) breaks(what string, harm, mend func() error, silent ...int) {
	s.Helper()
	if !slices.Contains(s.broken, what) {
		harness.Must(s, harm())
		s.broken, s.mend = append(s.broken, what), append(s.mend, mend)
		s.silent = append(s.silent, silent...)
	}
}

// mends does it in any order.
func (s *failing) mends(all []func() error, pause func()) {
	s.Helper()
	s.rnd.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	for _, mend := range all {
		harness.Must(s, mend())
		pause()
	}
}

// claimed counts the claims for a home of the processes that run.
func (s *failing) claimed(home int) (n float64) {
	for at, o := range s.of[home] {
		if at != home && o.Process.Running() {
			claims, _ := o.Series("outflow_cluster_claims_total")
			n += claims
		}
	}
	return n
}

// sober lets things fail at two clusters, until others have claimed for each home that is silent. The third
// one, which sees both, can, unless it stands still or nothing is left to claim. Then all mends all the same.
// If deaf, no row comes to these homes meanwhile, and links heal when they are back.
func (s *failing) sober(kinds []string, deaf bool) {
	s.Helper()
	s.broken, s.mend, s.heal, s.silent = nil, nil, nil, nil
	before := make([]float64, len(s.all))
	for home := range s.all {
		before[home] = s.claimed(home)
	}
	pair := s.rnd.Perm(len(s.all))
	for i, kind := range kinds {
		s.fails(kind, pair[i%2], pair[1-i%2])
	}
	for _, home := range s.silent {
		for from := range s.all {
			if deaf && from != home {
				s.cut(from, home)
			}
		}
	}
	s.Logf("%s", strings.Join(s.broken, ", "))
	for begun := time.Now(); time.Since(begun) < 3*maximumDelay; time.Sleep(400 * time.Millisecond) {
		if !slices.ContainsFunc(s.silent, func(home int) bool { return s.claimed(home) == before[home] }) {
			break
		}
	}
	s.mends(s.mend, func() {})
	sent := make([]uint64, len(s.all))
	publishes := func(home int) error {
		if s.last(home, home) == sent[home] {
			code, body := s.of[home][home].Get("/readyz")
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	}
	for _, home := range s.silent {
		sent[home] = s.last(home, home)
		harness.Eventually(s, "a home waits", func() error {
			err := publishes(home)
			if err == nil || !deaf || strings.Contains(err.Error(), "waiting for clusters") {
				return nil
			}
			return err
		})
	}
	s.mends(s.heal, func() {})
	for _, home := range s.silent {
		harness.Eventually(s, "a home is back", func() error { return publishes(home) })
	}
}

// wild lets things fail anywhere, one after the other and for any time.
func (s *failing) wild(kinds []string) {
	s.Helper()
	s.broken, s.mend, s.heal, s.silent = nil, nil, nil, nil
	pause := func() {
		longest := []time.Duration{time.Second, maximumDelay / 2, 3 * maximumDelay}[s.rnd.IntN(3)]
		time.Sleep(time.Duration(s.rnd.Int64N(int64(longest))))
	}
	for range 1 + s.rnd.IntN(4) {
		pair := s.rnd.Perm(len(s.all))
		s.fails(kinds[s.rnd.IntN(len(kinds))], pair[0], pair[1])
		pause()
	}
	s.Logf("%s", strings.Join(s.broken, ", "))
	s.mends(append(s.mend, s.heal...), pause)
	if s.rnd.IntN(2) == 0 {
		s.settle()
	}
}

// settle waits until all that was written is published.
func (s *failing) settle() {
	s.Helper()
	for home := range s.all {
		ids, err := s.written(home, home)
		harness.Must(s, err)
		harness.Eventually(s, "what was written is published", func() error {
			return s.unpublished(home, ids)
		})
	}
}

// TestIslandsSurviveWhatFails: three islands take writes and publish for each other, while several things
// fail at once: their NATS die and hang, two homes die, the link between two of them is cut while the third
// one sees both, outflows die. Nothing is missing, and what is twice has a reason. The long form takes half
// an hour for three majors.
func TestIslandsSurviveWhatFails(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", rand.Int()))
	t.Logf("OUTFLOW_TEST_SEED=%d", seed)
	for _, major := range awayMajors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			s := &failing{islands: newIslands(t, major, 3, 3),
				rnd: rand.New(rand.NewPCG(seed, uint64(major)))}
			s.switchOn()
			var loads []*harness.Load
			for home, of := range s.of {
				of[home].AwaitReady()
				loads = append(loads, s.load(home, 1, 12, seed+uint64(home)))
			}
			for home, of := range s.of { // before it has said anything of them nobody claims
				harness.AwaitMessages(t, s.js[home], of[home].Stream, 20)
			}
			kinds := []string{"nats dies", "nats hangs", "link", "homes die", "outflow dies"}
			s.rnd.Shuffle(len(kinds), func(i, k int) { kinds[i], kinds[k] = kinds[k], kinds[i] })
			s.sober(kinds[:3], true)
			s.sober(kinds[3:], false)
			kinds = append(kinds, "link one way", "postgres dies", "outflow sleeps")
			for range harness.EnvInt(t, "OUTFLOW_TEST_ROUNDS", harness.Sized(20, 0)) {
				s.wild(kinds)
			}
			for home, load := range loads {
				load.Ending.Store(true)
				load.Wait(t)
				s.of[home][home].AwaitReady()
			}
			s.settle()
			elsewhere := 0
			for home := range s.all {
				elsewhere += s.judge(home).elsewhere
			}
			if elsewhere == 0 {
				t.Error("nobody has published for another one")
			}
		})
	}
}
