// Package producer writes events into the outbox, inside the transaction that a service has open.
//
//	package main
//
//	import (
//		"context"
//		"log"
//		"os"
//
//		"github.com/jackc/pgx/v5"
//
//		"github.com/outflowhq/outflow/producer"
//	)
//
//	func main() {
//		ctx := context.Background()
//		conn, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
//		if err != nil {
//			log.Fatal(err)
//		}
//		outbox, err := producer.New(producer.Config{}) // once; the table that outflow init makes
//		if err != nil {
//			log.Fatal(err)
//		}
//		err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
//			if _, err := tx.Exec(ctx, "UPDATE note SET body = 'hello' WHERE id = 'note'"); err != nil {
//				return err
//			}
//			event, err := producer.JSONEvent("note", map[string]string{"text": "hello"})
//			if err != nil {
//				return err
//			}
//			event.Actor, event.Counter = "alice", 7
//			_, err = outbox.Enqueue(ctx, tx, event)
//			return err
//		})
//		if err != nil {
//			log.Fatal(err)
//		}
//	}
//
// The package never opens a connection, and never begins, commits or rolls back a transaction. An event is
// published if and only if the service's transaction commits. That is PostgreSQL's guarantee, and nothing
// here may weaken it, so there is no queue, no retry and no goroutine, only a statement; and a pool, or a
// connection without a transaction, is refused.
//
// # What is checked, and when
//
// A statement that PostgreSQL refuses costs the whole transaction. A row that Outflow cannot publish stops
// it, or becomes a dead letter, hours later and in another place. So an event is checked before anything is
// sent, and a [*Invalid] leaves the transaction as it was. The checks cover everything that can be known from
// the event and the table's columns: a document, a counter of 0 or more, text in UTF-8, JSON that the
// column's type accepts (jsonb accepts less than json), and a message within sink.max_payload, measured as
// PostgreSQL will print the payload. What only PostgreSQL knows, such as constraints and triggers, fails in
// the statement.
//
// # Byte for byte
//
// Each column's values travel as one parameter, an array of text in text form, whose elements PostgreSQL
// converts to the column's type. So no driver has to know an array or a JSON type, no number becomes a
// float64, and a call of any size has a handful of parameters. In json, text and bytea the payload arrives
// byte for byte; jsonb prints it in its own form, with every digit. (If the database's encoding is not UTF-8,
// the connection must set client_encoding=UTF8; pgx does not do that by itself.)
//
// # Order
//
// Events are inserted in the order in which they are given, and calls in the order in which they are made.
// That is their order in the WAL. In the stream it is the order of events of one sequence whose keys are
// equal or absent; otherwise the keys decide.
//
// # Counters
//
// A service that has no counters of its own turns [Config.NextCounter] on. Taking a counter locks the row of
// its document and actor until the end of the transaction. That makes the counters gapless: the next one is
// taken only once this transaction has ended. So transactions that write for one document and actor wait for
// each other, as they do anyway in a service that locks the document first.
//
// A counter that the service makes itself is not looked up: `outflow init` makes no unique constraint on
// document, actor and counter, because an index slows every insert. If a counter could be taken twice, let
// PostgreSQL refuse the second:
//
//	CREATE UNIQUE INDEX CONCURRENTLY outbox_once ON outbox (doc_id, actor_id, counter);
//
// A counter that was taken before is then an error that wraps [ErrTaken]. Without the index both events are
// published with the same key, in the order of their commits.
package producer
