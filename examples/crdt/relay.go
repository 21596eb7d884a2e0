package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/outbox"
)

// The polling relay that Outflow replaces, as it is commonly written: read unpublished rows and lock them,
// publish one by one, mark them. Several instances share the work by SKIP LOCKED. It does nothing wrong on
// purpose.
const (
	relayStream = "RELAY"
	relayBatch  = 100
	relayPoll   = 100 * time.Millisecond
	relayPause  = 500 * time.Millisecond // after an error
	relayWait   = 2 * time.Second        // for an acknowledgement
)

// relay publishes until ctx is cancelled; then it ends the batch that it is in.
func relay(ctx context.Context, js jetstream.JetStream, pool *pgxpool.Pool, log *slog.Logger) error {
	for ctx.Err() == nil {
		n, err := relayOnce(context.WithoutCancel(ctx), js, pool)
		pause := relayPoll
		if err != nil {
			log.Warn("a batch is rolled back and comes again", "err", err)
			pause = relayPause
		}
		if n == 0 {
			sleep(ctx, pause)
		}
	}
	return nil
}

// relayOnce publishes one batch and returns how many rows it had.
func relayOnce(ctx context.Context, js jetstream.JetStream, pool *pgxpool.Pool) (n int, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT id, doc_id, payload::text FROM public.outbox
			WHERE published_at IS NULL
			ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED`, relayBatch)
		if err != nil {
			return err
		}
		type row struct {
			ID      int64
			Doc     string
			Payload string
		}
		batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			return err
		}
		var ids []int64
		for _, r := range batch {
			if err := publish(ctx, js, r.Doc, r.Payload); err != nil {
				return err
			}
			ids = append(ids, r.ID)
		}
		n = len(batch)
		_, err = tx.Exec(ctx, "UPDATE public.outbox SET published_at = now() WHERE id = ANY($1)", ids)
		return err
	})
	if err != nil {
		n = 0
	}
	return n, err
}

func publish(ctx context.Context, js jetstream.JetStream, doc, payload string) error {
	ctx, cancel := context.WithTimeout(ctx, relayWait)
	defer cancel()
	_, err := js.Publish(ctx, string(outbox.AppendToken([]byte("relay."), doc)), []byte(payload))
	return err
}

// makeRelayStream makes the relay's stream if it is absent.
func makeRelayStream(ctx context.Context, js jetstream.JetStream) error {
	_, err := js.CreateOrUpdateStream(ctx,
		jetstream.StreamConfig{Name: relayStream, Subjects: []string{"relay.>"}})
	return err
}

// sleep waits, or until ctx is cancelled.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
