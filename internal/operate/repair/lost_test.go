package repair

import (
	"fmt"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/operate/initialize"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// TestWhatWasPublishedIsCountedWithoutAcknowledgements: the connection is lost when all is in the stream and
// only the first acknowledgement was read. The repair begins again, finds nothing to publish, and says how
// much it has published all the same.
func TestWhatWasPublishedIsCountedWithoutAcknowledgements(t *testing.T) {
	t.Parallel()
	const rows = 5
	direct := natstest.Server(t).URL()
	proxy, through, err := faultproxy.To(direct)
	must.Succeed(t, err)
	defer proxy.Close()
	db := outboxdb.New(t, pgtest.Server(t))
	cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": through, "slot": db.Slot,
		"stream": "OUTBOX", "sink.durable_after": "0s"}, nil)
	must.Succeed(t, err)
	ctx := outboxdb.Within(t)
	must.Succeed(t, initialize.Run(ctx, cfg, quiet, func(string, ...any) {}, nil))
	db.Exec("SELECT pg_drop_replication_slot($1)", db.Slot)
	for n := range rows {
		db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', $1, '{}')", n)
	}

	_, js := natstest.Connect(t, direct)
	stored := func() uint64 {
		s, err := js.Stream(ctx, "OUTBOX")
		must.Succeed(t, err)
		return s.CachedInfo().State.Msgs
	}
	var once sync.Once
	var cut sync.WaitGroup
	report, err := Run(ctx, cfg, quiet, Options{Accept: "slot_missing", sent: func() {
		once.Do(func() { // the first one is acknowledged
			proxy.Mute(faultproxy.ToClient, true)
			cut.Go(func() {
				await.Until(t, "all rows are in the stream", func() error {
					if n := stored(); n < rows {
						return fmt.Errorf("%d messages", n)
					}
					return nil
				})
				proxy.Cut()
				proxy.Heal()
			})
		})
	}})
	cut.Wait()
	if err != nil || report.Published != rows || report.InStream != rows || stored() != rows {
		t.Errorf("%d messages, %+v, %v", stored(), report, err)
	}
}
