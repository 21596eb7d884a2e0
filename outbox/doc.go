// Package outbox holds the public types of Outflow's message format: a position in the WAL ([LSN],
// [Position]), a message's header ([Header], [ParseHeader]), a document id as a subject token ([AppendToken],
// [ParseToken]), and the errors that Outflow returns ([Fault]). It depends on the standard library only. With
// it, a plain JetStream subscription can tell which event a message is:
//
//	package main
//
//	import (
//		"context"
//		"fmt"
//		"log"
//		"os"
//
//		"github.com/nats-io/nats.go"
//
//		"github.com/outflowhq/outflow/outbox"
//	)
//
//	func main() {
//		nc, err := nats.Connect(os.Getenv("NATS_URL"))
//		if err != nil {
//			log.Fatal(err)
//		}
//		js, err := nc.JetStream()
//		if err != nil {
//			log.Fatal(err)
//		}
//		sub, err := js.SubscribeSync("outbox.>", nats.BindStream("OUTBOX"), nats.OrderedConsumer())
//		if err != nil {
//			log.Fatal(err)
//		}
//		for {
//			msg, err := sub.NextMsgWithContext(context.Background())
//			if err != nil {
//				log.Fatal(err)
//			}
//			h, err := outbox.ParseHeader(msg.Header.Get(outbox.HeaderName))
//			if err != nil {
//				log.Fatal(err)
//			}
//			fmt.Println(h.Pos, h.Key, string(msg.Data))
//		}
//	}
//
// The subscription names the stream because the stream's own subject is a private one: JetStream cannot find
// it by outbox.>.
//
// An event's [Position] is the end LSN of its transaction and the index within it. It identifies the event,
// and it is the event's rank in the total order of the WAL.
package outbox
