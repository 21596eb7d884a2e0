package outage

import (
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// TestTheFiguresOfATakeOverAreMeasured logs the figures of docs/upgrades.md: how long an event waits, at
// most, when the instance that publishes is killed, frozen or stopped while another one stands by. What it
// checks is only that every event comes.
func TestTheFiguresOfATakeOverAreMeasured(t *testing.T) {
	tier.OnlyLong(t, "it measures, and takes minutes of an idle machine")
	url, nats := pgtest.Database(t, pgtest.Own(t, 0)), natstest.Process(t).URL()
	o := harness.New(t, url, nats, "takeover")
	o.Init()
	other := harness.New(t, url, nats, o.Slot)
	other.UseStream(o.Stream)
	conn, js := harness.Connect(t, url), harness.JetStream(t, nats)
	o.Start()
	other.Start()
	n := 0
	// the longest time until an event is in the stream; one is written when the one before it is there
	longest := func(during time.Duration) (worst time.Duration) {
		t.Helper()
		stream, err := js.Stream(t.Context(), o.Stream)
		harness.Must(t, err)
		for end := time.Now().Add(during); time.Now().Before(end); {
			n++
			harness.Insert(t, conn, "doc", n, "{}")
			began := time.Now()
			for {
				info, err := stream.Info(t.Context())
				harness.Must(t, err)
				if info.State.LastSeq >= uint64(n) {
					break
				}
				if time.Since(began) > 5*time.Minute {
					t.Fatal("the event does not come")
				}
				time.Sleep(2 * time.Millisecond) // the pace of looking
			}
			worst = max(worst, time.Since(began))
		}
		return worst.Round(time.Millisecond)
	}
	figures := map[string][]time.Duration{}
	for range 10 {
		active, standby := harness.AwaitRoles(o, other)
		longest(time.Second)
		active.Kill()
		figures["kill -9"] = append(figures["kill -9"], longest(time.Second))
		active.Start()

		active, _ = harness.AwaitRoles(standby, active)
		harness.Must(t, active.Process.Pause())
		figures["SIGSTOP"] = append(figures["SIGSTOP"], longest(time.Second))
		harness.Must(t, active.Process.Resume())

		active, _ = harness.AwaitRoles(o, other)
		active.MustStop(t)
		figures["SIGTERM"] = append(figures["SIGTERM"], longest(time.Second))
		active.Start()
	}
	for how, all := range figures {
		slices.Sort(all)
		t.Logf("%s: an event waited %v (median of %d), %v to %v", how, all[len(all)/2], len(all), all[0],
			all[len(all)-1])
	}
	harness.AwaitMessages(t, js, o.Stream, n)
	o.MustStop(t)
	other.MustStop(t)
}
