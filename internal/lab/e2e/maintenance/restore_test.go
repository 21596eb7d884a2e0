package maintenance

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// restored is an outflow whose stream is restored from an older copy, and a durable consumer of it.
type restored struct {
	*planned
	js      jetstream.JetStream
	durable jetstream.Consumer
	before  []*oracle.Message // all that there was before
}

// beforeRestore publishes a part of the load, lets backup take a backup under it, and stops outflow when more
// is published.
func beforeRestore(t *testing.T, natsURL, slot string, backup func(*restored), settings ...string) *restored {
	t.Helper()
	r := &restored{planned: underLoad(t, timedServer(t), natsURL, slot, 400, nil, settings...),
		js: harness.JetStream(t, natsURL)}
	var err error
	r.durable, err = r.js.CreateConsumer(t.Context(), r.Stream,
		jetstream.ConsumerConfig{Durable: "worker", AckPolicy: jetstream.AckExplicitPolicy})
	harness.Must(t, err)
	batch, err := r.durable.Fetch(100)
	harness.Must(t, err)
	for m := range batch.Messages() {
		harness.Must(t, m.DoubleAck(t.Context()))
	}
	harness.Must(t, batch.Error())
	backup(r)
	r.publishing()
	r.publishing()
	r.MustStop(t)
	r.before = harness.Messages(t, r.js, r.Stream)
	return r
}

// shortened makes sure that the restored stream lacks something.
func (r *restored) shortened() {
	r.t.Helper()
	harness.Eventually(r.t, "the restored stream", func() error {
		s, err := r.js.Stream(r.t.Context(), r.Stream)
		if err == nil && (s.CachedInfo().State.LastSeq == 0 ||
			s.CachedInfo().State.LastSeq >= uint64(len(r.before))) {
			r.t.Fatalf("the backup has %d messages of %d: it proves nothing", s.CachedInfo().State.LastSeq,
				len(r.before))
		}
		return err
	})
}

// unchanged makes sure that what was published before has its sequences again, and that the consumer goes on
// where it was.
func (r *restored) unchanged() {
	r.t.Helper()
	after := harness.Messages(r.t, r.js, r.Stream)
	for i, m := range r.before {
		if i >= len(after) || same(m) != same(after[i]) {
			r.t.Fatalf("message %d was %s, and is another one after the restore", i+1, same(m))
		}
	}
	info, err := r.durable.Info(r.t.Context())
	harness.Must(r.t, err)
	if info.AckFloor.Stream != 100 {
		r.t.Errorf("the durable consumer is at %d, want 100", info.AckFloor.Stream)
	}
}

// same is what must not change in a message.
func same(m *oracle.Message) string {
	return fmt.Sprintf("%d %s %v %s", m.Seq, m.Subject, m.Header, m.Data)
}

// Backups are younger or older than what counts as durable: what came after them is in the WAL, or in the
// table only.
var backupAges = map[string]string{"in the WAL": "1h", "in the table": "0s"}

// TestAnOlderFolderOfNATSIsFilledUpAgain: NATS gets an older copy of its folder, stream and record in it.
// What came after it comes again from the WAL, at the sequences that it had; where PostgreSQL does not have
// that any more, from the table.
func TestAnOlderFolderOfNATSIsFilledUpAgain(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	for name, durable := range backupAges {
		t.Run(name, func(t *testing.T) {
			if durable == "0s" {
				tier.OnlyLong(t, "the other age takes the same steps")
			}
			t.Parallel()
			ns := natstest.Process(t)
			copied := filepath.Join(t.TempDir(), "copy")
			r := beforeRestore(t, ns.URL(), "folder", func(*restored) {
				harness.Must(t, ns.Stop())
				harness.Must(t, os.CopyFS(copied, os.DirFS(ns.Dir())))
				harness.Must(t, ns.Start())
			}, "SINK_DURABLE_AFTER="+durable)
			harness.Must(t, ns.Stop())
			harness.Must(t, os.RemoveAll(ns.Dir()))
			harness.Must(t, os.CopyFS(ns.Dir(), os.DirFS(copied)))
			harness.Must(t, ns.Start())
			r.shortened()
			if durable == "0s" {
				r.MustFailInGap("slot_ahead", "run")
				mustAccept(r.planned.Outflow, "slot_ahead")
				r.mixed = true
			}
			r.Start()
			r.end()
			if durable != "0s" {
				r.unchanged()
			}
		})
	}
}

// TestARestoredStreamMustBeAccepted: the stream is restored from its own backup, which the server counts as
// another stream: what stands in the record says so, an operator accepts it.
func TestARestoredStreamMustBeAccepted(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	for name, durable := range backupAges {
		t.Run(name, func(t *testing.T) {
			if durable == "0s" {
				tier.OnlyLong(t, "the other age takes the same steps")
			}
			t.Parallel()
			ns := natstest.Server(t)
			var b *harness.Backup
			r := beforeRestore(t, ns.URL(), "restored", func(r *restored) {
				b = harness.TakeBackup(t, r.js.Conn(), r.Stream)
			}, "SINK_DURABLE_AFTER="+durable)
			harness.Must(t, r.js.DeleteStream(t.Context(), r.Stream))
			b.Restore(t, r.js.Conn(), r.Stream)
			r.shortened()
			if durable == "0s" {
				r.MustFailInGap("stream_recreated", "run")
				r.mixed = true
			}
			mustAccept(r.planned.Outflow, "stream_recreated")
			r.Start()
			r.end()
		})
	}
}
