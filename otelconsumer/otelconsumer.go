// Package otelconsumer traces the handlers of package consumer with OpenTelemetry. It is a module of its own,
// so that a service which does not trace has no OpenTelemetry among its dependencies.
//
//	cfg := consumer.Config{Name: "edits", Stream: "OUTBOX",
//		Use: []consumer.Middleware{otelconsumer.Trace("edits", nil)}}
package otelconsumer

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/outflowhq/outflow/consumer"
)

const scope = "github.com/outflowhq/outflow/otelconsumer"

// maxText bounds what a span has of an id, a subject or an error, in bytes.
const maxText = 256

// Trace returns middleware that makes a span of each call of the handler, "process <name>", and hands it to
// the handler in its context. It is a child of the span in the message's traceparent, beside Outflow's own
// span of the publishing; where there is none, or none that can be read, it begins a trace. An attempt that
// fails has the status Error, with the beginning of the error's text. The payload is not in the span.
//
// provider is that of the spans; nil: the global one, also if that is set later. Put Trace first in
// Config.Use, so that the span covers the rest. It may be used by several consumers.
func Trace(name string, provider trace.TracerProvider) consumer.Middleware {
	if provider == nil {
		provider = otel.GetTracerProvider()
	}
	tracer := provider.Tracer(scope)
	return func(next consumer.Handler) consumer.Handler {
		return func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
			ctx, span := tracer.Start(writer(ctx, e), "process "+name,
				trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(attributes(name, e)...))
			returned := false
			defer func() {
				if !returned {
					span.SetStatus(codes.Error, "the handler panicked, or ended its goroutine")
				}
				span.End()
			}()
			err := next(ctx, tx, e)
			returned = true
			if err != nil {
				span.SetStatus(codes.Error, text(err.Error()))
			}
			return err
		}
	}
}

// writer is the context of the span that wrote the event. Names of NATS headers keep their case, which
// propagation.HeaderCarrier does not.
func writer(ctx context.Context, e *consumer.Event) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{
		"traceparent": e.Header.Get("traceparent"), "tracestate": e.Header.Get("tracestate"),
	})
}

// attributes are those of the conventions for messaging, and what Outflow's own span has as well.
func attributes(name string, e *consumer.Event) []attribute.KeyValue {
	all := []attribute.KeyValue{
		attribute.String("messaging.system", "nats"),
		attribute.String("messaging.operation.name", "process"),
		attribute.String("messaging.operation.type", "process"),
		attribute.String("messaging.consumer.group.name", name),
		attribute.String("messaging.destination.name", text(e.Subject)),
		attribute.String("messaging.message.id", text(e.ID)),
		attribute.Int("messaging.message.body.size", len(e.Data)),
		attribute.String("outflow.position", e.Position.String()),
		attribute.Int("outflow.attempt", e.Attempt),
		attribute.Bool("outflow.replayed", e.Replayed),
	}
	if e.Sequence > 0 {
		all = append(all, attribute.Int64("outflow.stream.sequence", int64(e.Sequence)))
	}
	if e.Type != "" {
		all = append(all, attribute.String("outflow.event_type", text(e.Type)))
	}
	if e.DeadLetter != "" {
		all = append(all, attribute.String("outflow.dead_letter", text(e.DeadLetter)))
	}
	return all
}

// text is the beginning of a text, as valid UTF-8: an exporter refuses the whole batch for less.
func text(s string) string {
	if len(s) > maxText {
		s = s[:maxText]
	}
	return strings.ToValidUTF8(s, "")
}
