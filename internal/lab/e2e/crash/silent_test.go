package crash

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestSilenceAfterAPowerCutConfirmsNothing: the machine of NATS loses power. Nobody tells outflow: the
// connection stays open and silent, and the outbox is silent as well. What had been stored for less than
// durable_after is lost, so it must not be confirmed, however long the silence lasts.
func TestSilenceAfterAPowerCutConfirmsNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	nats := natstest.Process(t)
	link, through, err := faultproxy.To(nats.URL())
	harness.Must(t, err)
	t.Cleanup(link.Close)
	o := harness.New(t, url, through, harness.SlotName("silent"), "SINK_DURABLE_AFTER=10s")
	o.Init()
	o.Start()
	o.AwaitReady()
	conn := harness.Connect(t, url)
	bucket := "KV_outflow-" + o.Stream
	revisions := func(least uint64) (last uint64) {
		t.Helper()
		harness.Eventually(t, "a record", func() error {
			s, err := harness.JetStream(t, nats.URL()).Stream(t.Context(), bucket)
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
		before := harness.WALEnd(t, conn)
		// in one question to the server: a slow machine must not confirm some before the last is written
		harness.Exec(t, conn, fmt.Sprintf(`DO $$ BEGIN FOR n IN %d .. %d LOOP
			INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('doc', 'anna', n, '{}');
			COMMIT; END LOOP; END $$`, rows+1, rows+batch))
		rows += batch
		harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), o.Stream, rows)
		revisions(kept + 1)
		harness.Must(t, o.Process.Pause())
		if o.ConfirmedLSN(conn) <= before {
			break
		}
		harness.Must(t, o.Process.Resume())
		if try == harness.Tries {
			t.Fatal("the rows were confirmed before the silence began")
		}
	}
	for _, d := range []faultproxy.Direction{faultproxy.ToServer, faultproxy.ToClient} {
		link.Mute(d, true)
	}
	harness.Must(t, nats.Kill())
	harness.Must(t, o.Process.Resume())
	harness.Eventually(t, "the silence is noticed", func() error {
		if code, body := o.Get("/readyz"); code == http.StatusOK {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	_, err = natsserver.Tear(nats.Dir(), o.Stream, natsserver.Back, func(seq uint64, _ time.Time) bool {
		return seq <= uint64(rows-batch+10)
	})
	harness.Must(t, err)
	_, err = natsserver.Tear(nats.Dir(), bucket, natsserver.Back, func(seq uint64, _ time.Time) bool {
		return seq <= kept
	})
	harness.Must(t, err)
	harness.Must(t, nats.Start())
	link.Cut()
	link.Heal()
	harness.Eventually(t, "published again", func() error {
		if !o.Process.Running() {
			t.Fatalf("outflow ended with exit code %d", o.Wait())
		}
		s, err := harness.JetStream(t, nats.URL()).Stream(t.Context(), o.Stream)
		if err != nil {
			return err
		}
		if got := s.CachedInfo().State.Msgs; got < uint64(rows) {
			return fmt.Errorf("%d messages", got)
		}
		return nil
	})
	o.MustBeComplete(conn, nats.URL())
}
