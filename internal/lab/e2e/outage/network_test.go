package outage

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestNetworkFaultsLeaveAnExactStream: connections to either server are cut, go silent in one direction, lose
// what was answered, and are slow. The stream is the table all the same.
func TestNetworkFaultsLeaveAnExactStream(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Process(t)
	pgProxy, pgURL, err := faultproxy.To(url)
	harness.Must(t, err)
	t.Cleanup(pgProxy.Close)
	natsProxy, natsURL, err := faultproxy.To(nats.URL())
	harness.Must(t, err)
	t.Cleanup(natsProxy.Close)
	o := harness.New(t, pgURL, natsURL, harness.SlotName("network"))
	o.Init()
	o.Start()

	ops, written := harness.RecordedOps(t, 20_000), 0
	write := func(n int) {
		t.Helper()
		harness.StartLoad(t, url, ops[written:written+n], 4, 0, uint64(written)).Wait(t)
		written += n
	}
	caughtUp := func() { harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), o.Stream, written) }
	// A failure of PostgreSQL ends the session, one of NATS is outlived by it, if it is short.
	failures := func() float64 {
		return harness.Metric(t, o, "outflow_sessions_total") +
			harness.Metric(t, o, "outflow_resumptions_total")
	}
	noticed := func(before float64) {
		t.Helper()
		harness.Eventually(t, "the failure is noticed", func() error {
			if code, _ := o.Get("/readyz"); code == http.StatusOK && failures() <= before {
				return errors.New("it is ready, and went on with nothing new")
			}
			return nil
		})
	}
	write(500)
	caughtUp()

	for _, side := range []struct {
		proxy *faultproxy.Proxy
		muted faultproxy.Direction
	}{{pgProxy, faultproxy.ToClient}, {natsProxy, faultproxy.ToServer}} {
		before := failures()
		write(300)
		side.proxy.Refuse(true)
		side.proxy.Cut()
		noticed(before)
		write(300)
		side.proxy.Heal()
		caughtUp()

		before = failures()
		side.proxy.Mute(side.muted, true)
		write(300)
		noticed(before) // nobody was told
		side.proxy.Heal()
		side.proxy.Cut() // or what was held arrives after all
		o.AwaitReady()
		caughtUp()
	}

	before := failures()
	natsProxy.Drop(faultproxy.ToClient, true) // stored, and outflow is not told
	write(300)
	caughtUp()
	natsProxy.Cut()
	natsProxy.Heal()
	noticed(before)

	pgProxy.Delay(5 * time.Millisecond)
	natsProxy.Delay(20 * time.Millisecond)
	natsProxy.Rate(500_000)
	write(1000)
	caughtUp()
	o.MustStop(t)
	v, err := oracle.Compare(t.Context(), harness.Connect(t, url), "outbox", harness.JetStream(t, nats.URL()),
		o.Stream, 0)
	harness.Must(t, err)
	if !v.OK() {
		t.Error(v.String())
	}
}
