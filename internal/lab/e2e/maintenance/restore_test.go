package maintenance

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// backup is what `nats stream backup` keeps: the stream's configuration and state, and the server's archive
// in chunks.
type backup struct {
	Config json.RawMessage `json:"config"`
	State  json.RawMessage `json:"state"`
	chunks [][]byte
}

// apiAnswer is what all answers of the JetStream API have.
type apiAnswer struct {
	Error *jetstream.APIError `json:"error"`
}

// ask makes a request of the JetStream API.
func ask(t *testing.T, nc *nats.Conn, subject string, request, answer any) {
	t.Helper()
	body, err := json.Marshal(request)
	harness.Must(t, err)
	m, err := nc.Request("$JS.API."+subject, body, harness.Patience)
	harness.Must(t, err)
	var failed apiAnswer
	harness.Must(t, json.Unmarshal(m.Data, &failed))
	if failed.Error != nil {
		t.Fatalf("%s: %v", subject, failed.Error)
	}
	harness.Must(t, json.Unmarshal(m.Data, answer))
}

// takeBackup takes a backup of a stream, consumers included, while it is written to. The server gives up when
// it is not told for 5 s that a chunk has come: then it is taken again.
func takeBackup(t *testing.T, nc *nats.Conn, stream string) *backup {
	t.Helper()
	for try := 1; ; try++ {
		b, whole := takeBackupOnce(t, nc, stream)
		if whole {
			return b
		}
		if try == harness.Tries {
			t.Fatal("the server sends no whole backup")
		}
	}
}

func takeBackupOnce(t *testing.T, nc *nats.Conn, stream string) (b *backup, whole bool) {
	t.Helper()
	inbox := nats.NewInbox()
	sub, err := nc.SubscribeSync(inbox)
	harness.Must(t, err)
	defer sub.Unsubscribe() //nolint:errcheck // the connection is the test's
	b = &backup{}
	ask(t, nc, "STREAM.SNAPSHOT."+stream, map[string]any{"deliver_subject": inbox}, b)
	for {
		m, err := sub.NextMsg(harness.Patience)
		harness.Must(t, err)
		if len(m.Data) == 0 {
			status := m.Header.Get("Status")
			return b, status == "" || status == "204"
		}
		b.chunks = append(b.chunks, m.Data)
		if m.Reply != "" {
			harness.Must(t, m.Respond(nil)) // the server waits for it, now and then
		}
	}
}

// restore puts a backup back, as `nats stream restore` does. There must be no stream of the name. The server
// gives up when no chunk comes for seconds, and answers no more: then it is put back from the beginning.
func (b *backup) restore(t *testing.T, nc *nats.Conn, stream string) {
	t.Helper()
	for try := 1; !b.restoreOnce(t, nc, stream); try++ {
		if try == harness.Tries {
			t.Fatal("the server takes no backup")
		}
	}
}

func (b *backup) restoreOnce(t *testing.T, nc *nats.Conn, stream string) (whole bool) {
	t.Helper()
	var begun struct {
		To string `json:"deliver_subject"`
	}
	ask(t, nc, "STREAM.RESTORE."+stream, b, &begun)
	for _, chunk := range append(b.chunks, nil) {
		m, err := nc.Request(begun.To, chunk, harness.AskTimeout)
		if errors.Is(err, nats.ErrTimeout) || errors.Is(err, nats.ErrNoResponders) {
			return false
		}
		harness.Must(t, err)
		var failed apiAnswer
		if len(m.Data) > 0 {
			harness.Must(t, json.Unmarshal(m.Data, &failed))
		}
		if failed.Error != nil {
			t.Fatalf("restore stream %s: %v", stream, failed.Error)
		}
	}
	return true
}

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
			var b *backup
			r := beforeRestore(t, ns.URL(), "restored", func(r *restored) {
				b = takeBackup(t, r.js.Conn(), r.Stream)
			}, "SINK_DURABLE_AFTER="+durable)
			harness.Must(t, r.js.DeleteStream(t.Context(), r.Stream))
			b.restore(t, r.js.Conn(), r.Stream)
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
