package bench

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/process"
)

const publisherName = "publisher"

// publisher publishes the same messages out of its memory, into a stream without a door of its own: what
// JetStream alone takes.
type publisher struct {
	w     *harness
	child *child
}

func (p *publisher) name() string    { return publisherName }
func (p *publisher) subject() string { return p.w.name + "_publisher" }
func (p *publisher) stream() string  { return strings.ToUpper(p.subject()) }

func (p *publisher) prepare(ctx context.Context, c *Case) error {
	return p.w.makeStream(ctx, c, p.stream(), p.subject()+".>")
}

// drain measures from when the messages are in memory.
func (p *publisher) drain(ctx context.Context, _ *Case, b backlog) (sample, error) {
	var err error
	p.child, err = p.w.startChild(ctx, task{Role: publisherName, Stream: p.stream(), Subject: p.subject(),
		Table: outboxName, Rows: b.rows})
	if err != nil {
		return nil, err
	}
	return p.w.drainChild(ctx, p.child, p.stream(), b.rows)
}

// drainChild lets a child publish n messages, and measures it.
func (w *harness) drainChild(ctx context.Context, c *child, stream string, n int) (sample, error) {
	costs, err := w.costs(ctx)
	if err != nil {
		return nil, err
	}
	self := program{pid: c.PID()}
	self.before, _, _, _ = process.CPU(self.pid)
	got := sample{}
	begun := time.Now()
	if err := c.begin(); err != nil {
		return nil, err
	}
	ended, err := w.awaitMessages(ctx, n, c.died, stream)
	if err != nil {
		return nil, err
	}
	self.measured(n, got)
	got.rate(n, begun, ended)
	if err := costs.end(ctx, n, got); err != nil {
		return nil, err
	}
	if err := c.end(ctx, nil); err != nil {
		return nil, err
	}
	return got, w.verify(ctx, n, stream)
}

func (p *publisher) cleanUp(ctx context.Context) error {
	if p.child != nil {
		p.child.kill()
	}
	return p.w.dropStream(ctx, p.stream())
}

// publish is the role.
func publish(ctx context.Context, t task, ready func() error) (any, error) {
	type message struct {
		subject      string
		header, data []byte
	}
	conn, err := pgx.Connect(ctx, t.Postgres)
	if err != nil {
		return nil, err
	}
	rows, err := conn.Query(ctx, "SELECT doc_id, id::text, actor_id, counter, payload::text FROM "+t.Table+
		" ORDER BY (payload ->> 'n')::int")
	if err != nil {
		return nil, err
	}
	var doc, id, actor, payload string
	var counter int64
	all := make([]message, 0, t.Rows)
	_, err = pgx.ForEachRow(rows, []any{&doc, &id, &actor, &counter, &payload}, func() error {
		all = append(all, message{t.Subject + "." + doc, outflowHeader(id, actor, counter), []byte(payload)})
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err := conn.Close(ctx); err != nil {
		return nil, err
	}
	if len(all) != t.Rows {
		return nil, fmt.Errorf("the table has %d rows, not %d", len(all), t.Rows)
	}
	wire, err := newWire(t.NATS)
	if err != nil {
		return nil, err
	}
	defer wire.nc.Close()
	if err := ready(); err != nil {
		return nil, err
	}
	for i, m := range all {
		if err := wire.send(m.subject, m.header, m.data, i == len(all)-1); err != nil {
			return nil, err
		}
	}
	if err := wire.finish(); err != nil {
		return nil, err
	}
	<-ctx.Done() // it is asked about what it has used
	return nil, nil
}
