package outage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAPromotionUnderTheStreamStopsNothing: outflow reads from a standby, which is promoted and written to at
// once. Each message names the timeline of its event, or the next start takes the event for lost with the old
// one.
func TestAPromotionUnderTheStreamStopsNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	srv := pgtest.Own(t, 0)
	if srv.Installation.Major < 16 {
		t.Skip("no logical decoding on a standby")
	}
	url, err := srv.CreateDatabase(t.Context(), "app")
	harness.Must(t, err)
	nats := natstest.Process(t)
	o := harness.New(t, url, nats.URL(), "app", "REORDER_HORIZON=0s")
	o.Init()
	conn, js := harness.Connect(t, url), harness.JetStream(t, nats.URL())
	harness.Insert(t, conn, "doc", 1, "{}")
	harness.Must(t, conn.Close(t.Context()))
	harness.Must(t, srv.Stop("fast"))
	harness.Must(t, os.WriteFile(filepath.Join(srv.Dir, "data", "standby.signal"), nil, 0o644))
	harness.Must(t, srv.Start(t.Context()))
	o.Start()
	o.AwaitReady()
	harness.AwaitMessages(t, js, o.Stream, 1)
	harness.Must(t, srv.Promote(t.Context()))
	conn = harness.Connect(t, url)
	const rows = 30
	for n := 2; n <= rows; n++ {
		harness.Insert(t, conn, "doc", n, "{}")
	}
	harness.AwaitMessages(t, js, o.Stream, rows)
	for i, m := range harness.Messages(t, js, o.Stream) {
		if i > 0 && m.Outflow.Timeline != 2 {
			t.Fatalf("message %d was written behind the promotion: %+v", m.Seq, m.Outflow)
		}
	}
	o.MustStop(t)
}
