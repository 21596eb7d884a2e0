package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/recording"
)

// pace is how long somebody thinks between two edits.
const pace = 60 * time.Millisecond

// write has the recorded sessions typed at each cluster at once: the same documents everywhere, by actors of
// the cluster's own.
func (m *mesh) write(ctx context.Context) error {
	for _, trace := range recording.Names() {
		ops, err := recording.Load(trace)
		if err != nil {
			return err
		}
		for _, c := range m.all {
			m.typing.Add(1)
			m.beside.Go(func() {
				defer m.typing.Add(-1)
				if err := m.typed(ctx, c, ops); err != nil && ctx.Err() == nil {
					m.fail(fmt.Errorf("%s at cluster %d: %w", trace, c.number, err))
				}
			})
		}
	}
	return nil
}

// typed types until it is enough. While the cluster is down its people wait.
func (m *mesh) typed(ctx context.Context, c *cluster, ops []recording.Op) error {
	var conn *pgx.Conn
	defer func() { disconnect(conn) }()
	for _, op := range ops {
		op.Actor = actorAt(op.Actor, c.number)
		for {
			var err error
			if conn, err = insert(ctx, conn, c.url, &op); err == nil {
				break
			}
			disconnect(conn)
			conn = nil
			if !m.wait(ctx, 100*time.Millisecond, nil) {
				return ctx.Err()
			}
		}
		c.written.Add(1)
		if !m.wait(ctx, pace, m.enough) {
			return ctx.Err()
		}
	}
	return nil
}

// insert writes an event unless it is there: whether it was committed is not known when a server dies.
func insert(ctx context.Context, conn *pgx.Conn, url string, op *recording.Op) (*pgx.Conn, error) {
	if conn == nil {
		var err error
		if conn, err = pgx.Connect(ctx, url); err != nil {
			return nil, err
		}
		var there bool
		if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM outbox WHERE doc_id = $1 AND actor_id = $2 "+
			"AND counter = $3)", op.Doc, op.Actor, op.Counter).Scan(&there); err != nil || there {
			return conn, err
		}
	}
	_, err := conn.Exec(ctx, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES "+
		"($1, $2, $3, $4)", op.Doc, op.Actor, op.Counter, string(op.Payload))
	return conn, err
}

func disconnect(conn *pgx.Conn) {
	if conn != nil {
		_ = conn.Close(context.Background()) // every commit was answered, or is looked for
	}
}

// wait waits and reports whether to go on.
func (m *mesh) wait(ctx context.Context, d time.Duration, enough <-chan struct{}) bool {
	select {
	case <-ctx.Done():
		return false
	case <-enough:
		return false
	case <-time.After(d):
		return true
	}
}
