package e2e

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAtomicBatches: a backlog goes to a server that syncs each write, in atomic batches, while outflow and NATS are killed in turns; a
// twin publishes single messages. The streams are the same.
func TestAtomicBatches(t *testing.T) {
	slow(t)
	t.Parallel()
	const ops, each = 8000, 1500
	nats, twinNATS := natstest.Process(t, natsserver.Options{SyncAlways: true}), natstest.Process(t)
	victim, _, url := installation(t, pgtest.Server(t), nats.URL(), "batches")
	victim.set("SINK_DURABLE_AFTER=0s", "REORDER_HORIZON=0s")
	twin := newOutflow(t, url, twinNATS.URL(), slotName("batches_twin"), "REORDER_HORIZON=0s")
	twin.named(victim.stream)
	victim.init()
	twin.init()
	for o, want := range map[*outflow]bool{victim: true, twin: false} {
		server := nats
		if o == twin {
			server = twinNATS
		}
		s, err := js(t, server.URL()).Stream(t.Context(), o.stream)
		must(t, err)
		if got := s.CachedInfo().Config.AllowAtomicPublish; got != want {
			t.Errorf("init of %s: allow_atomic is %v", o.slot, got)
		}
	}
	twin.start()
	startLoad(t, url, traces(t, ops), 8, 0, 5).wait(t)

	victim.start()
	for n, kill := 0, 0; n < ops; kill++ {
		n = min(n+each, ops)
		awaitMessages(t, js(t, nats.URL()), victim.stream, n)
		switch {
		case n == ops:
		case kill%2 == 0:
			victim.kill()
			victim.start()
		default:
			must(t, nats.Kill())
			must(t, nats.Start())
		}
	}
	awaitMessages(t, js(t, twinNATS.URL()), twin.stream, ops)
	compareTwins(t, url, nats.URL(), twinNATS.URL(), victim.stream, 0)
	batched := inBatches(t, js(t, nats.URL()), victim.stream)
	t.Logf("%d of %d messages came in batches", batched, ops)
	// Whether a message costs enough here is the disk's to say.
	if told := strings.Count(victim.log.String(), "atomic batches"); told > 2 && batched == 0 || told == 0 && batched > 0 {
		t.Errorf("outflow says %d times that it sends batches", told)
	}
	if n := inBatches(t, js(t, twinNATS.URL()), twin.stream); n > 0 {
		t.Errorf("%d messages of the twin came in batches", n)
	}
	if victim.term() != 0 || twin.term() != 0 {
		t.Error("the stop was not clean")
	}
}

// inBatches counts the messages that came as part of a batch.
func inBatches(t *testing.T, js jetstream.JetStream, stream string) (n int) {
	t.Helper()
	s, err := js.Stream(t.Context(), stream)
	must(t, err)
	for seq := uint64(1); seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(t.Context(), seq)
		must(t, err)
		if m.Header.Get("Nats-Batch-Id") != "" {
			n++
		}
	}
	return n
}
