package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/operate/maintain"
	"github.com/outflowhq/outflow/internal/operate/partition"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

// slowArchive takes its time with each message.
type slowArchive struct{ read atomic.Int64 }

func (*slowArchive) Decorate(*pipeline.Config) {}

func (s *slowArchive) Hit(point string) {
	if point == "archive.message" {
		s.read.Add(1)
		time.Sleep(200 * time.Millisecond)
	}
}

// TestABacklogOfTheArchiveKeepsNoPartitionFromBeingMade: the services' inserts would fail until all of it is
// archived.
func TestABacklogOfTheArchiveKeepsNoPartitionFromBeingMade(t *testing.T) {
	t.Parallel()
	const backlog = 100
	db := outboxdb.New(t, pgtest.Own(t, 0, "wal_level=logical"))
	db.Exec(`CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), doc_id text NOT NULL,
		created_at timestamptz NOT NULL DEFAULT now()) PARTITION BY RANGE (created_at)`)
	cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": natstest.Server(t).URL(),
		"slot": db.Slot, "table": "public.outbox", "archive.url": "file://" + t.TempDir(),
		"maintain.every": "1s"}, nil)
	must.Succeed(t, err)
	nc, js := natstest.Connect(t, cfg.NATS.URL)
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: cfg.Stream,
		Subjects: []string{"outbox.>"}, AllowDirect: true})
	must.Succeed(t, err)
	for n := range backlog {
		_, err := js.Publish(t.Context(), fmt.Sprint("outbox.", n), nil)
		must.Succeed(t, err)
	}
	store := checkpoint.NewStore(jsapi.New(nc, ""),
		checkpoint.StoreConfig{Stream: cfg.Stream, Slot: cfg.Slot})
	must.Succeed(t, store.EnsureBucket(t.Context(), 1, jetstream.MemoryStorage))
	_, err = store.Save(t.Context(), &checkpoint.Record{Version: 2, Slot: cfg.Slot, Database: "d",
		SystemID: "1", Stream: cfg.Stream, Created: s.CachedInfo().Created,
		Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Key: "seq_key", Payload: "payload"},
		Publication: checkpoint.PublicationSeen{Seen: 1, PublicationIdentity: relay.PublicationIdentity{
			OID: 16401, Xmin: 730, RelOID: 16402, RelXmin: 730}},
		Checkpoints: []checkpoint.StoredCheckpoint{{Since: time.Now(), Checkpoint: relay.Checkpoint{
			Due: outbox.LSN(1000), Seq: backlog, Settings: cfg.Reorder.Settings(), Timeline: 1}}}}, 0)
	must.Succeed(t, err)

	where, slow := wiring.WhereIs(cfg), &slowArchive{}
	a := &App{Name: "outflow", Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}, where: &where, faults: slow}
	c, err := a.maintenance(cfg, nil, false)
	must.Succeed(t, err)
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- maintain.Run(ctx, c) }()
	await.Until(t, "a partition is made", func() error {
		if db.Text("SELECT count(*)::text FROM pg_inherits WHERE inhparent = 'outbox'::regclass") == "0" {
			return errors.New("there is none")
		}
		return nil
	})
	if n := slow.read.Load(); n == 0 || n == backlog {
		t.Errorf("%d messages were archived before", n)
	}
	end()
	if err := <-ended; !maintain.Ended(ctx, err) {
		t.Error(err)
	}
}

// TestWhoAcceptsRowsHasAllTheTimeThatIsNeeded, because everything has to be read before; a run by cron has
// not.
func TestWhoAcceptsRowsHasAllTheTimeThatIsNeeded(t *testing.T) {
	t.Parallel()
	for accept, want := range map[int64]bool{0: true, 5: false} {
		ctx, cancel := limited(t.Context(), partition.Options{Apply: true, AcceptUnpublished: accept})
		defer cancel()
		if _, has := ctx.Deadline(); has != want {
			t.Errorf("who accepts %d rows has a limit: %v", accept, has)
		}
	}
}
