package e2e

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
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
	bucket := "KV_outflow-" + o.stream
	revisions := func(least uint64) (last uint64) {
		t.Helper()
		eventually(t, "a record", func() error {
			s, err := js(t, nats.URL()).Stream(t.Context(), bucket)
			if err != nil {
				return err
			}
			if last = s.CachedInfo().State.LastSeq; last < least {
				return fmt.Errorf("%d revisions", last)
			}
			return nil
		})
		return last
	}
	// Until the record has rows that are not confirmed yet. Outflow is frozen then.
	const batch = 50
	rows, kept := 0, uint64(0) // kept are the revisions from before the rows
	for try := 1; ; try++ {
		kept = revisions(2) // two by init
		before := walEnd(t, conn)
		for i := range batch {
			row(t, conn, "doc", rows+i+1, `{}`)
		}
		rows += batch
		awaitMessages(t, js(t, nats.URL()), o.stream, rows)
		revisions(kept + 1)
		must(t, o.child.Pause())
		if o.confirmed(conn) <= before {
			break
		}
		must(t, o.child.Resume())
		if try == tries {
			t.Fatal("the rows were confirmed before the silence began")
		}
	}
	for _, d := range []faultproxy.Direction{faultproxy.ToServer, faultproxy.ToClient} {
		link.Mute(d, true)
	}
	must(t, nats.Kill())
	must(t, o.child.Resume())
	eventually(t, "the silence is noticed", func() error {
		if code, body := o.get("/readyz"); code == http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	_, err = natsserver.Tear(nats.Dir(), o.stream, natsserver.Back, func(seq uint64, _ time.Time) bool { return seq <= uint64(rows-batch+10) })
	must(t, err)
	_, err = natsserver.Tear(nats.Dir(), bucket, natsserver.Back, func(seq uint64, _ time.Time) bool { return seq <= kept })
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
		if got := s.CachedInfo().State.Msgs; got < uint64(rows) {
			return fmt.Errorf("%d messages", got)
		}
		return nil
	})
	o.mustBeComplete(conn, nats.URL())
}
