package clusters

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// TestTheSharedModeIsSwitchedOn: a stream that its home alone makes takes the mode up when all is published.
// What does not fit is refused, elsewhere nothing of the home's is made or removed, and init and uninstall
// may be run again.
func TestTheSharedModeIsSwitchedOn(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	majors := awayMajors(t)
	natsURL := natstest.Server(t, natsserver.Options{SyncAlways: true}).URL()
	all, _ := mesh(t, majors[len(majors)-1], 2, natsURL, "SINK_DURABLE_AFTER=0s")
	home := all[0].o
	away := harness.New(t, all[1].url, natsURL, home.Slot, clusterSettings(1, 2)...)
	away.UseStream("NONE")
	away.Set(inSharedMode...)
	away.Set("CLUSTER_SUBSCRIPTION=from_1")
	away.MustFail(3, []string{"init"}, "cluster_home_missing", "Run `outflow init` at home first")
	away.UseStream(home.Stream)
	away.MustFail(3, []string{"init"}, "cluster_mode")

	harness.Insert(t, all[0].conn, "a", 1, "{}")
	alone := home.Env
	home.Set(inSharedMode...)
	shared := home.Env
	home.MustFail(3, []string{"init"}, "not_published")
	home.Env = alone
	home.Drain()
	home.Env = shared
	home.Init()
	home.Env = alone
	home.MustFail(3, []string{"drain"}, "cluster_mode")
	home.Env = shared

	away.Init()
	away.Init()
	away.Start()
	home.Start()
	away.AwaitState("standby")
	harness.Insert(t, all[0].conn, "a", 2, "{}")
	js := harness.JetStream(t, natsURL)
	harness.AwaitMessages(t, js, home.Stream, 2)
	if said := away.MustRun("status"); !strings.Contains(said, "cluster 1, epoch 1") {
		t.Errorf("status elsewhere says\n%s", said)
	}
	away.MustFail(3, []string{"repair", "--check"}, "Run it at home")
	away.MustStop(t)
	away.MustRun("uninstall", "--yes")
	away.MustRun("uninstall", "--yes")
	harness.Insert(t, all[0].conn, "a", 3, "{}")
	harness.AwaitMessages(t, js, home.Stream, 3)
	away.Init()
}
