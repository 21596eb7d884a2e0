package tracing

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/traceparent"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// queueLimit is how many spans may wait for the SDK, whose own queue comes behind.
const queueLimit = 4096

// stopTimeout is how long a stop waits for the collector.
const stopTimeout = 2 * time.Second

// Config says where messages go.
type Config struct {
	Slot, Stream string
	Template     string // of the subjects
	Registerer   prometheus.Registerer
	Logger       *slog.Logger
}

// Tracer exports spans.
type Tracer struct {
	cfg     Config
	metrics *metrics
	tracer  trace.Tracer
	ids     *derivedIDs
	sdk     *sdktrace.TracerProvider

	invalid, unmapped rarely // traceparents

	queue   chan span // never closed
	stop    chan struct{}
	stopped chan struct{}   // by the worker
	giveUp  context.Context // an export that is under way
	cancel  context.CancelFunc
}

// Start begins to export spans, if the environment asks for them, until Stop; else it returns nil. What the
// environment asks for and can't be had is logged: it is no reason not to publish.
func Start(cfg Config) *Tracer {
	m := newMetrics(cfg.Registerer)
	on, why := enabled(os.Getenv)
	if why != "" {
		cfg.Logger.Warn("no spans are exported", "reason", why)
	}
	if !on {
		return nil
	}
	t := &Tracer{cfg: cfg, metrics: m, ids: new(derivedIDs), queue: make(chan span, queueLimit),
		stop: make(chan struct{}), stopped: make(chan struct{})}
	t.giveUp, t.cancel = context.WithCancel(context.Background())
	quiet(cfg.Logger)
	to, err := otlptracehttp.New(t.giveUp)
	if err != nil {
		t.cancel()
		cfg.Logger.Warn("no spans are exported", "err", err)
		return nil
	}
	about, err := resource.New(t.giveUp, resource.WithAttributes(semconv.ServiceName("outflow")),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil { // about is what could be read
		cfg.Logger.Warn("what the environment says of the service is incomplete", "err", err)
	}
	t.sdk = sdktrace.NewTracerProvider(sdktrace.WithResource(about), sdktrace.WithIDGenerator(t.ids),
		sdktrace.WithBatcher(&exporter{SpanExporter: to, tracer: t}, sdktrace.WithBlocking(), possible))
	t.tracer = t.sdk.Tracer("github.com/outflowhq/outflow",
		trace.WithSchemaURL(semconv.SchemaURL))
	cfg.Logger.Info("spans of sampled traces are exported by OTLP")
	go t.work()
	return t
}

// Stop exports what is left, as far as that is possible in 2 seconds. No observer may be used any more.
func (t *Tracer) Stop() {
	if t == nil {
		return
	}
	deadline := time.AfterFunc(stopTimeout, t.cancel)
	close(t.stop)
	select {
	case <-t.stopped:
	case <-t.giveUp.Done(): // the worker waits for the SDK, which waits for the collector
	}
	_ = t.sdk.Shutdown(t.giveUp) // what it could not export is counted
	deadline.Stop()
	t.cancel()
	<-t.stopped
}

// work makes spans of what was handed over.
func (t *Tracer) work() {
	defer crash.Guard()
	defer close(t.stopped)
	for {
		select {
		case s := <-t.queue:
			t.report(&s)
		case <-t.stop:
			for {
				select {
				case s := <-t.queue:
					t.report(&s)
				default:
					return
				}
			}
		}
	}
}

// span is what is known of a message.
type span struct {
	parent traceparent.Context
	state  string // the tracestate, valid or not; see bounded
	pos    outbox.Position
	id     string // the event's; see bounded
	seq    uint64
	bytes  int // of the payload

	subject string
	dead    sink.Reason // "": it is no dead letter

	commit, received, sent, end time.Time // received and sent may be zero: not known
}

// report hands a span to the SDK, and waits while that has no room for it.
func (t *Tracer) report(s *span) {
	t.ids.next = SpanID(s.parent.TraceID, t.cfg.Slot, t.cfg.Stream, s.pos)
	state, err := trace.ParseTraceState(s.state)
	if err != nil {
		state = trace.TraceState{} // of no use to anybody; the parent counts all the same
	}
	ctx := trace.ContextWithRemoteSpanContext(context.Background(),
		trace.NewSpanContext(trace.SpanContextConfig{TraceID: s.parent.TraceID, SpanID: s.parent.SpanID,
			TraceFlags: trace.FlagsSampled, TraceState: state, Remote: true}))
	attributes := []attribute.KeyValue{
		semconv.MessagingSystemKey.String("nats"),
		semconv.MessagingOperationName("publish"), semconv.MessagingOperationTypeSend,
		semconv.MessagingDestinationName(s.subject),
		semconv.MessagingMessageBodySize(s.bytes),
		attribute.String("outflow.slot", t.cfg.Slot), attribute.String("outflow.stream", t.cfg.Stream),
		attribute.Int64("outflow.stream.sequence", int64(s.seq)), //nolint:gosec // no stream has so many
		attribute.String("outflow.position", s.pos.String()),
	}
	if s.id != "" {
		attributes = append(attributes, semconv.MessagingMessageID(s.id))
	}
	switch {
	case s.sent.IsZero():
		attributes = append(attributes, attribute.Bool("outflow.made_again", true))
	case !s.received.IsZero():
		attributes = append(attributes,
			attribute.Float64("outflow.buffer.wait", s.sent.Sub(s.received).Seconds()))
	}
	destination := t.cfg.Template
	if s.dead != "" {
		destination = s.subject
		attributes = append(attributes, semconv.ErrorTypeKey.String(string(s.dead)))
	} else {
		attributes = append(attributes, semconv.MessagingDestinationTemplate(t.cfg.Template))
	}
	start := s.commit
	if start.After(s.end) { // the clocks differ
		start = s.end
	}
	_, out := t.tracer.Start(ctx, "publish "+destination, trace.WithTimestamp(start),
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attributes...))
	if s.dead != "" {
		out.SetStatus(codes.Error, "dead letter: "+string(s.dead))
	}
	out.End(trace.WithTimestamp(s.end))
}
