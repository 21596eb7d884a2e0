package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/consumer"
)

// outflowStream is where Outflow publishes.
const outflowStream = "OUTBOX"

// lease is how long the consumers of a process that was killed keep others waiting: short, as here somebody
// looks on.
const lease = 3 * time.Second

// project keeps the three projections of a schema up to date from Outflow's stream until ctx is cancelled. An
// event's effect and the mark that it has had it are committed together, so each event has its effect once.
func project(ctx context.Context, js jetstream.JetStream, pool *pgxpool.Pool, schema string,
	log *slog.Logger) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, p := range projections {
		c, err := consumer.New(js, consumer.Postgres(pool), consumer.Config{
			Name: consumerName(schema, p), Stream: outflowStream, Lease: lease, Log: log,
		})
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		g.Go(func() error {
			return c.Run(ctx, p.handle)
		})
	}
	return g.Wait()
}

func consumerName(schema string, p *projection) string { return schema + "-" + p.name }

// handle gives an event its effect, in the transaction that also moves the mark.
func (p *projection) handle(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
	op, err := decode(e.Data)
	if err != nil {
		return consumer.Poison(err) // no attempt would make it better
	}
	return p.apply(ctx, tx, op, e.Data)
}
