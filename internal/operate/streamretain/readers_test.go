package streamretain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/replication/postgres"
)

// TestWhoIsBehindHoldsTheFront: the record, the archive, durables, consumers in databases and in the bucket.
// Each is named.
func TestWhoIsBehindHoldsTheFront(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.cfg.Archive.URL = "file://" + t.TempDir()
	url := w.database()
	w.publish(100)
	w.goes(0, "there is no checkpoint record")
	w.confirm(10)
	w.goes(0, "archive: up to 0 may go", "1 to 99 wait for it")
	w.archived()
	w.goes(10, "the confirmed checkpoint is at 10", "11 to 99 wait for it")
	w.confirm(90)
	w.goes(10, "archived up to 10")
	w.archived()

	// a durable that has acknowledged some, one with a filter, one that nobody has ever read
	durable := w.durable("some", "")
	w.acknowledge(durable, 20)
	w.goes(29, "consumer some", "it has acknowledged everything up to 30")
	w.acknowledge(durable, 20)
	rare := w.durable("rare", "outbox.d0")
	w.acknowledge(rare, 1) // 30, then 35 is the next one
	w.goes(33, "consumer rare", "nothing up to 34")
	w.acknowledge(rare, 14)

	w.stored(url, "app", "texts", 60, 45)
	w.goes(44, "consumer texts", "its oldest offset is 45", "schema app")
	w.stored(url, "app", "texts", 60, 60)
	other := w.database()
	w.stored(other, "public", "search", 48, 70)
	w.goes(47, "consumer search", "its oldest offset is 48")
	w.stored(other, "public", "search", 70, 70)
	w.goes(49, "consumer some", "it has acknowledged everything up to 50")

	// whom nobody waits for
	w.cfg.Retain.Stream.IgnoreConsumers = []string{"some", "texts"}
	w.goes(69, "consumer texts is not waited for", "its oldest offset is 60",
		"consumer some is not waited for")
	w.repair = "slot_missing"
	w.confirm(95)
	w.stored(other, "public", "search", 90, 90)
	w.goes(69, "outflow repair --accept slot_missing has not finished")
	w.repair = ""
	w.confirm(95)
	w.goes(89, "consumer search")
}

// TestAConsumerThatLagsGoesOnAfterThePurge: one of package consumer, that runs. While its database is not
// known nothing goes; then all before its oldest offset does, and it reads the rest without a gap.
func TestAConsumerThatLagsGoesOnAfterThePurge(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.publish(60)
	w.confirm(60)
	url := pgtest.Database(t, pgtest.Server(t))
	var done []uint64
	// runs the consumer up to a message, which fails
	run := func(until uint64, meanwhile func()) {
		t.Helper()
		pool, err := pgxpool.New(t.Context(), url)
		must.Succeed(t, err)
		defer pool.Close()
		c, err := consumer.New(w.js, consumer.Postgres(pool), consumer.Config{Name: "texts", Stream: "OUTBOX",
			Partitions: 1, Batch: 1, MaxAttempts: 1000, Log: slog.New(slog.DiscardHandler)})
		must.Succeed(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended, stuck := make(chan error, 1), make(chan struct{}, 1)
		go func() {
			ended <- c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
				if e.Sequence == until {
					select {
					case stuck <- struct{}{}:
					default:
					}
					return errors.New("stuck")
				}
				done = append(done, e.Sequence)
				return nil
			})
		}()
		select {
		case <-stuck:
		case err := <-ended:
			t.Fatalf("the consumer ended: %v", err)
		}
		meanwhile()
		stop()
		must.Succeed(t, <-ended)
	}
	run(25, func() {
		w.goes(0, "consumer texts", "its offsets are not in a database that was looked at")
		w.in = []postgres.Target{{URL: url, Setting: "--database"}}
		w.goes(23, "its oldest offset is 24")
	})
	w.goes(23, "its oldest offset is 24") // also while it does not run
	run(60, func() { w.goes(58, "its oldest offset is 59") })
	want := make([]uint64, 59)
	for i := range want {
		want[i] = uint64(i + 1)
	}
	if !slices.Equal(done, want) {
		t.Errorf("done: %v", done)
	}
}

