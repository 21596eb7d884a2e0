package archive

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// TestARestoreEndsWhenTheLeaderIsLost: acknowledgements and answers that never come do not make it wait
// forever, and the next run finishes.
func TestARestoreEndsWhenTheLeaderIsLost(t *testing.T) {
	t.Parallel()
	t.Run("while it publishes", func(t *testing.T) { loseLeader(t, "restore.message", 500) })
	t.Run("at its end", func(t *testing.T) {
		tier.OnlyLong(t, "a cluster of three takes half a minute")
		loseLeader(t, "restore.published", 1)
	})
}

// loseLeader loses it when a run comes to a point for the n-th time.
func loseLeader(t *testing.T, point string, nth int) {
	t.Helper()
	c := natstest.Cluster(t, 3)
	nc, err := nats.Connect(c.URLs(), nats.MaxReconnects(-1), nats.Timeout(time.Minute))
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	w := &world{t: t}
	w.js, err = jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second),
		jetstream.WithPublishAsyncTimeout(20*time.Second))
	must.Succeed(t, err)
	w.makeStream(1)
	w.store = checkpoint.NewStore(jsapi.New(nc, ""),
		checkpoint.StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	must.Succeed(t, w.store.EnsureBucket(t.Context(), 3, jetstream.FileStorage))
	folder := "file://" + t.TempDir()
	load := func(node int) {
		w.cfg, err = config.Load(config.Args{"nats.url": c.URL(node), "stream": "OUTBOX", "slot": "outflow",
			"archive.url": folder, "init.replicas": "3"}, nil)
		must.Succeed(t, err)
	}
	load(0)
	all := w.publishAsync(4000)
	w.confirm(all)
	w.mustRun(Options{Now: true})
	must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))

	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	// a restore that is stopped once shows which node leads
	half, stop := context.WithCancel(ctx)
	n := 0
	_, err = Restore(half, w.cfg, slog.New(slog.DiscardHandler), RestoreOptions{Hit: func(string) {
		if n++; n == 50 {
			stop()
		}
	}})
	leader, err := c.WaitLeader("OUTBOX", time.Minute)
	must.Succeed(t, err)
	load((leader + 1) % 3)
	// a run that begins while messages of the one before still come in fails and is run again
	stopped := false
	for try := 0; (try == 0 || err != nil) && ctx.Err() == nil; try++ {
		n := 0
		_, err = Restore(ctx, w.cfg, slog.New(slog.DiscardHandler), RestoreOptions{Hit: func(p string) {
			if p != point || stopped {
				return
			}
			if n++; n == nth {
				stopped = true
				c.Stop(leader)
			}
		}})
		if stopped && ctx.Err() == nil {
			_, err := c.WaitLeader("OUTBOX", time.Minute)
			must.Succeed(t, err)
		}
	}
	if ctx.Err() != nil {
		t.Fatal("the restore waited for acknowledgements that cannot come")
	}
	must.Succeed(t, err)
	if got := w.stored("OUTBOX"); uint64(len(got)) != all {
		t.Errorf("%d messages of %d", len(got), all)
	}
}

// publishAsync publishes until the stream has at least n messages, and returns how many it has: a cluster may
// lose acknowledgements while it settles.
func (w *world) publishAsync(n uint64) uint64 {
	w.t.Helper()
	for {
		s, err := w.js.Stream(w.t.Context(), "OUTBOX")
		must.Succeed(w.t, err)
		last := s.CachedInfo().State.LastSeq
		if last >= n {
			return last
		}
		for i := range min(n-last, 2000) {
			_, err := w.js.PublishMsgAsync(&nats.Msg{Subject: fmt.Sprintf("outbox.doc%d", i%3),
				Data: []byte("{}")}, jetstream.WithStallWait(time.Minute))
			must.Succeed(w.t, err)
		}
		<-w.js.PublishAsyncComplete()
	}
}
