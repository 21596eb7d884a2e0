// Command consumer reads one document's events in order: a plain JetStream subscription, nothing more is
// needed.
//
//	go run -C examples ./consumer -server nats://127.0.0.1:4222 -doc friendsforever
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/outbox"
)

var (
	server = flag.String("server", nats.DefaultURL, "NATS server")
	stream = flag.String("stream", "OUTBOX", "JetStream stream")
	prefix = flag.String("prefix", "outbox",
		"what the subject template has before the document: outbox for outbox.{doc_id}")
	doc     = flag.String("doc", "", "document to read")
	durable = flag.String("durable", "",
		"name of a durable consumer, which goes on where it was; empty: read from the beginning")
	count = flag.Int("count", 0, "stop after so many events; 0: go on until interrupted")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := read(ctx); err != nil && ctx.Err() == nil {
		log.Fatal(err)
	}
}

func read(ctx context.Context) error {
	nc, err := nats.Connect(*server)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	consumer, err := subscribe(ctx, js, string(outbox.AppendToken([]byte(*prefix+"."), *doc)))
	if err != nil {
		return err
	}
	messages, err := consumer.Messages()
	if err != nil {
		return err
	}
	defer messages.Stop()
	for n := 0; *count == 0 || n < *count; n++ {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return err
		}
		h, err := outbox.ParseHeader(msg.Headers().Get(outbox.HeaderName))
		if err != nil {
			return err
		}
		fmt.Printf("%s %s\n", h.Key, msg.Data()) // your work; then acknowledge
		if *durable == "" {
			continue // an ordered consumer needs no acknowledgements
		}
		if err := msg.DoubleAck(ctx); err != nil {
			return err
		}
	}
	return nil
}

func subscribe(ctx context.Context, js jetstream.JetStream, subject string) (jetstream.Consumer, error) {
	if *durable == "" {
		return js.OrderedConsumer(ctx, *stream,
			jetstream.OrderedConsumerConfig{FilterSubjects: []string{subject}})
	}
	return js.CreateOrUpdateConsumer(ctx, *stream, jetstream.ConsumerConfig{
		Durable: *durable, FilterSubject: subject, AckPolicy: jetstream.AckExplicitPolicy,
		MaxAckPending: 1, // one at a time: a message that comes again cannot come behind a later one
	})
}
