package otelconsumer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	api "go.opentelemetry.io/otel/trace"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/consumertest"
	"github.com/outflowhq/outflow/otelconsumer"
)

// The span is a child of the one that wrote the event.
func ExampleTrace() {
	spans := tracetest.NewSpanRecorder() // a service has an exporter
	provider := trace.NewTracerProvider(trace.WithSpanProcessor(spans))
	stream := consumertest.NewStream()
	stream.Add(consumertest.Event{Document: "note", Header: nats.Header{
		"traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}})
	c, err := consumertest.NewConsumer(stream, nil, consumer.Memory(), consumer.Config{
		Name: "edits", Stream: "OUTBOX",
		Use: []consumer.Middleware{otelconsumer.Trace("edits", provider)},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	err = c.Run(ctx, func(ctx context.Context, _ pgx.Tx, e *consumer.Event) error {
		fmt.Println("handled in trace", api.SpanContextFromContext(ctx).TraceID())
		stop()
		return nil
	})
	for _, s := range spans.Ended() {
		fmt.Println(s.Name(), "below", s.Parent().SpanID())
	}
	fmt.Println(err)
	// Output:
	// handled in trace 0af7651916cd43dd8448eb211c80319c
	// process edits below b7ad6b7169203331
	// <nil>
}

// Each attempt has a span of its own, which says how it ended; a traceparent that can't be read costs nothing
// but the parent.
func TestEachAttemptHasASpan(t *testing.T) {
	t.Parallel()
	spans := tracetest.NewSpanRecorder()
	provider := trace.NewTracerProvider(trace.WithSpanProcessor(spans))
	parent := func(flags string) nats.Header {
		return nats.Header{"traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-" + flags},
			"tracestate": {"a=b"}}
	}
	stream := consumertest.NewStream()
	stream.Add(
		consumertest.Event{Document: "a", Type: "put", ID: "one", Header: parent("01"),
			Data: []byte("12345")},
		consumertest.Event{Document: "a", Header: nats.Header{"traceparent": {"nonsense\xff"}}},
		consumertest.Event{Document: "a", Header: parent("00")},
		consumertest.Event{Document: "a", Type: "x" + strings.Repeat("é", 200)},
	)
	c, err := consumertest.NewConsumer(stream, nil, consumer.Memory(), consumer.Config{
		Name: "edits", Stream: "OUTBOX", Backoff: consumer.Backoff{First: 1, Max: 1},
		Use: []consumer.Middleware{otelconsumer.Trace("edits", provider)},
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	refuse := errors.New("refused: " + strings.Repeat("x", 1000) + "\xff")
	var inside []string
	err = c.Run(ctx, func(ctx context.Context, _ pgx.Tx, e *consumer.Event) error {
		at := api.SpanContextFromContext(ctx)
		inside = append(inside, fmt.Sprintf("%d/%d sampled=%t state=%s", e.Sequence, e.Attempt,
			at.IsSampled(), at.TraceState()))
		switch {
		case e.Sequence == 1 && e.Attempt == 1:
			return refuse
		case e.Sequence == 1 && e.Attempt == 2:
			panic("at last")
		case e.Sequence == 4:
			stop()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := "1/1 sampled=true state=a=b,1/2 sampled=true state=a=b,1/3 sampled=true state=a=b," +
		"2/1 sampled=true state=,3/1 sampled=false state=a=b,4/1 sampled=true state="
	if got := strings.Join(inside, ","); got != want {
		t.Errorf("the handler ran in\n%s, want\n%s", got, want)
	}
	var ended []string
	for _, s := range spans.Ended() {
		ended = append(ended, fmt.Sprintf("%s %d bytes, attempt %s: %v %t",
			value(s, "outflow.stream.sequence"), len(s.Status().Description), value(s, "outflow.attempt"),
			s.Status().Code, s.Parent().IsValid()))
	}
	want = "1 256 bytes, attempt 1: Error true,1 44 bytes, attempt 2: Error true," +
		"1 0 bytes, attempt 3: Unset true,2 0 bytes, attempt 1: Unset false,4 0 bytes, attempt 1: Unset false"
	if got := strings.Join(ended, ","); got != want {
		t.Errorf("spans\n%s, want\n%s", got, want)
	}
	first, last := spans.Ended()[0], spans.Ended()[4]
	for name, want := range map[string]string{
		"messaging.system": "nats", "messaging.operation.type": "process", "messaging.message.id": "one",
		"messaging.destination.name": "outbox.a", "messaging.message.body.size": "5",
		"messaging.consumer.group.name": "edits", "outflow.event_type": "put", "outflow.replayed": "false",
	} {
		if got := value(first, name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if first.Status().Code != codes.Error || !strings.HasPrefix(first.Status().Description, "refused: xxx") {
		t.Errorf("%+v", first.Status())
	}
	if kind := value(last, "outflow.event_type"); kind != "x"+strings.Repeat("é", 127) {
		t.Errorf("the type is cut to %q", kind)
	}
}

func value(s trace.ReadOnlySpan, name string) string {
	for _, a := range s.Attributes() {
		if a.Key == attribute.Key(name) {
			return a.Value.String()
		}
	}
	return ""
}
