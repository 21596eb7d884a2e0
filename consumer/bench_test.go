package consumer

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// BenchmarkConsumer reads one stream in several ways, in one run: each op is one event. What has an effect
// inserts a row.
func BenchmarkConsumer(b *testing.B) {
	const events, partitions = 20_000, 8
	server := natstest.Server(b)
	nc, err := nats.Connect(server.URL())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := js.CreateStream(b.Context(),
		jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>"}}); err != nil {
		b.Fatal(err)
	}
	s := &publisher{}
	for i, m := range s.events(events, 200) {
		m.Data = make([]byte, 200)
		if _, err := js.PublishMsgAsync(&nats.Msg{Subject: m.Subject, Header: m.Header,
			Data: m.Data}); err != nil {
			b.Fatal(err)
		}
		if i%1000 == 999 {
			<-js.PublishAsyncComplete()
		}
	}
	cfg, err := pgxpool.ParseConfig(pgtest.Database(b, pgtest.Server(b)))
	if err != nil {
		b.Fatal(err)
	}
	cfg.MaxConns = partitions + 2
	pool, err := pgxpool.NewWithConfig(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	if _, err := pool.Exec(b.Context(), `CREATE TABLE effect (document text, id text)`); err != nil {
		b.Fatal(err)
	}
	insert := func(ctx context.Context, tx pgx.Tx, e *Event) error {
		_, err := tx.Exec(ctx, `INSERT INTO effect VALUES ($1, $2)`, e.Document, e.ID)
		return err
	}
	// alone is what a service without this package does: a transaction of its own, without an offset.
	alone := func(ctx context.Context, _ pgx.Tx, e *Event) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return insert(ctx, tx, e) })
	}
	nothing := func(context.Context, pgx.Tx, *Event) error { return nil }

	// a loop over Messages with an acknowledgement of each 100th
	b.Run("plain JetStream, no effect", func(b *testing.B) {
		for n := 0; n < b.N; {
			cons, err := js.CreateConsumer(b.Context(), "OUTBOX",
				jetstream.ConsumerConfig{AckPolicy: jetstream.AckAllPolicy, MaxAckPending: 20_000})
			if err != nil {
				b.Fatal(err)
			}
			it, err := cons.Messages(jetstream.PullMaxMessages(500))
			if err != nil {
				b.Fatal(err)
			}
			for range min(events, b.N-n) {
				m, err := it.Next()
				if err != nil {
					b.Fatal(err)
				}
				if n++; n%100 == 0 {
					_ = m.Ack()
				}
			}
			it.Stop()
		}
		perSecond(b)
	})
	runs := 0
	for _, c := range []struct {
		name    string
		offsets Offsets
		handler Handler
		batch   int
	}{
		{"JetStream marks, no effect", JetStream(), nothing, 0},
		{"PostgreSQL marks, no effect, batch 64", Postgres(pool), nothing, 64},
		{"PostgreSQL marks, no effect, batch 1", Postgres(pool), nothing, 1},
		{"JetStream marks, row in its own transaction", JetStream(), alone, 0},
		{"PostgreSQL marks, row, batch 1", Postgres(pool), insert, 1},
		{"PostgreSQL marks, row, batch 64", Postgres(pool), insert, 64},
	} {
		b.Run(c.name, func(b *testing.B) {
			for n := 0; n < b.N; n += events {
				runs++
				readEvents(b, js, c.offsets, c.handler, Config{
					Log:  slog.New(slog.DiscardHandler),
					Name: fmt.Sprint("c", runs), Stream: "OUTBOX", Partitions: partitions, Batch: c.batch,
				}, min(events, b.N-n))
			}
			perSecond(b)
		})
	}
}

func perSecond(b *testing.B) {
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
}

// readEvents runs a consumer until it has handled so many.
func readEvents(b *testing.B, js jetstream.JetStream, offsets Offsets, h Handler, cfg Config, n int) {
	b.Helper()
	ctx, stop := context.WithTimeout(b.Context(), 10*time.Minute)
	defer stop()
	var handled atomic.Int64
	c, err := New(js, offsets, cfg)
	if err != nil {
		b.Fatal(err)
	}
	err = c.Run(ctx, func(ctx context.Context, tx pgx.Tx, e *Event) error {
		err := h(ctx, tx, e)
		if handled.Add(1) == int64(n) {
			stop()
		}
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
}
