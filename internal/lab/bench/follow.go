package bench

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/internal/lab/process"
)

// follow lets a contender follow writers at a steady rate, and measures how late its messages are.
func (w *harness) follow(ctx context.Context, c *Case, p follower) (sample, error) {
	if err := w.emptyTables(ctx); err != nil {
		return nil, err
	}
	if err := p.prepare(ctx, c); err != nil {
		return nil, err
	}
	table, err := p.start(ctx, c)
	if err != nil {
		return nil, err
	}
	if err := w.warm(ctx, p, table); err != nil {
		return nil, err
	}
	writers, err := w.startChild(ctx, task{
		Role: writersRole, Table: table, Stream: p.stream(), Subject: p.subject(), Docs: c.Documents,
		Payload: c.Payload, Rate: c.Rate, Writers: latencyWriters, Warm: latencyWarm, For: latencyFor,
	})
	if err != nil {
		return nil, err
	}
	defer writers.kill()
	costs, err := w.costs(ctx)
	if err != nil {
		return nil, err
	}
	self := program{pid: p.pid()}
	self.before, _, _, _ = process.CPU(self.pid)
	if err := writers.begin(); err != nil {
		return nil, err
	}
	var wrote written
	if err := writers.result(ctx, &wrote); err != nil {
		return nil, fmt.Errorf("%w%s", err, because(p.died()))
	}
	if _, err := w.awaitMessages(ctx, wrote.Rows+1, p.died, p.stream()); err != nil { // 1 has warmed it
		return nil, err
	}
	got := sample{}
	got.rate(wrote.Rows, wrote.Begun, wrote.Ended)
	self.measured(wrote.Rows, got)
	if err := costs.end(ctx, wrote.Rows, got); err != nil {
		return nil, err
	}
	wrote.Delays.add(got)
	if err := p.stop(ctx); err != nil {
		return nil, err
	}
	if err := w.verify(ctx, wrote.Rows+1, p.stream()); err != nil {
		return nil, err
	}
	return got, p.cleanUp(ctx) // nothing of it beside the next one
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return "\n" + err.Error()
}

// warm waits until the contender publishes: until a first row is in its stream.
func (w *harness) warm(ctx context.Context, p follower, table string) error {
	err := w.exec(ctx, "INSERT INTO "+table+` (id, doc_id, actor_id, counter, payload)
		VALUES ('00000000-0000-0000-0000-000000000001', 'warm', 'actor', -1, '{"n": -1, "op": ""}') ON CONFLICT DO NOTHING`)
	if err != nil {
		return err
	}
	_, err = w.awaitMessages(ctx, 1, p.died, p.stream())
	return err
}
