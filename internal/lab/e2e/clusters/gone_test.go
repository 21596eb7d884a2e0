package clusters

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// TestAHomeDoesNotStopForAClusterThatIsGone: a home comes back while the third cluster is gone, so that it
// can't know what that one has claimed. The second one publishes for it until the third one is back; or the
// home itself, if an operator says that it is gone for good. Nothing is missing, and what is twice has a
// reason.
func TestAHomeDoesNotStopForAClusterThatIsGone(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", rand.Int()))
	t.Logf("OUTFLOW_TEST_SEED=%d", seed)
	majors := awayMajors(t)
	s := newIslands(t, majors[len(majors)-1], 3, 1)
	s.switchOn()
	home, third := s.all[0].o, s.of[0][2]
	home.AwaitReady()
	load := s.load(0, 4, 60, seed)
	s.awaitHeard(0)
	grows := func(what string, at int) {
		t.Helper()
		before := s.last(0, at)
		harness.Eventually(t, what, func() error {
			if s.last(0, at) == before {
				return fmt.Errorf("%d messages", before)
			}
			return nil
		})
	}
	is := func(name string, want float64) {
		t.Helper()
		harness.Eventually(t, name, func() error {
			if got, _ := home.Series("outflow_cluster_" + name); got != want {
				return fmt.Errorf("%v; want %v", got, want)
			}
			return nil
		})
	}
	bothFail := func() {
		t.Helper()
		third.Kill()
		harness.Must(t, s.all[2].pg.Kill())
		home.Kill()
		grows("the second cluster publishes", 1)
	}
	thirdReturns := func() {
		t.Helper()
		harness.Must(t, s.all[2].pg.Start(t.Context()))
		third.Start()
	}

	bothFail()
	home.Start()
	is(`awaited{cluster="3"`, 1)
	is("yielded", 1)
	grows("the second cluster publishes on", 1)
	thirdReturns()
	grows("the home publishes", 0)
	is("yielded", 0)

	bothFail()
	home.Set("CLUSTER_GONE=3")
	home.Start()
	grows("the home publishes without the third cluster", 0)
	home.AwaitReady()
	home.MustStop(t)
	home.Set("CLUSTER_GONE=")
	thirdReturns()
	home.Start()
	grows("the home publishes", 0)

	load.Ending.Store(true)
	load.Wait(t)
	harness.Eventually(t, "all of the home's events", func() error { return s.missing(0, 0) })
	if all := s.judge(0); all.others > 0 {
		t.Errorf("two others have published %d events", all.others)
	}
}
