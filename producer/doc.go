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
//			_, err := outbox.Enqueue(ctx, tx, producer.Event{
//				Document: "note", Actor: "alice", Counter: 7, Payload: []byte(`{"text": "hello"}`),
//			})
//			return err
//		})
//		if err != nil {
//			log.Fatal(err)
//		}
//	}
//
// It never opens a connection, begins, commits or rolls back a transaction. An event is published if and only
// if the service's transaction commits: that is PostgreSQL's guarantee, and nothing here may weaken it. So
// there is no queue, no retry and no goroutine, only a statement.
//
// # What is checked, and when
//
// A statement that PostgreSQL refuses costs the whole transaction, and a row that Outflow cannot publish
// stops it or becomes a dead letter, hours later and in another place. So an event is checked before anything
// is sent: a [*Invalid] leaves the transaction as it was. What passes is what PostgreSQL takes and Outflow
// can publish, as far as both follow from the event and the table's columns: a document, a counter of 0 or
// more, text that is UTF-8, JSON as the column's own type judges it (of jsonb also what it cannot hold), and
// a message within sink.max_payload, measured as PostgreSQL will print the payload. What only PostgreSQL can
// know, constraints and triggers, fails in the statement.
//
// # Byte for byte
//
// Each column's values travel as one parameter, the text of an array of text, which PostgreSQL takes apart
// and reads as the column's type. No driver has to know an array or a JSON type, no number becomes a float64,
// and a call of any size has a handful of parameters. The payload is what was given: in json, text and bytea
// byte for byte; jsonb prints it in its own form, with every digit. (Where the database's encoding is not
// UTF-8, the connection must say client_encoding=UTF8, which pgx does not by itself.)
//
// # Order
//
// The events of a call are inserted in the order of the call, and calls in the order in which they are made.
// That is their order in the WAL, so in the stream, within one sequence and where their keys are equal or
// absent; else the keys decide.
//
// # Counters
//
// A service that has no counters of its own turns [Config.NextCounter] on. Taking a counter locks the row of
// its document and actor until the end of the transaction, and that makes the counters gapless: the next one
// is taken only once this transaction has ended. So transactions that write for one document and actor wait
// for each other, as they do anyway in a service that locks the document first. A counter that the service
// makes itself is not looked up: `outflow init` makes no unique constraint on document, actor and counter,
// for an index costs every insert. Where a counter could be taken twice, let PostgreSQL watch:
//
//	CREATE UNIQUE INDEX CONCURRENTLY outbox_once ON outbox (doc_id, actor_id, counter);
//
// An event whose counter was taken is then an error that wraps [ErrTaken]. Without it both events are
// published, with one key, in the order of their commits.
package producer
