package e2e

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestReplicatedStream publishes to a stream with three replicas whose leader's node stops in the middle.
func TestReplicatedStream(t *testing.T) {
	slow(t)
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Cluster(t, 3)
	o := newOutflow(t, url, nats.URLs(), "replicated", "INIT_REPLICAS=3")
	o.init()
	o.start()
	ops := traces(t, 6000)
	l := startLoad(t, url, ops, 4, 1500, 7)
	awaitMessages(t, js(t, nats.URLs()), o.stream, len(ops)/4)
	leader, err := nats.WaitLeader(o.stream, patience)
	if err != nil {
		t.Fatal(err)
	}
	nats.Stop(leader)
	if _, err := nats.WaitLeader(o.stream, patience); err != nil {
		t.Fatal(err)
	}
	if err := nats.Start(leader); err != nil {
		t.Fatal(err)
	}
	l.wait(t)
	awaitMessages(t, js(t, nats.URLs()), o.stream, len(ops))
	if code := o.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	v, err := oracle.Compare(t.Context(), db(t, url), "outbox", js(t, nats.URLs()), o.stream, 0)
	if err != nil {
		t.Fatal(err)
	}
	if !v.OK() {
		t.Errorf("%s", v.String())
	}
}
