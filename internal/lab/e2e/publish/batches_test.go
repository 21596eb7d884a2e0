package publish

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestAtomicBatchesLeaveTheSameStream: a backlog goes to a server that syncs each write, in atomic batches,
// while outflow and NATS are killed in turns; a twin publishes single messages. The streams are the same.
func TestAtomicBatchesLeaveTheSameStream(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	const ops, each = 8000, 1500
	nats, twinNATS := natstest.Process(t, natsserver.Options{SyncAlways: true}), natstest.Process(t)
	victim, _, url := harness.Install(t, pgtest.Server(t), nats.URL(), "batches")
	victim.Set("SINK_DURABLE_AFTER=0s", "REORDER_HORIZON=0s")
	twin := harness.New(t, url, twinNATS.URL(), harness.SlotName("batches_twin"), "REORDER_HORIZON=0s")
	twin.UseStream(victim.Stream)
	victim.Init()
	twin.Init()
	for o, want := range map[*harness.Outflow]bool{victim: true, twin: false} {
		server := nats
		if o == twin {
			server = twinNATS
		}
		s, err := harness.JetStream(t, server.URL()).Stream(t.Context(), o.Stream)
		harness.Must(t, err)
		if got := s.CachedInfo().Config.AllowAtomicPublish; got != want {
			t.Errorf("init of %s: allow_atomic is %v", o.Slot, got)
		}
	}
	twin.Start()
	harness.StartLoad(t, url, harness.RecordedOps(t, ops), 8, 0, 5).Wait(t)

	victim.Start()
	for n, kill := 0, 0; n < ops; kill++ {
		n = min(n+each, ops)
		harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), victim.Stream, n)
		switch {
		case n == ops:
		case kill%2 == 0:
			victim.Kill()
			victim.Start()
		default:
			harness.Must(t, nats.Kill())
			harness.Must(t, nats.Start())
		}
	}
	harness.AwaitMessages(t, harness.JetStream(t, twinNATS.URL()), twin.Stream, ops)
	harness.CompareStreams(t, url, nats.URL(), twinNATS.URL(), victim.Stream, 0)
	batched := inBatches(t, harness.JetStream(t, nats.URL()), victim.Stream)
	t.Logf("%d of %d messages came in batches", batched, ops)
	// Whether a message costs enough here is the disk's to say.
	if told := strings.Count(victim.Log.String(), "atomic batches"); told > 2 && batched == 0 || told == 0 &&
		batched > 0 {
		t.Errorf("outflow says %d times that it sends batches", told)
	}
	if n := inBatches(t, harness.JetStream(t, twinNATS.URL()), twin.Stream); n > 0 {
		t.Errorf("%d messages of the twin came in batches", n)
	}
	if victim.Stop() != 0 || twin.Stop() != 0 {
		t.Error("the stop was not clean")
	}
}

// inBatches counts the messages that came as part of a batch.
func inBatches(t *testing.T, js jetstream.JetStream, stream string) (n int) {
	t.Helper()
	s, err := js.Stream(t.Context(), stream)
	harness.Must(t, err)
	for seq := uint64(1); seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(t.Context(), seq)
		harness.Must(t, err)
		if m.Header.Get("Nats-Batch-Id") != "" {
			n++
		}
	}
	return n
}
