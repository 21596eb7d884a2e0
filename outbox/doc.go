// Package outbox has the public words of Outflow's format: a place in the WAL ([LSN], [Position]), a
// message's header ([Header], [ParseHeader]), a document's name as a token of a subject ([AppendToken],
// [ParseToken]), and the errors that Outflow returns ([Fault]). It depends on the standard library only. A
// plain JetStream subscription reads with it which event a message is:
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
//		sub, err := js.SubscribeSync("outbox.>", nats.OrderedConsumer())
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
// An event's [Position], the end LSN of its transaction and the index within it, is its identity and its rank
// in the total order of the WAL.
package outbox
