package bench

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	relayName  = "relay"
	relayBatch = 100
	relayPoll  = 10 * time.Millisecond // when there was nothing: most wait longer
	relayRows  = 60_000                // of a backlog: all of it would take most of the time
)

// poller is a relay after the common pattern: take a batch, lock it, publish it, wait, mark it. It has a
// table of its own, so that what it writes does not lie in the others' way.
type poller struct {
	w     *harness
	child *child
}

func (p *poller) name() string    { return relayName }
func (p *poller) subject() string { return p.w.name + "_relay" }
func (p *poller) stream() string  { return strings.ToUpper(p.subject()) }
func (p *poller) died() error     { return p.child.died() }
func (p *poller) pid() int        { return p.child.PID() }

func (p *poller) prepare(ctx context.Context, c *Case) error {
	return p.w.makeStream(ctx, c, p.stream(), p.subject()+".>")
}

func (p *poller) spawn(ctx context.Context) (err error) {
	p.child, err = p.w.startChild(ctx, task{Role: relayName, Stream: p.stream(), Subject: p.subject(),
		Table: relayTable})
	return err
}

// drain copies the backlog to the relay's table first.
func (p *poller) drain(ctx context.Context, _ *Case, b backlog) (sample, error) {
	n := min(b.rows, relayRows)
	err := p.w.exec(ctx, "TRUNCATE "+relayTable+" RESTART IDENTITY", fmt.Sprintf(
		"INSERT INTO %s (id, doc_id, actor_id, counter, payload) SELECT id, doc_id, actor_id, counter, "+
			"payload FROM %s WHERE (payload ->> 'n')::int < %d ORDER BY (payload ->> 'n')::int",
		relayTable, outboxName, n), "ANALYZE "+relayTable)
	if err != nil {
		return nil, err
	}
	if p.w.pg != nil {
		if err := p.w.exec(ctx, "CHECKPOINT"); err != nil {
			return nil, err
		}
	}
	if err := p.spawn(ctx); err != nil {
		return nil, err
	}
	return p.w.drainChild(ctx, p.child, p.stream(), n)
}

func (p *poller) start(ctx context.Context, _ *Case) (string, error) {
	if err := p.spawn(ctx); err != nil {
		return "", err
	}
	return relayTable, p.child.begin()
}

func (p *poller) stop(ctx context.Context) error { return p.child.end(ctx, nil) }

func (p *poller) cleanUp(ctx context.Context) error {
	if p.child != nil {
		p.child.kill()
	}
	return p.w.dropStream(ctx, p.stream())
}

// poll is the role.
func poll(ctx context.Context, t task, ready func() error) (any, error) {
	conn, err := pgx.Connect(ctx, t.Postgres)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // the process ends
	nc, err := nats.Connect(t.NATS, nats.MaxReconnects(-1), nats.Timeout(attempt))
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(relayBatch))
	if err != nil {
		return nil, err
	}
	if err := ready(); err != nil {
		return nil, err
	}
	for ctx.Err() == nil {
		n, err := relayOnce(context.WithoutCancel(ctx), conn, js, t)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			_ = sleep(ctx, relayPoll) // the loop ends with ctx
		}
	}
	return nil, nil
}

// relayOnce publishes a batch and returns how many rows it had.
func relayOnce(ctx context.Context, conn *pgx.Conn, js jetstream.JetStream, t task) (int, error) {
	var ids []string
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		// The limit stands in the text: a generic plan for one that it does not know would sort the whole
		// table for each batch.
		rows, err := tx.Query(ctx, fmt.Sprintf("SELECT id::text, doc_id, payload::text FROM %s"+
			" WHERE sent_at IS NULL ORDER BY place LIMIT %d FOR UPDATE SKIP LOCKED", t.Table, relayBatch))
		if err != nil {
			return err
		}
		var id, doc, payload string
		var acks []jetstream.PubAckFuture
		_, err = pgx.ForEachRow(rows, []any{&id, &doc, &payload}, func() error {
			m := &nats.Msg{Subject: t.Subject + "." + doc, Data: []byte(payload),
				Header: nats.Header{nats.MsgIdHdr: {id}}}
			ack, err := js.PublishMsgAsync(m)
			ids, acks = append(ids, id), append(acks, ack)
			return err
		})
		if err != nil {
			return err
		}
		for _, ack := range acks {
			select {
			case <-ack.Ok():
			case err := <-ack.Err():
				return err
			}
		}
		if len(ids) > 0 {
			_, err = tx.Exec(ctx, "UPDATE "+t.Table+" SET sent_at = now() WHERE id = ANY($1::text[]::uuid[])",
				ids)
		}
		return err
	})
	return len(ids), err
}
