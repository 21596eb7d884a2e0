package outage

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestPublishingGoesOnWhenTheStreamLeaderStops publishes to a stream with three replicas whose leader's node
// stops in the middle.
func TestPublishingGoesOnWhenTheStreamLeaderStops(t *testing.T) {
	harness.SkipIfShort(t)
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Cluster(t, 3)
	o := harness.New(t, url, nats.URLs(), "replicated", "INIT_REPLICAS=3")
	o.Init()
	o.Start()
	ops := harness.RecordedOps(t, 6000)
	l := harness.StartLoad(t, url, ops, 4, 1500, 7)
	harness.AwaitMessages(t, harness.JetStream(t, nats.URLs()), o.Stream, len(ops)/4)
	leader, err := nats.WaitLeader(o.Stream, harness.Patience)
	harness.Must(t, err)
	nats.Stop(leader)
	if _, err := nats.WaitLeader(o.Stream, harness.Patience); err != nil {
		t.Fatal(err)
	}
	harness.Must(t, nats.Start(leader))
	l.Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, nats.URLs()), o.Stream, len(ops))
	o.MustStop(t)
	v, err := oracle.Compare(t.Context(), harness.Connect(t, url), "outbox",
		harness.JetStream(t, nats.URLs()), o.Stream, 0)
	harness.Must(t, err)
	if !v.OK() {
		t.Errorf("%s", v.String())
	}
}
