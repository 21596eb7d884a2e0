// Package consumer reads the events of an Outflow stream: different documents in parallel, each document
// strictly in order and, with a PostgreSQL database, with the effect of each event exactly once.
//
//	package main
//
//	import (
//		"context"
//		"log"
//
//		"github.com/jackc/pgx/v5"
//
//		"github.com/outflowhq/outflow/consumer"
//	)
//
//	type edit struct{ Text string }
//
//	func main() {
//		cfg := consumer.Config{Name: "usage"}
//		if err := consumer.Main(context.Background(), cfg, consumer.JSON(count)); err != nil {
//			log.Fatal(err)
//		}
//	}
//
//	// count has its effect through tx: exactly once for each event.
//	func count(ctx context.Context, tx pgx.Tx, e *consumer.Event, edit edit) error {
//		_, err := tx.Exec(ctx, "UPDATE usage SET n = n + $2 WHERE doc_id = $1", e.Document, len(edit.Text))
//		return err
//	}
//
// [Main] takes the addresses of the servers from DATABASE_URL and NATS_URL; [New] and [Consumer.Run] take
// connections of your own. A service whose events have several types gives [Mux] a handler for each.
//
// # What it promises
//
// With [Postgres], what the handler writes through its transaction is committed together with the consumer's
// offset. So each event has its effect exactly once: after a crash at any point, a redelivery, a lost
// acknowledgement or commit answer, with two instances that both believe they have a partition, and when a
// broker has lost the end of its stream and Outflow has published it again. What leaves the transaction, such
// as a mail or a call to another service, may happen more than once.
//
// With [JetStream] there is no transaction: the offset is written up to a second after the effect. After a
// crash the events of that time come again, in the same order: at least once.
//
// The events of one document come one after the other, in the order of the stream. Documents are divided into
// partitions by a hash ([Config.Partitions]); each has a worker and an offset, in the table outflow_mark.
//
// Any number of instances may run under one name. They share the partitions evenly, and rebalance when one
// comes, leaves, or has not renewed its lease ([Config.Lease]). With [JetStream] one of them works, and the
// others stand by.
//
// An event that fails is tried again, while later events of its partition wait, unless the handler says that
// this is useless ([Poison]) or not the event's fault ([RetryAfter], [Halt]). After [Config.MaxAttempts]
// and [Config.ParkAfter] it is parked: it and all later events of its document go to the table outflow_parked
// until an operator releases them (outflow parked), and the other documents go on. Without a database it goes
// to [Config.OnPoison]. Where many fail ([Config.ParkLimit]) nothing more is parked: all wait. A dead letter
// is parked at once, unless there is a handler for it ([Config.DeadLetters]).
//
// A handler that does not return within a few seconds of the end of its context costs its instance the
// partition of its event, until it returns: another instance takes that partition, and all others go on. With
// [JetStream] it costs the lease. [State] and the metric hung_handlers say so.
//
// Nothing is left out silently. If messages were removed before they were read, if the stream is another one,
// or if it has a message that Outflow did not publish, [Consumer.Run] ends with an error that says what can
// be done; see [ErrGap].
//
// Package consumertest runs a handler with events in memory and crashes it at every point. Why the promise
// holds, case by case with the tests that show it, is argued in docs/consumer.md of the repository.
package consumer
