// Package consumer reads the events of an Outflow stream: different documents in parallel, each document
// strictly in order and, with a PostgreSQL database, with the effect of each event exactly once.
//
//	package main
//
//	import (
//		"context"
//		"log"
//		"os"
//		"os/signal"
//
//		"github.com/jackc/pgx/v5"
//		"github.com/jackc/pgx/v5/pgxpool"
//		"github.com/nats-io/nats.go"
//		"github.com/nats-io/nats.go/jetstream"
//
//		"github.com/outflowhq/outflow/consumer"
//	)
//
//	func main() {
//		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
//		defer stop()
//		pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
//		if err != nil {
//			log.Fatal(err)
//		}
//		nc, err := nats.Connect(os.Getenv("NATS_URL"), nats.MaxReconnects(-1))
//		if err != nil {
//			log.Fatal(err)
//		}
//		js, err := jetstream.New(nc)
//		if err != nil {
//			log.Fatal(err)
//		}
//		cfg := consumer.Config{Name: "counts", Stream: "OUTBOX"}
//		c, err := consumer.New(js, consumer.Postgres(pool), cfg)
//		if err != nil {
//			log.Fatal(err)
//		}
//		if err := c.Run(ctx, count); err != nil { // nil after a clean stop
//			log.Fatal(err)
//		}
//	}
//
//	// count has its effect through tx.
//	func count(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
//		_, err := tx.Exec(ctx, `INSERT INTO counts VALUES ($1, 1)
//			ON CONFLICT (doc_id) DO UPDATE SET n = counts.n + 1`, e.Document)
//		return err
//	}
//
// # What it promises
//
// With [Postgres], what the handler writes through its transaction is committed together with the consumer's
// offset. So each event has its effect exactly once: after a crash at any point, a redelivery, a lost
// acknowledgement or commit answer, with two instances that both believe they are active, and when a broker
// has lost the end of its stream and Outflow has published it again. What leaves the transaction, such as a
// mail or a call to another service, may happen more than once.
//
// With [JetStream] there is no transaction: the offset is written up to a second after the effect. After a
// crash the events of that time come again, in the same order: at least once.
//
// The events of one document come one after the other, in the order of the stream. Documents are divided into
// partitions by a hash ([Config.Partitions]); each has a worker and an offset, in the table outflow_mark. The
// number may be changed between two runs.
//
// Any number of instances may run under one name. One of them is active, by a lease; the others stand by.
//
// An event that fails is tried again, while later events of its partition wait. After [Config.MaxAttempts]
// and [Config.ParkAfter] it is parked: it and all later events of its document go to the table outflow_parked
// until an operator releases them (outflow parked), and the other documents go on. Without a database it goes
// to [Config.OnPoison]. Where many fail ([Config.ParkLimit]) nothing more is parked: all wait. A dead letter
// is parked at once, unless there is a handler for it ([Config.DeadLetters]).
//
// A handler that does not return within a few seconds of the end of its context costs its instance the lease:
// another instance takes over, and this one goes on when the handler has returned.
//
// Nothing is left out silently. If messages were removed before they were read, if the stream is another one,
// or if it has a message that Outflow did not publish, [Consumer.Run] ends with an error that says what can
// be done; see [ErrGap].
//
// Package consumertest runs a handler with events in memory and crashes it at every point. Why the promise
// holds, case by case with the tests that show it, is argued in docs/consumer.md of the repository.
package consumer
