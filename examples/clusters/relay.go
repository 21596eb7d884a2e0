package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A relay that knows nothing of clusters, for comparison: it publishes the rows that are in its database,
// in the order in which they were written, and remembers which. It looks only at what it has here, so rows
// that were replicated are published once more.
const (
	relayStream = "RELAYS"
	relayKey    = "Key"
	relayBatch  = 200
	relayPoll   = 200 * time.Millisecond
)

// startRelays starts one at each cluster.
func (m *mesh) startRelays(ctx context.Context) error {
	stream := jetstream.StreamConfig{Name: relayStream, Subjects: []string{"relays.>"}}
	if m.mode == shared { // where each write to a file is synced, and one server is killed
		stream.Storage, stream.Replicas = jetstream.MemoryStorage, clusters
	}
	for _, c := range m.all {
		if _, err := c.js.CreateOrUpdateStream(ctx, stream); err != nil {
			return err
		}
		if err := c.exec(ctx, "CREATE TABLE relayed (id uuid PRIMARY KEY)"); err != nil {
			return err
		}
		m.beside.Go(func() { m.relay(ctx, c) })
	}
	return nil
}

// relay publishes until ctx is done. After a failure, such as the cluster's, it begins anew.
func (m *mesh) relay(ctx context.Context, c *cluster) {
	for ctx.Err() == nil {
		conn, err := pgx.Connect(ctx, c.url)
		for err == nil && m.wait(ctx, relayPoll, nil) {
			err = relayOnce(ctx, conn, c.js)
		}
		disconnect(conn)
		m.wait(ctx, relayPoll, nil)
	}
}

// relayOnce publishes one batch. Where that fails, it remembers what it has published up to there.
func relayOnce(ctx context.Context, conn *pgx.Conn, js jetstream.JetStream) error {
	rows, err := conn.Query(ctx, `SELECT id::text, doc_id, seq_key, payload::text FROM outbox o
		WHERE NOT EXISTS (SELECT FROM relayed r WHERE r.id = o.id)
		ORDER BY created_at, doc_id, seq_key LIMIT $1`, relayBatch)
	if err != nil {
		return err
	}
	type row struct{ ID, Doc, Key, Payload string }
	batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		return err
	}
	var ids []string
	var failed error
	for _, r := range batch {
		msg := nats.NewMsg("relays." + r.Doc)
		msg.Header.Set(relayKey, r.Key)
		msg.Data = []byte(r.Payload)
		if _, failed = js.PublishMsg(ctx, msg); failed != nil {
			break
		}
		ids = append(ids, r.ID)
	}
	_, err = conn.Exec(ctx, "INSERT INTO relayed SELECT unnest($1::text[])::uuid", ids)
	return errors.Join(failed, err)
}
