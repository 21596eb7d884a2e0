package e2e

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/faultproxy"
	"github.com/outflowhq/outflow/internal/natsserver"
	"github.com/outflowhq/outflow/internal/natstest"
	"github.com/outflowhq/outflow/internal/pgtest"
)

// TestSilentCrash: the machine of NATS loses power. Nobody tells outflow: the connection stays open and silent, and the outbox is
// silent as well. What had been stored for less than durable_after is lost, so it must not be confirmed, however long the silence lasts.
func TestSilentCrash(t *testing.T) {
	slow(t)
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Process(t)
	link, through, err := faultproxy.To(nats.URL())
	must(t, err)
	t.Cleanup(link.Close)
	o := newOutflow(t, url, through, slotName("silent"), "SINK_DURABLE_AFTER=4s")
	o.init()
	o.start()
	o.ready()
	conn := db(t, url)
	const rows = 50
	for i := range rows {
		row(t, conn, "doc", i+1, `{}`)
	}
	awaitMessages(t, js(t, nats.URL()), o.stream, rows)
	bucket := "KV_outflow-" + o.stream
	var recorded uint64
	eventually(t, "the record has the last message", func() error {
		s, err := js(t, nats.URL()).Stream(t.Context(), bucket)
		if err != nil {
			return err
		}
		if recorded = s.CachedInfo().State.LastSeq; recorded < 3 { // two by init
			return fmt.Errorf("%d revisions", recorded)
		}
		return nil
	})
	for _, d := range []faultproxy.Direction{faultproxy.ToServer, faultproxy.ToClient} {
		link.Mute(d, true)
	}
	must(t, nats.Kill())
	eventually(t, "the silence is noticed", func() error {
		if code, body := o.get("/readyz"); code == http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	_, err = natsserver.Tear(nats.Dir(), o.stream, natsserver.Back, func(seq uint64, _ time.Time) bool { return seq <= 10 })
	must(t, err)
	_, err = natsserver.Tear(nats.Dir(), bucket, natsserver.Back, func(seq uint64, _ time.Time) bool { return seq < 3 })
	must(t, err)
	must(t, nats.Start())
	link.Cut()
	link.Heal()
	eventually(t, "published again", func() error {
		if !o.child.Running() {
			t.Fatalf("outflow ended with exit code %d", o.wait())
		}
		s, err := js(t, nats.URL()).Stream(t.Context(), o.stream)
		if err != nil {
			return err
		}
		if got := s.CachedInfo().State.Msgs; got < rows {
			return fmt.Errorf("%d messages", got)
		}
		return nil
	})
	o.mustBeComplete(conn, nats.URL())
}
