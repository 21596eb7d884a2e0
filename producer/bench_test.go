package producer

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
)

// BenchmarkEnqueue is one call in a transaction of its own, by the number of its events; events/s is the
// figure. "by hand" is what a service writes without this package: the same rows with one INSERT of many
// parameters, which pgx has prepared.
func BenchmarkEnqueue(b *testing.B) {
	d := newDatabase(b, defaultTable)
	counting, plain, message := outboxOf(b, Config{NextCounter: true}), outboxOf(b, Config{}), messageOf(b,
		Config{})
	d.exec(counting.Schema())
	for _, n := range []int{1, 10, 100, 1000} {
		for _, c := range []struct {
			name string
			call func(ctx context.Context) error
		}{
			{"pgx", func(ctx context.Context) error {
				_, err := d.pgx(ctx, plain, many(n, false)...)
				return err
			}},
			{"sql", func(ctx context.Context) error {
				_, err := d.std(ctx, plain, many(n, false)...)
				return err
			}},
			{"counted", func(ctx context.Context) error {
				_, err := d.pgx(ctx, counting, many(n, true)...)
				return err
			}},
			{"message", func(ctx context.Context) error {
				_, err := d.pgx(ctx, message, many(n, false)...)
				return err
			}},
			{"by hand", func(ctx context.Context) error { return d.byHand(ctx, many(n, false)) }},
		} {
			b.Run(fmt.Sprintf("%s/%d", c.name, n), func(b *testing.B) {
				if err := c.call(b.Context()); err != nil { // the columns are read, statements are prepared
					b.Fatal(err)
				}
				for b.Loop() {
					if err := c.call(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "events/s")
			})
			d.exec("TRUNCATE outbox")
		}
	}
}

func (d *database) byHand(ctx context.Context, events []Event) error {
	statement := "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES "
	var args []any
	for i, e := range events {
		if i > 0 {
			statement += ", "
		}
		statement += fmt.Sprintf("($%d, $%d, $%d, $%d)", 4*i+1, 4*i+2, 4*i+3, 4*i+4)
		args = append(args, e.Document, e.Actor, e.Counter, string(e.Payload))
	}
	return pgx.BeginFunc(ctx, d.conn, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, statement+" RETURNING id::text", args...)
		if err != nil {
			return err
		}
		_, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
}

// BenchmarkCheck is the part of a call that the service's own processor does.
func BenchmarkCheck(b *testing.B) {
	o := outboxOf(b, Config{})
	d := newDatabase(b, defaultTable)
	mustCall(b, d.pgx, o, many(1, false)...)
	l, events := o.layout.Load(), many(1000, false)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := o.build(l, events); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N*len(events))/b.Elapsed().Seconds(), "events/s")
}
