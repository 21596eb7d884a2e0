package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/faultproxy"
	"github.com/outflowhq/outflow/internal/natstest"
	"github.com/outflowhq/outflow/internal/pgtest"
	"github.com/outflowhq/outflow/internal/verify"
)

// TestNetworkFaults: connections to either server are cut, go silent in one direction, lose what was answered, and are slow. The stream is
// the table all the same.
func TestNetworkFaults(t *testing.T) {
	slow(t)
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Process(t)
	pgProxy, pgURL, err := faultproxy.To(url)
	must(t, err)
	t.Cleanup(pgProxy.Close)
	natsProxy, natsURL, err := faultproxy.To(nats.URL())
	must(t, err)
	t.Cleanup(natsProxy.Close)
	o := newOutflow(t, pgURL, natsURL, slotName("network"))
	o.init()
	o.start()

	ops, written := traces(t, 20_000), 0
	write := func(n int) {
		t.Helper()
		startLoad(t, url, ops[written:written+n], 4, 0, uint64(written)).wait(t)
		written += n
	}
	caughtUp := func() { awaitMessages(t, js(t, nats.URL()), o.stream, written) }
	sessions := func() float64 { return metric(t, o, "outflow_sessions_total") }
	newSession := func(before float64) {
		t.Helper()
		eventually(t, "a new session", func() error {
			if n := sessions(); n <= before {
				return fmt.Errorf("%v sessions", n)
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
		before := sessions()
		write(300)
		side.proxy.Refuse(true)
		side.proxy.Cut()
		newSession(before)
		write(300)
		side.proxy.Heal()
		caughtUp()

		before = sessions()
		side.proxy.Mute(side.muted, true)
		write(300)
		newSession(before) // nobody was told
		side.proxy.Heal()
		side.proxy.Cut() // or what was held arrives after all
		o.ready()
		caughtUp()
	}

	before := sessions()
	natsProxy.Drop(faultproxy.ToClient, true) // stored, and outflow is not told
	write(300)
	caughtUp()
	natsProxy.Cut()
	natsProxy.Heal()
	newSession(before)

	pgProxy.Delay(5 * time.Millisecond)
	natsProxy.Delay(20 * time.Millisecond)
	natsProxy.Rate(500_000)
	write(1000)
	caughtUp()
	if code := o.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	v, err := verify.Compare(t.Context(), db(t, url), "outbox", js(t, nats.URL()), o.stream, 0)
	must(t, err)
	if !v.OK() {
		t.Error(v.String())
	}
}