// TestTheOffsetsOfAStandbyDoNotCount: it is behind, and does not know that a consumer was set back.
func TestTheOffsetsOfAStandbyDoNotCount(t *testing.T) {
	t.Parallel()
	primary := pgtest.Own(t, 0)
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.publish(60)
	w.confirm(55)
	w.stored(primary.URL("postgres"), "public", "texts", 40, 50)
	standby, err := primary.Standby(t.Context(), "standby", nil)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, standby.Remove()) })
	conn, err := pgx.Connect(t.Context(), standby.URL("postgres"))
	must.Succeed(t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	_, err = conn.Exec(t.Context(), "SELECT pg_wal_replay_pause()")
	must.Succeed(t, err)
	w.stored(primary.URL("postgres"), "public", "texts", 10, 10)
	w.in = []postgres.Target{{URL: standby.URL("postgres"), Setting: "--database"}}
	_, err = w.run(true)
	w.wantFault(err, "in_recovery")
	w.in[0].URL = primary.URL("postgres")
	w.goes(9, "consumer texts: up to 9 may go")
}

// TestOffsetsInJetStreamCount: those of a consumer without a database, and an ephemeral consumer of anybody.
func TestOffsetsInJetStreamCount(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.publish(60)
	w.confirm(60)
	c, err := consumer.New(w.js, consumer.JetStream(), consumer.Config{Name: "texts", Stream: "OUTBOX",
		Partitions: 3, MaxAttempts: 1000, Log: slog.New(slog.DiscardHandler)})
	must.Succeed(t, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var least atomic.Uint64
	must.Succeed(t, c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
		if e.Document != "d2" {
			return nil
		}
		if least.Store(e.Sequence); e.Sequence == 32 {
			stop()
			return errors.New("stuck")
		}
		return nil
	}))
	direct, err := w.nc.SubscribeSync("$JS.API.DIRECT.GET.>") // which any replica may answer, out of date
	must.Succeed(t, err)
	must.Succeed(t, w.nc.Flush())
	r, err := w.run(false)
	must.Succeed(t, err)
	if m, err := direct.NextMsg(100 * time.Millisecond); err == nil {
		t.Errorf("not only the leader was asked: %s", m.Subject)
	}
	must.Succeed(t, direct.Unsubscribe())
	text := strings.Join(r.Lines(), "\n")
	if r.MayGo >= least.Load()-1 || !strings.Contains(text, "bucket outflow-consumers-OUTBOX") {
		t.Errorf("up to %d may go, and the consumer is before %d:\n%s", r.MayGo, least.Load(), text)
	}
	w.cfg.Retain.Stream.IgnoreConsumers = []string{"texts"}
	e, err := w.s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Name: "passing",
		AckPolicy: jetstream.AckNonePolicy, InactiveThreshold: time.Hour})
	must.Succeed(t, err)
	for range 5 {
		_, err = e.Next(jetstream.FetchMaxWait(time.Minute))
		must.Succeed(t, err)
	}
	w.goes(4, "consumer passing: up to 4 may go")
}

// TestAReplicatedStream: with a node down that leads a consumer nothing is known of that one, and nothing
// goes.
func TestAReplicatedStream(t *testing.T) {
	t.Parallel()
	cluster := natstest.Cluster(t, 3)
	w := newWorld(t, cluster.URLs(), 3)
	w.publish(30)
	w.confirm(25)
	c, err := w.s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "lone", Replicas: 1,
		AckPolicy: jetstream.AckExplicitPolicy})
	must.Succeed(t, err)
	w.acknowledge(c, 10)
	w.goes(9, "consumer lone")
	info, err := c.Info(t.Context())
	must.Succeed(t, err)
	var node int
	_, err = fmt.Sscanf(info.Cluster.Leader, "node%d", &node)
	must.Succeed(t, err)
	cluster.Stop(node)
	_, err = cluster.WaitLeader("OUTBOX", time.Minute)
	must.Succeed(t, err)
	must.Succeed(t, cluster.WaitReady(time.Minute))
	await.Until(t, "the stream answers", func() error {
		_, err := w.s.Info(t.Context())
		return err
	})
	if r, err := w.run(true); err == nil || w.first() != 10 {
		t.Fatalf("nobody knows where consumer lone is: %+v, %v, and the stream begins at %d", r, err,
			w.first())
	} else {
		t.Log(err)
	}
	must.Succeed(t, cluster.Start(node))
	await.Until(t, "the consumer is back", func() error {
		_, err := c.Info(t.Context())
		return err
	})
	must.Succeed(t, cluster.WaitReady(time.Minute))
	w.acknowledge(c, 20)
	w.goes(25, "the confirmed checkpoint is at 25")
}
