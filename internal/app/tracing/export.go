package tracing

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/url"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/outflowhq/outflow/outbox"
)

// SpanID is the id of the span in which an outflow has published the event at a position. Two outflows that
// publish the same event report two spans.
func SpanID(traceID [16]byte, slot, stream string, pos outbox.Position) (id trace.SpanID) {
	b := append(traceID[:], slot+"\n"+stream+"\n"...) // neither has a line feed
	sum := sha256.Sum256(pos.Append(b))
	copy(id[:], sum[:])
	if !id.IsValid() {
		id[0] = 1
	}
	return id
}

// derivedIDs gives each span the id that was set before it is started. It belongs to the worker.
type derivedIDs struct{ next trace.SpanID }

func (d *derivedIDs) NewSpanID(context.Context, trace.TraceID) trace.SpanID { return d.next }

// NewIDs is for a span without a parent, and there is none: all zero, it is not valid.
func (d *derivedIDs) NewIDs(context.Context) (id trace.TraceID, span trace.SpanID) { return id, span }

// metrics counts what became of spans.
type metrics struct{ exported, queueFull, failed, invalid prometheus.Counter }

func newMetrics(r prometheus.Registerer) *metrics {
	exported := prometheus.NewCounter(prometheus.CounterOpts{Name: "spans_exported_total",
		Help: "Spans that the OTLP collector has taken. 0 while no OTEL_ variable names one."})
	dropped := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spans_dropped_total",
		Help: "Events of sampled traces whose span was not exported, by reason: the queue was full " +
			"(queue_full), or the collector did not take it (export_failed); and events whose " +
			"traceparent is not valid, so that there is none (invalid_traceparent). Publishing goes on " +
			"as ever."},
		[]string{"reason"})
	r.MustRegister(exported, dropped)
	return &metrics{exported, dropped.WithLabelValues("queue_full"),
		dropped.WithLabelValues("export_failed"), dropped.WithLabelValues("invalid_traceparent")}
}

// exporter counts what becomes of spans, and gives up when the tracer stops.
type exporter struct {
	sdktrace.SpanExporter
	tracer *Tracer
	failed rarely
}

// ExportSpans never fails for the SDK: a collector that does not answer is counted, and logged rarely.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.tracer.giveUp, cancel)()
	if err := e.SpanExporter.ExportSpans(ctx, spans); err != nil {
		e.tracer.metrics.failed.Add(float64(len(spans)))
		e.failed.say(e.tracer.cfg.Logger, "spans can't be exported, and are dropped; "+
			"publishing goes on", "spans", len(spans), "err", bounded(err.Error(), maxError))
		return nil
	}
	e.tracer.metrics.exported.Add(float64(len(spans)))
	return nil
}

// maxError is how much of an error is logged, in bytes: it may hold all that a collector has answered.
const maxError = 1000

// quiet sends what the OpenTelemetry libraries have to say to the log, rarely, and without the values of
// variables: OTEL_EXPORTER_OTLP_HEADERS holds secrets.
func quiet(log *slog.Logger) {
	s := &logSink{log: log}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { s.Error(err, "OpenTelemetry") }))
	otel.SetLogger(logr.New(s))
}

type logSink struct {
	log   *slog.Logger
	often rarely
}

func (*logSink) Init(logr.RuntimeInfo)            {}
func (*logSink) Enabled(int) bool                 { return false }
func (*logSink) Info(int, string, ...any)         {}
func (s *logSink) WithValues(...any) logr.LogSink { return s }
func (s *logSink) WithName(string) logr.LogSink   { return s }
func (s *logSink) Error(err error, msg string, _ ...any) {
	if quoted, ok := errors.AsType[*url.Error](err); ok { // with a password, maybe
		err = quoted.Err
	}
	s.often.say(s.log, "tracing: "+msg, "err", bounded(err.Error(), maxError))
}

// rarely logs one kind of thing: the first one at once, then one a minute at most, with the number of those
// before it that were not logged.
type rarely struct {
	mu         sync.Mutex
	logged     time.Time
	suppressed int
}

func (r *rarely) say(log *slog.Logger, what string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); now.Sub(r.logged) >= time.Minute {
		if r.suppressed > 0 {
			args = append(args, "not_logged", r.suppressed)
		}
		log.Warn(what, args...)
		r.logged, r.suppressed = now, 0
	} else {
		r.suppressed++
	}
}
