package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
)

const relayedTables = "CREATE TABLE IF NOT EXISTS relayed_mark (name text PRIMARY KEY, seq bigint NOT NULL);"

// projectRelayed keeps the three projections up to date from the relay's stream until ctx is cancelled. So
// that the two sides differ in the relay alone, the reader is exact: each message of the stream has its
// effect once, in the order of the stream.
func projectRelayed(ctx context.Context, js jetstream.JetStream, pool *pgxpool.Pool, log *slog.Logger) error {
	if err := makeAll(ctx, pool, relayedTables); err != nil {
		return err
	}
	var g errgroup.Group
	for _, p := range projections {
		g.Go(func() error {
			for ctx.Err() == nil {
				if err := p.follow(ctx, js, pool); err != nil && ctx.Err() == nil {
					log.Warn("reading again from the mark", "consumer", p.name, "err", err)
					sleep(ctx, relayPause)
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// follow reads from the mark on until something fails.
func (p *projection) follow(ctx context.Context, js jetstream.JetStream, pool *pgxpool.Pool) error {
	var mark uint64
	err := pool.QueryRow(ctx, "SELECT seq FROM relayed_mark WHERE name = $1", p.name).Scan(&mark)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	c, err := js.OrderedConsumer(ctx, relayStream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: mark + 1,
	})
	if err != nil {
		return err
	}
	messages, err := c.Messages()
	if err != nil {
		return err
	}
	defer messages.Stop()
	for {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return err
		}
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// What is no operation has no effect, as on Outflow's side, where it is parked.
			if op, err := decode(msg.Data()); err == nil {
				if err := p.apply(ctx, tx, op, msg.Data()); err != nil {
					return err
				}
			}
			_, err := tx.Exec(ctx,
				`INSERT INTO relayed_mark VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET seq = excluded.seq`,
				p.name, meta.Sequence.Stream)
			return err
		})
		if err != nil {
			return err
		}
	}
}
