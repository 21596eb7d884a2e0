package clusters

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

// TestWhatIsSeenOfIslands: doctor, metrics and status of both clusters say so while all is well, while the
// home is silent, and while it waits for the other one; and doctor finds what a subscription lacks.
func TestWhatIsSeenOfIslands(t *testing.T) {
	t.Parallel()
	majors := awayMajors(t)
	s := newIslands(t, majors[len(majors)-1], 2, 1)
	home, away := s.of[0][0], s.of[0][1]
	s.switchOn()
	home.AwaitReady()
	harness.Exec(t, s.all[0].conn, harness.InsertNumbered, 1, 10)
	harness.AwaitMessages(t, s.js[0], home.Stream, 10)
	doctor := func(o *harness.Outflow, code int, says string) {
		t.Helper()
		harness.Eventually(t, "doctor says "+says, func() error {
			out, errOut, got := o.Run("doctor", "--only", "cluster")
			if got != code || !strings.Contains(out, says) {
				return fmt.Errorf("exit code %d, want %d:\n%s%s", got, code, out, errOut)
			}
			return nil
		})
	}
	is := func(o *harness.Outflow, name string, want float64) {
		t.Helper()
		harness.Eventually(t, name, func() error {
			if got, ok := o.Series("outflow_cluster_" + name); !ok || got != want {
				return fmt.Errorf("%v, %t; want %v", got, ok, want)
			}
			return nil
		})
	}
	doctor(home, 0, "the home's newest hello is")
	doctor(away, 0, "the home's newest hello is")
	is(home, "yielded", 0)
	is(away, "publishes", 0)
	is(away, "unsettled_wal_bytes", 0)
	is(away, "behind_events", 0)
	if _, ok := away.Series("outflow_cluster_heard_timestamp_seconds"); !ok {
		t.Error("it is not known when the home was heard")
	}

	home.Kill()
	harness.Exec(t, s.all[0].conn, harness.InsertNumbered, 11, 20)
	is(away, "publishes", 1)
	doctor(away, 0, "cluster_silent")
	if n, _ := away.Series("outflow_cluster_claims_total"); n < 1 {
		t.Errorf("%v claims", n)
	}

	away.Kill()
	home.Start()
	is(home, `awaited{cluster="2"`, 1)
	doctor(home, 0, "cluster_waits")
	away.Start()
	home.AwaitReady()
	is(home, "left_events_total", 10)
	is(away, "publishes", 0)
	doctor(home, 0, "the home's newest hello is")

	home.Set("CLUSTER_SUBSCRIPTIONS=2=nobody")
	doctor(home, 3, "cluster_mesh")
	home.Set(s.mode(0)...)
	harness.Exec(t, s.all[0].conn, "ALTER SUBSCRIPTION from_2 DISABLE")
	doctor(home, 0, "cluster_lag")
}
